"""Activation Beacon: windows of text into keys and values of beacon tokens (Zhang et al., 2024).

The source is the official code as the paper runs it: beacons interleaved with the text, full
coverage, attention to earlier beacons, and an attention sink. The stream [start; context; prompt;
answer] is read in windows. In each, a beacon token follows every `ratio` tokens. Beacons have their
own query, key and value projections in every layer; text tokens use the frozen ones. After a full
window, only the KV cache of its beacons stays, plus that of the first tokens of the first window,
the sink. The cached columns are re-indexed to positions 0, 1, 2 ..., and the next window is read
after them. Context tokens that do not fill a window stay uncompressed; prompt and answer follow.

There are two settings of `window`: 128 tokens, so that contexts of ordinary questions are
compressed at all, and the paper's 1,024.

Deviations: docs/deviations.md.

Letters: B batch, P positions of one call, K cached columns, N columns kept of a call, W tokens of a
window, G beacons of a window, R tokens per beacon, L layers, H key heads, E width of a head, A
tokens to predict, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.backbone.decoder import Backbone, KeyAxis
from sedem.config import Whole, WholeAbove0, WholeFrom0
from sedem.errors import ConfigError
from sedem.method.injection import GrowingCache
from sedem.method.losses import next_token_loss
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.settings import ReaderConfig
from sedem_lab.baselines.soft_prompt import PrefillResult, pad_left, prefill_result
from sedem_lab.baselines.trained import CompressedContext, TrainedReader, generator_for

QKV = ("q", "k", "v")
"""Projections that beacon tokens do not share with text tokens."""


class BeaconConfig(ReaderConfig):
    """Settings of Activation Beacon; all defaults except the window are the paper's.

    Attributes:
        window: text tokens of a window; their keys and values are dropped after it.
        ratio: tokens per beacon in reading and in evaluation losses.
        ratios: training draws one of these for every window.
        sink: number of first tokens whose keys and values stay.
    """

    window: Annotated[Whole, Field(ge=2)] = 128
    ratio: WholeAbove0 = 4
    ratios: Annotated[tuple[WholeAbove0, ...], Field(min_length=1)] = (2, 4, 8, 16, 32)
    sink: WholeAbove0 = 1
    seed: WholeFrom0 = 0

    free: ClassVar[frozenset[str]] = frozenset({"ratio", "ratios"})
    adapted: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        for ratio in (self.ratio, *self.ratios):
            if self.window % ratio:
                raise ValueError(
                    f"a ratio is {ratio}; it must divide the window of {self.window} tokens"
                )
        if self.sink > min(self.ratio, *self.ratios):
            raise ValueError(
                f"sink is {self.sink}; it must end before the first beacon, so it can be at most "
                f"the smallest ratio, {min(self.ratio, *self.ratios)}"
            )
        return self


@dataclass(frozen=True)
class ReindexedCache:
    """Keys and values of the columns that are left, at positions 0, 1, 2 ... in every row."""

    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer `[B, H, K, E]`; empty before the first call."""
    valid: Tensor
    """False where a column is padding `[B, K]`."""


class ActivationBeacon(TrainedReader):
    """Compresses a context into the KV cache of beacon tokens.

    Args:
        backbone: beacons are initialized from its projections and the embedding of its end token.
    """

    name = "beacon"
    Config = BeaconConfig

    def __init__(self, config: BeaconConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        end = torch.tensor([backbone.eos_token_id], device=backbone.device)
        with torch.no_grad():
            token: Any = self.parts()["token"]
            token.weight.copy_(backbone.embed(end))
        for own, frozen in self.projections():
            own.load_state_dict(frozen.state_dict())

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """The beacon token, and three projections per layer, shaped like the backbone's."""
        heads = shape.num_attention_heads
        size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        outputs = {"q": heads, "k": shape.num_key_value_heads, "v": shape.num_key_value_heads}
        bias = shape.model_type == "qwen2" or bool(getattr(shape, "attention_bias", False))
        width, depth = shape.hidden_size, shape.num_hidden_layers
        own = {
            name: nn.ModuleList(nn.Linear(width, heads * size, bias=bias) for _ in range(depth))
            for name, heads in outputs.items()
        }
        return nn.ModuleDict({"token": nn.Embedding(1, width), **own})

    def projections(self) -> Iterator[tuple[Any, nn.Module]]:
        """Each beacon projection, paired with the backbone's projection."""
        for index, layer in enumerate(self.backbone.model.get_decoder().layers):
            for name in QKV:
                own: Any = self.parts()[name]
                yield own[index], getattr(layer.self_attn, f"{name}_proj")

    # The stream

    def _empty_cache(self, rows: int) -> ReindexedCache:
        return ReindexedCache(
            [], torch.zeros(rows, 0, dtype=torch.bool, device=self.backbone.device)
        )

    def _run(
        self, hidden_BPD: Tensor, valid_BP: Tensor, cached: ReindexedCache
    ) -> tuple[Tensor, GrowingCache]:
        """Run embedded tokens after the cached columns.

        Returns:
            States after the last layer `[B, P, D]`, and the cache to decode from.
        """
        cache = GrowingCache()
        cache.upper.stored.update(enumerate(cached.layers))
        count_B1 = cached.valid.sum(1, keepdim=True)
        cached_BK = (cached.valid.long().cumsum(1) - 1) * cached.valid
        positions_BP = (count_B1 + valid_BP.long().cumsum(1) - 1) * valid_BP
        columns_BK = torch.cat([cached.valid, valid_BP], dim=1)
        axis = KeyAxis(
            torch.cat([cached_BK, positions_BP], dim=1),
            columns_BK,
            not bool(columns_BK.all()),
            columns_BK.shape[1],
        )
        cache.begin_everywhere(axis, columns_BK.sum(1))
        states_BPD = self.backbone.run(
            hidden_BPD, 0, self.backbone.depth, positions_BP, valid_BP, axis, cache.upper
        )
        return states_BPD, cache

    def _compress_window(
        self, ids_BW: Tensor, active_B: Tensor, cached: ReindexedCache, ratio: int
    ) -> tuple[Tensor, ReindexedCache]:
        """Read a full window and keep its beacons.

        Args:
            active_B: False for rows without this window; their columns are padding.
            cached: columns left by the earlier windows.
            ratio: R.

        Returns:
            States of the window's tokens after the last layer `[B, W, D]`, and the new cache.
        """
        text_BGRD = self.backbone.embed(ids_BW).unflatten(1, (-1, ratio))
        zeros_BG1 = ids_BW.new_zeros(*text_BGRD.shape[:2], 1)
        beacon_BG1D = self.parts()["token"](zeros_BG1).to(text_BGRD.dtype)
        hidden_BPD = torch.cat([text_BGRD, beacon_BG1D], dim=2).flatten(1, 2)
        total = hidden_BPD.shape[1]
        beacons = torch.arange(ratio, total, ratio + 1, device=ids_BW.device)

        @contextmanager
        def with_beacons() -> Iterator[None]:
            """Tokens at the places of the beacons use the beacon projections."""

            def replaced(own: nn.Module, _: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
                projected: Tensor = own(inputs[0][:, beacons].float())
                return out.index_copy(1, beacons, projected.to(out.dtype))

            hooks = [
                frozen.register_forward_hook(partial(replaced, own))
                for own, frozen in self.projections()
            ]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

        with self.backbone.within(with_beacons):
            states_BPD, cache = self._run(hidden_BPD, active_B[:, None].expand(-1, total), cached)
        sink = torch.arange(0 if cached.layers else self.config.sink, device=ids_BW.device)
        kept, before = torch.cat([sink, beacons]), cached.valid.shape[1]
        # The kept columns move to the next free positions. Cached keys carry the rotation of the
        # position where they were computed. Rotations add up, so rotating a key by the difference
        # moves it to its new position.
        rotary = self.backbone.model.get_decoder().rotary_emb
        moved_1N = (torch.arange(len(kept), device=kept.device) - kept)[None]
        angles = rotary(kept.new_zeros(1, dtype=torch.float), position_ids=moved_1N)
        # Some rotary embeddings also scale keys; cached keys are already scaled.
        cos_1NE, sin_1NE = (x / rotary.attention_scaling for x in angles)
        layers = []
        for keys, values in cache.upper.stored.values():
            keys_BHNE = keys[:, :, before + kept]
            first, second = keys_BHNE.float().chunk(2, dim=-1)
            rotated_BHNE = torch.cat([first, second], dim=-1) * cos_1NE
            rotated_BHNE = rotated_BHNE + torch.cat([-second, first], dim=-1) * sin_1NE
            keys = torch.cat([keys[:, :, :before], rotated_BHNE.to(keys_BHNE.dtype)], dim=2)
            values = torch.cat([values[:, :, :before], values[:, :, before + kept]], dim=2)
            layers.append((keys, values))
        valid_BK = torch.cat([cached.valid, active_B[:, None].expand(-1, len(kept))], dim=1)
        states_BGRD = states_BPD.unflatten(1, (-1, ratio + 1))[:, :, :ratio]
        return states_BGRD.flatten(1, 2), ReindexedCache(layers, valid_BK)

    # Memory

    def compress(self, ids: list[int]) -> CompressedContext:
        """Cache sink, beacons and the tokens that fill no window; keys and values in bfloat16."""
        size = self.config.window
        stream = torch.tensor([[self.backbone.bos_token_id, *ids]], device=self.backbone.device)
        whole = stream.shape[1] // size
        cached, row = self._empty_cache(1), torch.ones(1, dtype=torch.bool, device=stream.device)
        for n in range(whole):
            window = stream[:, n * size : (n + 1) * size]
            _, cached = self._compress_window(window, row, cached, self.config.ratio)
        layers, rest = cached.layers, stream[:, whole * size :]
        if rest.shape[1]:
            _, end = self._run(self.backbone.embed(rest), torch.ones_like(rest).bool(), cached)
            layers = list(end.upper.stored.values())
        kept_L2HKE = torch.stack([torch.cat(pair) for pair in layers]).bfloat16()
        notes: tuple[str, ...] = ()
        if not whole:
            small = f"the context has {len(ids):,} tokens, fewer than a window of {size:,}"
            notes = (f"{small}, so nothing of it was compressed",)
        return CompressedContext(kept_L2HKE, 2 * kept_L2HKE.numel(), notes)

    # Answering

    def _columns(self, tokens: int) -> int:
        """Number of cached columns for the given number of context tokens and the start token."""
        whole, rest = divmod(1 + tokens, self.config.window)
        beacons = whole * (self.config.window // self.config.ratio)
        return beacons + rest + (self.config.sink if whole else 0)

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return all tokens, or those of the whole windows whose beacons fit."""
        window, sink = self.config.window, self.config.sink
        # The start token counts as part of the prompt and is cached too.
        room, whole = free_positions(self.backbone, prompt, limit) + 1, (1 + tokens) // window
        if not whole:
            return min(tokens, room - 1)
        cached = min(room, self.backbone.max_positions - window) - sink
        most = max(0, cached) // (window // self.config.ratio)
        if whole <= most and self._columns(tokens) <= room:
            return tokens
        return max(0, min(whole, most) * window - 1)

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill the prompts after the cached columns."""
        backbone = self.backbone
        counts = [self._columns(count) for count in used]
        kept_BL2HKE = torch.stack(
            [
                F.pad(columns[..., :count, :], (0, 0, 0, max(counts) - count))
                for columns, count in zip(contents, counts, strict=True)
            ]
        ).to(backbone.dtype)
        layers = [(pair[:, 0], pair[:, 1]) for pair in kept_BL2HKE.unbind(1)]
        counts_B1 = torch.tensor(counts, device=backbone.device)[:, None]
        valid_BK = torch.arange(max(counts), device=backbone.device) < counts_B1
        ids_BP, valid_BP = pad_left(
            [torch.tensor(prompt[1:], device=backbone.device) for prompt in prompts]
        )
        states_BPD, cache = self._run(
            backbone.embed(ids_BP), valid_BP, ReindexedCache(layers, valid_BK)
        )
        conditioning = [n + len(prompt) - 1 for n, prompt in zip(counts, prompts, strict=True)]
        return prefill_result(backbone, states_BPD[:, -1], cache, conditioning)

    # Training

    def _draw_ratios(self, ids: Tensor, windows: int) -> list[int]:
        """Draw a ratio for each window, among those that stay within the positions."""
        if not self.training:
            return [self.config.ratio] * windows
        size, most = self.config.window, self.backbone.max_positions
        fitting = [r for r in self.config.ratios if windows * (size // r) + size < most]
        generator = generator_for(self.config.seed, ids)
        return generator.choice(fitting or [max(self.config.ratios)], windows).tolist()

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of every token of a text that is read in windows.

        Raises:
            ConfigError: the text is shorter than a window, so it has no beacon.
        """
        total = context.shape[1] + continuation.shape[1]
        if total < self.config.window:
            raise ConfigError(
                f"text.context and text.continuation are {total:,} tokens and model.window is "
                f"{self.config.window:,}; such a text has no beacon, make texts longer"
            )
        start_B1 = context.new_full((len(context), 1), self.backbone.bos_token_id)
        *windows, last_BP = torch.cat([start_B1, context, continuation], dim=1).split(
            self.config.window, dim=1
        )
        cached = self._empty_cache(len(context))
        row_B = torch.ones(len(context), dtype=torch.bool, device=context.device)
        states = []
        for window, ratio in zip(windows, self._draw_ratios(context[0], len(windows)), strict=True):
            states_BWD, cached = self._compress_window(window, row_B, cached, ratio)
            states.append(states_BWD)
        valid_BP = torch.ones_like(last_BP, dtype=torch.bool)
        states_BPD, _ = self._run(self.backbone.embed(last_BP), valid_BP, cached)
        logits_BAV = self.backbone.logits(torch.cat([*states, states_BPD], dim=1)[:, :-1])
        return {"loss": next_token_loss(logits_BAV, torch.cat([context, continuation], dim=1))}

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer; the n-th windows of all rows are one batch."""
        size = self.config.window
        start = ids.new_tensor([self.backbone.bos_token_id])
        streams = [torch.cat([start, context]) for context in contexts]
        counts_B = torch.tensor([len(stream) // size for stream in streams], device=ids.device)
        cached = self._empty_cache(len(streams))
        for n, ratio in enumerate(self._draw_ratios(contexts[0], int(counts_B.max()))):
            windows = [F.pad(s[n * size :][:size], (0, size))[:size] for s in streams]
            _, cached = self._compress_window(torch.stack(windows), counts_B > n, cached, ratio)
        rows = [
            torch.cat([stream[count * size :], own[real][1:]])
            for stream, count, own, real in zip(streams, counts_B.tolist(), ids, valid, strict=True)
        ]
        rest_BP, valid_BP = pad_left(rows)
        states_BPD, _ = self._run(self.backbone.embed(rest_BP), valid_BP, cached)
        losses = self.answer_loss(states_BPD, labels)
        if not cached.layers:
            # No row fills a window. The batch trains nothing, but its loss needs a gradient.
            losses["loss"] = losses["loss"] + 0 * self.parts()["token"](start - start).sum()
        return losses
