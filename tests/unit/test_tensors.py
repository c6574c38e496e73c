"""Stored vectors keep the precision of their type and report their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from sedem import tensors
from sedem.errors import CheckpointError, ConfigError
from sedem.tensors import (
    DTYPES,
    Quantized,
    check_dtype,
    check_weights,
    dequantize_int8,
    join,
    load_weights,
    quantize,
    quantize_int8,
    save_tensors,
    vector_bytes,
    weights_digest,
)

ROUNDING = {"int8": 0.5 / 127, "fp8": 16 / 448}
"""Half of the widest gap between two values, against the largest value of a vector."""


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16), power=st.integers(-20, 20), dtype=st.sampled_from(list(ROUNDING))
)
def test_values_come_back_within_the_rounding_of_their_vector(
    seed: int, power: int, dtype: str
) -> None:
    vectors = torch.randn(3, 4, 16, generator=torch.manual_seed(seed)) * 2.0**power
    off = (quantize(vectors, dtype).dequantize() - vectors).abs().amax(-1)
    assert (off <= vectors.abs().amax(-1) * ROUNDING[dtype] * 1.001).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_the_largest_value_bytes_and_joined_parts_are_exact(dtype: str) -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.5, -7.0]])
    found = quantize(vectors, dtype).dequantize().float()
    assert torch.equal(found[0], vectors[0])
    assert found[1, 1].item() == pytest.approx(-7.0, rel=1e-6)
    quantized = quantize(torch.randn(5, 4, 8), dtype)
    assert quantized.nbytes == 20 * vector_bytes(8, dtype)
    assert vector_bytes(2048, dtype) == (4096 if dtype == "bfloat16" else 2052)
    joined = join([quantized[:2], quantized[[2]], quantized[3:]])
    assert torch.equal(joined.dequantize(), quantized.dequantize()) and len(joined) == 5


def test_casting_rounds_once_and_not_at_all_to_the_same_type() -> None:
    quantized = quantize(torch.randn(5, 8), "int8")
    assert quantized.cast("int8") is quantized
    assert torch.equal(
        quantized.cast("fp8").dequantize(), quantize(quantized.dequantize(), "fp8").dequantize()
    )
    plain = torch.randn(2, 3).bfloat16()
    assert Quantized(plain).dequantize() is plain


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="stored as 'int4'; use bfloat16, int8, fp8"):
        check_dtype("int4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rows_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)) * 3
    weight[4] *= 1e-4
    weight[5] *= 1e4
    weight = weight.to(dtype)
    quantized = quantize_int8({"w": weight})
    assert quantized["w"].dtype == torch.int8
    assert quantized["w.scale"].shape == (20,)
    restored = dequantize_int8(quantized, torch.float32)["w"]
    step = weight.float().abs().amax(1) / 127
    error = (restored - weight.float()).abs()
    assert (error <= step[:, None] * 0.5001).all()
    assert error.max() > 0
    torch.testing.assert_close(restored.abs().amax(1), weight.float().abs().amax(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_not_quantized_and_types_are_those_that_are_asked_for(
    dtype: torch.dtype,
) -> None:
    weights = {"norm": torch.randn(7), "bias": torch.randn(3).bfloat16(), "one": torch.tensor(2.5)}
    quantized = quantize_int8(weights)
    assert quantized.keys() == weights.keys()
    restored = dequantize_int8(quantized | quantize_int8({"w": torch.randn(2, 3)}), dtype)
    assert {tensor.dtype for tensor in restored.values()} == {dtype}
    assert all(torch.equal(restored[name], weights[name].to(dtype)) for name in weights)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_any_row_comes_back_within_half_a_step_and_then_as_it_is(values: list[float]) -> None:
    weight = torch.tensor([values, [0.0] * len(values)])
    restored = dequantize_int8(quantize_int8({"w": weight}), torch.float32)["w"]
    step = max(abs(value) for value in values) / 127
    assert (restored - weight).abs().max() <= step * 0.501 + 1e-12
    again = dequantize_int8(quantize_int8({"w": restored}), torch.float32)["w"]
    torch.testing.assert_close(again, restored, rtol=1e-6, atol=0)


def test_int8_rows_without_their_scale_are_refused() -> None:
    quantized = quantize_int8({"w": torch.randn(2, 3)})
    del quantized["w.scale"]
    with pytest.raises(CheckpointError, match=r"'w' .*'w\.scale'"):
        dequantize_int8(quantized, torch.float32)


WHOLE = save({"a": torch.randn(50, 50)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"not a weight file at all, only words",
        (2**63 - 1).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (7).to_bytes(8, "little") + b"garbage",
        b"\x80\x04\x95pickle",
        *(WHOLE[: int(len(WHOLE) * share)] for share in (0.99, 0.5, 0.1, 0.01)),
    ],
    ids=lambda content: repr(content[:9]),
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match=r"w\.safetensors' is missing; the checkpoint is inc"):
        load_weights(path)
    with pytest.raises(CheckpointError, match="is a folder; give a file"):
        load_weights(tmp_path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.safetensors' is truncated or not a safetensors"):
        load_weights(path)


def test_other_shapes_and_names_of_weights_are_refused() -> None:
    one = torch.zeros(1)
    for expected, found, words in (
        ({"b": torch.zeros(4)}, {"b": torch.zeros(5, 1)}, r"b has shape \[5, 1\], \[4\] is needed"),
        (
            {"a": one, "b": one, "c": one},
            {"c": one, "z": one},
            r"2 weights are missing \(such as a\) and 1 are not known \(such as z\)",
        ),
    ):
        with pytest.raises(CheckpointError, match=f"'here' .*{words}"):
            check_weights(expected, found, "here")


def test_the_digest_depends_on_weights_names_and_text() -> None:
    weights = {"a": torch.randn(10, 10), "b": torch.randn(3)}
    digest = weights_digest(weights, "words")
    assert digest == weights_digest(dict(reversed(weights.items())), "words")
    assert digest != weights_digest(weights, "other words")
    assert digest != weights_digest({"a": weights["a"], "c": weights["b"]}, "words")
    changed = weights["a"].clone()
    changed[7, 7] += 1
    assert digest != weights_digest({**weights, "a": changed}, "words")


def test_the_digest_is_the_same_for_float32_and_bfloat16() -> None:
    weights = {"a": torch.randn(10, 10), "b": torch.randn(9000)}
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    both = [weights_digest(found, dtype=torch.bfloat16) for found in (weights, rounded)]
    assert both[0] == both[1]
    assert weights_digest(weights) != weights_digest(rounded)


@pytest.mark.parametrize("place", [0, 1, 4095, 54_321, 99_999])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_digest_covers_every_value_to_the_last_bit(
    place: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "PIECE", 30_000)
    weights = torch.ones(100, 1000)
    digest = weights_digest({"a": weights}, dtype=dtype)
    weights.view(-1)[place] = 1.01 if dtype else torch.nextafter(torch.ones(()), torch.tensor(2.0))
    assert weights_digest({"a": weights}, dtype=dtype) != digest


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = tmp_path / "weights.safetensors"
    save_tensors({"a": torch.ones(2)}, path, {"made": "here"})
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert torch.equal(load_weights(path)["a"], torch.ones(2))
    path.chmod(0o640)
    save_tensors({"a": torch.zeros(2)}, path)
    assert path.stat().st_mode & 0o777 == 0o640
