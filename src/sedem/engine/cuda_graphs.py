"""One function of fixed buffers as one CUDA graph; without a GPU it is simply called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Pool = Any
"""What torch calls memory that graphs share; nothing of ours looks into it."""


def new_pool() -> Pool:
    """A pool of its own on the current GPU."""
    return torch.cuda.graph_pool_handle()


def pool_bytes(pool: Pool) -> int:
    """Bytes that the graphs of a pool keep for what they compute on the way."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


class Replay:
    """Runs a function again and again, on a GPU as one captured graph.

    A graph knows addresses, not tensors: what the function reads must have been copied into fixed
    buffers and what it gives is read from fixed buffers. Both are checked before every run, without
    a graph too, so that a mistake shows on any machine.

    The function is given to each run and not kept, so that its owner, who keeps this, is freed with
    its buffers and graph as soon as nobody uses it.

    Args:
        buffers: all that the function shares with its caller.
        carried: those of them that a run both reads and changes; rehearsing leaves them unchanged.
        graph: whether to capture it.
        pool: memory that graphs share.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        carried: Sequence[Tensor] = (),
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        self.buffers = list(buffers)
        self.carried = list(carried)
        self.graph = graph
        self.pool = pool
        self._addresses = self._layout()
        self._captured: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None]) -> None:
        """Run a function once.

        Args:
            function: reads and writes the buffers; the same every time, for only the first is
                captured. It must not wait for the device then.
        """
        assert self._layout() == self._addresses, "a buffer was moved after it was fixed"
        if not self.graph:
            function()
            return
        if self._captured is None:
            self._captured = self._capture(function)
        self._captured.replay()

    def rehearse(self, function: Callable[[], None]) -> None:
        """Run it once for what first runs set up, and take back what it changed for the next."""
        before = [buffer.clone() for buffer in self.carried]
        function()
        for buffer, value in zip(self.carried, before, strict=True):
            buffer.copy_(value)

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # Libraries set up their workspaces in the first run, which must not be captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.rehearse(function)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=self.pool, capture_error_mode="thread_local"):
            function()
        return captured

    def _layout(self) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
        return [(b.data_ptr(), b.shape, b.stride()) for b in self.buffers]
