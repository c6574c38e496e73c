"""The size of a bank on paper is that of a bank that was built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.blocks import Blocks
from sedem.bank.file import BankFile
from sedem.bank.keys import key_index, keys_of
from sedem.bank.rows import Meta
from sedem.bank.search import pool_keys
from sedem.checkpoint.folder import embedded
from sedem.quantization import DTYPES, Quantized
from sedem.scale.bank_bytes import BlockShape, bank_bytes

NANO = BlockShape.of_model(str(embedded("sedem-nano")))


@pytest.fixture(scope="module")
def model() -> SeDeM:
    return SeDeM.from_pretrained("sedem-nano", light=True)


@pytest.fixture(scope="module")
def bank(model: SeDeM) -> MemoryBank:
    return model.read([Document("hills.txt", "The lease of the house on the hill ends. " * 60)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_take_the_bytes_of_a_real_bank(dtype: str, bank: MemoryBank) -> None:
    expected = bank_bytes(NANO, bank.tokens, len(bank))
    assert bank.cast(dtype).memory_bytes == expected["slots"][dtype]
    assert len(bank) == NANO.blocks(bank.tokens, bank.tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [NANO.width, 1024])
def test_blocks_take_the_bytes_of_a_real_file(dtype: str, width: int) -> None:
    shape = replace(NANO, width=width)
    file, starts = BankFile(), np.arange(100) * 10
    tokens = np.full((100, shape.slots), 4, np.uint8)
    memory_NJD = Quantized(torch.randn(100, shape.slots, width))
    sizes = []
    with file.creating(Meta("print", {}, shape.slots, width, dtype, texts=False, words=False)):
        for name in "abcdef":
            blocks = Blocks(np.zeros(100, np.int64), starts, starts + 10, tokens)
            file.append("print", [Document(name, "ten chars." * 100)], blocks, memory_NJD)
            sizes.append(file.size)
    # Of further documents, because every table takes a page.
    assert sizes[-1] - sizes[0] == pytest.approx(500 * shape.file_bytes(dtype), rel=0.04)
    assert bank_bytes(shape, 1, 500)["file"][dtype] == round(500 * shape.file_bytes(dtype))


def test_keys_take_the_bytes_of_real_keys(model: SeDeM, bank: MemoryBank) -> None:
    expected = bank_bytes(NANO, bank.tokens, len(bank))
    keys = keys_of(bank, model.selector, range(len(bank)))
    for dtype in DTYPES:
        assert keys.cast(dtype).nbytes == expected["keys"][dtype]
    assert keys.dequantize().float().nbytes == len(bank) * NANO.key_bytes("float32")
    pooled, _ = pool_keys(keys, key_index(bank, model.selector).padding)
    assert pooled.nbytes == expected["pooled_keys"]


def test_kept_values_take_the_bytes_that_were_measured() -> None:
    # docs/bank-format.md: 12,288 bytes a token in float32 and 3,264 in int8.
    assert (NANO.kept_bytes("float32"), NANO.kept_bytes("int8")) == (12_288, 3_264)


def test_blocks_that_see_each_other_keep_nothing() -> None:
    shape = BlockShape.of_model("llama-3.2-1b")
    assert bank_bytes(shape, 1000, shape.blocks(1000))["kept"] == {}


def test_short_documents_take_more_blocks() -> None:
    assert NANO.blocks(1280) == 10
    assert NANO.blocks(1280, 100) == 13
    assert NANO.blocks(1280, 130) == 2 * 9 + 1
    assert NANO.blocks(1, 10_000) == 1
