"""Codes are signs of mean keys; their file is used, completed, replaced, or done without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.bank import codes, index
from sedem.bank.codes import Codes, CodesFile, CodeSpace, codes_path, mean_keys
from sedem.bank.file import delete
from sedem.bank.index import bank_codes
from sedem.reading.building import build_bank
from sedem.selecting import select as search
from sedem.tensors import Quantized

Made = list[list[int]]
LEASE = Document("lease.txt", "The rent is 900 euros. The tenant pays for water and for heat. " * 6)
OTHER = Document("other.txt", "Roses are red. Violets are blue. Nobody lives in that house. " * 3)


@pytest.fixture
def path(model: SeDeM, tmp_path: Path) -> Path:
    model.read([LEASE, OTHER]).save(tmp_path / "a.bank")
    return tmp_path / "a.bank"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The blocks whose mean keys were computed, for the space and for codes, call by call."""
    calls: Made = []
    means = index._means

    def spied(bank: object, selector: object, blocks_n: np.ndarray) -> torch.Tensor:
        calls.append(blocks_n.tolist())
        return means(bank, selector, blocks_n)  # type: ignore[arg-type]

    monkeypatch.setattr(index, "_means", spied)
    return calls


def test_mean_keys_are_means_over_real_slots() -> None:
    keys = torch.randn(3, 2, 2, 5)
    found_NE = mean_keys(Quantized(keys), torch.tensor([3, 4, 5]))
    expected = torch.stack([keys[0].mean(0), keys[1, 0], torch.zeros(2, 5)]).flatten(1)
    torch.testing.assert_close(found_NE, expected)


@pytest.mark.parametrize("close", [1, 4, 1000])
def test_the_nearest_blocks_are_those_of_plain_loops(
    close: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "CLOSE", close)
    monkeypatch.setattr(codes, "SLICE", 37)
    generator = torch.Generator().manual_seed(3)
    means_NE = torch.randn(200, 24, generator=generator) + 2
    space = CodeSpace.fit(means_NE)
    assert space.directions_CE.shape == (64, 24)
    query_E = torch.randn(24, generator=generator)
    found = Codes.of(space, space.codes(means_NE)).nearest(query_E, 5).tolist()
    query = (space.directions_CE @ query_E).tolist()
    differing, likeness = list[int](), list[float]()
    for mean_E in means_NE:
        signs = [float(row @ (mean_E - means_NE.mean(0))) > 0 for row in space.directions_CE]
        differing.append(sum(a != (b > 0) for a, b in zip(signs, query, strict=True)))
        likeness.append(sum(b for a, b in zip(signs, query, strict=True) if a))
    limit = sorted(differing)[min(5 * close, 200) - 1]
    assert len(found) == len(set(found)) == 5
    assert all(differing[block] <= limit for block in found)
    worst = min(likeness[block] for block in found)
    better = {n for n in range(200) if differing[n] < limit and likeness[n] > worst + 1e-4}
    assert better <= set(found)
    assert found == sorted(found, key=lambda block: -likeness[block])


def test_a_code_ignores_what_all_blocks_have_in_common() -> None:
    means_NE = torch.randn(500, 32, generator=torch.Generator().manual_seed(1))
    space = CodeSpace.fit(means_NE + 3)
    common_E = torch.nn.functional.normalize((means_NE + 3).mean(0), dim=0)
    torch.testing.assert_close(space.directions_CE @ common_E, torch.zeros(64), atol=1e-4, rtol=0)
    query_E = means_NE[17] - means_NE.mean(0) - 5 * common_E
    found = Codes.of(space, space.codes(means_NE + 3)).nearest(query_E, 1)
    assert found.tolist() == [17]


def test_codes_are_read_from_the_file_beside_the_bank(
    model: SeDeM, path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "ROW", 2)
    bank = MemoryBank.open(path)
    first = bank_codes(bank, model.selector)
    assert [n for call in made[1:] for n in call] == [*range(len(bank))]
    assert bank_codes(bank, model.selector) is first
    made.clear()
    again = bank_codes(MemoryBank.open(path), model.selector)
    assert not made
    assert np.array_equal(again.words_WN, first.words_WN)
    assert torch.equal(again.space.directions_CE, first.space.directions_CE)
    in_ram = bank_codes(model.read([LEASE, OTHER]), model.selector)
    assert np.array_equal(in_ram.words_WN, first.words_WN)


def test_only_codes_of_new_blocks_are_made(model: SeDeM, path: Path, made: Made) -> None:
    bank = MemoryBank.open(path)
    before = bank_codes(bank, model.selector)
    made.clear()
    bank.append(model.read([Document("new.txt", "The garden has a pond. " * 9)]))
    after = bank_codes(bank, model.selector)
    count = before.words_WN.shape[1]
    assert made == [[*range(count, len(bank))]]
    assert np.array_equal(after.words_WN[:, :count], before.words_WN)
    made.clear()
    bank.remove("lease.txt")
    rest = bank_codes(bank, model.selector)
    assert not made
    assert np.array_equal(rest.words_WN, after.words_WN[:, -len(bank) :])
    part = bank.snapshot().part(range(1, len(bank)))
    assert np.array_equal(bank_codes(part, model.selector).words_WN, rest.words_WN[:, 1:])
    assert not made


def test_codes_of_another_selector_or_bank_are_replaced(
    model: SeDeM, path: Path, made: Made
) -> None:
    bank = MemoryBank.open(path)
    first = bank_codes(bank, model.selector)
    other = model.read([OTHER])
    other.save(path.with_name("b.bank"))
    codes_path(path).rename(codes_path(path.with_name("b.bank")))
    made.clear()
    assert bank_codes(other, model.selector).words_WN.shape[1] == len(other)
    assert made
    with torch.no_grad():
        model.selector.w_key.weight.mul_(-1)
    made.clear()
    second = bank_codes(bank, model.selector)
    assert made and not np.array_equal(first.words_WN, second.words_WN)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        _flip,
        lambda file: file.write_bytes(b"nothing" * 99),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:9000]),
    ],
)
def test_a_damaged_file_is_made_again(
    harm: Callable[[Path], None], model: SeDeM, path: Path, made: Made
) -> None:
    first = bank_codes(MemoryBank.open(path), model.selector)
    harm(codes_path(path))
    made.clear()
    again = bank_codes(MemoryBank.open(path), model.selector)
    assert made
    assert np.array_equal(again.words_WN, first.words_WN)
    made.clear()
    bank_codes(MemoryBank.open(path), model.selector)
    assert not made


def test_a_file_with_a_mean_of_other_keys_is_made_again(
    model: SeDeM, path: Path, made: Made
) -> None:
    bank = MemoryBank.open(path)
    id = bank.snapshot().views[0].head.id
    file = CodesFile(path, id, model.selector.digest())
    file.space(lambda: CodeSpace(torch.ones(3), torch.ones(64, 3)))
    file.close()
    found = bank_codes(bank, model.selector)
    assert made
    assert len(found.space.mean_E) == model.selector.w_key.out_features


def test_without_a_place_for_the_file_codes_are_made_in_memory(
    model: SeDeM, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = path.with_name("victim")
    victim.write_bytes(b"mine")
    codes_path(path).symlink_to(victim)
    found = bank_codes(MemoryBank.open(path), model.selector)
    assert found.words_WN.shape[1] == len(MemoryBank.open(path))
    assert victim.read_bytes() == b"mine"
    assert "the codes of the bank are not stored" in caplog.text


def test_the_file_goes_with_its_bank(model: SeDeM, path: Path) -> None:
    bank_codes(MemoryBank.open(path), model.selector)
    assert codes_path(path).exists()
    delete(path)
    assert [*path.parent.iterdir()] == []


def test_a_build_makes_the_codes_of_a_large_bank(
    model: SeDeM, tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "COARSE_FROM", 3)
    bank = tmp_path / "b.bank"
    build_bank(model, model.engine, bank, [LEASE])
    assert [*range(len(MemoryBank.open(bank)))] in made
    made.clear()
    bank_codes(MemoryBank.open(bank), model.selector)
    assert not made
