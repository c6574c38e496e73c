"""Texts that come with questions are read once for each key, in the background, within bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from answers import RENT, SHORT, assert_same_sources
from conftest import LEASE, RECIPE
from unit.server.conftest import in_a_loop

from sedem import Document, SeDeM
from sedem.bank.index import cached_bytes, key_parts
from sedem.engine.kept import REQUESTS
from sedem.errors import CancelledError, DataError, QueueFullError
from sedem_serve.server.online import KEPT_SHARE, OnlineBanks
from sedem_serve.server.settings import ServerSettings

ONE, TWO = Document("message 1", LEASE), Document("message 2", RECIPE)


class Watched:
    """A model that counts what it reads, and reads on when it may."""

    def __init__(self, model: SeDeM) -> None:
        self.model, self.selector, self.go = model, model.selector, Event()
        self.read_texts: list[str] = []
        self.go.set()

    def read(self, documents: list[Document], progress: Callable[[int, int], None]) -> Any:
        self.read_texts += [document.text for document in documents]
        while not self.go.wait(0.005):
            progress(0, 1)
        return self.model.read(documents, progress=progress)


@pytest.fixture
def watched(model: SeDeM) -> Watched:
    return Watched(model)


@pytest.fixture
def make(watched: Watched, tmp_path: Path) -> Iterator[Callable[..., OnlineBanks]]:
    made = []

    def make_one(**changes: Any) -> OnlineBanks:
        banks = OnlineBanks(watched, ServerSettings(folder=tmp_path, **changes))  # type: ignore[arg-type]
        made.append(banks)
        return banks

    yield make_one
    for banks in made:
        banks.close()


def test_texts_make_the_bank_that_reading_them_together_makes(
    make: Callable[..., OnlineBanks], model: SeDeM
) -> None:
    banks = make()
    bank, cached = asyncio.run(banks.bank("ann", [ONE, TWO]))
    together = model.read([ONE, TWO])
    assert (list(bank.documents), bank.tokens, cached) == ([ONE, TWO], together.tokens, 0)
    expected = model.answer(together, RENT, k=4, decoding=SHORT)
    answer = model.answer(bank, RENT, k=4, decoding=SHORT)
    assert answer.text == expected.text
    assert_same_sources(answer, expected)


@in_a_loop
async def test_questions_that_come_together_read_a_text_once(
    make: Callable[..., OnlineBanks], watched: Watched
) -> None:
    banks = make()
    watched.go.clear()
    asked = [asyncio.create_task(banks.bank("ann", [ONE])) for _ in range(3)]
    await asyncio.sleep(0.02)  # the loop is free while the text is read
    assert banks.waiting == 1
    watched.go.set()
    results = await asyncio.gather(*asked)
    assert len({id(bank) for bank, _ in results}) == 1
    assert sorted(cached > 0 for _, cached in results) == [False, True, True]
    longer, cached = await banks.bank("ann", [ONE, TWO])
    assert cached == results[0][0].tokens < longer.tokens
    assert watched.read_texts == [LEASE, RECIPE]
    # Keys share no texts.
    assert (await banks.bank("ben", [ONE]))[1] == 0 and watched.read_texts[2:] == [LEASE]


@in_a_loop
async def test_the_banks_used_last_are_kept(
    make: Callable[..., OnlineBanks], watched: Watched
) -> None:
    banks = make(online_banks=2)
    three = Document("message 3", "Pets need the landlord's word.")
    for documents in ([ONE], [TWO], [ONE], [three], [ONE], [TWO]):
        await banks.bank("ann", documents)
        assert len(banks) <= 2
    none = make(online_banks=0)
    await none.bank("ann", [ONE, TWO])
    assert len(none) == len(none._joined) == 0
    assert watched.read_texts[:4] == [LEASE, RECIPE, "Pets need the landlord's word.", RECIPE]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_kept_banks_and_their_keys_stay_within_the_memory_of_the_process(
    most: int, make: Callable[..., OnlineBanks], model: SeDeM
) -> None:
    sizes = []
    for number in range(5):
        bank = model.read([Document(f"message {number}", LEASE)])
        [(_, keys)] = key_parts(bank, model.selector)
        assert cached_bytes(bank, model.selector) == keys.values.nbytes
        sizes.append(bank.snapshot().views[0].file.size + keys.values.nbytes)
    banks = make(memory=max(1, REQUESTS * KEPT_SHARE * most * max(sizes)))

    async def ask() -> None:
        for number in range(5):
            await banks.bank("ann", [Document(f"message {number}", LEASE)])
            assert len(banks) == min(most, number + 1)

    asyncio.run(ask())


@in_a_loop
async def test_reading_stops_when_nobody_waits(
    make: Callable[..., OnlineBanks], watched: Watched
) -> None:
    banks = make()
    watched.go.clear()
    two = [asyncio.create_task(banks.bank("ann", [ONE])) for _ in range(2)]
    await asyncio.sleep(0.02)
    (reading,) = banks._parts.values()
    for task in two:
        assert not reading.given_up.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    end = time.monotonic() + 20
    while not reading.future.done():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)
    assert isinstance(reading.future.exception(), CancelledError)
    assert len(banks) == 0
    watched.go.set()
    bank, cached = await banks.bank("ann", [ONE])
    assert len(bank) and cached == 0


@in_a_loop
async def test_a_text_that_cannot_be_read_is_tried_again(make: Callable[..., OnlineBanks]) -> None:
    class Failing:
        def read(self, documents: list[Document], progress: Any) -> Any:
            raise DataError("the text has no tokens")

    banks = make()
    banks.model = Failing()  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(DataError, match="no tokens"):
            await banks.bank("ann", [ONE, TWO])
        assert len(banks) == 0


@in_a_loop
async def test_too_many_texts_and_those_after_the_end_are_refused(
    make: Callable[..., OnlineBanks], watched: Watched
) -> None:
    banks = make(waiting=2)
    watched.go.clear()
    tasks = [asyncio.create_task(banks.bank("ann", [one])) for one in (ONE, TWO)]
    await asyncio.sleep(0.02)
    with pytest.raises(QueueFullError, match="2 texts are waiting to be read"):
        await banks.bank("ann", [Document("message 3", LEASE)])
    again = asyncio.create_task(banks.bank("ann", [ONE]))  # which needs no reading of its own
    await asyncio.sleep(0)
    watched.go.set()
    await asyncio.gather(*tasks, again)
    # Closing ends what is being read.
    watched.go.clear()
    task = asyncio.create_task(banks.bank("ben", [ONE]))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(banks.close)
    with pytest.raises(CancelledError):
        await task
