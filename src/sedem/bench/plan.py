"""What a bench is to measure, checked before anything heavy is opened."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sedem.baselines.registry import TRAINED
from sedem.bench.contexts import check_lengths, source
from sedem.bench.peers import PEERS
from sedem.bench.selection import check_blocks
from sedem.errors import ConfigError
from sedem.evaluation.command import digest_of, weight_files
from sedem.evaluation.config import DTYPES
from sedem.evaluation.cost import PRESETS
from sedem.evaluation.registry import METHODS, default_checkpoint
from sedem.inference.checkpoint import locate
from sedem.method.selector import Budget, resolve_budget
from sedem.quantization import BFLOAT16, check_dtype

MOST_ANSWER_TOKENS = 512


@dataclass(frozen=True)
class Plan:
    """What is measured, and how.

    Attributes:
        methods: names in `METHODS` and `PEERS`; empty means all but trained baselines.
        contexts: lengths in tokens.
        k: selection budget; None means the model's own.
        batches: how many questions are answered together, beside the one that is clocked alone.
        memory: what SeDeM stores slots as; each type is a method of its own, such as "sedem-int8".
        checkpoint: folder or hub id.
        backbone: a public shape to be run on random weights in the checkpoint's place.
        runs: counted turns of each method over each context.
        answer_tokens: of every answer.
        device: None means a GPU if there is one.
        dtype: None means bfloat16 on a GPU and float32 elsewhere.
        engine: what runs SeDeM.
        text: file that contexts are cut from; None means the demo's documents.
        blocks: sizes of synthetic banks to score.

    Raises:
        ConfigError: something in this cannot be measured.
    """

    methods: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (1024, 8192)
    k: Budget | None = None
    batches: tuple[int, ...] = ()
    memory: tuple[str, ...] = (BFLOAT16,)
    checkpoint: str = "sedem-nano"
    backbone: str | None = None
    runs: int = 20
    answer_tokens: int = 33
    device: str | None = None
    dtype: str | None = None
    engine: str = "auto"
    text: Path | None = None
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.methods:
            untrained = [name for name in METHODS if name not in TRAINED]
            object.__setattr__(self, "methods", (*untrained, *PEERS))
        for name in self.methods:
            if name not in METHODS and name not in PEERS:
                known = ", ".join((*METHODS, *PEERS))
                raise ConfigError(f"there is no method '{name}'; there are {known}")
        if len(set(self.methods)) < len(self.methods):
            raise ConfigError("a method is named twice; name each once")
        check_lengths(list(self.contexts))
        check_blocks(list(self.blocks))
        if self.k is not None:
            resolve_budget(self.k, 1)
        if any(batch < 1 for batch in self.batches) or len(set(self.batches)) < len(self.batches):
            raise ConfigError(
                f"batches are {list(self.batches)}; give different numbers of at least 1"
            )
        if not self.memory or len(set(self.memory)) < len(self.memory):
            raise ConfigError(f"memory is {list(self.memory)}; give different types, at least one")
        for kind in self.memory:
            check_dtype(kind)
        for name, least in (("runs", 1), ("answer_tokens", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.answer_tokens > MOST_ANSWER_TOKENS:
            raise ConfigError(
                f"answer_tokens is {self.answer_tokens}; it can be {MOST_ANSWER_TOKENS} at most"
            )
        if self.blocks and "sedem" not in self.methods:
            raise ConfigError(
                "blocks are scored by 'sedem', which is not among the methods; add it"
            )
        if self.backbone is not None and self.backbone.lower() not in PRESETS:
            raise ConfigError(
                f"there is no shape '{self.backbone}'; there are {', '.join(PRESETS)} (a backbone "
                "with weights comes with its checkpoint, -m)"
            )
        self._check_machine()

    def _check_machine(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype is '{self.dtype}'; it can be {' or '.join(DTYPES)}")
        try:
            device = torch.device(self.device or "cpu")
            kind, number = device.type, device.index or 0
        except RuntimeError:
            kind, number = "", 0
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device is '{self.device}'; it can be cpu or cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device is '{self.device}', but there is no GPU here; leave it out")

        if kind == "cuda" and number >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise ConfigError(
                f"device is '{self.device}', but the last GPU here is cuda:{last}; take another"
            )

    @property
    def place(self) -> torch.device:
        """The device that is meant."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def type(self) -> torch.dtype:
        """The type that is meant."""
        default = "bfloat16" if self.place.type == "cuda" else "float32"
        found: torch.dtype = getattr(torch, self.dtype or default)
        return found

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result but the machine, as JSON-ready values.

        Context lengths and bank sizes are left out: a folder of results takes more of both.
        """
        entries = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(self).items()}
        for name in ("contexts", "blocks", "text"):
            del entries[name]
        text, words = source(self.text)
        return {
            **entries,
            "device": str(self.place),
            "dtype": str(self.type).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "text": words,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "weights_sha256": None
            if self.backbone
            else digest_of(*weight_files(locate(self.checkpoint), "sedem")),
            "baselines_sha256": {
                name: digest_of(*weight_files(locate(default_checkpoint(name)), name))
                for name in self.methods
                if name in TRAINED
            },
        }
