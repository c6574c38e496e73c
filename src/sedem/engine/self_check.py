"""Check once whether a fast engine agrees with the reference on this machine.

Kernels, drivers and versions of torch differ. Both engines therefore run a model on a few random
blocks when it is first opened on a GPU. Agreement is recorded in the user's cache folder, by
machine, versions and shape.

Letters: X extraction layers, B batch, T tokens, E encoder width, K blocks, J slots per block, D
decoder width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sedem.durable_files import write_text
from sedem.engine.interface import Engine, Start
from sedem.engine.split_keys import LONG
from sedem.modules import SedemModules

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-3}
"""Largest distance of two results, relative to the norm of the reference's."""
TOLERANCE = 0.1
"""The same for types of 16 bits. Rounding causes 0.01; a wrong mask or position causes 1."""

NO_FOLDER = (OSError, RuntimeError)
"""Errors of a missing cache folder; the second is raised if a user has no home."""

PREFIXES = ((5, (0, -1)), (9, (1,)))
"""Rows of the trial: prefix tokens and blocks. Different rows need masks and padding."""
LONG_PREFIX = 6
"""Prefix tokens of one more row, which has all blocks: enough for keys to be split."""


class RandomBlocks:
    """A bank of random memory, as engines see it.

    Args:
        model: determines the shape.
    """

    def __init__(self, model: SedemModules) -> None:
        slots = model.config.slots_per_block
        count = max(2, -(-LONG // (slots * model.decompressor.states_per_slot)))
        shape = count, slots, model.decoder.width
        self.memory_KJD = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.tokens_KJ = torch.full(shape[:2], model.config.compression)
        self.tokens_KJ[-1, -1] = 0  # a block with padding

    def __len__(self) -> int:
        return len(self.memory_KJD)

    def memory(self, indices: Sequence[int]) -> Tensor:
        """Memory of some blocks `[K, J, D]`."""
        return self.memory_KJD[list(indices)]

    def slot_tokens(self, indices: Sequence[int]) -> Tensor:
        """Number of real tokens behind each slot of some blocks `[K, J]`."""
        return self.tokens_KJ[list(indices)]


@torch.no_grad()
def trial(engine: Engine, model: SedemModules) -> list[Tensor]:
    """Run an engine on random input.

    Returns:
        States of questions `[X, B, T, E]`, and logits `[B, V]` of each batch after its prefixes and
        after a token.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = min(b.model.config.vocab_size for b in (model.encoder, model.decoder))

    def tokens(*shape: int) -> Tensor:
        return torch.randint(vocabulary, shape, generator=draw)

    bank = RandomBlocks(model)

    def start(count: int, blocks: Sequence[int]) -> Start:
        numbers = torch.arange(len(bank))[list(blocks)].tolist()
        return Start(bank, numbers, torch.arange(len(blocks)).float(), tokens(count))

    found = [engine.encode_questions(tokens(2, 7)).clone()]
    unlike = [start(count, blocks) for count, blocks in PREFIXES]
    for starts in (unlike, [start(LONG_PREFIX, range(len(bank)))]):
        with engine.start(starts, limit=2) as (logits_BV, step):
            found.append(logits_BV.clone())
            next_B = tokens(len(starts)).to(logits_BV.device)
            found.append(step(next_B, range(len(starts))).clone())
    return [tensor.float().cpu() for tensor in found]


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest relative distance of two trials; infinite if a number is not finite."""
    distances = [float((a - e).norm() / e.norm()) for e, a in zip(expected, actual, strict=True)]
    return max(d if d == d else float("inf") for d in distances)


def tolerance(model: SedemModules) -> float:
    """Return the largest distance that rounding explains."""
    return TOLERANCES.get(model.decoder.dtype, TOLERANCE)


def key_of(model: SedemModules) -> str:
    """Hash of what a trial depends on: machine, versions, the engine's code, and the shape."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    shapes = [backbone.model.config.to_json_string() for backbone in (model.encoder, model.decoder)]
    parts = [torch.__version__, str(torch.version.cuda), device, str(model.decoder.dtype)]
    parts += [json.dumps(model.made_by(), sort_keys=True), str(model.config), *shapes]
    digest.update("\n".join(parts).encode())
    return digest.hexdigest()[:32]


def is_known(key: str) -> bool:
    """Whether a trial with this key has agreed before."""
    return key in _known()


def remember(key: str) -> None:
    """Record that a trial has agreed; without a writable folder, it runs again next time."""
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps([*_known(), key]))
    except NO_FOLDER as error:
        logger.debug("the trial of an engine is not remembered: %s", error)


def _known() -> list[str]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (*NO_FOLDER, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _file() -> Path:
    own = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(own) if own else Path.home() / ".cache"
    return folder / "sedem" / "engines.json"
