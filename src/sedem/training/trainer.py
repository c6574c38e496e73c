"""A thin layer over transformers.Trainer: learning rates by part, loss parts, sealed checkpoints.

A trainable method is a module. Its `forward(**batch)` returns a dict with `loss` and its named
parts, `parameter_groups()` names the trained parameters, and `collate` makes a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from sedem.backbone.safetensors import check_weights, load_weights, save_tensors
from sedem.data.windows import Windows
from sedem.errors import ConfigError
from sedem.training.checkpoints import checkpoints, is_complete, remove, seal
from sedem.training.run_setup import averaging, divided

logger = logging.getLogger(__name__)

TRAINED = "trained.safetensors"


class Trainable(Protocol):
    """A torch module that the trainer can train."""

    progress: float
    """Share of the training that is done; the trainer sets it before every step."""

    epoch: int
    """Passes over the data before this one; the trainer sets it before every pass."""

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Trained parameters by the name of their learning rate; a part may have none."""
        ...

    def collate(self, items: list[Any]) -> dict[str, Any]:
        """Collate items of the dataset into the arguments of `forward`."""
        ...

    def tokens(self, batch: Mapping[str, Any]) -> int | Tensor:
        """Number of tokens of text in a batch, without padding; on the batch's device."""
        ...


class _Intervals(TrainerCallback):
    """Logs and saves at this run's intervals, and announces each epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # A resumed state has the intervals of the previous run.
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        # The module and its windows must know the epoch before its first batch is made.
        epoch = int(state.epoch or 0)
        cast(Trainable, options["model"]).epoch = epoch
        if isinstance(self.dataset, Windows):
            self.dataset.epoch = epoch


class SedemTrainer(Trainer):
    """Trains one `Trainable`, in one process or in several that share the batches of a step.

    Counts and logged losses cover all processes. Only the first process writes and removes
    checkpoints.

    Args:
        learning_rates: by name of the parameter group.
        keep: number of newest checkpoints to keep, besides the best one if evaluations choose it;
            None keeps all.

    Raises:
        ConfigError: a part has no learning rate, or a learning rate has no part.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        module: nn.Module,
        learning_rates: Mapping[str, float],
        args: TrainingArguments,
        keep: int | None = None,
        **options: Any,
    ) -> None:
        self.learning_rates = learning_rates
        self.keep = keep
        # Sums of each part of the loss since the last log line, and of their weights. They stay on
        # the device until then, because a step that reads a number waits for all of its work.
        self.parts: dict[str, list[Any]] = {}
        self.tokens: int | Tensor = 0
        self.trainable = cast(Trainable, module)
        _check_rates(learning_rates, self.trainable.parameter_groups())
        super().__init__(module, args, data_collator=self.trainable.collate, **options)
        # Each loss is the mean of its batch, so the losses of a step's batches must be averaged.
        # Trainer sums them instead if it finds a `forward(**batch)`: it assumes that such a
        # forward divides by the number of items of the whole step.
        self.model_accepts_loss_kwargs = False
        self.add_callback(_Intervals(self.train_dataset))

    def run(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint if there is one.

        A checkpoint of the last step is only loaded, because `train` would add a step.
        """
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            if state.global_step >= state.max_steps:
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def examples_seen(self) -> int:
        """Examples of all steps so far; the last batch of an epoch may contain fewer than others.

        Several processes fill up the last batches of an epoch with its first examples.
        """
        count = len(cast(Sized, self.train_dataset))
        together = self.args.per_device_train_batch_size * self.args.world_size
        if self.args.world_size > 1:
            count = -(-count // together) * together
        of_step = together * self.args.gradient_accumulation_steps
        epochs, steps = divmod(self.state.global_step, -(-count // of_step))
        return epochs * count + steps * of_step

    def evaluate_and_keep_best(self) -> dict[str, float]:
        """Evaluate the last weights, and return to the best evaluated ones if those were better.

        Earlier weights are loaded only if evaluations during training recorded the best checkpoint
        (`metric_for_best_model`).

        Returns:
            Losses of the weights that are kept, over the evaluation set.
        """
        metrics, best = self.evaluate(), self.state.best_global_step
        if not best or metrics["eval_loss"] <= cast(float, self.state.best_metric):
            return metrics
        folder = Path(self.args.output_dir) / f"checkpoint-{best}"
        if not is_complete(folder):
            logger.warning("the best checkpoint, '%s', is damaged; the last one is used", folder)
            return metrics
        self._load_from_checkpoint(str(folder))
        evaluated = (line for line in self.state.log_history if "eval_loss" in line)
        return next(line for line in evaluated if line["step"] == best)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with one learning rate per part, and weight decay on matrices only."""
        if self.optimizer is None:
            groups = []
            for name, parameters in self.trainable.parameter_groups().items():
                for decays in (True, False):
                    chosen = [p for p in parameters if (p.dim() > 1) == decays]
                    if chosen:
                        decay = self.args.weight_decay if decays else 0.0
                        rate = self.learning_rates[name]
                        groups.append({"params": chosen, "lr": rate, "weight_decay": decay})
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=self.args.adam_epsilon)
        return self.optimizer

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        # Accelerate refuses to average gradients next to sharded weights, which have none here.
        if training and model is self.model and divided(model):
            return averaging(self.accelerator.prepare_model(model, evaluation_mode=True))
        return super()._wrap_model(model, training, dataloader)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Run the module and collect the parts of its loss for the next log line."""
        weight = self._evaluated_examples()
        if model.training and self.state.max_steps:
            self.trainable.progress = self.state.global_step / self.state.max_steps
            self.tokens = self.tokens + self.trainable.tokens(inputs)
            # The loss is averaged over the batches of a step and then over steps; so are its parts.
            weight = 1 / self.current_gradient_accumulation_steps
        outputs = model(**inputs)
        for name, value in outputs.items():
            if name != "loss":
                sums = self.parts.setdefault(name, [0.0, 0.0])
                sums[0] = sums[0] + weight * value.detach().double()
                sums[1] += weight
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def _evaluated_examples(self) -> float:
        """Number of examples in this evaluation batch.

        The last batch may be short. Several processes fill it up with examples that were evaluated
        before, which do not count.
        """
        full, dealt = self.args.eval_batch_size, self.accelerator.gradient_state
        if not dealt.end_of_dataloader or dealt.remainder <= 0:
            return full
        return min(max(dealt.remainder - self.args.process_index * full, 0), full)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the losses, with the mean of each part since the last log line."""
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        sums = self._of_all(list(self.parts.values()))
        for name, (part, weight) in zip(self.parts, sums, strict=True):
            logs[f"{prefix}{name}"] = part / weight
        self.parts.clear()
        self._count_tokens()
        super().log(logs, start_time)

    def _of_all(self, numbers: list[Any]) -> list[Any]:
        """Sums over all processes; each gives the same number of values in the same order."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.args.device)
        return self.accelerator.reduce(own, "sum").tolist()

    def _count_tokens(self) -> None:
        # The trainer's state is part of checkpoints, so the count survives a kill.
        self.state.num_input_tokens_seen += round(self._of_all([self.tokens])[0])
        self.tokens = 0

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Losses over the evaluation set, with the same batches in every epoch.

        The parts collected during training are kept.
        """
        parts, self.parts = self.parts, {}
        epoch, self.trainable.epoch = self.trainable.epoch, 0
        metrics = super().evaluate(*args, **options)
        self.parts, self.trainable.epoch = parts, epoch
        return metrics

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Loss of one batch, without predictions."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    # Checkpoints contain only the trained weights, and a manifest once they are complete.

    def _trained_weights(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.contiguous() for name, tensor in self._trained_weights().items()}
        save_tensors(weights, folder / TRAINED)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = super()._determine_best_metric(metrics, trial)
        # The best weights are needed at the end, so save them even between two save_steps.
        self.control.should_save |= best
        return best

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._count_tokens()
        super()._save_checkpoint(model, trial)
        # Each process writes its random state, and the seal covers all of them.
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            run = Path(self.args.output_dir)
            seal(run / f"checkpoint-{self.state.global_step}")
            # Delete old ones only now: a kill must never leave a run without a complete checkpoint.
            best = f"checkpoint-{self.state.best_global_step}"
            for folder in checkpoints(run)[self.keep :] if self.keep else []:
                if folder.name != best:
                    remove(folder)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        path = Path(resume_from_checkpoint) / TRAINED
        weights = load_weights(path)
        own = self._trained_weights()
        check_weights(own, weights, str(path))
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])


def _check_rates(rates: Mapping[str, float], groups: Mapping[str, Sequence[nn.Parameter]]) -> None:
    given = f"optimization.learning_rates has {', '.join(rates)}"
    missing = [name for name, parameters in groups.items() if parameters and name not in rates]
    unknown = [name for name in rates if name not in groups]
    if missing:
        raise ConfigError(f"{given}, but not {', '.join(missing)}; every trained part needs one")
    if unknown:
        raise ConfigError(
            f"{given}, but {', '.join(unknown)} is no part of this training; its parts are "
            f"{', '.join(groups)}"
        )
