from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainingArguments

from sedem import Document, SeDeM
from sedem.config import SedemConfig
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem.training import trainer
from sedem.training.recipe import as_yaml
from sedem.training.run import Stage1Recipe, Stage2Recipe, train_stage1, train_stage2
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.training.trainer import (
    COMPLETE,
    TRAINED,
    SedemTrainer,
    is_whole,
    last_whole_checkpoint,
    seal,
)

Recipe = Stage1Recipe | Stage2Recipe


def train(recipe: Recipe) -> Path:
    return train_stage1(recipe) if isinstance(recipe, Stage1Recipe) else train_stage2(recipe)


def elsewhere(recipe: Any, name: str, **run: Any) -> Any:
    """The same recipe in another output folder."""
    output = Path(recipe.run.output).with_name(name)
    return recipe.with_changes(run=recipe.run.with_changes(output=str(output), **run))


@pytest.fixture(params=["stage1", "stage2"])
def recipe(
    request: pytest.FixtureRequest, stage1_recipe: Stage1Recipe, stage2_recipe: Stage2Recipe
) -> Recipe:
    """A recipe of each stage in turn."""
    return stage1_recipe if request.param == "stage1" else stage2_recipe


@contextmanager
def killed_in_step(step: int) -> Iterator[None]:
    """Training that is interrupted in the middle of an optimizer step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        whole = SedemTrainer.training_step

        def cut(self: SedemTrainer, *args: Any, **options: Any) -> Tensor:
            loss = whole(self, *args, **options)
            if self.state.global_step + 1 == step:
                raise KeyboardInterrupt
            return loss

        patch.setattr(SedemTrainer, "training_step", cut)
        yield


def summary(recipe: Recipe) -> dict[str, Any]:
    return dict(json.loads((Path(recipe.run.output) / "training.json").read_text()))


def losses(recipe: Recipe) -> list[dict[str, float]]:
    """Everything that was logged about losses, line by line, times and speeds left out."""
    left_out = ("runtime", "per_second", "total_flos", "train_loss")
    return [
        {name: value for name, value in line.items() if not any(n in name for n in left_out)}
        for line in summary(recipe)["log"]
    ]


def final_weights(recipe: Recipe) -> dict[str, Tensor]:
    final = Path(recipe.run.output) / "final"
    weights = load_file(final / "sedem.safetensors")
    adapter = final / "adapter" / "adapter_model.safetensors"
    return {**weights, **(load_file(adapter) if adapter.is_file() else {})}


def assert_same_training(found: Recipe, expected: Recipe) -> None:
    assert losses(found) == losses(expected)
    weights, wanted = final_weights(found), final_weights(expected)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in weights)


# Killed and resumed


def test_a_run_killed_in_the_middle_resumes_with_the_same_losses(recipe: Recipe) -> None:
    whole = elsewhere(recipe, "whole")
    train(whole)
    with killed_in_step(5):
        train(recipe)
    train(recipe)
    assert summary(recipe)["resumed_from"] == "checkpoint-4"
    assert summary(whole)["resumed_from"] is None
    assert_same_training(recipe, whole)
    # The second half was trained on its own losses, not on nothing.
    steps = [line["step"] for line in losses(recipe) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_the_batches_of_a_step_are_averaged(stage2_recipe: Stage2Recipe) -> None:
    assert stage2_recipe.optimization.accumulation == 2
    train(stage2_recipe)
    weights = {"answer": 1.0, "select": 1.0, "reconstruct": 0.1}
    for line in losses(stage2_recipe):
        if "loss" in line:
            total = sum(weight * line[name] for name, weight in weights.items())
            assert line["loss"] == pytest.approx(total, rel=1e-4)


def test_a_run_killed_before_its_first_checkpoint_starts_anew(stage1_recipe: Stage1Recipe) -> None:
    whole = elsewhere(stage1_recipe, "whole")
    train(whole)
    with killed_in_step(2):
        train(stage1_recipe)
    train(stage1_recipe)
    assert summary(stage1_recipe)["resumed_from"] is None
    assert_same_training(stage1_recipe, whole)


KILLED = """
import os, signal, sys
from pathlib import Path
from sedem.training import trainer
from sedem.training.recipe import load_recipe
from sedem.training.run import Stage1Recipe, train_stage1

seal = trainer.seal
def killed(folder):
    if folder.name == "checkpoint-4":
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder)
trainer.seal = killed
train_stage1(load_recipe(Stage1Recipe, Path(sys.argv[1])))
"""


def test_a_process_killed_while_it_writes_a_checkpoint_resumes_from_the_one_before(
    stage1_recipe: Stage1Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # With one checkpoint kept, the old one must stay until the new one is whole.
    kept = elsewhere(stage1_recipe, "killed", keep=1)
    path = tmp_path / "recipe.yaml"
    path.write_text(as_yaml(kept))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert killed.returncode == -9
    left = {folder.name for folder in Path(kept.run.output).glob("checkpoint-*")}
    assert left == {"checkpoint-2", "checkpoint-4"}
    assert not is_whole(Path(kept.run.output) / "checkpoint-4")
    with caplog.at_level(logging.WARNING):
        train(kept)
    assert "checkpoint-4' is incomplete and is passed over" in caplog.text
    assert summary(kept)["resumed_from"] == "checkpoint-2"
    whole = elsewhere(stage1_recipe, "whole", keep=1)
    train(whole)
    assert_same_training(kept, whole)


def test_a_finished_run_that_is_started_again_stays_as_it_is(
    recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe)
    lines, weights = losses(recipe), final_weights(recipe)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    train(recipe)
    assert not list(elsewhere.iterdir()), "a run writes into its output folder alone"
    assert summary(recipe)["resumed_from"] == "checkpoint-6"
    assert [line for line in losses(recipe) if "loss" in line] == [
        line for line in lines if "loss" in line
    ]
    assert all(torch.equal(weights[name], new) for name, new in final_weights(recipe).items())


def test_the_newest_checkpoints_are_kept(stage1_recipe: Stage1Recipe) -> None:
    few = elsewhere(stage1_recipe, "few", save_every=1, keep=2)
    train(few)
    names = {folder.name for folder in Path(few.run.output).glob("checkpoint-*")}
    assert names == {"checkpoint-5", "checkpoint-6"}


# What is whole and what is not


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three sealed checkpoints."""
    for step in (8, 9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "inner").mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(range(100)))
        (folder / "inner" / "state").write_text("state")
        seal(folder)
    return tmp_path


def test_the_newest_sealed_checkpoint_is_the_last_whole_one(run: Path, tmp_path: Path) -> None:
    assert last_whole_checkpoint(run) == run / "checkpoint-10"
    assert last_whole_checkpoint(tmp_path / "nothing") is None


def unsealed(folder: Path) -> None:
    (folder / COMPLETE).unlink()


def half_sealed(folder: Path) -> None:
    (folder / COMPLETE).rename(folder / f".{COMPLETE}")


def broken_seal(folder: Path) -> None:
    (folder / COMPLETE).write_text('{"weights": [100')


def truncated(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(99)))


def changed(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(1, 101)))


def missing(folder: Path) -> None:
    (folder / "inner" / "state").unlink()


@pytest.mark.parametrize(
    "damage", [unsealed, half_sealed, broken_seal, truncated, changed, missing]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    run: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(run / "checkpoint-10")
    assert not is_whole(run / "checkpoint-10")
    with caplog.at_level(logging.WARNING):
        assert last_whole_checkpoint(run) == run / "checkpoint-9"
    assert "checkpoint-10' is incomplete and is passed over" in caplog.text
    # Its name is free for the checkpoint that the resumed run writes.
    assert not (run / "checkpoint-10").exists()


def test_no_whole_checkpoint_means_none(run: Path) -> None:
    for folder in run.iterdir():
        unsealed(folder)
    assert last_whole_checkpoint(run) is None


@pytest.fixture
def stopped(stage2_recipe: Stage2Recipe) -> Stage2Recipe:
    """A stage-2 run that was killed after its checkpoint of step 4."""
    with killed_in_step(5):
        train(stage2_recipe)
    return stage2_recipe


def test_a_truncated_checkpoint_of_a_run_costs_the_steps_since_the_one_before(
    stopped: Stage2Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    whole = elsewhere(stopped, "whole")
    train(whole)
    weights = Path(stopped.run.output) / "checkpoint-4" / TRAINED
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        train(stopped)
    assert "checkpoint-4' is incomplete" in caplog.text
    assert summary(stopped)["resumed_from"] == "checkpoint-2"
    assert_same_training(stopped, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("model.selector.w_key.weight"),
            r"1 weights are missing \(such as model\.selector\.w_key\.weight\) and 0 are not known",
        ),
        (
            lambda weights: weights.update(extra=torch.zeros(1)),
            r"0 weights are missing and 1 are not known \(such as extra\)",
        ),
        (
            lambda weights: weights.update({"model.compressor.w_in.weight": torch.zeros(2, 3)}),
            r"model\.compressor\.w_in\.weight has shape \[2, 3\], \[32, 32\] is needed",
        ),
    ],
)
def test_a_checkpoint_with_other_weights_is_refused(
    stopped: Stage2Recipe, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = Path(stopped.run.output) / "checkpoint-4"
    weights = load_file(folder / TRAINED)
    change(weights)
    save_file(weights, folder / TRAINED)
    seal(folder)
    with pytest.raises(CheckpointError, match=message):
        train(stopped)


def test_a_checkpoint_holds_what_is_trained_and_nothing_of_the_backbone(
    stopped: Stage2Recipe,
) -> None:
    names = load_file(Path(stopped.run.output) / "checkpoint-4" / TRAINED).keys()
    assert {name.split(".")[1] for name in names} == {
        "compressor",
        "decompressor",
        "selector",
        "encoder",  # one backbone is both; its adapters go by this name
    }
    assert all("lora_" in name for name in names if ".encoder." in name)


# The output folder


def test_other_settings_in_the_same_output_folder_are_refused(recipe: Recipe) -> None:
    with killed_in_step(3):
        train(recipe)
    other = recipe.with_changes(optimization=recipe.optimization.with_changes(steps=7))
    with pytest.raises(ConfigError, match=r"holds a run with other settings .*recipe\.yaml"):
        train(other)
    kept = (Path(recipe.run.output) / "recipe.yaml").read_text()
    assert kept == as_yaml(recipe)


def test_a_run_that_left_nothing_does_not_hold_its_folder(stage1_recipe: Stage1Recipe) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder '.*nowhere"):
        train(stage1_recipe.with_changes(data_root="nowhere"))
    train(stage1_recipe)
    assert (Path(stage1_recipe.run.output) / "recipe.yaml").read_text() == as_yaml(stage1_recipe)
    # A finished run holds it even if somebody has removed its checkpoints.
    for folder in Path(stage1_recipe.run.output).glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        train(stage1_recipe.with_changes(data_root="nowhere"))


def test_the_summary_says_everything_about_the_run(recipe: Recipe) -> None:
    train(recipe)
    found = summary(recipe)
    assert found["recipe"]["optimization"]["learning_rates"] == recipe.optimization.learning_rates
    assert found["recipe"]["model"]["extract_layers"] == [3]
    assert found["recipe"]["losses"]["pool_weight"] == 1.0
    assert found["steps"] == 6
    assert found["examples_seen"] == 24
    assert found["seconds"] >= 0
    assert found["machine"]["threads"] == 1
    assert found["machine"]["python"] == sys.version.split()[0]
    assert found["versions"].keys() >= {"sedem", "torch", "transformers"}
    assert "commit" in found
    counts = found["trained_parameters"]
    assert counts["compressor"] == 32 * 32
    assert counts["decompressor"] == 2 * 32 + (32 * 32 + 32) + (32 * 128 + 128)
    if isinstance(recipe, Stage2Recipe):
        assert counts["selector"] == 4 * 32 + 2 * 32 * 32
        assert counts["lora"] == 4 * 4 * (32 + 32 + 32 + 32 + 32 + 16 + 32 + 16)
    assert set(found["evaluation"]) >= {"eval_loss", "eval_reconstruct"}


def test_every_part_of_the_loss_is_logged(stage1_recipe: Stage1Recipe) -> None:
    train(stage1_recipe)
    lines = losses(stage1_recipe)
    trained = {line["step"]: line for line in lines if "loss" in line}
    # The regression alone for the first half.
    for step in (1, 2, 3):
        assert "context" not in trained[step]
        assert trained[step]["regress"] == pytest.approx(trained[step]["loss"], rel=1e-6)
    for step in (4, 5, 6):
        line = trained[step]
        loss = line["context"] + 0.5 * line["distill"] + line["reconstruct"] + 0.5 * line["regress"]
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
    # Evaluation has lines of its own, and leaves no trace in those of training.
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [3, 6, 6]
    assert all("loss" not in line and "eval_context" in line for line in evaluated)
    assert not any("eval_context" in line for line in trained.values())


def test_evaluation_does_not_touch_the_losses_of_training(stage1_recipe: Stage1Recipe) -> None:
    # Steps 3 and 4 share a line, and evaluation comes between them.
    followed = elsewhere(stage1_recipe, "followed", log_every=2)
    alone = elsewhere(stage1_recipe, "alone", log_every=2, eval_every=0)
    train(followed)
    train(alone)
    lines = [line for line in losses(followed) if "loss" in line]
    assert lines == [line for line in losses(alone) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 4, 6]


def test_results_are_not_mixed_with_the_log(
    stage1_recipe: Stage1Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    train(stage1_recipe)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loss" in captured.err


def test_rates_of_parts_follow_the_schedule(stage2_recipe: Stage2Recipe) -> None:
    slow = stage2_recipe.with_changes(
        optimization=stage2_recipe.optimization.with_changes(warmup=3, schedule="linear"),
    )
    train(slow)
    rates = [line["learning_rate"] for line in losses(slow) if "learning_rate" in line]
    first = stage2_recipe.optimization.learning_rates["compressor"]
    assert rates == pytest.approx([first * share for share in (0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)])


# The final checkpoint


def test_the_final_checkpoint_opens_and_answers(recipe: Recipe) -> None:
    final = train(recipe)
    model = SeDeM.from_pretrained(final)
    assert model.decoder.has_lora == isinstance(recipe, Stage2Recipe)
    bank = model.read([Document("lease.txt", "The rent is 900 euros a month, due in May.")])
    answer = model.answer(bank, "What is the rent?", k=1)
    assert len(answer.citations) == 1
    assert answer.text or answer.finish_reason == "end"
    # It is the model that was trained, not a fresh one.
    trained = load_file(Path(recipe.run.output) / "checkpoint-6" / TRAINED)
    for name, tensor in model.parts().state_dict().items():
        if f"model.{name}" in trained:
            assert torch.equal(tensor, trained[f"model.{name}"]), name
    if isinstance(recipe, Stage2Recipe):
        factors = {n: p for n, p in model.named_parameters() if "lora_" in n}
        assert factors and all(
            torch.equal(p, trained[f"model.{name}"]) for name, p in factors.items()
        )


def test_stage_2_goes_on_from_stage_1(
    stage1_recipe: Stage1Recipe, stage2_recipe: Stage2Recipe
) -> None:
    first = train(stage1_recipe)
    frozen = stage2_recipe.with_changes(
        start_from=str(first),
        optimization=stage2_recipe.optimization.with_changes(
            learning_rates=dict.fromkeys(stage2_recipe.optimization.learning_rates, 0.0),
        ),
    )
    train(frozen)
    before, after = final_weights(stage1_recipe), final_weights(frozen)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compression": 2}, "model.compression is 2 in the recipe, .* has 4"),
        ({"segment_length": 32}, "model.segment_length is 32 in the recipe, .* has 16"),
        ({"inject_layer": 1}, "model.inject_layer is 1 in the recipe, .* has 2"),
    ],
)
def test_a_checkpoint_of_another_shape_is_no_start(
    stage2_recipe: Stage2Recipe, model: SeDeM, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    model.save_pretrained(tmp_path / "start")
    other = stage2_recipe.with_changes(
        start_from=str(tmp_path / "start"),
        model=stage2_recipe.model.with_changes(**change),
    )
    with pytest.raises(ConfigError, match=message):
        train(other)


def test_stage_2_goes_on_from_stage_2_with_the_same_adapters(
    stage2_recipe: Stage2Recipe, config: SedemConfig
) -> None:
    first = train(stage2_recipe)
    again = elsewhere(stage2_recipe, "again").with_changes(start_from=str(first))
    SeDeM.from_pretrained(train(again))
    for change in ({"lora_rank": 8}, {"lora_rank": 0}, {"lora_alpha": 16}):
        (name,) = change
        other = elsewhere(again, "other").with_changes(model=config.with_changes(**change))
        with pytest.raises(ConfigError, match=rf"model\.{name} is .* in the recipe, checkpoint"):
            train(other)


# The optimizer


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True, report_to=[], max_steps=1
    )


def groups_by_name(stage: Stage1 | Stage2, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rate and decay that each parameter really gets, by its name."""
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in found
            found[names[id(parameter)]] = (group["lr"], group["weight_decay"])
    return found


def test_every_part_has_its_learning_rate_and_vectors_do_not_decay(
    model: SeDeM, arguments: TrainingArguments
) -> None:
    model.decoder.add_lora(2, 4)
    stage = Stage2(model, Stage2Losses(), None)
    rates = {"compressor": 1e-4, "decompressor": 2e-4, "selector": 5e-4, "lora": 3e-4}
    found = groups_by_name(stage, SedemTrainer(stage, rates, arguments).create_optimizer())
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    assert found.keys() == trained
    for name, parameter in stage.named_parameters():
        if name in trained:
            part = "lora" if "lora_" in name else name.split(".")[1]
            decay = 0.1 if parameter.dim() > 1 else 0.0
            assert found[name] == (rates[part], decay), name
    # Both kinds are there: a test of matrices alone would prove nothing.
    assert {decay for _, decay in found.values()} == {0.0, 0.1}


def test_stage_1_has_two_learning_rates(model: SeDeM, arguments: TrainingArguments) -> None:
    stage = Stage1(model, Stage1Losses())
    rates = {"compressor": 1e-4, "decompressor": 2e-4}
    found = groups_by_name(stage, SedemTrainer(stage, rates, arguments).create_optimizer())
    assert {name.split(".")[1]: rate for name, (rate, _) in found.items()} == rates


def test_a_part_without_a_learning_rate_is_an_error(
    model: SeDeM, arguments: TrainingArguments
) -> None:
    stage = Stage1(model, Stage1Losses())
    with pytest.raises(
        ConfigError, match="learning_rates has compresor, decompressor, but not compressor"
    ):
        SedemTrainer(stage, {"compresor": 1e-4, "decompressor": 1e-4}, arguments)


def test_seal_is_written_last(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run / "checkpoint-10"
    unsealed(folder)

    def fails(path: Path) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(trainer, "_sha256", fails)
    with pytest.raises(OSError, match="no space left"):
        seal(folder)
    monkeypatch.undo()
    assert not is_whole(folder)
