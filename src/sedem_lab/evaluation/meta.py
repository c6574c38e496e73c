"""Run modules without their numbers, and count FLOPs and the bytes that are alive at once.

Weights and activations are on torch's meta device, where a tensor has a shape and no storage. So a
step of a model of any size runs in seconds on any machine, by the code that trains and answers.

Whole numbers and masks keep their values, because code branches on them. Those that depend on an
activation, such as the indices of the best scores, are zero, and such masks are true.

FLOPs are those of `torch.utils.flop_counter`: matrix products alone, a multiply-add as two. Every
attention here is causal, so the pairs that its mask hides are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import empty_model

VALUES = 2**22
"""Whole numbers and masks of more elements have no values: masks of a long context."""

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
"""An attention that keeps no probabilities, as on a GPU, and that torch has for this device."""
WITH_PROBABILITIES = F.scaled_dot_product_attention
"""Attention whose bias is trained; here it keeps them."""
HALVED = (
    (F, "linear"),
    (torch, "bmm"),
    (torch, "einsum"),
    (torch, "matmul"),
    (Tensor, "matmul"),
    (Tensor, "__matmul__"),
)
"""What mixed precision computes in bfloat16."""


def backbone_of(shape: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> Backbone:
    """A backbone of this shape on the meta device, whose tokenizer knows the letter x alone."""
    with torch.device("meta"):
        # A configuration may name an attention implementation that would have to be downloaded;
        # transformers writes the chosen one into it.
        model = empty_model(deepcopy(shape), dtype=dtype, attn_implementation="sdpa")
    own = Tokenizer(BPE(vocab={"<start>": 0, "<end>": 1, "x": 2}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<start>", eos_token="<end>"
    )
    return Backbone(model, tokenizer, shape.name_or_path, digest="no weights")


@contextmanager
def counting(kept: Iterable[Tensor] = (), *, mixed: bool = False) -> Iterator[Counter]:
    """Count FLOPs and bytes of what runs inside.

    Args:
        kept: tensors whose bytes do not count, such as weights.
        mixed: run as in mixed precision (`torch.autocast`, which does not know this device).
    """
    mixture = _Mixed()
    with Counter(kept) as counter, ExitStack() as replaced:
        replaced.enter_context(torch.compiler.set_stance("force_eager"))
        replaced.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
        replaced.enter_context(patch.object(torch, "autocast", mixture.autocast))
        # It would make tensors on this device without asking `Counter`.
        make = torch.tensor
        on_cpu: Any = lambda data, *, device=None, **options: make(data, **options)  # noqa: E731
        replaced.enter_context(patch.object(torch, "tensor", on_cpu))
        # It wants both tensors on one device before it asks.
        replaced.enter_context(patch.object(torch, "take_along_dim", _taken))
        for owner, name in HALVED if mixed else ():
            halved = mixture.halved(getattr(owner, name))
            replaced.enter_context(patch.object(owner, name, halved))
        yield counter


def counted(run: Callable[[], object]) -> int:
    """The FLOPs of a call."""
    with counting() as counter:
        run()
    return counter.flops


class _Mixed:
    """Mixed precision."""

    def __init__(self) -> None:
        self.enabled = True
        # As in autocast, a weight is cast once.
        self.cast: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @contextmanager
    def autocast(self, _: str, *, enabled: bool) -> Iterator[None]:
        """Turn it off, as `torch.autocast` does on other devices."""
        before, self.enabled = self.enabled, self.enabled and enabled
        try:
            yield
        finally:
            self.enabled = before

    def halved(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same call with tensors of bfloat16."""

        def halved(*args: Any, **kwargs: Any) -> Tensor:
            if self.enabled:
                args, kwargs = tree_map_only(Tensor, half, (args, kwargs))
            return call(*args, **kwargs)

        def half(tensor: Tensor) -> Tensor:
            if tensor.dtype != torch.float32:
                return tensor
            if not (tensor.is_leaf and tensor.requires_grad):
                return tensor.bfloat16()
            if (cast := self.cast.get(id(tensor))) is None:
                cast = self.cast[id(tensor)] = tensor.bfloat16()
            return cast

        return halved


def _taken(given: Tensor, indices: Tensor, dim: int) -> Tensor:
    shape = [*given.shape]
    shape[dim] = indices.shape[dim]
    return given.gather(dim, indices.expand(shape))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # As torch does: what a kernel adds has the type of the queries, and is kept.
        none = query.new_zeros(())
        attn_mask = torch.where(attn_mask, none, none)
    if attn_mask is not None and attn_mask.requires_grad:
        given = query, key, value, attn_mask, dropout_p, is_causal
        return WITH_PROBABILITIES(*given, scale=scale, enable_gqa=enable_gqa)
    found = ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return found[0]


class Counter(TorchDispatchMode):
    """Runs every operation on shapes; see the module.

    Attributes:
        flops: FLOPs.
        peak_bytes: most bytes of tensors that were alive at once.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        super().__init__()
        self.flops = self.peak_bytes = self.alive = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.index.Tensor:
            args = (args[0], [*chain.from_iterable(map(_places, args[1]))])
        leaves = [*_flat(args), *_flat(kwargs.values())]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_meta = [tensor.is_meta for tensor in given]
        if not any(on_meta) and META not in leaves and prod(t.numel() for t in given) <= VALUES:
            found = func(*args, **kwargs)
        elif func is aten._local_scalar_dense.default:
            found = 0.0
        elif func._schema.is_mutable and any(on_meta):
            found = args[0]
        elif all(on_meta) and on_meta and _is_view(func):
            found = func(*args, **kwargs)
        else:
            # Activations stay without numbers wherever they are sent.
            sent = {"device": META} if any(on_meta) and "device" in kwargs else {}
            found = _on_meta(func, args, {**kwargs, **sent}, leaves)
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=found)
        for leaf in _flat((found,)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.known:
                storage = leaf.untyped_storage()
                self.known.add(storage._cdata)
                self.alive += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.alive)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return found

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


META, CPU = torch.device("meta"), torch.device("cpu")
_SHAPES: dict[Any, Any] = {}
"""What operations gave, by operation and arguments: layers repeat them, and torch is slow here."""


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and the entries of lists among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from (len(value), *value)
        else:
            yield value


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """A mask with values as the indices of what it picks, whose number a shape depends on."""
    picks = index is not None and index.dtype == torch.bool and not index.is_meta
    return index.nonzero().unbind(1) if picks else [index]  # type: ignore[union-attr]


def _is_view(func: Any) -> bool:
    return any(returned.alias_info for returned in func._schema.returns)


def _on_meta(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    """What an operation gives: shapes of activations, values of whole numbers and masks."""
    key = func, *map(_shape, leaves)
    if (known := _SHAPES.get(key)) is not None:
        return _made(known) if isinstance(known, _Shape) else tree_map_only(_Shape, _made, known)
    numbers = not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)
    try:
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(META), (args, kwargs))
        found = func(*moved[0], **moved[1])
    except (NotImplementedError, RuntimeError):
        if not numbers:
            raise
        found = None  # it depends on values
    own = [leaf for leaf in _flat((found,)) if isinstance(leaf, Tensor)]
    if numbers and not any(t.is_floating_point() or t.numel() > VALUES for t in own):
        return func(*args, **{k: CPU if value == META else value for k, value in kwargs.items()})
    if not _is_view(func):
        _SHAPES[key] = tree_map_only(Tensor, _shape, found)
    return found if _is_view(func) else tree_map_only(_Shape, _made, _SHAPES[key])


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    meta: bool


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.is_meta)
    return type(leaf), leaf


def _made(shape: _Shape) -> Tensor:
    if shape.dtype.is_floating_point or prod(shape.size) > VALUES:
        return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=META)
    make = torch.ones if shape.dtype == torch.bool else torch.zeros
    return make(shape.size, dtype=shape.dtype, device=CPU)


def _causal(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and values: query i of q sees the keys before it, the last one all of them."""
    (batch, heads, queries, width), keys = query.shape, key.shape[-2]
    pairs = queries * keys - queries * (queries - 1) // 2
    return 2 * batch * heads * pairs * (width + value.shape[-1])


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    ATTENTION: _causal,
    # Scores again, and the gradients of scores, queries, keys and values.
    ATTENTION_BACKWARD: lambda _, *attended, **__: _causal(*attended[:3]) * 5 // 2,
}
