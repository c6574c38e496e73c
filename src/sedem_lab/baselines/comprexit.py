"""ComprExIT: hidden states of all layers, fused and transported to soft tokens (Ye et al., 2026).

The source is the official code with its pooling `ot-dy-src` and the two-layer projector, which its
scripts for Llama-3.2 run. A context is cut into pieces, and the frozen backbone encodes each piece
separately. Depth: every token attends over its own states of all layers, the embedding included.
Width: in each window of fused tokens an entropic optimal transport plan moves the tokens to
anchors. There is one anchor for each `compression` tokens, initially their mean. A projection maps
the anchors to the decoder's input, where the same frozen backbone reads them as soft tokens. Only
fusion, transport and projection are trained.

There are two settings of `piece`: 512 tokens as published, and 128 as in SeDeM's segments. Training
on questions may set it differently from the preceding training on text.

Deviations: docs/deviations.md.

Letters: B batch, S pieces, T tokens, L layers with the embedding, N tokens or windows in a row,
K anchors of a window, U slots of a context, D width, E inner width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from sedem.config import NumberAbove0, Share, WholeAbove0, WidthAbove0
from sedem.method.compressor import pool, slot_tokens
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.settings import ReaderConfig
from sedem_lab.baselines.soft_prompt import (
    PrefillResult,
    continuation_loss,
    prefill_soft_prompts,
    run_soft_prompts,
)
from sedem_lab.baselines.trained import CompressedContext, TrainedReader

ENCODED_TOGETHER = 16
"""Pieces in one batch of the encoder."""

LOG_ZERO = -1e9
"""Logarithm of zero mass; finite, so that the difference of two is defined."""


class ComprExITConfig(ReaderConfig):
    """Settings of ComprExIT; the defaults are the official ones.

    Attributes:
        piece: tokens that are encoded together.
        window: fused tokens of one transport plan.
        inner: width of the fusion's queries and keys, and of the space where costs are computed.
        fusion_temperature: temperature of the softmax over layers, times the root of `inner`.
        entropy: weight of the plan's entropy (epsilon of Sinkhorn's iterations).
        floor: share of the mass that is spread uniformly over the tokens of a window.
        gain: gain of the projection's initialization.
    """

    piece: WidthAbove0 = 512
    window: WidthAbove0 = 128
    compression: WholeAbove0 = 4
    inner: WidthAbove0 = 256
    fusion_temperature: NumberAbove0 = 0.7
    entropy: NumberAbove0 = 0.1
    iterations: WholeAbove0 = 30
    floor: Share = 0.05
    gain: NumberAbove0 = 0.4

    free: ClassVar[frozenset[str]] = frozenset({"piece"})
    adapted: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.piece % self.window or self.window % self.compression:
            raise ValueError(
                f"piece is {self.piece}, window {self.window} and compression {self.compression}; "
                "piece must be a multiple of window, and window of compression"
            )
        return self


class LayerFusion(nn.Module):
    """Depth: fuses the states of all layers into one state per token.

    Args:
        layers: L.
        width: D.
        inner: width of queries and keys.
        temperature: temperature of the softmax over layers.
    """

    def __init__(self, layers: int, width: int, inner: int, temperature: float) -> None:
        super().__init__()
        self.mixture = nn.Parameter(torch.zeros(layers))
        self.layers = nn.Parameter(torch.randn(layers, inner) * 0.02)
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, inner)
        self.value = nn.Linear(width, width)
        self.scale = temperature * math.sqrt(inner)

    def forward(self, states_NLD: Tensor) -> Tensor:
        """Fused states `[N, D]`.

        The key of layer l is W h_l + b + e_l, and the values are projected states. Neither is
        computed for every layer: q . W h_l equals (q W) . h_l, and the weights sum to one.
        """
        mixed_ND = torch.einsum("l,nld->nd", self.mixture.softmax(0), states_NLD)
        query_NE = self.query(mixed_ND)
        own_NL = torch.einsum("nd,nld->nl", query_NE @ self.key.weight, states_NLD)
        scores_NL = (own_NL + query_NE @ (self.key.bias + self.layers).T) / self.scale
        return self.value(torch.einsum("nl,nld->nd", scores_NL.softmax(-1), states_NLD))


class Transport(nn.Module):
    """Width: moves the tokens of a window to its anchors.

    Args:
        width: D.
    """

    def __init__(self, config: ComprExITConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.metric = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, config.inner))
        self.value = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        mass = nn.Linear(width, 1)
        nn.init.zeros_(mass.weight)
        nn.init.zeros_(mass.bias)
        self.mass = nn.Sequential(nn.LayerNorm(width), mass)

    def forward(self, tokens_NTD: Tensor, mask_NT: Tensor) -> Tensor:
        """Contents of the anchors `[N, K, D]`; undefined for anchors of padding only.

        Args:
            tokens_NTD: fused states in windows, each with at least one token.
            mask_NT: False where a token is padding.
        """
        compression = self.config.compression
        # Masses are tiny and the iterations add up, so half precision is too coarse.
        with torch.autocast(tokens_NTD.device.type, enabled=False):
            tokens_NTD = tokens_NTD.float()
            tokens_NTE = F.normalize(self.metric(tokens_NTD), dim=-1)
            anchors_NKD = pool(tokens_NTD, mask_NT, compression)
            anchors_NKE = F.normalize(self.metric(anchors_NKD), dim=-1)
            real_NK = (slot_tokens(mask_NT, compression) > 0).float()
            target_NK = real_NK / real_NK.sum(1, keepdim=True)
            plan_NTK = transport_plan(
                1 - tokens_NTE @ anchors_NKE.transpose(1, 2),
                self.masses(tokens_NTD, mask_NT),
                target_NK,
                self.config.entropy,
                self.config.iterations,
            )
            moved_NKD = plan_NTK.transpose(1, 2) @ self.value(tokens_NTD)
            return moved_NKD / target_NK.clamp_min(1e-6)[..., None]

    def masses(self, tokens_NTD: Tensor, mask_NT: Tensor) -> Tensor:
        """Mass of each token of a window `[N, T]`; the masses of a window sum to one."""
        scores_NT = self.mass(tokens_NTD)[..., 0].masked_fill(~mask_NT, -torch.inf)
        uniform_NT = mask_NT / mask_NT.sum(1, keepdim=True)
        return (1 - self.config.floor) * scores_NT.softmax(-1) + self.config.floor * uniform_NT


def transport_plan(
    cost_NTK: Tensor, source_NT: Tensor, target_NK: Tensor, entropy: float, iterations: int
) -> Tensor:
    """Entropic transport plan `[N, T, K]`, by Sinkhorn's iterations in log space.

    Args:
        cost_NTK: cost of moving one unit of mass.
        source_NT: mass of each token; a token of zero mass moves nothing.
        target_NK: mass of each anchor; an anchor of zero mass receives nothing.
        iterations: number of iterations; each ends with the columns, so their sums are exact.
    """
    kernel_NTK = -cost_NTK / entropy
    source_NT, target_NK = _logarithm(source_NT), _logarithm(target_NK)
    column_NK = torch.zeros_like(target_NK)
    for _ in range(iterations):
        row_NT = source_NT - (kernel_NTK + column_NK[:, None]).logsumexp(2)
        column_NK = target_NK - (kernel_NTK + row_NT[..., None]).logsumexp(1)
    return (kernel_NTK + row_NT[..., None] + column_NK[:, None]).exp()


def _logarithm(mass: Tensor) -> Tensor:
    empty = mass <= 0
    return mass.masked_fill(empty, 1.0).log().masked_fill(empty, LOG_ZERO)


class ComprExIT(TrainedReader):
    """Explicit information transmission over depth and width."""

    name = "comprexit"
    Config = ComprExITConfig

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """Fusion, transport and projection."""
        layers, width = shape.num_hidden_layers + 1, shape.hidden_size
        linears = [nn.Linear(width, width), nn.Linear(width, width)]
        for linear in linears:
            nn.init.xavier_uniform_(linear.weight, gain=config.gain)
            nn.init.zeros_(linear.bias)
        return nn.ModuleDict(
            {
                "fusion": LayerFusion(layers, width, config.inner, config.fusion_temperature),
                "transport": Transport(config, width),
                "projection": nn.Sequential(linears[0], nn.GELU(), linears[1]),
            }
        )

    # Memory

    @torch.no_grad()
    def states(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """States of all layers `[T, L, D]` of each piece; the backbone reads each separately.

        The last layer's states are those after the final norm. The start token is left out.
        """
        backbone = self.backbone
        start = pieces[0].new_tensor([backbone.bos_token_id])
        ids_ST = pad_sequence([torch.cat([start, piece]) for piece in pieces], batch_first=True)
        positions_ST = torch.arange(ids_ST.shape[1], device=ids_ST.device).expand_as(ids_ST)
        hidden_STD = backbone.embed(ids_ST)
        layers = [hidden_STD]
        for index in range(backbone.depth):
            hidden_STD = backbone.run(hidden_STD, index, index + 1, positions_ST)
            layers.append(hidden_STD)
        layers[-1] = backbone.model.get_decoder().norm(hidden_STD)
        states_STLD = torch.stack(layers, dim=2).float()
        return [
            states_TLD[1 : 1 + len(piece)]
            for states_TLD, piece in zip(states_STLD, pieces, strict=True)
        ]

    def encode(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Slots of each piece `[K, D]`, one for every `compression` tokens."""
        parts, window = self.parts(), self.config.window
        sizes = [len(piece) for piece in pieces]
        fused = parts["fusion"](torch.cat(self.states(pieces))).split(sizes)
        windows = [part for piece in fused for part in piece.split(window)]
        tokens_NTD = torch.stack([F.pad(part, (0, 0, 0, window - len(part))) for part in windows])
        counts_N1 = torch.tensor([[len(part)] for part in windows], device=tokens_NTD.device)
        mask_NT = torch.arange(window, device=tokens_NTD.device) < counts_N1
        moved_NKD = parts["transport"](tokens_NTD, mask_NT)
        real_NK = slot_tokens(mask_NT, self.config.compression) > 0
        return list(parts["projection"](moved_NKD[real_NK]).split([*map(self._slots, sizes)]))

    def _slots(self, tokens: int) -> int:
        return -(-tokens // self.config.compression)

    def compress(self, ids: list[int]) -> CompressedContext:
        """Encode every piece into slots, in bfloat16."""
        pieces = torch.tensor(ids, device=self.backbone.device).split(self.config.piece)
        slots = [
            slots_KD
            for at in range(0, len(pieces), ENCODED_TOGETHER)
            for slots_KD in self.encode(pieces[at : at + ENCODED_TOGETHER])
        ]
        states_UD = torch.cat(slots).bfloat16()
        return CompressedContext(states_UD, 2 * states_UD.numel())

    # Answering

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return the tokens of all windows whose slots fit."""
        room, window = free_positions(self.backbone, prompt, limit), self.config.window
        return tokens if self._slots(tokens) <= room else room // self._slots(window) * window

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill start token, slots and prompt."""
        rows = [
            states_UD[: self._slots(count)].to(self.backbone.dtype)
            for states_UD, count in zip(contents, used, strict=True)
        ]
        return prefill_soft_prompts(self.backbone, rows, prompts)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after slots and prompt."""
        slots = self._encode_contexts(contexts)
        return self.answer_loss(run_soft_prompts(self.backbone, slots, ids, valid).prefix, labels)

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of the continuation right after the slots of the context."""
        slots = self._encode_contexts(list(context))
        return {"loss": continuation_loss(self.backbone, slots, continuation, continuation)}

    def _encode_contexts(self, contexts: Sequence[Tensor]) -> list[Tensor]:
        """Slots of each context `[U, D]`; all pieces are one batch."""
        size = self.config.piece
        pieces = [piece for context in contexts for piece in context.split(size) if len(piece)]
        counts = [self._slots(len(context)) for context in contexts]
        return list(torch.cat(self.encode(pieces)).split(counts))
