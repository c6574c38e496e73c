from __future__ import annotations

import logging

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from sedem.training.progress import NamedBar


@pytest.mark.parametrize("lines", [False, True])
def test_a_bar_has_the_name_of_its_run_and_the_loss_unless_lines_are_wanted(
    lines: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO if lines else logging.WARNING, "sedem.training.progress")
    state, control = TrainerState(max_steps=2, global_step=1), TrainerControl()
    arguments = TrainingArguments(output_dir="none")
    bar = NamedBar("stage1")
    bar.on_train_begin(arguments, state, control)
    bar.on_log(arguments, state, control, {"loss": 1.5, "context": 0.5})
    bar.on_step_end(arguments, state, control)
    bar.on_train_end(arguments, state, control)
    shown = "".join(capsys.readouterr())
    assert "stage1:  50%" in shown
    assert ("loss=1.500" in shown) is not lines
    assert ("'context': '0.5'" in shown) is lines
