"""Answers by parts are those of one machine, to the bit: every replica here, without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import apsw
import pytest
import torch
from answers import build, opened, untimed
from ray.exceptions import RayActorError, RayError, RayTaskError
from synthetic import answer_or_error, decoding_of, synthetic_bank, synthetic_questions

from sedem import MemoryBank, SeDeM
from sedem.answering import running
from sedem.answering.conversation import conversation_request
from sedem.answering.running import Estimate, Selected
from sedem.backbone.decoder import Backbone
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.bank.parts import PartFile, Parts
from sedem.config import SedemConfig
from sedem.errors import BankError, SedemError
from sedem.selecting import plan as plans
from sedem.selecting import select as search
from sedem.selecting.plan import Request
from sedem.types import Answer
from sedem_serve.ray import replicas
from sedem_serve.ray.replicas import EngineReplica, OpenVersions, SelectorReplica, Version
from sedem_serve.server.settings import ServerSettings

QUESTIONS = 48


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas get snapshots as Ray would send them to another process."""

    def fetch(version: Version) -> Snapshot:
        snapshot: Snapshot = pickle.loads(pickle.dumps(version.snapshot))
        for view in snapshot.views:
            view.file.check_holds(view.head)
        return snapshot

    monkeypatch.setattr(replicas, "_fetch", fetch)


def version_of(snapshot: Snapshot) -> Version:
    store = snapshot.store
    stored = not isinstance(store, BankFile) or store.path is not None
    return Version(uuid4().hex, str(store), stored, snapshot)


def engine_of(
    model: SeDeM, parts: int, scores: Callable[..., Awaitable[Any]] | None = None
) -> EngineReplica:
    """An engine whose selectors are in this process; `scores` replaces those of the first part."""
    settings = ServerSettings(model="tiny", folder=Path("unused"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "open_model", lambda _: model)
        selectors = [SelectorReplica(settings, part, parts) for part in range(parts)]
        answering: list[Any] = [selector.scores for selector in selectors]
        if scores is not None:
            answering[0] = scores
        handles = [SimpleNamespace(scores=SimpleNamespace(remote=one)) for one in answering]
        return EngineReplica(settings, *handles)


async def answered(
    engine: EngineReplica, version: Version, request: Request, number: int = 0
) -> Answer | str:
    """The answer of an engine, or the sentence of its error."""
    sent: Any = replace(request, bank=None)  # type: ignore[arg-type]
    events = [event async for event in engine.events(version, sent, decoding_of(number))]
    *before, last = events
    if isinstance(last, Exception):
        assert isinstance(last, SedemError) and not before
        return str(last)
    assert isinstance(last, Answer)
    selected, *pieces = before
    assert isinstance(selected, Selected) and selected.citations == last.citations
    assert "".join(str(piece) for piece in pieces) == last.text
    return last


def assert_same(found: Answer | str, wanted: Answer | str) -> None:
    """Check that two answers are the same but for their times."""
    if isinstance(found, str) or isinstance(wanted, str):
        assert found == wanted
        return
    assert untimed(found) == untimed(wanted)
    assert found.timings.keys() >= {"encode_ms", "score_ms", "select_ms", "ttft_ms", "total_ms"}


def check(model: SeDeM, bank: Snapshot, questions: Sequence[Request], parts: Sequence[int]) -> None:
    """Compare engines of some numbers of parts with one machine."""
    version, engines = version_of(bank), [engine_of(model, count) for count in parts]
    for number, request in enumerate(questions):
        wanted = answer_or_error(model, request, decoding_of(number))
        for engine in engines:
            assert_same(asyncio.run(answered(engine, version, request, number)), wanted)
    for engine in engines:
        engine._scheduler.close(at_once=True)


@pytest.fixture
def stored(config: SedemConfig, backbone: Backbone, tmp_path: Path) -> tuple[SeDeM, MemoryBank]:
    """A model with guidance and confidence, and a bank on disk, with blocks that are equal."""
    model = build(config, backbone, guidance=True, confidence=True)
    assert model.confidence is not None
    with torch.no_grad():
        model.confidence.weight.copy_(torch.tensor([2.0, -3.0, 1.0]))
    synthetic_bank(model, 30).save(tmp_path / "documents.bank")
    return model, MemoryBank.open(tmp_path / "documents.bank")


def test_questions_of_all_kinds_have_the_answers_of_one_machine(
    stored: tuple[SeDeM, MemoryBank],
) -> None:
    model, bank = stored[0], stored[1].snapshot()
    asked = synthetic_questions(QUESTIONS, bank.documents.names)
    check(model, bank, [Request(bank, text, **more) for text, more in asked], (1, 2, 4))
    engine, version = engine_of(model, 3), version_of(bank)
    found = asyncio.run(engine.scores(version, "storm over the harbour"))
    assert torch.equal(found, model.scores(bank, "storm over the harbour"))

    async def fail(*_: Any) -> None:
        raise BankError("part 1 is damaged")

    told = asyncio.run(answered(engine_of(model, 2, fail), version, Request(bank, "harbour?")))
    assert told == "part 1 is damaged"


def test_one_part_finds_the_candidates_of_one_machine_in_a_large_bank(
    stored: tuple[SeDeM, MemoryBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "COARSE_FROM", 1)
    monkeypatch.setattr(search, "CANDIDATES_ALONE", 3)
    model, bank = stored[0], stored[1].snapshot()
    asked = ["What is the storm over the harbour?", "How is it that they are in the north wind?"]
    check(model, bank, [Request(bank, text, 2, selection="states") for text in asked], [1])


def test_a_text_that_came_with_a_question_is_not_split(model: SeDeM, bank: MemoryBank) -> None:
    async def refuse(*_: Any) -> None:
        raise AssertionError("a bank in RAM has no parts")

    engine, version = engine_of(model, 1, refuse), version_of(bank.snapshot())
    request = Request(bank.snapshot(), "Who signed the lease?")
    found = asyncio.run(answered(engine, version, request))
    assert isinstance(found, Answer)
    assert untimed(found) == untimed(model.answer_requests([request], decoding_of(0))[0])
    assert torch.equal(asyncio.run(engine.scores(version, "rent")), model.scores(bank, "rent"))


def test_an_engine_tells_how_long_an_answer_takes(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "WIDE", 20)
    monkeypatch.setattr(running, "TELL", 0.0)
    monkeypatch.setattr(running, "MEASURED", 0.0)
    model = opened(config, "static", block_context="independent")
    bank = synthetic_bank(model, 4).snapshot()
    engine, sent = engine_of(model, 1), Request(None, "Who signed it?", "all")  # type: ignore[arg-type]

    async def read() -> list[Any]:
        return [one async for one in engine.events(version_of(bank), sent, decoding_of(0))]

    first, second, *_, last = asyncio.run(read())
    assert isinstance(first, Selected) and isinstance(last, Answer)
    assert isinstance(second, Estimate) and second.blocks == len(bank)


def test_a_conversation_without_documents_needs_no_parts(
    config: SedemConfig, chat_backbone: Backbone
) -> None:
    model = build(config, chat_backbone)
    request, _, _ = conversation_request(model, [("user", "Hello!")], decoding_of(0).max_new_tokens)
    engine, version = engine_of(model, 0), version_of(request.bank.snapshot())
    found = asyncio.run(answered(engine, version, request))
    assert isinstance(found, Answer)
    assert untimed(found) == untimed(model.answer_requests([request], decoding_of(0))[0])


CHOSEN, ANSWERED = Selected((), (), None, False), Answer("Ada", (), 0, 0, {}, "end", "tiny")
SOON = Estimate(20.0, 300)
GONE = replicas.LostError("a machine that was answering is lost; ask again")


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([[GONE], [CHOSEN, "Ada", ANSWERED]], [CHOSEN, "Ada", ANSWERED]),
        ([[CHOSEN, RayActorError()], [CHOSEN, "Ada", ANSWERED]], [CHOSEN, "Ada", ANSWERED]),
        ([[CHOSEN, SOON, "Ada", ANSWERED]], [CHOSEN, SOON, "Ada", ANSWERED]),
        (
            [[CHOSEN, SOON, RayActorError()], [CHOSEN, SOON, "Ada", ANSWERED]],
            [CHOSEN, SOON, SOON, "Ada", ANSWERED],
        ),
        ([[CHOSEN, "Ad", RayActorError()]], [CHOSEN, "Ad", GONE]),
        ([[RayTaskError("scores", "a stack trace", BankError("damaged"))]], [BankError("damaged")]),
        ([[GONE]] * 2, [GONE]),
    ],
    ids=[
        "a part is lost",
        "before text",
        "long",
        "within a long one",
        "within text",
        "another error",
        "for too long",
    ],
)
def test_a_question_is_asked_again_until_there_is_text(
    attempts: list[list[Any]],
    expected: list[Any],
    stored: tuple[SeDeM, MemoryBank],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.0 if attempts == [[GONE]] * 2 else 60.0)
    monkeypatch.setattr(replicas.Distributed, "version_of", lambda *_: None)
    left = iter(attempts)

    class Pending:
        """The stream of one replica, which may raise in the middle."""

        def __init__(self) -> None:
            self.events = iter(next(left))

        def __aiter__(self) -> Pending:
            return self

        async def __anext__(self) -> Any:
            event = next(self.events, None)
            if event is None:
                raise StopAsyncIteration
            if isinstance(event, RayError):
                raise event
            return event

        def cancel(self) -> None:
            """Nothing runs."""

    remote = SimpleNamespace(events=SimpleNamespace(remote=lambda *_: Pending()))
    engines = SimpleNamespace(options=lambda **_: remote)
    told: list[Any] = []
    asked = replicas.Distributed(engines, [], rows=1, waiting=1)
    asyncio.run(asked._answer(Request(stored[1], "Who?"), decoding_of(0), told.append))
    assert [(type(event), str(event)) for event in told] == [
        (type(event), str(event)) for event in expected
    ]
    assert asked.running == 0


def test_a_question_runs_on_the_version_that_it_names(stored: tuple[SeDeM, MemoryBank]) -> None:
    model, bank = stored
    engine, before = engine_of(model, 2), bank.snapshot()
    first = version_of(before)
    bank.append(synthetic_bank(model, 3, seed=99))
    bank.remove("doc-7-4.txt")
    after = bank.snapshot()
    second = version_of(after)
    for version, snapshot in ((second, after), (first, before), (second, after)):
        request = Request(snapshot, "the captain of the harbour?", ranking=True)
        found = asyncio.run(answered(engine, version, request))
        assert_same(found, answer_or_error(model, request, decoding_of(0)))


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
    monkeypatch.setattr(replicas, "open_model", lambda _: model)
    version = version_of(MemoryBank.open(tmp_path / "parts").snapshot())
    assert version.stored and not read
    for number in range(2):
        selector = SelectorReplica(ServerSettings(model="tiny", folder=tmp_path), number, 2)
        asyncio.run(selector.prepare(version))
        assert read == {entry.name for entry in entries[2 * number :][:2]}
        read.clear()


def test_a_version_of_a_bank_that_was_replaced_is_rejected(
    stored: tuple[SeDeM, MemoryBank], tmp_path: Path
) -> None:
    model, bank = stored
    version = version_of(bank.snapshot())
    (tmp_path / "documents.bank").unlink()
    synthetic_bank(model, 3, seed=5).save(tmp_path / "documents.bank")
    with pytest.raises(BankError, match="another bank is at"):
        OpenVersions(lambda snapshot: snapshot).get(version)


def test_replicas_keep_the_newest_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(number: int, bank: str) -> Version:
        return Version(f"v{number}", bank, True, number)

    made: list[Any] = []
    monkeypatch.setattr(replicas, "_fetch", lambda version: version.snapshot)
    monkeypatch.setattr(replicas, "KEPT", 4)
    opened = OpenVersions(lambda number: made.append(number) or number)  # type: ignore[func-returns-value]
    for number in (1, 2, 3, 1):
        opened.get(version(number, "a"))
    assert made == [1, 2, 3, 1] and [*opened._open] == ["v3", "v1"]
    for number in (4, 5, 6):
        opened.get(version(number, str(number)))
    assert [*opened._open] == ["v1", "v4", "v5", "v6"]
