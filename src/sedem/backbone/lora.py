"""Attach LoRA adapters to a Hugging Face decoder, switch them off, save and load them.

PEFT is imported only when used: importing it takes longer than opening a small model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from sedem.backbone.safetensors import check_weights, load_weights, save_tensors
from sedem.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""The joined matrix that contains each one, in layouts that join several (Phi-3)."""


class LoraModel(nn.Module):
    """A decoder whose matrices can have adapters.

    Args:
        model: the causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # Adapters of the layers after this many are merged; the original weights are gone.
        self.merged_from: int | None = None
        self._adapters_off = False

    @property
    def has_lora(self) -> bool:
        """Whether adapters are attached."""
        return bool(getattr(self.model, "peft_config", None))

    def add_lora(
        self,
        rank: int,
        alpha: int,
        targets: Sequence[str] = LORA_TARGETS,
        dropout: float = 0.0,
    ) -> None:
        """Attach adapters, W' = W + (alpha / r) A B, to matrices of every layer (equation 15).

        Appendix Trainable Parameters.

        Args:
            rank: r.
            alpha: numerator of the scale.
            targets: names of the matrices; the query, key, value and output projections by default.
                The name of a part of a joined matrix means the joined matrix.
            dropout: share of the adapters' inputs that is dropped in training.

        Raises:
            ConfigError: a layer has no such matrix, such as with experts instead of an MLP.
        """
        from peft import LoraConfig

        layers = self.model.get_decoder().layers
        own = Counter(name.rpartition(".")[2] for name, _ in layers.named_modules())
        present = [name if own[name] else JOINED.get(name, name) for name in targets]
        for target, name in zip(targets, present, strict=True):
            if own[name] < len(layers):
                raise ConfigError(
                    f"adapters are to be on '{target}', but {len(layers) - own[name]} of "
                    f"{len(layers)} layers have no such matrix (experts hold theirs together); "
                    f"give some of {', '.join(LORA_TARGETS)}"
                )
        self.model.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=alpha,
                target_modules=list(dict.fromkeys(present)),
                lora_dropout=dropout,
                bias="none",
            )
        )
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()

    def lora_parameters(self) -> list[nn.Parameter]:
        """The adapters' factors A and B."""
        return [p for n, p in self.model.named_parameters() if "lora_" in n]

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Run only the frozen weights inside the `with` block, as the encoder must."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = (m for m in self.model.modules() if isinstance(m, BaseTunerLayer))
        layers = [layer for layer in adapted if not layer.disable_adapters]
        trainable = [p for p in self.lora_parameters() if p.requires_grad]
        for layer in layers:
            layer.enable_adapters(False)
        outermost, self._adapters_off = not self._adapters_off, True
        try:
            yield
        finally:
            self._adapters_off = not outermost
            for layer in layers:
                layer.enable_adapters(True)
            # PEFT marks every factor trainable when it enables adapters.
            for parameter in self.lora_parameters():
                parameter.requires_grad_(False)
            for parameter in trainable:
                parameter.requires_grad_(True)

    def save_lora(self, folder: Path, base: str, dtype: torch.dtype = torch.float32) -> None:
        """Write the adapters in PEFT's layout.

        Args:
            folder: where to write; created if it does not exist.
            base: name of the backbone, for adapter_config.json.
            dtype: type of the factors.
        """
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.model)
        save_tensors(
            {n: t.to(dtype).contiguous() for n, t in weights.items()}, folder / ADAPTER_WEIGHTS
        )
        config = copy(self.model.peft_config["default"])
        config.base_model_name_or_path = base
        # PEFT holds a set, whose order differs from run to run.
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(str(folder))

    def load_lora(self, folder: Path) -> None:
        """Read adapters into those that `add_lora` attached.

        Args:
            folder: a folder that `save_lora` wrote.

        Raises:
            CheckpointError: a file is missing or a factor is missing, extra or of another shape.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        weights = load_weights(folder / ADAPTER_WEIGHTS)
        expected = get_peft_model_state_dict(self.model)
        check_weights(expected, weights, str(folder / ADAPTER_WEIGHTS))
        set_peft_model_state_dict(self.model, weights)
