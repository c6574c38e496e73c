"""ComprExIT: hidden states of all layers, fused and transported to soft tokens (Ye et al., 2026).

Followed: the official code with its pooling `ot-dy-src` and two-layer projector, the one that its
scripts for Llama-3.2 run. A context is cut into pieces, each encoded on its own by the frozen
backbone. Depth: every token attends over its own states of all layers, embedding included. Width:
in windows of the fused tokens an entropic transport plan moves them to anchors, one for each few
tokens, which are the means of these at first. A projection takes the anchors' contents to the
decoder's input, where the same frozen backbone reads them as soft tokens. Nothing but fusion,
transport and projection is trained.

Two settings: pieces of 512 tokens, the published one, and of 128 as SeDeM's segments
(`piece`; a training on questions may set it otherwise than its training on text did).

Where it differs: docs/deviations.md.

Letters: B batch, S pieces, T tokens, L layers with the embedding, N tokens or windows in a row,
K anchors of a window, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from sedem.baselines.memory import Begun, Remembered
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.soft_prompt import begin_soft, continuation_loss, run_soft
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.method.losses import next_token_loss
from sedem.method.pooling import pool, slot_tokens

ENCODED_TOGETHER = 16
"""Pieces, when a context is read."""

NEVER = -1e9
"""Logarithm of no mass; finite, so that no difference of two is undefined."""


@dataclass(frozen=True)
class ComprExITConfig(ReaderConfig):
    """Settings of ComprExIT; the defaults are the official ones.

    Attributes:
        piece: tokens that are encoded together.
        window: fused tokens that one plan moves.
        compression: tokens to an anchor.
        inner: width of queries and keys of the fusion, and of the space of costs.
        fusion_temperature: of the softmax over layers, beside the root of `inner`.
        entropy: weight of the plan's entropy (epsilon of Sinkhorn's iterations).
        iterations: of Sinkhorn.
        floor: share of a token's mass that all tokens of a window have alike.
        gain: of the projection's start values.
    """

    piece: int = 512
    window: int = 128
    compression: int = 4
    inner: int = 256
    fusion_temperature: float = 0.7
    entropy: float = 0.1
    iterations: int = 30
    floor: float = 0.05
    gain: float = 0.4

    least: ClassVar[Mapping[str, int]] = {
        "piece": 1,
        "window": 1,
        "compression": 1,
        "inner": 1,
        "iterations": 1,
    }
    shares: ClassVar[tuple[str, ...]] = ("floor",)
    free: ClassVar[frozenset[str]] = frozenset({"piece"})
    adapted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fusion_temperature", "entropy", "gain"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        if self.piece % self.window or self.window % self.compression:
            raise ConfigError(
                f"piece is {self.piece}, window {self.window} and compression {self.compression}; "
                "a piece must be whole windows and a window whole anchors"
            )


class LayerFusion(nn.Module):
    """Depth: one state of each token from those of all layers.

    Args:
        layers: L.
        width: D.
        inner: of queries and keys.
        temperature: of the softmax over layers.
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

        The key of layer l is W h_l + b + e_l and the values are projected states. Neither is
        written out for every layer: q . W h_l is (q W) . h_l, and the weights add up to one.
        """
        mixed_ND = torch.einsum("l,nld->nd", self.mixture.softmax(0), states_NLD)
        query_NE = self.query(mixed_ND)
        own_NL = torch.einsum("nd,nld->nl", query_NE @ self.key.weight, states_NLD)
        scores_NL = (own_NL + query_NE @ (self.key.bias + self.layers).T) / self.scale
        return self.value(torch.einsum("nl,nld->nd", scores_NL.softmax(-1), states_NLD))


class Transport(nn.Module):
    """Width: the tokens of a window moved to its anchors.

    Args:
        config: the method's settings.
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
        """Contents of the anchors `[N, K, D]`; those of padding alone mean nothing.

        Args:
            tokens_NTD: fused states in windows, each with a token at least.
            mask_NT: False where a token is padding.
        """
        compression = self.config.compression
        # Masses are tiny and the plan is an exponential of thirty rounds: never in half precision.
        with torch.autocast(tokens_NTD.device.type, enabled=False):
            tokens_NTD = tokens_NTD.float()
            places_NTE = F.normalize(self.metric(tokens_NTD), dim=-1)
            anchors_NKD = pool(tokens_NTD, mask_NT, compression)
            anchors_NKE = F.normalize(self.metric(anchors_NKD), dim=-1)
            held_NK = (slot_tokens(mask_NT, compression) > 0).float()
            target_NK = held_NK / held_NK.sum(1, keepdim=True)
            plan_NTK = transport_plan(
                1 - places_NTE @ anchors_NKE.transpose(1, 2),
                self.masses(tokens_NTD, mask_NT),
                target_NK,
                self.config.entropy,
                self.config.iterations,
            )
            moved_NKD = plan_NTK.transpose(1, 2) @ self.value(tokens_NTD)
            return moved_NKD / target_NK.clamp_min(1e-6)[..., None]

    def masses(self, tokens_NTD: Tensor, mask_NT: Tensor) -> Tensor:
        """What each token of a window has to give `[N, T]`; they add up to one."""
        scores_NT = self.mass(tokens_NTD)[..., 0].masked_fill(~mask_NT, -torch.inf)
        alike_NT = mask_NT / mask_NT.sum(1, keepdim=True)
        return (1 - self.config.floor) * scores_NT.softmax(-1) + self.config.floor * alike_NT


def transport_plan(
    cost_NTK: Tensor, source_NT: Tensor, target_NK: Tensor, entropy: float, iterations: int
) -> Tensor:
    """The entropic transport plan `[N, T, K]`, by Sinkhorn's iterations on logarithms.

    Args:
        cost_NTK: of moving a unit.
        source_NT: masses; where they are zero nothing is moved.
        target_NK: masses; where they are zero nothing arrives.
        entropy: epsilon.
        iterations: how many; the last one sets the columns right.
    """
    kernel_NTK = -cost_NTK / entropy
    source_NT, target_NK = _logarithm(source_NT), _logarithm(target_NK)
    column_NK = torch.zeros_like(target_NK)
    for _ in range(iterations):
        row_NT = source_NT - (kernel_NTK + column_NK[:, None]).logsumexp(2)
        column_NK = target_NK - (kernel_NTK + row_NT[..., None]).logsumexp(1)
    return (kernel_NTK + row_NT[..., None] + column_NK[:, None]).exp()


def _logarithm(mass: Tensor) -> Tensor:
    nothing = mass <= 0
    return mass.masked_fill(nothing, 1.0).log().masked_fill(nothing, NEVER)


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
        """States of all layers `[T, L, D]` of each piece, each read on its own by the backbone.

        The last are those after the closing norm; the start token in front is left out.
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
        """Slots of each piece `[K, D]`, one for each run of `compression` tokens."""
        parts, window = self.parts(), self.config.window
        sizes = [len(piece) for piece in pieces]
        fused = parts["fusion"](torch.cat(self.states(pieces))).split(sizes)
        windows = [own for piece in fused for own in piece.split(window)]
        tokens_NTD = torch.stack([F.pad(own, (0, 0, 0, window - len(own))) for own in windows])
        counts_N1 = torch.tensor([[len(own)] for own in windows], device=tokens_NTD.device)
        mask_NT = torch.arange(window, device=tokens_NTD.device) < counts_N1
        moved_NKD = parts["transport"](tokens_NTD, mask_NT)
        held_NK = slot_tokens(mask_NT, self.config.compression) > 0
        return list(parts["projection"](moved_NKD[held_NK]).split([*map(self._slots, sizes)]))

    def _slots(self, tokens: int) -> int:
        return -(-tokens // self.config.compression)

    def remember(self, ids: list[int]) -> Remembered:
        """Slots of every piece, in bfloat16."""
        pieces = torch.tensor(ids, device=self.backbone.device).split(self.config.piece)
        slots = [
            own
            for at in range(0, len(pieces), ENCODED_TOGETHER)
            for own in self.encode(pieces[at : at + ENCODED_TOGETHER])
        ]
        states_UD = torch.cat(slots).bfloat16()
        return Remembered(states_UD, 2 * states_UD.numel())

    # Answering

    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """Whole windows whose slots have positions left."""
        room, window = self.room(prompt, limit), self.config.window
        return tokens if self._slots(tokens) <= room else room // self._slots(window) * window

    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill start token, slots and prompt."""
        rows = [
            states_UD[: self._slots(count)].to(self.backbone.dtype)
            for states_UD, count in zip(contents, seen, strict=True)
        ]
        return begin_soft(self.backbone, rows, prompts)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after slots and prompt."""
        states_BPD = run_soft(self.backbone, self._read(contexts), ids, valid).prefix
        logits_BAV = self.backbone.logits(states_BPD[:, -labels.shape[1] :])
        return {"loss": next_token_loss(logits_BAV, labels)}

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of the continuation right after the slots of the context."""
        slots = self._read(list(context))
        return {"loss": continuation_loss(self.backbone, slots, continuation, continuation)}

    def _read(self, contexts: Sequence[Tensor]) -> list[Tensor]:
        """Slots of each context `[U, D]`, all pieces as one batch."""
        size = self.config.piece
        pieces = [piece for context in contexts for piece in context.split(size) if len(piece)]
        counts = [self._slots(len(context)) for context in contexts]
        return list(torch.cat(self.encode(pieces)).split(counts))
