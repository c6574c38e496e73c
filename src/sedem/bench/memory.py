"""Memory that a method needs, measured in a separate pass that is not timed.

On a GPU the allocator reports the peak (`torch.cuda.max_memory_allocated`). On a CPU it is the
resident set of the process. Its high-water mark is reset before the pass (Linux,
`/proc/self/clear_refs`), after the C library has returned its free pages, which would hide growth.

Several methods are open in one process, so the pass measures growth. The memory that the method
already holds is added: weights and the caches that stay between answers, counted tensor by tensor,
and on a GPU the pool of SeDeM's graphs. The pool of another method's graphs cannot be separated and
is left out, which favours that method.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from sedem.bench.subjects import Keeper
from sedem.evaluation.readers import BoundSedem
from sedem.types import Document, Reader

PROCESS = Path("/proc/self")


def measure_memory(
    reader: Reader, documents: Sequence[Document], question: str, device: torch.device
) -> dict[str, int] | None:
    """Memory needed to read and answer, in bytes.

    Returns:
        `weights_bytes`; `caches_bytes`, which stay allocated between answers; `steady_bytes`, both
        plus the read memory after an answer; `peak_bytes`, the highest at any time. None if the
        system does not report memory.
    """
    if device.type != "cuda" and not (PROCESS / "clear_refs").exists():
        return None
    if isinstance(reader, BoundSedem):
        # Drop the engine's caches for other batch sizes, and allocate those of this pass.
        reader.model.engine.release()
        reader.answer(reader.read(documents), question)
    weights, caches = weights_bytes(reader), cache_bytes(reader)
    before = _reset_peak(device)
    memory = reader.read(documents)
    if isinstance(reader, Keeper):
        reader.warm(memory)
    reader.answer(memory, question)
    peak = _peak(device)
    after = _reset_peak(device)
    del memory
    return {
        "weights_bytes": weights,
        "caches_bytes": caches,
        "steady_bytes": weights + caches + max(0, after - before),
        "peak_bytes": weights + caches + max(0, peak - before),
    }


def weights_bytes(reader: Reader) -> int:
    """Bytes of a reader's weights, each tensor once; merged copies of weights count too."""
    if isinstance(reader, BoundSedem):
        return reader.model.engine.memory()["weights"]
    modules = [value for value in vars(reader).values() if isinstance(value, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def cache_bytes(reader: Reader) -> int:
    """Bytes besides weights that stay allocated between answers."""
    if isinstance(reader, BoundSedem):
        allocated = reader.model.engine.memory()
        return allocated["caches"] + allocated["graphs"] + allocated["kept"]
    return int(getattr(reader, "cache_bytes", 0))


def _reset_peak(device: torch.device) -> int:
    """Reset the high-water mark and return the memory in use, in bytes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    (PROCESS / "clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def _status(name: str) -> int:
    """A counter of /proc/self/status, in bytes."""
    lines = (PROCESS / "status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
