"""Activation Beacon: windows of text into keys and values of beacon tokens (Zhang et al., 2024).

Followed: the official code as the paper runs it: beacons interleaved with the text, full coverage,
earlier beacons attended to, a sink. The stream [start; context; prompt; answer] is read in windows.
In each a beacon token follows every `ratio` tokens, and has query, key and value projections of its
own in every layer, beside the frozen ones. A full window leaves the keys and values of its beacons
alone; the first leaves those of its first tokens too, the sink. What is left stands at positions
from 0 on without gaps. Window after window is read above what the earlier ones have left. The rest
of a context that fills no window is kept as it is, and prompt and answer follow it.

Two settings: windows of 128 tokens, so that contexts of ordinary questions are compressed at all,
and the paper's 1,024. With a `rank`, a beacon's projections are not matrices of their own as in the
paper but the frozen ones plus a product of two narrow matrices: a small part of the parameters.

Where it differs: docs/deviations.md.

Letters: B batch, P positions of one call, K columns held, W tokens of a window, G beacons of it,
R tokens of a beacon, H key heads, E width of a head, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.baselines.memory import Begun, Remembered, own_generator
from sedem.baselines.reindexed_cache import Held
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.soft_prompt import begun, padded_left
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.method.injection import Stream
from sedem.method.losses import next_token_loss

OWN = ("q", "k", "v")
"""Projections that a beacon token has of its own."""


@dataclass(frozen=True)
class BeaconConfig(ReaderConfig):
    """Settings of Activation Beacon; all but the window are the paper's.

    Attributes:
        window: tokens after which raw keys and values are dropped.
        ratio: tokens to a beacon when documents are read, and in losses that are only followed.
        ratios: what training draws from, anew for every window.
        sink: first tokens whose keys and values are kept.
        rank: width of the product that a beacon's projections differ by from the frozen ones; 0 is
            the paper's, matrices of their own.
        seed: of the draws.
    """

    window: int = 128
    ratio: int = 4
    ratios: tuple[int, ...] = (2, 4, 8, 16, 32)
    sink: int = 1
    rank: int = 0
    seed: int = 0

    least: ClassVar[Mapping[str, int]] = {"window": 2, "ratio": 1, "sink": 1, "rank": 0, "seed": 0}
    free: ClassVar[frozenset[str]] = frozenset({"ratio", "ratios"})
    adapted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ratios", tuple(self.ratios))
        if not self.ratios:
            raise ConfigError("ratios is empty; give at least one")
        for ratio in (self.ratio, *self.ratios):
            if not isinstance(ratio, int) or ratio < 1 or self.window % ratio:
                raise ConfigError(
                    f"a ratio is {ratio!r}; beacons must divide the window of {self.window} tokens"
                )
        if self.sink > min(self.ratio, *self.ratios):
            raise ConfigError(
                f"sink is {self.sink}; it must end before the first beacon, so be at most the "
                f"smallest ratio, {min(self.ratio, *self.ratios)}"
            )


class ActivationBeacon(TrainedReader):
    """Streams a context into beacon activations.

    Args:
        config: its settings.
        backbone: what its beacons are copied from at the start: its projections, and the embedding
            of its end token.
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
            if config.rank:
                nn.init.zeros_(own[1].weight)
            else:
                own.load_state_dict(frozen.state_dict())

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """One token, and in every layer three projections as the backbone's."""
        heads = shape.num_attention_heads
        size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        outputs = {"q": heads, "k": shape.num_key_value_heads, "v": shape.num_key_value_heads}
        bias = shape.model_type == "qwen2" or bool(getattr(shape, "attention_bias", False))
        width, rank = shape.hidden_size, config.rank

        def projection(out: int) -> nn.Module:
            if not rank:
                return nn.Linear(width, out, bias=bias)
            narrow = nn.Linear(width, rank, bias=False)
            return nn.Sequential(narrow, nn.Linear(rank, out, bias=False))

        depth = shape.num_hidden_layers
        own = {n: nn.ModuleList(projection(outputs[n] * size) for _ in range(depth)) for n in OWN}
        return nn.ModuleDict({"token": nn.Embedding(1, width), **own})

    def projections(self) -> Iterator[tuple[Any, nn.Module]]:
        """Each projection of beacons, or what it adds to the backbone's, with the backbone's."""
        for index, layer in enumerate(self.backbone.model.get_decoder().layers):
            for name in OWN:
                own: Any = self.parts()[name]
                yield own[index], getattr(layer.self_attn, f"{name}_proj")

    # The stream

    def _nothing(self, rows: int) -> Held:
        return Held([], torch.zeros(rows, 0, dtype=torch.bool, device=self.backbone.device))

    def _run(self, hidden_BPD: Tensor, valid_BP: Tensor, held: Held) -> tuple[Tensor, Stream]:
        """Run embedded tokens above what is held.

        Returns:
            States after the last layer `[B, P, D]`, and where the rows stand.
        """
        cache = DynamicCache()
        for index, (keys, values) in enumerate(held.layers):
            cache.update(keys, values, index)
        count_B1 = held.valid.sum(1, keepdim=True)
        held_BK = (held.valid.long().cumsum(1) - 1) * held.valid
        positions_BP = (count_B1 + valid_BP.long().cumsum(1) - 1) * valid_BP
        columns_BK = torch.cat([held.valid, valid_BP], dim=1)
        axis = KeyAxis(
            torch.cat([held_BK, positions_BP], dim=1),
            columns_BK,
            not bool(columns_BK.all()),
            columns_BK.shape[1],
        )
        states_BPD = self.backbone.run(
            hidden_BPD, 0, self.backbone.depth, positions_BP, valid_BP, axis, cache
        )
        return states_BPD, Stream(cache, axis, axis, columns_BK.sum(1))

    def _compress(
        self, ids_BW: Tensor, active_B: Tensor, held: Held, ratio: int
    ) -> tuple[Tensor, Held]:
        """Read a full window.

        Args:
            ids_BW: its tokens.
            active_B: False where a row has no such window; it only goes along.
            held: what the earlier windows have left.
            ratio: R.

        Returns:
            States of the window's tokens after the last layer `[B, W, D]`, and what is held now.
        """
        text_BGRD = self.backbone.embed(ids_BW).unflatten(1, (-1, ratio))
        nought_BG1 = ids_BW.new_zeros(*text_BGRD.shape[:2], 1)
        beacon_BG1D = self.parts()["token"](nought_BG1).to(text_BGRD.dtype)
        hidden_BPD = torch.cat([text_BGRD, beacon_BG1D], dim=2).flatten(1, 2)
        total = hidden_BPD.shape[1]
        beacons = torch.arange(ratio, total, ratio + 1, device=ids_BW.device)
        with self._beacons_at(beacons):
            states_BPD, stream = self._run(hidden_BPD, active_B[:, None].expand(-1, total), held)
        sink = torch.arange(0 if held.layers else self.config.sink, device=ids_BW.device)
        rotary = self.backbone.model.get_decoder().rotary_emb
        grown = held.grown(stream.cache, torch.cat([sink, beacons]), active_B, rotary)
        states_BGRD = states_BPD.unflatten(1, (-1, ratio + 1))[:, :, :ratio]
        return states_BGRD.flatten(1, 2), grown

    @contextmanager
    def _beacons_at(self, places: Tensor) -> Iterator[None]:
        """Inside the block, tokens at these places go through the projections of beacons."""
        hooks = [
            frozen.register_forward_hook(_replaced_at(places, own, added=bool(self.config.rank)))
            for own, frozen in self.projections()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # Memory

    def remember(self, ids: list[int]) -> Remembered:
        """Keys and values of sink, beacons and the rest that fills no window, in bfloat16."""
        size = self.config.window
        stream = torch.tensor([[self.backbone.bos_token_id, *ids]], device=self.backbone.device)
        whole = stream.shape[1] // size
        held, row = self._nothing(1), torch.ones(1, dtype=torch.bool, device=stream.device)
        for n in range(whole):
            window = stream[:, n * size : (n + 1) * size]
            _, held = self._compress(window, row, held, self.config.ratio)
        layers, rest = held.layers, stream[:, whole * size :]
        if rest.shape[1]:
            _, end = self._run(self.backbone.embed(rest), torch.ones_like(rest).bool(), held)
            layers = [(layer.keys, layer.values) for layer in end.cache.layers]
        kept_L2HKE = torch.stack([torch.cat(pair) for pair in layers]).bfloat16()
        notes: tuple[str, ...] = ()
        if not whole:
            small = f"the context has {len(ids):,} tokens, fewer than a window of {size:,}"
            notes = (f"{small}, so nothing of it was compressed",)
        return Remembered(kept_L2HKE, 2 * kept_L2HKE.numel(), notes)

    # Answering

    def _columns(self, tokens: int) -> int:
        """What stands for so many tokens of a context and the start token before them."""
        whole, rest = divmod(1 + tokens, self.config.window)
        beacons = whole * (self.config.window // self.config.ratio)
        return beacons + rest + (self.config.sink if whole else 0)

    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """All of a context, or the whole windows whose beacons have positions left."""
        window, sink = self.config.window, self.config.sink
        # The start token is in the prompt, and in what is held.
        room, whole = self.room(prompt, limit) + 1, (1 + tokens) // window
        if not whole:
            return min(tokens, room - 1)
        held = min(room, self.backbone.max_positions - window) - sink
        most = max(0, held) // (window // self.config.ratio)
        if whole <= most and self._columns(tokens) <= room:
            return tokens
        return max(0, min(whole, most) * window - 1)

    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill the prompts above what was kept."""
        backbone = self.backbone
        counts = [self._columns(count) for count in seen]
        kept_BL2HKE = torch.stack(
            [
                F.pad(kept[..., :count, :], (0, 0, 0, max(counts) - count))
                for kept, count in zip(contents, counts, strict=True)
            ]
        ).to(backbone.dtype)
        layers = [(pair[:, 0], pair[:, 1]) for pair in kept_BL2HKE.unbind(1)]
        counts_B1 = torch.tensor(counts, device=backbone.device)[:, None]
        valid_BK = torch.arange(max(counts), device=backbone.device) < counts_B1
        ids_BP, valid_BP = padded_left(
            [torch.tensor(prompt[1:], device=backbone.device) for prompt in prompts]
        )
        states_BPD, stream = self._run(backbone.embed(ids_BP), valid_BP, Held(layers, valid_BK))

        conditioning = [n + len(prompt) - 1 for n, prompt in zip(counts, prompts, strict=True)]
        return begun(backbone, states_BPD[:, -1], stream, conditioning)

    # Training

    def _draw(self, ids: Tensor, windows: int) -> list[int]:
        """A ratio for each window; those that would exceed the positions are not drawn."""
        if not self.training:
            return [self.config.ratio] * windows
        size, most = self.config.window, self.backbone.max_positions
        fitting = [r for r in self.config.ratios if windows * (size // r) + size < most]
        draws = own_generator(self.config.seed, ids)
        return draws.choice(fitting or [max(self.config.ratios)], windows).tolist()

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of every token of a text, beacons standing between its windows.

        Raises:
            ConfigError: a text is a single window, so that nothing would be learnt.
        """
        total = context.shape[1] + continuation.shape[1]
        if total < self.config.window:
            raise ConfigError(
                f"text.context and text.continuation are {total:,} tokens and model.window is "
                f"{self.config.window:,}; no beacon would stand among them, make texts longer"
            )
        start_B1 = context.new_full((len(context), 1), self.backbone.bos_token_id)
        *windows, last_BP = torch.cat([start_B1, context, continuation], dim=1).split(
            self.config.window, dim=1
        )
        held = self._nothing(len(context))
        row_B = torch.ones(len(context), dtype=torch.bool, device=context.device)
        states = []
        for window, ratio in zip(windows, self._draw(context[0], len(windows)), strict=True):
            states_BWD, held = self._compress(window, row_B, held, ratio)
            states.append(states_BWD)
        valid_BP = torch.ones_like(last_BP, dtype=torch.bool)
        states_BPD, _ = self._run(self.backbone.embed(last_BP), valid_BP, held)
        logits_BAV = self.backbone.logits(torch.cat([*states, states_BPD], dim=1)[:, :-1])
        return {"loss": next_token_loss(logits_BAV, torch.cat([context, continuation], dim=1))}

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer; windows of all rows go together, as far as a row has any."""
        size = self.config.window
        start = ids.new_tensor([self.backbone.bos_token_id])
        streams = [torch.cat([start, context]) for context in contexts]
        counts_B = torch.tensor([len(stream) // size for stream in streams], device=ids.device)
        held = self._nothing(len(streams))
        for n, ratio in enumerate(self._draw(contexts[0], int(counts_B.max()))):
            windows = [F.pad(s[n * size :][:size], (0, size))[:size] for s in streams]
            _, held = self._compress(torch.stack(windows), counts_B > n, held, ratio)
        rows = [
            torch.cat([stream[count * size :], own[real][1:]])
            for stream, count, own, real in zip(streams, counts_B.tolist(), ids, valid, strict=True)
        ]
        rest_BP, valid_BP = padded_left(rows)
        states_BPD, _ = self._run(self.backbone.embed(rest_BP), valid_BP, held)
        logits_BAV = self.backbone.logits(states_BPD[:, -labels.shape[1] :])
        loss = next_token_loss(logits_BAV, labels)
        if not held.layers:
            # No row fills a window: nothing is learnt from this batch, which is no error.
            loss = loss + 0 * self.parts()["token"](start - start).sum()
        return {"loss": loss}


def _replaced_at(
    places: Tensor, own: nn.Module, added: bool
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """A hook on a projection that gives the tokens at some places to another one, or adds it."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        beacons: Tensor = own(inputs[0][:, places].float()) + (output[:, places] if added else 0)
        return output.index_copy(1, places, beacons.to(output.dtype))

    return hook
