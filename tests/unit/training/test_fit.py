"""Runs from recipes: killed and resumed, logged, summarized, continued by another run."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from unit.training.blocks import block_dataset, collator
from unit.training.conftest import stage1_recipe_in
from unit.training.runs import (
    Recipe,
    assert_same_training,
    copied,
    elsewhere,
    final_weights,
    killed_in_step,
    losses,
    summary,
    train,
    train_in_two_processes,
)

from sedem import Document, SeDeM, SedemConfig
from sedem.errors import CheckpointError, ConfigError
from sedem_lab.data.examples import ExampleSet
from sedem_lab.training import fit
from sedem_lab.training.checkpoints import COMPLETE, is_complete, seal
from sedem_lab.training.fit import STATE, TRAINED, Run
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe

# Killed and resumed


@pytest.mark.parametrize(
    ("stage", "killed", "start"),
    [("stage1", 5, "checkpoint-4"), ("stage2", 5, "checkpoint-4"), ("stage1", 2, None)],
)
def test_a_killed_run_resumes_from_its_last_checkpoint_with_the_same_losses(
    stage: str, killed: int, start: str | None, request: pytest.FixtureRequest
) -> None:
    recipe: Recipe = request.getfixturevalue(f"{stage}_recipe")
    finished: Recipe = request.getfixturevalue(f"finished_{stage}")
    with killed_in_step(killed):
        train(recipe)
    train(recipe)
    assert summary(recipe)["resumed_from"] == start
    assert summary(finished)["resumed_from"] is None
    assert_same_training(recipe, finished)
    steps = [line["step"] for line in losses(recipe) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_windows_are_cut_by_epoch_and_alike_after_a_kill(
    stage1_recipe: Stage1Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = stage1_recipe.optimization.with_changes(steps=4, batch_size=2)
    whole = stage1_recipe.with_changes(
        text=stage1_recipe.text.with_changes(windows=4),
        optimization=few,
        run=stage1_recipe.run.with_changes(save_every=3, eval_every=1),
    )
    seen: list[tuple[int, list[int]]] = []
    forward = Stage1.forward

    def noted(self: Stage1, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        assert self.training or self.epoch == 0, "evaluations are alike in every epoch"
        if self.training:
            seen.append((self.epoch, context.flatten().tolist()))
        return forward(self, context, continuation)

    monkeypatch.setattr(Stage1, "forward", noted)
    train(whole)
    # Four windows make two steps. They are others in the second epoch.
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1]
    assert sorted(seen[0][1] + seen[1][1]) != sorted(seen[2][1] + seen[3][1])
    killed = elsewhere(whole, "killed")
    uninterrupted, seen[:] = list(seen), []
    with killed_in_step(4):
        train(killed)
    train(killed)
    assert summary(killed)["resumed_from"] == "checkpoint-3"
    assert seen == [*uninterrupted, uninterrupted[3]]
    assert_same_training(killed, whole)


def test_a_process_killed_while_it_writes_a_checkpoint_resumes_from_the_one_before(
    stage1_recipe: Stage1Recipe,
    finished_stage1: Stage1Recipe,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # With keep=1, the old checkpoint must stay until the new one is complete.
    recipe = elsewhere(stage1_recipe, "killed", keep=1)
    seal = fit.seal

    def killed(folder: Path) -> None:
        if folder.name == "checkpoint-4":
            os.kill(os.getpid(), signal.SIGKILL)
        seal(folder)

    def run() -> None:
        # torch's own pool of threads does not survive a fork, and is renewed by one thread alone.
        torch.set_num_threads(1)
        train(recipe)

    # Forked, so that nothing is imported again.
    with monkeypatch.context() as patch:
        patch.setattr(fit, "seal", killed)
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join(120)
    assert process.exitcode == -signal.SIGKILL
    left = {folder.name for folder in Path(recipe.run.output).glob("checkpoint-*")}
    assert left == {"checkpoint-2", "checkpoint-4"}
    assert not is_complete(Path(recipe.run.output) / "checkpoint-4")
    with caplog.at_level(logging.WARNING):
        train(recipe)
    assert "checkpoint-4' is incomplete and is skipped" in caplog.text
    assert summary(recipe)["resumed_from"] == "checkpoint-2"
    assert_same_training(recipe, finished_stage1)
    left = {folder.name for folder in Path(recipe.run.output).glob("checkpoint-*")}
    assert left == {"checkpoint-6"}


def test_a_finished_run_that_is_started_again_does_not_change(
    finished: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = copied(finished, tmp_path)
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    train(again)
    assert not list(Path().iterdir()), "a run writes only into its output folder"
    assert summary(again)["resumed_from"] == "checkpoint-6"
    lines = [line for line in losses(again) if "loss" in line]
    assert lines == [line for line in losses(finished) if "loss" in line]
    weights = final_weights(finished)
    assert all(torch.equal(weights[name], new) for name, new in final_weights(again).items())


def test_processes_that_load_data_change_nothing(finished_stage2: Stage2Recipe) -> None:
    recipe = elsewhere(finished_stage2, "workers", workers=1)
    train(recipe)
    assert_same_training(recipe, finished_stage2)


# Batches by tokens


def by_tokens(recipe: Any, tokens: int | None) -> Any:
    """The recipe with batches of at most so many tokens."""
    changed = recipe.optimization.with_changes(batch_tokens=tokens)
    return recipe.with_changes(optimization=changed)


@pytest.mark.parametrize(
    ("lengths", "tokens", "wanted"),
    [
        ([9, 1, 1, 1, 8, 2, 2, 2] * 3, 18, [[2, 6]]),
        ([9, 1, 1, 1, 8, 2, 2, 2] * 3, 9, [[1, 1, 4, 2]]),
        ([9, 1, 1, 1, 8, 2, 2, 2] * 3, 5, [[1, 1, 2, 2, 2]]),
        ([9, 1, 1, 1, 8, 2, 2, 2] * 3, 100, [[8]]),
        # Of two processes, each has a half of a step.
        ([9, 1, 1, 1, 8, 2, 2, 2] * 3, 9, [[1, 3], [1, 3]]),
        ([9, 1, 1, 1, 8, 2, 2, 2] * 3, 100, [[4], [4]]),
        # The one with shorter examples has as many batches.
        ([9, 9, 9, 9, 1, 1, 1, 1], 9, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ([9, 9, 1, 1, 1, 1, 1, 1], 9, [[1, 1, 2], [2, 1, 1]]),
    ],
)
def test_a_step_is_divided_by_length(
    lengths: list[int],
    tokens: int,
    wanted: list[list[int]],
    stage2_recipe: Stage2Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = stage2_recipe.optimization.with_changes(batch_size=4, accumulation=2)
    recipe = by_tokens(stage2_recipe.with_changes(optimization=changed), tokens)
    examples = TensorDataset(torch.zeros(len(lengths)))
    monkeypatch.setattr(fit, "lengths_of", lambda _: np.array(lengths))
    monkeypatch.setattr("torch.randperm", lambda count, **_: torch.arange(count))
    seen = list[int]()
    for process, sizes in enumerate(wanted):
        run = run_of(Point(), recipe, {"all": 1.0}, examples)
        run.batches_of_step = 2 // len(wanted)
        own = SimpleNamespace(num_processes=len(wanted), process_index=process)
        run.own = own
        steps = run.order(0)
        assert all([len(batch) for batch in step] == sizes for step in steps)
        for batch in (batch for step in steps for batch in step):
            assert len(batch) == 1 or max(lengths[n] for n in batch) * len(batch) <= tokens
            seen += batch
    assert sorted(seen) == [*range(len(lengths))]


class Point(fit.Trainable):
    """A point that is drawn to every example alike."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.zeros(3))

    def parameter_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"all": [self.place]}

    def collate(self, items: list[tuple[Tensor]]) -> dict[str, Tensor]:
        return {"examples": torch.stack([item for (item,) in items])}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return len(batch["examples"])

    def forward(self, examples: Tensor) -> dict[str, Tensor]:
        return {"loss": (examples - self.place).square().sum(1).mean()}

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()


def test_a_step_divided_by_length_is_the_same_step(
    stage2_recipe: Stage2Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(fit, "lengths_of", lambda data: np.arange(1, len(data) + 1))
    changed = stage2_recipe.optimization.with_changes(
        learning_rates={"all": 0.1}, batch_size=4, accumulation=2
    )
    recipe = stage2_recipe.with_changes(optimization=changed)
    found = {}
    for tokens in (None, 1000, 12, 1):
        own, point = by_tokens(elsewhere(recipe, f"{tokens}"), tokens), Point()
        Path(own.run.output).mkdir()
        fit.fit(point, point, own, examples, None)
        means = [line["loss"] for line in summary(own)["log"]]
        found[tokens] = [*means, *point.place.tolist(), summary(own)["examples_seen"]]
    for numbers in found.values():
        assert numbers == pytest.approx(found[None], rel=1e-5)


# Two processes

Pair = tuple[Recipe, Recipe]


def sharded(recipe: Any) -> Any:
    """The recipe with the frozen layers divided among its processes."""
    return recipe.with_changes(optimization=recipe.optimization.with_changes(shard_backbone=True))


@pytest.fixture(scope="module")
def pairs(
    config: SedemConfig,
    finished_stage2: Stage2Recipe,
    killed_stage2: Stage2Recipe,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Pair]:
    """Runs of two processes, each with the run of one process that it must equal."""
    folder = tmp_path_factory.mktemp("together")
    stage1 = stage1_recipe_in(folder, config)
    alone = stage1.with_changes(
        optimization=stage1.optimization.with_changes(batch_size=2, accumulation=2)
    )
    train(alone)
    output = finished_stage2.run.with_changes(output=str(folder / "stage2"))
    found = {
        "stage2": (finished_stage2.with_changes(run=output), finished_stage2),
        "sharded-stage1": (sharded(elsewhere(alone, "sharded")), alone),
        # A run begun with whole layers goes on with divided ones.
        "sharded-resumed": (sharded(copied(killed_stage2, folder / "sharded")), finished_stage2),
    }
    train_in_two_processes([together for together, _ in found.values()], folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage2", "sharded-stage1", "sharded-resumed"])
def test_two_processes_train_as_one(name: str, pairs: dict[str, Pair]) -> None:
    together, alone = pairs[name]
    found, expected = losses(together), losses(alone)
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        # Two processes fill up their last batches, so an epoch can be a batch longer.
        assert line.pop("epoch") == pytest.approx(wanted.pop("epoch"), rel=0.01)
        assert line == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    torch.testing.assert_close(final_weights(together), final_weights(alone), rtol=1e-4, atol=1e-6)
    counts, wanted_counts = summary(together), summary(alone)
    assert (counts["processes"], wanted_counts["processes"]) == (2, 1)
    for count in ("steps", "examples_seen", "tokens_seen"):
        assert counts[count] == wanted_counts[count]
    # Both leave one set of checkpoints.
    output, wanted_output = (Path(recipe.run.output) for recipe in (together, alone))
    names = {path.name for path in output.glob("checkpoint-*")}
    assert names == {path.name for path in wanted_output.glob("checkpoint-*")}
    assert all(is_complete(output / name) for name in names)
    newest = json.loads((output / "checkpoint-6" / COMPLETE).read_text())
    assert {"random-0.safetensors", "random-1.safetensors"} < newest.keys()


# Logs


def test_the_summary_describes_the_run(finished: Recipe) -> None:
    found = summary(finished)
    assert found["recipe"] == finished.to_dict()
    assert (found["steps"], found["examples_seen"]) == (6, 24)
    assert found["seconds"] >= 0 and "commit" in found
    assert found["machine"]["threads"] == 1
    assert found["versions"].keys() >= {"sedem", "torch", "transformers"}
    counts = found["trained_parameters"]
    assert counts["compressor"] == 32 * 32
    assert counts["decompressor"] == 2 * 32 + (32 * 32 + 32) + (32 * 128 + 128)
    if isinstance(finished, Stage2Recipe):
        assert counts["selector"] == 4 * 32 + 2 * 32 * 32
        assert counts["lora"] == 4 * 4 * (32 + 32 + 32 + 32 + 32 + 16 + 32 + 16)
    assert set(found["evaluation"]) >= {"eval_loss", "eval_reconstruct"}


def test_every_part_of_the_loss_is_logged(finished_stage1: Stage1Recipe) -> None:
    lines = losses(finished_stage1)
    trained = {line["step"]: line for line in lines if "loss" in line}
    # Only the regression in the first half.
    for step in (1, 2, 3):
        assert "context" not in trained[step]
        assert trained[step]["regress"] == pytest.approx(trained[step]["loss"], rel=1e-6)
    for step in (4, 5, 6):
        line = trained[step]
        loss = line["context"] + 0.5 * line["distill"] + line["reconstruct"] + 0.5 * line["regress"]
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
    # Evaluation has its own lines and adds nothing to those of training.
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert all("loss" not in line and "eval_context" in line for line in evaluated)
    assert not any("eval_context" in line for line in trained.values())


def test_a_short_last_batch_counts_as_what_it_holds(stage2_recipe: Stage2Recipe) -> None:
    # Twelve questions in batches of five: the third batch has two, the second step one batch.
    recipe = stage2_recipe.with_changes(
        optimization=stage2_recipe.optimization.with_changes(
            batch_size=5, accumulation=2, steps=None, epochs=2
        ),
        run=stage2_recipe.run.with_changes(eval_every=0, log_every=2),
    )
    train(recipe)
    found = summary(recipe)
    assert (found["steps"], found["examples_seen"]) == (4, 24)
    weights = {"answer": 1.0, "select": 1.0, "reconstruct": 0.1}
    for prefix, lines in (("", found["log"]), ("eval_", [found["evaluation"]])):
        for line in lines:
            if f"{prefix}answer" in line and f"{prefix}loss" in line:
                total = sum(weight * line[prefix + name] for name, weight in weights.items())
                assert line[f"{prefix}loss"] == pytest.approx(total, rel=1e-4)


def test_a_resumed_run_takes_its_own_intervals(stopped: Stage2Recipe) -> None:
    train(stopped.with_changes(run=stopped.run.with_changes(log_every=2, save_every=5, keep=9)))
    assert summary(stopped)["resumed_from"] == "checkpoint-4"
    assert [line["step"] for line in losses(stopped) if "loss" in line] == [1, 2, 3, 4, 6]
    names = {folder.name for folder in Path(stopped.run.output).glob("checkpoint-*")}
    assert names >= {"checkpoint-4", "checkpoint-5"}


def test_evaluation_does_not_change_the_losses_of_training(
    stage1_recipe: Stage1Recipe, finished_stage1: Stage1Recipe
) -> None:
    # Steps 3 and 4 share a log line, and evaluation comes between them.
    followed = elsewhere(stage1_recipe, "followed", log_every=2)
    train(followed)
    every = {line["step"]: line for line in losses(finished_stage1) if "loss" in line}
    lines = {line["step"]: line for line in losses(followed) if "loss" in line}
    assert [*lines] == [1, 2, 4, 6]
    for name in ("loss", "regress"):
        assert lines[4][name] == pytest.approx((every[3][name] + every[4][name]) / 2, rel=1e-6)
    assert lines[4]["context"] == every[4]["context"]


def test_rates_of_parts_follow_the_schedule(stage2_recipe: Stage2Recipe) -> None:
    linear = stage2_recipe.optimization.with_changes(schedule="linear", warmup_ratio=0.5)
    slow = stage2_recipe.with_changes(optimization=linear)
    train(slow)
    rates = [line["learning_rate"] for line in losses(slow) if "learning_rate" in line]
    first = stage2_recipe.optimization.learning_rates["compressor"]
    assert rates == pytest.approx([first * share for share in (0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)])


def test_a_process_uses_one_gpu_and_says_how_to_use_all(
    stage1_recipe: Stage1Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    train(stage1_recipe.with_changes(optimization=stage1_recipe.optimization.with_changes(steps=1)))
    assert "4 GPUs are visible and one is used" in caplog.text
    assert "torchrun --nproc-per-node 4" in caplog.text


def test_a_tracker_gets_every_line(stage1_recipe: Stage1Recipe) -> None:
    train(stage1_recipe)
    (folder,) = (Path(stage1_recipe.run.output) / "trackers").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    for name, prefix in (("loss", ""), ("eval_context", "eval_")):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        lines = [line for line in losses(stage1_recipe) if f"{prefix}loss" in line]
        assert found == [(line["step"], pytest.approx(line[name])) for line in lines]


def test_every_saved_step_is_pushed_and_a_hub_that_is_away_ends_nothing(
    stage1_recipe: Stage1Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed: list[str] = []

    def push(folder: Path, name: str, private: bool) -> None:
        assert private and (folder / "sedem.safetensors").is_file()
        pushed.append(name)
        if len(pushed) == 2:
            raise OSError("no route to the hub")

    monkeypatch.setattr(fit, "push_folder", push)
    run = stage1_recipe.run.with_changes(push_to="me/mine")
    train(stage1_recipe.with_changes(run=run))
    # Before the first step, with each of three checkpoints, and at the end.
    assert pushed == ["me/mine"] * 5
    assert "step 2 could not be pushed: no route to the hub" in caplog.text


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("run", {"trackers": ("tensorbord",)}, "has 'tensorbord', but accelerate knows aim, "),
        ("run", {"trackers": ("comet_ml",)}, "'comet_ml', which is not installed; install it fir"),
        ("run", {"push_to": "me/mine"}, "which only this machine has"),
        ("optimization", {"batch_tokens": 64}, "is 64, but windows of text are of one length"),
        ("optimization", {"learning_rates": {"compresor": 1, "decompressor": 1}},
         "has compresor, decompressor, but not compressor; every trained part needs one"),
        ("optimization", {"learning_rates": {"compressor": 1, "decompressor": 1, "selectr": 1}},
         "but selectr is no part of this training; its parts are compressor, decompressor"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_known_before_the_first_step(
    section: str, changes: dict[str, Any], message: str, stage1_recipe: Stage1Recipe
) -> None:
    changed = getattr(stage1_recipe, section).with_changes(**changes)
    with pytest.raises(ConfigError, match=message):
        train(stage1_recipe.with_changes(**{section: changed}))
    assert not [*Path(stage1_recipe.run.output).glob("checkpoint-*")]


def test_the_state_before_an_evaluation_is_json_and_resumed_without_a_best_loss(
    stopped: Stage2Recipe, model: SeDeM
) -> None:
    text = (Path(stopped.run.output) / "checkpoint-2" / STATE).read_text()
    state = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (state["step"], state["best"]) == (2, None)
    shutil.rmtree(Path(stopped.run.output) / "checkpoint-4")
    model.decoder.add_lora(stopped.model.lora_rank, stopped.model.lora_alpha)
    run = Run(Stage2(model, stopped.losses, None), stopped, TensorDataset(torch.zeros(12)), False)
    assert run.resume() == "checkpoint-2"
    assert (run.step, run.best) == (2, (0, math.inf))


# The final checkpoint


def test_the_final_checkpoint_opens_and_answers(finished: Recipe) -> None:
    run = Path(finished.run.output)
    model = SeDeM.from_pretrained(run / "final")
    assert model.decoder.has_lora == isinstance(finished, Stage2Recipe)
    bank = model.read([Document("lease.txt", "The rent is 900 euros a month, due in May.")])
    answer = model.answer(bank, "What is the rent?", k=1)
    assert len(answer.citations) == 1
    assert answer.text or answer.finish_reason == "end"
    # It is the trained model, not a new one.
    trained = load_file(run / "checkpoint-6" / TRAINED)
    expected = {name.removeprefix("model."): tensor for name, tensor in trained.items()}
    plain = SeDeM.from_pretrained(run / "final", engine="eager")
    found = {name: p for name, p in plain.named_parameters() if name in expected}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_stage_2_continues_from_the_weights_and_adapters_of_a_checkpoint(
    finished_stage2: Stage2Recipe, stage2_recipe: Stage2Recipe
) -> None:
    rates = dict.fromkeys(stage2_recipe.optimization.learning_rates, 0.0)
    still = stage2_recipe.optimization.with_changes(learning_rates=rates, steps=2)
    start = str(Path(finished_stage2.run.output) / "final")
    second = stage2_recipe.with_changes(optimization=still, start_from=start)
    train(second)
    before, after = final_weights(finished_stage2), final_weights(second)
    assert any("lora_" in name for name in before) and before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_the_final_weights_are_between_those_of_start_and_end(
    finished_stage2: Stage2Recipe, stage2_recipe: Stage2Recipe
) -> None:
    start = Path(finished_stage2.run.output) / "final"
    between = stage2_recipe.optimization.with_changes(keep_start=0.25, steps=2)
    recipe = stage2_recipe.with_changes(optimization=between, start_from=str(start))
    final = train(recipe)
    ends = load_file(final.parent / "checkpoint-2" / TRAINED)
    before, after = (
        dict(SeDeM.from_pretrained(folder, engine="eager").named_parameters())
        for folder in (start, final)
    )
    moved = 0
    for name, end in ends.items():
        own = name.removeprefix("model.")
        torch.testing.assert_close(after[own], 0.75 * end + 0.25 * before[own])
        moved += not torch.equal(end, before[own])
    assert moved > len(ends) // 2
    # The losses are those of what is written, and a second start changes nothing.
    found = summary(recipe)
    assert found["evaluation"] == found["log"][-1] and "eval_loss" in found["log"][-1]
    assert found["evaluation"]["eval_loss"] != found["log"][-2]["eval_loss"]
    weights = final_weights(recipe)
    train(recipe)
    assert all(torch.equal(weights[name], new) for name, new in final_weights(recipe).items())


@pytest.mark.parametrize("lines", [False, True])
def test_a_bar_has_the_name_of_its_run_and_the_loss_unless_lines_are_wanted(
    lines: bool,
    stage1_recipe: Stage1Recipe,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO if lines else logging.WARNING, "sedem_lab.training.fit")
    train(stage1_recipe)
    printed, shown = capsys.readouterr()
    assert "stage1: 100%" in shown and not printed
    assert ("loss=" in shown) is not lines
    assert ("'regress': " in shown) is lines


# Weights of a checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.selector.w_key.weight"),
         r"1 weights are missing \(such as model\.selector\.w_key\.weight\) and 0 are not known"),
        (lambda weights: weights.update(extra=torch.zeros(1)),
         r"0 weights are missing and 1 are not known \(such as extra\)"),
        (lambda weights: weights.update({"model.compressor.w_in.weight": torch.zeros(2, 3)}),
         r"model\.compressor\.w_in\.weight has shape \[2, 3\], \[32, 32\] is needed"),
        (None, "was written by an earlier version of sedem"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model_or_version_is_refused(
    stopped: Stage2Recipe, change: Callable[[dict[str, Tensor]], Any] | None, message: str
) -> None:
    folder = Path(stopped.run.output) / "checkpoint-4"
    weights = load_file(folder / TRAINED)
    # Only what is trained is kept. One backbone is both encoder and decoder; its adapters have the
    # first name.
    parts = {name.split(".")[1] for name in weights if ".encoder." not in name}
    assert parts == {"compressor", "decompressor", "selector"}
    assert all("lora_" in name for name in weights if ".encoder." in name)
    if change is None:
        (folder / STATE).unlink()
    else:
        change(weights)
        save_file(weights, folder / TRAINED)
    seal(folder)
    with pytest.raises(CheckpointError, match=message):
        train(stopped)


# The optimizer


def run_of(
    stage: fit.Trainable,
    recipe: Recipe,
    rates: dict[str, float],
    training: Any = None,
) -> Run:
    """A run that has not begun."""
    changed = recipe.optimization.with_changes(learning_rates=rates, weight_decay=0.1)
    changed_recipe = recipe.with_changes(optimization=changed)
    training = training or TensorDataset(torch.zeros(4))
    return Run(stage, changed_recipe, training, False)


def test_every_part_has_its_learning_rate_and_only_matrices_decay(
    model: SeDeM, stage2_recipe: Stage2Recipe
) -> None:
    model.decoder.add_lora(2, 4)
    stage = Stage2(model, Stage2Losses(), None)
    rates = {"compressor": 1e-4, "decompressor": 2e-4, "selector": 5e-4, "lora": 3e-4}
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    found = [
        (names[id(parameter)], group["initial_lr"], group["weight_decay"])
        for group in run_of(stage, stage2_recipe, rates).optimizer.param_groups
        for parameter in group["params"]
    ]
    expected = []
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            part = "lora" if "lora_" in name else name.split(".")[1]
            expected.append((name, rates[part], 0.1 if parameter.dim() > 1 else 0.0))
    assert sorted(found) == sorted(expected)
    assert {decay for *_, decay in found} == {0.0, 0.1}
    # A part that this model lacks is a part all the same.
    run_of(stage, stage2_recipe, dict.fromkeys(stage.parameter_groups(), 1e-4))


def test_a_damaged_best_checkpoint_is_not_loaded(
    model: SeDeM, stage1_recipe: Stage1Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage1(model, Stage1Losses())
    run = run_of(stage, stage1_recipe, dict.fromkeys(stage.parameter_groups(), 1e-4))
    run.best = (2, 1.0)
    (run.output / "checkpoint-2").mkdir(parents=True)
    assert run.load_best() is None
    assert "checkpoint-2', is damaged; the last one is used" in caplog.text


# A step starts all of its work without reading a number from the device

READING = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}
"""Operations whose result the host needs before it can go on."""
INDEXING = {"index", "index_put", "index_put_"}


class Waits(TorchDispatchMode):
    """Notes operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in INDEXING else ()
        masks = any(one is not None and one.dtype == torch.bool for one in indices)
        if name in READING or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_nothing(model: SeDeM, examples: ExampleSet) -> None:
    ones = torch.ones(3)
    with Waits() as waits:
        bool(ones.any()), ones.sum().item(), ones[ones > 0], ones * ones[torch.tensor([0, 2])][0]
    assert waits.found == ["_local_scalar_dense", "_local_scalar_dense", "index"]

    first, ids = Stage1(model, Stage1Losses()), torch.randint(2, 258, (3, 21))
    with Waits() as waits:
        first(ids[:, :16], ids[:, 16:])["loss"].backward()
    assert waits.found == []

    model.decoder.add_lora(2, 4)
    second = Stage2(model, Stage2Losses(), collator(block_dataset(model, examples)))
    batch = second.collate(second.collator.dataset.items)
    with Waits() as waits:
        second(**batch)["loss"].backward()
        second.tokens(batch)
    assert waits.found == []
