"""Answers by parts are those of one machine, to the bit: every replica here, without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path

import apsw
import pytest
import torch
from answers import build, untimed
from synthetic import (
    answer_or_error,
    decoding_of,
    synthetic_bank,
    synthetic_questions,
)

from sedem import MemoryBank, SeDeM
from sedem.answering.reply import Selected
from sedem.answering.requests import (
    Request,
    Selection,
    check_min_confidence,
    choose,
    confidences,
    encode_questions,
)
from sedem.answering.scores import score_requests
from sedem.backbone.decoder import Backbone
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.bank.parts import PartFile, Parts
from sedem.config import SedemConfig
from sedem.errors import BankError, SedemError, UnavailableError
from sedem.quantization import Quantized
from sedem.scale.answering import Asked, EngineReplica
from sedem.scale.partitions import Found
from sedem.scale.selecting import PartSelector, Wanted
from sedem.scale.versions import KEPT_OF_ONE, OpenVersions, Version, Versions
from sedem.types import Answer

QUESTIONS = 500
PARTS = (1, 2, 4)


def same(snapshot: Snapshot) -> Snapshot:
    """Puts and fetches a snapshot in one process, as Ray would between two."""
    packed: Snapshot = pickle.loads(pickle.dumps(snapshot))
    return packed


def selectors_of(model: SeDeM, parts: int) -> list[PartSelector]:
    """Selectors in this process."""
    return [PartSelector(model.selector, part, parts, same) for part in range(parts)]


def engine_of(model: SeDeM, parts: int, selectors: Sequence[PartSelector] = ()) -> EngineReplica:
    """An engine whose selectors are in this process."""

    def asking(selector: PartSelector) -> Callable[[Wanted], Awaitable[Found]]:
        return lambda wanted: asyncio.to_thread(selector.find, wanted)

    asked = [asking(one) for one in selectors or selectors_of(model, parts)]
    return EngineReplica(model, asked, same)


async def answered(engine: EngineReplica, asked: Asked) -> Answer | str:
    """The answer of an engine, or the sentence of its error."""
    events = [event async for event in engine.events(asked)]
    *before, last = events
    if isinstance(last, Exception):
        assert isinstance(last, SedemError) and not before
        return str(last)
    assert isinstance(last, Answer)
    selected, *pieces = before
    assert isinstance(selected, Selected)
    assert selected.citations == last.citations
    assert "".join(str(piece) for piece in pieces) == last.text
    return last


async def compared(
    model: SeDeM, bank: Snapshot, questions: Sequence[Request], every: int
) -> tuple[int, int]:
    """Compare one machine with engines of 1, 2 and 4 parts.

    Args:
        model: the model.
        bank: the bank.
        questions: the questions to it.
        every: of so many questions one is answered; of the others only the selection is compared.

    Returns:
        How many selections and answers were compared.
    """
    versions = Versions(same)
    engines = [engine_of(model, count) for count in PARTS]
    selections = answers = 0
    try:
        for number, request in enumerate(questions):
            decoding = decoding_of(number)
            asked = Asked.of(versions.of(bank), request, decoding)
            wanted = selection_or_error(model, request)
            for engine in engines:
                found = await selected_or_error(engine, request, asked.version)
                assert_same_selection(found, wanted)
                selections += 1
            if number % every == 0:
                answer = answer_or_error(model, request, decoding)
                for engine in engines:
                    assert_same_answer(await answered(engine, asked), answer)
                    answers += 1
    finally:
        for engine in engines:
            engine.close()
    return selections, answers


def selection_or_error(model: SeDeM, request: Request) -> Selection | str:
    """The selection of one machine, or the sentence of its error."""
    try:
        check_min_confidence(model, request)
        states = encode_questions(model, model.engine, [request.question])
        scores = score_requests(model, [request], *states)
        return choose(model, request, scores[0], *confidences(model, scores, states[1]))
    except SedemError as error:
        return str(error)


async def selected_or_error(
    engine: EngineReplica, request: Request, version: Version
) -> Selection | str:
    """The selection by parts, or the sentence of its error."""
    try:
        return (await engine.selected(request, version))[0].selection or "nothing was selected"
    except SedemError as error:
        return str(error)


def assert_same_selection(found: Selection | str, wanted: Selection | str) -> None:
    """Check that all that the answer depends on is the same to the bit."""
    if isinstance(found, str) or isinstance(wanted, str):
        assert found == wanted
        return
    assert (found.ranked, found.memory, found.texts) == (wanted.ranked, wanted.memory, wanted.texts)
    assert torch.equal(found.scores[found.ranked], wanted.scores[wanted.ranked])
    assert (found.confidence, found.declined) == (wanted.confidence, wanted.declined)


def assert_same_answer(found: Answer | str, wanted: Answer | str) -> None:
    """Check that two answers are the same but for their times."""
    if isinstance(found, str) or isinstance(wanted, str):
        assert found == wanted
        return
    assert untimed(found) == untimed(wanted)
    assert found.timings.keys() >= {"encode_ms", "score_ms", "select_ms", "ttft_ms", "total_ms"}


@pytest.fixture
def stored(config: SedemConfig, backbone: Backbone, tmp_path: Path) -> tuple[SeDeM, MemoryBank]:
    """A model with guidance and confidence, and a bank on disk, with blocks that are equal."""
    model = build(config, backbone, guidance=True, confidence=True)
    assert model.confidence is not None
    with torch.no_grad():
        model.confidence.weight.copy_(torch.tensor([2.0, -3.0]))
    synthetic_bank(model, 30).save(tmp_path / "documents.bank")
    return model, MemoryBank.open(tmp_path / "documents.bank")


def test_500_questions_have_the_answers_of_one_machine(
    stored: tuple[SeDeM, MemoryBank],
) -> None:
    model, memory = stored
    bank = memory.snapshot()
    questions = [
        Request(bank, text, **more)
        for text, more in synthetic_questions(QUESTIONS, bank.documents.names)
    ]
    assert asyncio.run(compared(model, bank, questions, every=50)) == (1500, 30)


def test_the_nano_model_answers_the_same_by_parts(tmp_path: Path) -> None:
    model = SeDeM.from_pretrained("sedem-nano", light=True)
    synthetic_bank(model, 6).save(tmp_path / "documents.bank")
    bank = MemoryBank.open(tmp_path / "documents.bank").snapshot()
    questions = [
        Request(bank, text, **more) for text, more in synthetic_questions(2, bank.documents.names)
    ]
    assert asyncio.run(compared(model, bank, questions, every=1)) == (6, 6)


def test_the_scores_of_every_block_are_those_of_one_machine(
    stored: tuple[SeDeM, MemoryBank],
) -> None:
    model, bank = stored
    versions, engine = Versions(same), engine_of(model, 3)
    found = asyncio.run(engine.scores(versions.of(bank.snapshot()), "storm over the harbour"))
    engine.close()
    assert torch.equal(found, model.scores(bank, "storm over the harbour"))


def test_a_text_that_came_with_a_question_is_not_split(model: SeDeM, bank: MemoryBank) -> None:
    async def refuse(wanted: Wanted) -> Found:
        raise AssertionError("a bank in RAM has no parts")

    engine = EngineReplica(model, [refuse, refuse], same)
    request = Request(bank.snapshot(), "Who signed the lease?")
    version = Versions(same).of(bank.snapshot())
    found = asyncio.run(answered(engine, Asked.of(version, request, decoding_of(0))))
    assert isinstance(found, Answer)
    assert untimed(found) == untimed(model.answer_requests([request], decoding_of(0))[0])
    assert torch.equal(asyncio.run(engine.scores(version, "rent")), model.scores(bank, "rent"))
    engine.close()


def test_a_part_that_fails_fails_the_question(stored: tuple[SeDeM, MemoryBank]) -> None:
    model, bank = stored

    async def fail(wanted: Wanted) -> Found:
        raise BankError("part 3 is damaged")

    engine = EngineReplica(model, [*engine_of(model, 2).parts, fail], same)
    version = Versions(same).of(bank.snapshot())
    request = Request(bank.snapshot(), "harbour?")
    found = asyncio.run(answered(engine, Asked.of(version, request, decoding_of(0))))
    engine.close()
    assert found == "part 3 is damaged"


def test_a_question_runs_on_the_version_that_it_names(stored: tuple[SeDeM, MemoryBank]) -> None:
    model, bank = stored
    versions, engine = Versions(same), engine_of(model, 2)
    before = bank.snapshot()
    first = versions.of(before)
    bank.append(synthetic_bank(model, 3, seed=99))
    bank.remove("doc-7-4.txt")
    second = versions.of(bank.snapshot())
    assert (first.bank, first.number) == (second.bank, second.number - 1)
    after = bank.snapshot()
    for version, snapshot in ((second, after), (first, before), (second, after)):
        request = Request(snapshot, "the captain of the harbour?", ranking=True)
        found = asyncio.run(answered(engine, Asked.of(version, request, decoding_of(0))))
        wanted = answer_or_error(model, request, decoding_of(0))
        assert isinstance(found, Answer) and isinstance(wanted, Answer)
        assert untimed(found) == untimed(wanted)
    engine.close()


def test_a_replica_reads_only_the_files_that_it_needs(
    stored: tuple[SeDeM, MemoryBank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = stored[0], Parts(tmp_path / "parts")
    for seed in range(4):
        synthetic_bank(model, 3, seed=seed).save(tmp_path / f"{seed}.bank")
    entries = [store.publish(BankFile(tmp_path / f"{seed}.bank")) for seed in range(4)]
    store.start(entries)
    read: set[str] = set()
    reading = PartFile.reading

    def recorded(part: PartFile) -> AbstractContextManager[apsw.Connection]:
        read.add(part.entry.name)
        return reading(part)

    monkeypatch.setattr(PartFile, "reading", recorded)
    bank = MemoryBank.open(tmp_path / "parts").snapshot()
    version, selectors = Versions(same).of(bank), selectors_of(model, 2)
    assert version.stored and not read
    for number, selector in enumerate(selectors):
        selector.prepare(version)
        assert read == {entry.name for entry in entries[2 * number :][:2]}
        read.clear()
    request = Request(bank, "the captain of the harbour?", k=1)
    engine = engine_of(model, 2, selectors)
    found = asyncio.run(answered(engine, Asked.of(version, request, decoding_of(0))))
    engine.close()
    assert isinstance(found, Answer)
    [citation] = found.citations
    assert read == {entries[int(citation.document.split("-")[1])].name}
    wanted = answer_or_error(model, request, decoding_of(0))
    assert isinstance(wanted, Answer) and untimed(found) == untimed(wanted)


def test_a_version_of_a_bank_that_was_replaced_is_rejected(
    stored: tuple[SeDeM, MemoryBank], tmp_path: Path
) -> None:
    model, bank = stored
    version = Versions(same).of(bank.snapshot())
    (tmp_path / "documents.bank").unlink()
    synthetic_bank(model, 3, seed=5).save(tmp_path / "documents.bank")
    with pytest.raises(BankError, match="another bank is at"):
        OpenVersions(same, lambda snapshot: snapshot).get(version)


def test_versions_live_with_their_snapshots_and_replicas_keep_the_newest() -> None:
    def version(number: int, bank: str) -> Version:
        return Version(f"v{number}", number, bank, 1, True, number)

    made: list[object] = []
    empty = MemoryBank("0" * 64, {}, [], [], Quantized(torch.zeros(0, 2, 4))).snapshot()
    one = OpenVersions(lambda content: empty, made.append, kept=4)
    for number in (1, 2, 3):
        one.get(version(number, "a"))
    assert one.ids() == ["v2", "v3"] and len(made) == 3
    assert len(one.ids()) == KEPT_OF_ONE
    # An older version that is asked again is opened again, and is not dropped at once.
    one.get(version(1, "a"))
    assert one.ids()[-1] == "v1" and len(made) == 4
    for number in (4, 5, 6):
        one.get(version(number, str(number)))
    assert len(one.ids()) == 4
    assert {field.name for field in fields(Version)} >= {"number", "content"}


def test_a_version_whose_server_has_gone_is_said_to_be_lost() -> None:
    def gone(content: object) -> Snapshot:
        raise RuntimeError("the owner died")

    versions = OpenVersions(gone, lambda snapshot: snapshot)
    with pytest.raises(UnavailableError, match="version 3 of the bank is lost"):
        versions.get(Version("v3", 3, "a", 1, True, None))
