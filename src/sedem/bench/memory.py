"""How much memory a method needs: measured on a pass of its own, not on the runs that are timed.

On a GPU the allocator's own counters are read (`torch.cuda.max_memory_allocated`). On a CPU the
resident set of the process is: its high-water mark is reset before the pass (Linux,
`/proc/self/clear_refs`), and pages that the C library keeps for later are given back first, so that
they hide no growth. Several methods are open in one process, so what a pass adds is measured, and
what the method holds before it is put on top: its weights and the caches that stay from answer to
answer, counted tensor by tensor, and on a GPU the pool of SeDeM's graphs. The pool of what
`hf-compiled` compiles cannot be told apart and is left out, which favours it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from sedem.bench.peers import Compiled
from sedem.evaluation.readers import BoundSedem
from sedem.types import Document, Reader

PROCESS = Path("/proc/self")


def measure_memory(
    reader: Reader, documents: Sequence[Document], question: str, device: torch.device
) -> dict[str, int] | None:
    """Bytes that reading and answering take.

    Returns:
        `weights_bytes`; `caches_bytes`, held from answer to answer; `steady_bytes`, both with the
        memory that was read, when an answer is given; `peak_bytes`, the most at any time. None
        where the system does not tell.
    """
    if device.type != "cuda" and not (PROCESS / "clear_refs").exists():
        return None
    _settle(reader, documents, question)
    weights, caches = weights_bytes(reader), cache_bytes(reader)
    before = _restart(device)
    memory = reader.read(documents)
    reader.answer(memory, question)
    peak = _peak(device)
    after = _restart(device)
    del memory
    return {
        "weights_bytes": weights,
        "caches_bytes": caches,
        "steady_bytes": weights + caches + max(0, after - before),
        "peak_bytes": weights + caches + max(0, peak - before),
    }


def weights_bytes(reader: Reader) -> int:
    """Bytes of all weights that a reader holds, each once; where adapters are merged, those too."""
    if isinstance(reader, BoundSedem):
        return reader.model.engine.memory()["weights"]
    held = [value for value in vars(reader).values() if isinstance(value, nn.Module)]
    tensors = [tensor for module in held for tensor in (*module.parameters(), *module.buffers())]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def cache_bytes(reader: Reader) -> int:
    """Bytes that a reader keeps from answer to answer beside its weights."""
    if isinstance(reader, BoundSedem):
        held = reader.model.engine.memory()
        return held["caches"] + held["graphs"]
    return reader.cache_bytes if isinstance(reader, Compiled) else 0


def _settle(reader: Reader, documents: Sequence[Document], question: str) -> None:
    """Leave an engine the caches of this pass alone; others are of batches of other sizes."""
    if isinstance(reader, BoundSedem):
        reader.model.engine.release()
        reader.answer(reader.read(documents), question)


def _restart(device: torch.device) -> int:
    """Begin a new high-water mark; where memory stands now, in bytes."""
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
    """One of the process's counters, in bytes."""
    lines = (PROCESS / "status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
