"""Stored vectors keep the precision of their type and report their size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sedem.errors import ConfigError
from sedem.quantization import DTYPES, Quantized, check_dtype, join, quantize, vector_bytes

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
def test_zeros_and_the_largest_value_are_exact(dtype: str) -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.5, -7.0]])
    found = quantize(vectors, dtype).dequantize().float()
    assert torch.equal(found[0], vectors[0])
    assert found[1, 1].item() == pytest.approx(-7.0, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_values_and_scales(dtype: str) -> None:
    quantized = quantize(torch.randn(5, 4, 8), dtype)
    assert quantized.nbytes == 20 * vector_bytes(8, dtype)
    assert vector_bytes(2048, "int8") == vector_bytes(2048, "fp8") == 2052
    assert vector_bytes(2048, "bfloat16") == 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_joining_parts_restores_the_whole(dtype: str) -> None:
    quantized = quantize(torch.randn(5, 4, 8), dtype)
    joined = join([quantized[:2], quantized[[2]], quantized[3:]])
    assert torch.equal(joined.dequantize(), quantized.dequantize())
    assert len(joined) == 5


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
