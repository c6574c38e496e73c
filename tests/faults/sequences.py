"""Any sequence of operations on a bank, on disk and in RAM, does what it does to a dict."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from campaign import Result
from faults.operations import FINGERPRINT, MADE_BY, SLOTS, WIDTH, memory_of, rows_of, text_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sedem import Document, MemoryBank
from sedem.bank.care import Damage, examine_all
from sedem.errors import BankError
from sedem.tensors import DTYPES, Quantized, join, quantize

STEPS = 12
NAMES = st.sampled_from(["a", "b", "c", "é 🥧"])
VERSIONS = st.integers(0, 4)
TYPES = st.sampled_from(sorted(DTYPES))


def bank_of(documents: dict[str, int], dtype: str = "bfloat16") -> MemoryBank:
    """A bank in RAM."""
    rows = [row for i, version in enumerate(documents.values()) for row in rows_of(version, i)]
    memory = [memory_of(version).cast(dtype) for version in documents.values()]
    none = quantize(torch.zeros(0, SLOTS, WIDTH), dtype)
    return MemoryBank(
        FINGERPRINT,
        MADE_BY,
        [Document(name, text_of(version)) for name, version in documents.items()],
        rows,
        join(memory) if memory else none,
        dtype=dtype,
    )


class BanksAndDict(RuleBasedStateMachine):
    """A bank on disk and one in RAM, which both must equal a dict of versions and memory."""

    @initialize(documents=st.dictionaries(NAMES, VERSIONS), dtype=TYPES)
    def start(self, documents: dict[str, int], dtype: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.saved = 0
        self.dtype = dtype
        self.model = {
            name: (version, memory_of(version).cast(dtype)) for name, version in documents.items()
        }
        self.ram = bank_of(documents, dtype)
        self.disk = bank_of(documents, dtype)
        self._save()

    @rule(documents=st.dictionaries(NAMES, VERSIONS, min_size=1), dtype=TYPES)
    def append(self, documents: dict[str, int], dtype: str) -> None:
        other = bank_of(documents, dtype)
        self.ram.append(other)
        self.disk.append(other)
        changed = {
            name: version
            for name, version in documents.items()
            if name not in self.model or self.model[name][0] != version
        }
        for name in changed:
            self.model.pop(name, None)
        for name, version in changed.items():
            memory = memory_of(version).cast(dtype)
            self.model[name] = (version, memory.cast(self.dtype))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        for bank in (self.ram, self.disk):
            try:
                bank.remove(name)
                assert name in self.model
            except BankError:
                assert name not in self.model
        self.model.pop(name, None)

    @rule()
    def open(self) -> None:
        assert self.disk.path is not None
        self.disk = MemoryBank.open(self.disk.path)

    @rule(dtype=TYPES)
    def cast(self, dtype: str) -> None:
        self.ram, self.disk = self.ram.cast(dtype), self.disk.cast(dtype)
        self.dtype = dtype
        self.model = {name: (v, memory.cast(dtype)) for name, (v, memory) in self.model.items()}
        self._save()

    @rule()
    def compact(self) -> None:
        for bank in (self.ram, self.disk):
            bank.compact()

    @rule()
    def exchange(self) -> None:
        """What was in RAM is saved, and what was on disk is cast into RAM."""
        self.ram, self.disk = self.disk.cast(self.dtype), self.ram
        self._save()

    def _save(self) -> None:
        self.saved += 1
        self.disk.save(Path(self.folder.name, f"{self.saved}.bank"))

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def equal(self) -> None:
        wanted = [(name, text_of(version)) for name, (version, _) in self.model.items()]
        rows = [r for i, (v, _) in enumerate(self.model.values()) for r in rows_of(v, i)]
        for bank in (self.ram, self.disk):
            assert [(d.name, d.text) for d in bank.documents] == wanted
            assert list(bank.blocks) == rows
            assert bank.dtype == self.dtype
            if rows:
                expected = join([memory for _, memory in self.model.values()])
                assert _same(bank.stored(range(len(bank))), expected)
            assert examine_all(bank.store) == Damage([], [])
        assert MemoryBank.open(self.disk.path).documents == self.disk.documents

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def _same(found: Quantized, wanted: Quantized) -> bool:
    if found.scales is not None and wanted.scales is not None:
        return torch.equal(found.values.view(torch.int8), wanted.values.view(torch.int8)) and (
            torch.equal(found.scales, wanted.scales)
        )
    return torch.equal(found.values, wanted.values)


def sequences(points: int, folder: Path, seed: int = 0) -> Result:
    """Do many sequences of operations; hypothesis chooses them."""
    result = Result("sequences")
    chosen = settings(
        max_examples=points,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    result.cases["append, remove, compact, save, open, cast"] = points - 1
    with result.case("append, remove, compact, save, open, cast", "a sequence"):
        run_state_machine_as_test(BanksAndDict, settings=chosen)
    return result
