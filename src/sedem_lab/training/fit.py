"""Training: one loop over the steps of a run, from its last complete checkpoint to its end.

What is trained is a `Trainable`. Its `forward(**batch)` returns a dict with `loss` and its named
parts.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import get_scheduler

from sedem.checkpoint.hub import SUMMARY_FILE, push_folder
from sedem.durable_files import write_text
from sedem.errors import CheckpointError, ConfigError
from sedem.tensors import check_weights, load_weights, save_tensors
from sedem_lab.data.windows import Windows
from sedem_lab.provenance import provenance
from sedem_lab.training.checkpoints import (
    checkpoints,
    is_complete,
    last_complete_checkpoint,
    remove,
    seal,
)
from sedem_lab.training.example_dataset import lengths_of
from sedem_lab.training.memory import set_checkpointing
from sedem_lab.training.recipe import Recipe
from sedem_lab.training.run_setup import (
    FINAL,
    averaging,
    divided,
    flat,
    processes,
    share_of_batches,
)

logger = logging.getLogger(__name__)

TRAINED, OPTIMIZER, STATE = "trained.safetensors", "optimizer.safetensors", "state.json"
"""Files of a checkpoint: trained weights; the optimizer's moments; counts and log."""
RANDOM = "random-{}.safetensors"
"""The random state of a process, by its number."""
COUNTS = ("step", "examples", "tokens", "best", "lines")
"""What a checkpoint keeps of a `Run` in STATE."""


class Trainable(nn.Module, ABC):
    """A module that `fit` can train.

    Attributes:
        progress: share of the training that is done; set before every step.
        epoch: passes over the data before this one; set before every pass.
    """

    progress: float = 0.0
    epoch: int = 0

    @abstractmethod
    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Trained parameters by the name of their learning rate; a part may have none."""

    @abstractmethod
    def collate(self, items: list[Any], /) -> dict[str, Any]:
        """Collate items of the dataset into the arguments of `forward`."""

    @abstractmethod
    def tokens(self, batch: Mapping[str, Any], /) -> int | Tensor:
        """Number of tokens of text in a batch, without padding; on the batch's device."""

    def freeze_others(self) -> None:
        """Freeze every parameter that is in no group."""
        self.requires_grad_(False)
        for parameters in self.parameter_groups().values():
            for parameter in parameters:
                parameter.requires_grad_(True)


class Savable(Protocol):
    """A model that can be written as a checkpoint."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the model to a folder."""
        ...


def fit(
    stage: Trainable,
    model: Savable,
    recipe: Recipe,
    training: Dataset[Any],
    evaluation: Dataset[Any] | None,
    *,
    data_summary: Mapping[str, Any] | None = None,
    best: bool = False,
    shown: bool = True,
) -> Path:
    """Train, evaluate, and write the final checkpoint and training.json.

    Several processes share the batches of a step. Counts and logged losses cover all of them, and
    only the first one writes and removes checkpoints.

    Args:
        model: the model that the final checkpoint is written from.
        recipe: its output folder was claimed by `start_run`.
        data_summary: facts about the data for training.json, such as how much was left out.
        best: if losses are evaluated during training (`run.eval_every`), write the weights with the
            lowest evaluated loss; otherwise the last ones.
        shown: whether a bar and log lines show it.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: a part has no learning rate, or a learning rate has no part; or a tracker
            cannot be used.
        CheckpointError: the last checkpoint has other weights than the model.
    """
    started, own, settings = time.time(), processes(), recipe.run
    if (gpus := torch.cuda.device_count()) > own.num_processes == 1:
        logger.warning(
            f"{gpus} GPUs are visible and one is used; to use all, start the command with "
            f"'torchrun --nproc-per-node {gpus} --no-python'"
        )
    set_checkpointing(stage, recipe.optimization, training)
    run = Run(stage, recipe, training, shown)
    resumed_from = run.resume()
    if settings.push_to and own.is_main_process:
        # Also before the first step, so that what the hub refuses is known in time.
        _push(model, settings.push_to)

    losses = Losses()
    stage.train()
    while run.step < run.steps:
        # A pass over the data, without what was seen before a kill. Module and windows must know
        # the pass before its first batch is made.
        stage.epoch, done = divmod(run.step, run.steps_of_epoch)
        if isinstance(training, Windows):
            training.epoch = stage.epoch
        left = run.order(stage.epoch)[done:][: run.steps - run.step]
        batches = run.batches(training, [indices for step in left for indices in step])
        for step in left:
            # The gradients of a step's batches are averaged; over processes with the last one.
            stage.progress = run.step / run.steps
            examples = sum(map(len, step))
            for number, indices in enumerate(step, 1):
                batch, share = next(batches), len(indices) / examples
                with run.accelerator.no_sync(run.wrapped) if number < len(step) else nullcontext():
                    parts = run.forward(batch)
                    run.accelerator.backward(parts["loss"] * share)
                losses.add(parts, share)
                run.new_tokens = run.new_tokens + stage.tokens(batch)
            norm = run.accelerator.clip_grad_norm_(
                [*run.trained.values()], recipe.optimization.max_grad_norm
            )
            for group in run.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * run.rate(run.step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step += 1
            run.examples += own.num_processes * examples

            # Log, evaluate and save, each at its interval.
            run.bar.update()
            if run.step == 1 or run.step % settings.log_every == 0:
                rate = run.optimizer.param_groups[0]["lr"]
                others = {"grad_norm": float(norm), "learning_rate": rate}
                run.note(losses.means(run.accelerator) | others)
            saves = run.step == run.steps or run.step % settings.save_every == 0
            every = settings.eval_every
            if evaluation is not None and every and run.step % every == 0:
                run.evaluate(evaluation)
                # The best weights are needed at the end, so they are saved at once.
                saves |= best and run.best[0] == run.step
            if saves:
                run.save(keeps_best=best)
                if settings.push_to and own.is_main_process:
                    try:
                        _push(model, settings.push_to)
                    except Exception as error:  # a hub that is away must not end a training
                        logger.warning("step %d could not be pushed: %s", run.step, error)
    run.bar.close()

    # The last weights are kept, or the best evaluated ones.
    metrics: dict[str, float] = {}
    if evaluation is not None:
        if not run.lines or "eval_loss" not in run.lines[-1]:
            run.evaluate(evaluation)
        metrics = run.lines[-1]
        if best and settings.eval_every and run.best[0] != run.step:
            metrics = run.load_best() or metrics
    # Or what lies between them and the start.
    if run.average_with_start() and evaluation is not None:
        run.evaluate(evaluation)
        metrics = run.lines[-1]
    final = run.output / FINAL
    run.count_tokens()
    if own.is_main_process:
        model.save_pretrained(final)
        summary = {
            "recipe": recipe.to_dict(),
            "steps": run.step,
            "final_step": metrics.get("step", run.step),
            "processes": own.num_processes,
            "examples_seen": run.examples,
            "tokens_seen": run.tokens,
            "data": dict(data_summary or {}),
            "trained_parameters": {
                name: sum(p.numel() for p in parameters)
                for name, parameters in stage.parameter_groups().items()
                if parameters
            },
            "seconds": round(time.time() - started, 1),
            "resumed_from": resumed_from,
            "evaluation": metrics,
            "log": run.lines,
            **provenance(),
        }
        write_text(run.output / SUMMARY_FILE, json.dumps(summary, indent=1, default=str) + "\n")
        if settings.push_to:
            push_folder(final, settings.push_to, private=True)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    own.wait_for_everyone()
    return final


class Losses:
    """Weighted sums of losses and of their parts.

    They stay on the device until their means are needed: a step that reads a number waits for all
    of its work.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor], weight: float) -> None:
        """Add the losses of a batch."""
        for name, value in parts.items():
            pair = torch.stack(
                [value.detach().double() * weight, value.new_full((), weight).double()]
            )
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over all batches of all processes, which have the same parts; starts anew."""
        sums = accelerator.reduce(torch.stack([*self.sums.values()]), "sum").tolist()
        means = {name: total / of for name, (total, of) in zip(self.sums, sums, strict=True)}
        self.sums.clear()
        return means


class Run:
    """A training on its way: its modules, counts and log, its batches and its checkpoints.

    Args:
        training: its examples.

    Attributes:
        step: finished steps, of `steps`.
        rate: share of the learning rates at a step.
        examples: examples of all steps so far.
        tokens: tokens of all steps so far, without `new_tokens`, which are those of this process
            since the last log line or checkpoint.
        best: step and loss of the lowest evaluated loss.
        lines: the log.
    """

    def __init__(
        self, stage: Trainable, recipe: Recipe, training: Dataset[Any], shown: bool
    ) -> None:
        own, optimization, output = processes(), recipe.optimization, Path(recipe.run.output)
        self.stage, self.recipe, self.output, self.own = stage, recipe, output, own
        self.count, self.lengths = len(cast(Sized, training)), lengths_of(training)
        if optimization.batch_tokens and self.lengths is None:
            raise ConfigError(
                f"optimization.batch_tokens is {optimization.batch_tokens}, but windows of text "
                "are of one length; set optimization.batch_size instead"
            )
        self.step, self.examples, self.tokens = 0, 0, 0
        self.new_tokens: int | Tensor = 0
        self.best: tuple[int, float] = (0, math.inf)
        self.lines: list[dict[str, float]] = []
        installed = {str(name) for name in get_available_trackers()}
        for name in recipe.run.trackers:
            if name not in LOGGER_TYPE_TO_CLASS:
                known = ", ".join(LOGGER_TYPE_TO_CLASS)
                raise ConfigError(f"run.trackers has '{name}', but accelerate knows {known}")
            if name not in installed:
                raise ConfigError(
                    f"run.trackers has '{name}', which is not installed; install it first"
                )
        self.accelerator = Accelerator(
            cpu=own.device.type == "cpu",
            mixed_precision="no",  # `forward` decides, by the recipe alone
            log_with=[*recipe.run.trackers],
            project_config=ProjectConfiguration(str(output), str(output / "trackers")),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.accelerator.init_trackers(
            output.name, {name: str(value) for name, value in flat(recipe.to_dict()).items()}
        )

        # AdamW with one learning rate per part, and weight decay on matrices only.
        groups, rates = stage.parameter_groups(), optimization.learning_rates
        given = f"optimization.learning_rates has {', '.join(rates)}"
        if missing := ", ".join(name for name in groups if groups[name] and name not in rates):
            raise ConfigError(f"{given}, but not {missing}; every trained part needs one")
        if unknown := ", ".join(name for name in rates if name not in groups):
            raise ConfigError(
                f"{given}, but {unknown} is no part of this training; its parts are "
                f"{', '.join(groups)}"
            )
        stage.to(own.device)
        self.trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self.keep_start = optimization.keep_start
        kept = self.trained.items() if self.keep_start else ()
        self.start = {name: p.detach().clone() for name, p in kept}
        self.optimizer = torch.optim.AdamW(
            {"params": chosen, "lr": rates[name], "weight_decay": decay}
            for name, parameters in groups.items()
            for matrices, decay in ((True, optimization.weight_decay), (False, 0.0))
            if (chosen := [p for p in parameters if (p.dim() > 1) == matrices])
        )
        # Accelerate refuses to average gradients next to sharded weights, which have none here.
        self.wrapped = averaging(stage) if divided(stage) else self.accelerator.prepare_model(stage)

        # A step has the same examples for any number of processes, which fill up the last batches
        # of a pass.
        self.batches_of_step = share_of_batches(optimization, own.num_processes)
        rounds = math.ceil(self.count / (optimization.batch_size * own.num_processes))
        self.steps_of_epoch = math.ceil(rounds / self.batches_of_step)
        epochs = optimization.epochs or 0.0
        self.steps = optimization.steps or math.ceil(epochs * self.steps_of_epoch)
        warmup = optimization.warmup or math.ceil(optimization.warmup_ratio * self.steps)
        schedule = get_scheduler(optimization.schedule, self.optimizer, warmup, self.steps)
        self.rate: Callable[[int], float] = schedule.lr_lambdas[0]
        hidden = not (shown and own.is_main_process)
        self.bar = tqdm(total=self.steps, desc=output.name, disable=hidden, dynamic_ncols=True)

    def order(self, epoch: int) -> list[list[list[int]]]:
        """The examples of a pass over the data: of each step, the batches of this process."""
        own, optimization, lengths = self.own, self.recipe.optimization, self.lengths
        drawn = torch.Generator().manual_seed(optimization.seed + epoch)
        order = torch.randperm(self.count, generator=drawn).tolist()
        size = optimization.batch_size
        if own.num_processes > 1:
            missing = -self.count % (size * own.num_processes)
            order += [order[number % self.count] for number in range(missing)]
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        every = [batches[process :: own.num_processes] for process in range(own.num_processes)]
        share = self.batches_of_step
        if optimization.batch_tokens is None or lengths is None:
            mine = every[own.process_index]
            return [mine[at : at + share] for at in range(0, len(mine), share)]

        def by_length(examples: list[int]) -> list[list[int]]:
            """Batches of examples within `batch_tokens`, the longest examples first."""
            found, left = [], sorted(examples, key=lambda example: -lengths[example])
            while left:
                rows = optimization.rows(int(lengths[left[0]]))
                found.append(left[:rows])
                left = left[rows:]
            return found

        # Divided by length, the processes' steps still have as many batches each: layers that are
        # divided among processes are gathered by all of them at once.
        steps = []
        for at in range(0, len(every[0]), share):
            parts = [by_length([*chain(*one[at : at + share])]) for one in every]
            mine, most = parts[own.process_index], max(map(len, parts))
            while len(mine) < most:
                largest = mine.pop(max(range(len(mine)), key=lambda number: len(mine[number])))
                mine += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
            steps.append(mine)
        return steps

    def batches(self, dataset: Dataset[Any], indices: list[list[int]]) -> Iterator[Any]:
        """Batches of a dataset by the indices of their examples, on this process's device."""
        loader = DataLoader(
            dataset,
            batch_sampler=indices,
            collate_fn=self.stage.collate,
            num_workers=self.recipe.run.workers,
            pin_memory=self.own.device.type == "cuda",
            generator=torch.Generator(),  # the random numbers of the training are not touched
        )
        return (send_to_device(batch, self.own.device, non_blocking=True) for batch in loader)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Losses of a batch, in the precision of the recipe."""
        mixed = self.recipe.optimization.bf16
        with torch.autocast(self.own.device.type, torch.bfloat16, enabled=mixed):
            losses: dict[str, Tensor] = self.wrapped(**batch)
        return losses

    def evaluate(self, dataset: Dataset[Any]) -> None:
        """Log the losses over the evaluation set, with the same batches in every epoch."""
        own, epoch = self.own, self.stage.epoch
        self.stage.epoch = 0
        self.stage.eval()
        size, indices = self.recipe.optimization.batch_size, range(len(cast(Sized, dataset)))
        batches = [[*indices[at : at + size]] for at in range(0, len(indices), size)]
        weights = [*map(len, batches)]
        # Divided layers are gathered by all processes at once, so each runs as many batches; those
        # that fill up do not count.
        missing = -len(batches) % own.num_processes
        batches, weights = batches + missing * batches[:1], weights + missing * [0]
        mine = slice(own.process_index, None, own.num_processes)
        losses = Losses()
        shown = tqdm(
            zip(self.batches(dataset, batches[mine]), weights[mine], strict=True),
            f"{self.output.name}, evaluating",
            len(batches[mine]),
            leave=False,
            disable=self.bar.disable,
        )
        with torch.no_grad():
            for batch, weight in shown:
                losses.add(self.forward(batch), weight)
        self.stage.train()
        self.stage.epoch = epoch
        line = {f"eval_{name}": mean for name, mean in losses.means(self.accelerator).items()}
        self.note(line)
        self.best = min(self.best, (self.step, line["eval_loss"]), key=lambda pair: pair[1])

    def note(self, line: Mapping[str, float]) -> None:
        """Write a line of the log, also to the trackers."""
        self.count_tokens()
        self.accelerator.log(dict(line), step=self.step)
        self.lines.append({**line, "epoch": self.step / self.steps_of_epoch, "step": self.step})
        if not self.bar.disable and logger.isEnabledFor(logging.INFO):
            rounded = {name: float(f"{value:.4g}") for name, value in self.lines[-1].items()}
            self.bar.write(str(rounded), file=sys.stderr)
        elif "loss" in line:
            self.bar.set_postfix(loss=f"{line['loss']:.3f}", refresh=False)

    def count_tokens(self) -> None:
        """Add the new tokens of all processes to their count."""
        new = torch.as_tensor(self.new_tokens, dtype=torch.int64, device=self.own.device)
        self.tokens += int(self.accelerator.reduce(new, "sum"))
        self.new_tokens = 0

    def save(self, keeps_best: bool) -> None:
        """Write a checkpoint, sealed once it is complete, and remove old ones."""
        own, folder = self.own, self.output / f"checkpoint-{self.step}"
        self.count_tokens()
        folder.mkdir(exist_ok=True)
        # Each process writes its random state, and the seal covers all of them.
        random = {"cpu": torch.get_rng_state()}
        if own.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(own.device)
        save_tensors(random, folder / RANDOM.format(own.process_index))
        if own.is_main_process:
            weights = {name: p.detach().contiguous() for name, p in self.trained.items()}
            save_tensors(weights, folder / TRAINED)
            moments = {
                f"{number}.{name}": tensor
                for number, state in self.optimizer.state_dict()["state"].items()
                for name, tensor in state.items()
            }
            save_tensors(moments, folder / OPTIMIZER)
            # Without an evaluation, the best loss is infinite, which is no number of JSON.
            counts = {name: getattr(self, name) for name in COUNTS}
            counts["best"] = self.best if math.isfinite(self.best[1]) else None
            write_text(folder / STATE, json.dumps(counts, indent=1) + "\n")
        own.wait_for_everyone()
        if own.is_main_process:
            seal(folder)
            # Only now: a kill must never leave a run without a complete checkpoint.
            for old in checkpoints(self.output)[self.recipe.run.keep :]:
                if not (keeps_best and old.name == f"checkpoint-{self.best[0]}"):
                    remove(old)

    def resume(self) -> str | None:
        """Go on from the last complete checkpoint, if there is one, and return its name."""
        own = self.own
        # The first process removes incomplete checkpoints and renames damaged ones before the
        # others look for one.
        with own.main_process_first():
            folder = last_complete_checkpoint(self.output)
        if folder is None:
            return None
        if not (folder / STATE).is_file():
            raise CheckpointError(
                f"'{folder}' was written by an earlier version of sedem, whose runs cannot be "
                "resumed; finish it with that version, or set run.output to another folder"
            )
        self._load(folder)
        for name, value in json.loads((folder / STATE).read_text(encoding="utf-8")).items():
            if value is not None:
                setattr(self, name, value)
        moments: dict[int, dict[str, Tensor]] = {}
        for place, tensor in load_weights(folder / OPTIMIZER).items():
            number, name = place.split(".")
            moments.setdefault(int(number), {})[name] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        # A run may go on with more processes than it had.
        if (path := folder / RANDOM.format(own.process_index)).is_file():
            random = load_weights(path)
            torch.set_rng_state(random["cpu"])
            if own.device.type == "cuda" and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], own.device)
        self.bar.update(self.step)
        return folder.name

    def load_best(self) -> dict[str, float] | None:
        """Go back to the best evaluated weights and return their losses; None if damaged."""
        folder = self.output / f"checkpoint-{self.best[0]}"
        if not is_complete(folder):
            logger.warning("the best checkpoint, '%s', is damaged; the last one is used", folder)
            return None
        self._load(folder)
        evaluated = (line for line in self.lines if "eval_loss" in line)
        return next(line for line in evaluated if line["step"] == self.best[0])

    @torch.no_grad()
    def average_with_start(self) -> bool:
        """Average the weights with those of the start, and return whether that changes them."""
        for name, weights in self.start.items():
            self.trained[name].lerp_(weights, self.keep_start)
        return bool(self.start)

    def _load(self, folder: Path) -> None:
        weights = load_weights(folder / TRAINED)
        check_weights(self.trained, weights, str(folder / TRAINED))
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])


def _push(model: Savable, repo_id: str) -> None:
    """Upload the weights as they are now."""
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(Path(temporary) / FINAL)
        push_folder(Path(temporary) / FINAL, repo_id, private=True)
