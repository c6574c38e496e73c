"""Vectors in few bytes come back within their type's rounding, and say how large they are."""

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
def test_a_vector_of_zeros_stays_one_and_the_largest_value_is_kept(dtype: str) -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.5, -7.0]])
    found = quantize(vectors, dtype).dequantize().float()
    assert torch.equal(found[0], vectors[0])
    assert found[1, 1].item() == pytest.approx(-7.0, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_values_and_scales(dtype: str) -> None:
    packed = quantize(torch.randn(5, 4, 8), dtype)
    assert packed.nbytes == 20 * vector_bytes(8, dtype)
    assert vector_bytes(2048, "int8") == vector_bytes(2048, "fp8") == 2052
    assert vector_bytes(2048, "bfloat16") == 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_join_to_what_they_were_cut_from(dtype: str) -> None:
    packed = quantize(torch.randn(5, 4, 8), dtype)
    joined = join([packed[:2], packed[[2]], packed[3:]])
    assert torch.equal(joined.dequantize(), packed.dequantize())
    assert len(joined) == 5


def test_casting_to_the_own_type_rounds_nothing_and_to_another_rounds_once() -> None:
    packed = quantize(torch.randn(5, 8), "int8")
    assert packed.cast("int8") is packed
    assert torch.equal(
        packed.cast("fp8").dequantize(), quantize(packed.dequantize(), "fp8").dequantize()
    )
    plain = torch.randn(2, 3).bfloat16()
    assert Quantized(plain).dequantize() is plain


def test_a_type_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="stored as 'int4'; use bfloat16, int8, fp8"):
        check_dtype("int4")
