"""What docs/bank-format.md says is enough to read a bank."""

from __future__ import annotations

from pathlib import Path

import bank_reader
import numpy as np
import pytest
from faults.operations import append, create, text_of

from sedem import MemoryBank
from sedem.bank.store.local import LocalStore


def changed_bank(folder: Path, dtype: str) -> Path:
    """A bank in which one document was replaced and one removed."""
    create(folder, (("é 🥧", 1), ("b", 2), ("c", 3)), dtype)
    append(LocalStore(folder), [("é 🥧", 4), ("d", 5)])
    LocalStore(folder).remove("b")
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_a_reader_without_sedem_finds_the_same_documents_spans_and_memory(
    dtype: str, tmp_path: Path
) -> None:
    bank = MemoryBank.open(changed_bank(tmp_path / "a.bank", dtype))
    texts, blocks = bank_reader.read_bank(tmp_path / "a.bank")
    assert texts == {document.name: document.text for document in bank.documents}
    assert list(texts) == ["c", "é 🥧", "d"]
    assert [(name, start, end) for name, start, end, _ in blocks] == [
        (bank.documents.names[block.document], block.start, block.end) for block in bank.blocks
    ]
    expected = bank.memory(range(len(bank))).float().numpy()
    assert np.array_equal(np.stack([memory for *_, memory in blocks]), expected)


@pytest.mark.parametrize("file", ["catalog.sqlite", "shards/000001.safetensors"])
def test_a_reader_without_sedem_finds_damage(file: str, tmp_path: Path) -> None:
    path = changed_bank(tmp_path / "a.bank", "bfloat16") / file
    data = bytearray(path.read_bytes())
    place = data.rfind(text_of(3).encode()[:20]) if file == "catalog.sqlite" else len(data) - 1
    data[place + 8 if file == "catalog.sqlite" else place] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="damaged"):
        bank_reader.read_bank(tmp_path / "a.bank")


def test_the_reader_stays_short() -> None:
    """The format is simple only as long as a reader of it is."""
    lines = Path(bank_reader.__file__).read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 60
