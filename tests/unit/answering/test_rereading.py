"""The second reading: which sentences are read as text, and how both readings decide together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from answers import RENT, SHORT, build, opened, prepared_for, untimed
from conftest import LEASE

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering import rereading
from sedem.answering.rereading import Found, TextSearch, open_text, sentences_of_spans, told_partly
from sedem.answering.spans import Beginning, Candidate, FoundSpan, Passage, Quotation, SpanSearch
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import end_ids, with_texts
from sedem.guidance.spans import LEAST, SECOND_FEATURES, SecondReading, rival_features
from sedem.selecting.plan import Prepared, Request, Scores, Selection

LIMIT = 12


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has room for few bytes."""
    monkeypatch.setattr(rereading, "TOKENS", 60)


@pytest.fixture
def model(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model whose memory is never sure."""
    model = build(config, backbone, second_reading=True, spans=True, answer="auto")
    model.requires_grad_(False)
    decider(model).sure.fill_(2.0)
    decider(model).freely.bias.fill_(-1e3)
    return model


def decider(model: SeDeM) -> SecondReading:
    assert model.second_reading is not None
    return model.second_reading


def searches(
    model: SeDeM, bank: MemoryBank, k: int = 2
) -> Iterator[tuple[Prepared, SpanSearch, TextSearch]]:
    """Yield a prepared question with its search in memory and the one in text."""
    request = Request(bank, RENT, k)
    prepared = prepared_for(model, request, LIMIT)
    assert prepared.inputs is not None
    with torch.no_grad(), model.engine.open_rows(1) as rows:
        [logits_V] = rows.join([0], [prepared.inputs], [LIMIT])
        memory = SpanSearch(model, rows, 0, prepared, LIMIT, logits_V)
        spans = memory.ordered(memory.candidates())
        with open_text(model, model.engine, prepared, LIMIT, memory, spans) as text:
            yield prepared, memory, text


def test_the_sentences_are_exact_and_the_answer_stands_in_one(
    model: SeDeM, bank: MemoryBank
) -> None:
    answer = model.answer(bank, RENT, k=2, decoding=SHORT)
    texts = {document.name: document.text for document in bank.documents}
    assert answer.sentences == tuple(sorted(answer.sentences))
    [(document, (start, end))] = [
        (one.document, span) for one in answer.citations for span in one.answer_spans
    ]
    assert texts[document][start:end] == answer.text
    assert any(name == document and a <= start < b for name, a, b in answer.sentences)
    alone = build(model.config.with_changes(second_reading=False), model.decoder)
    first = alone.answer(bank, RENT, k=2, decoding=SHORT)
    read = [texts[name][a:b] for name, a, b in answer.sentences]
    prompt = model.decoder.token_ids(f"\n\nQuestion: {RENT}\nAnswer:")
    tokens = with_texts(model.decoder, [model.decoder.bos_token_id, *prompt], read)
    assert answer.conditioning is not None and first.conditioning is not None
    assert answer.conditioning == first.conditioning + len(tokens)
    assert first.sentences == ()


def test_if_memory_is_sure_nothing_is_read_again(model: SeDeM, bank: MemoryBank) -> None:
    decider(model).sure.fill_(0.0)
    model.spans.gap.fill_(1e9)
    alone = build(model.config.with_changes(second_reading=False), model.decoder)
    alone.spans.gap.data.fill_(1e9)
    assert untimed(model.answer(bank, RENT)) == untimed(alone.answer(bank, RENT))


@pytest.mark.parametrize(
    ("rows", "question", "expected"),
    [
        (["Who: Ida | Rent: 9", "Who: Axel | Rent: 7"], "Rent of Axel?", [1]),
        (["Code: B-7 | Day: 3.", "Code: B7 | Day: 4", "Code: 7 | Day: 5"], "Day of B7?", [0, 1]),
        (["Who: Dr. Ann | No: 1", "Who: Dr. Bo | No: 2"], "No of Dr. Bo", [1]),
    ],
)
def test_rows_with_most_of_the_words_are_read_again_even_if_memory_is_sure(
    rows: list[str],
    question: str,
    expected: list[int],
    model: SeDeM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decider(model).sure.fill_(0.0)
    model.spans.gap.fill_(1e9)
    monkeypatch.setattr(rereading, "TOKENS", 1)
    bank = model.read([Document("a.md", "\n".join(rows)), Document("b.md", "Nothing else.")])
    answer = model.answer(bank, question, k=8, decoding=SHORT, documents=["a.md"])
    texts = [bank.documents[0].text[start:end].strip() for _, start, end in answer.sentences]
    assert set(texts) <= {rows[one] for one in expected} and texts


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("context", ["joint", "independent"])
def test_both_readings_give_a_span_the_probability_of_decoding_it(
    engine: str, context: str, config: SedemConfig
) -> None:
    changes: dict[str, object] = {"block_context": context, "second_reading": True}
    slow, model = (opened(config, name, **changes) for name in ("eager", engine))
    bank = slow.read([Document("lease.txt", LEASE)])
    for _, memory, text in searches(model, bank):
        spans = text.candidates()
        features_CF = text.compared(spans)[1]
        assert features_CF.shape == (len(spans), len(SECOND_FEATURES))
        read = dict(zip(SECOND_FEATURES, features_CF.unbind(1), strict=True))
        known = {one.place: one.likelihood for one in memory.candidates()}
        checked = [number for number, one in enumerate(spans) if one.place in text.remembered]
        assert len(checked) >= 3
        for number in checked[::4]:
            span = spans[number]
            ids = model.decoder.token_ids(f" {span.text}")
            with slow.engine.open_rows(1) as rows:
                logs = [rows.join([0], [text.inputs], [20])[0].log_softmax(-1)]
                logs += [rows.step(torch.tensor([token]))[0].log_softmax(-1) for token in ids]
            ends = [logs[-1][end].item() for end in end_ids(model.decoder)]
            values = [log_V[token].item() for log_V, token in zip(logs, ids, strict=False)]
            expected = sum(max(value, LEAST) for value in (*values, *ends))
            assert read["likelihood"][number].item() == pytest.approx(expected, abs=1e-3)
            gap = logs[0].max() - logs[0][ids[0]]
            assert read["gap"][number].item() == pytest.approx(gap.item(), abs=1e-3)
            if span.place in known:
                in_memory = read["memory likelihood"][number].item()
                assert in_memory == pytest.approx(known[span.place], abs=1e-3)
                mean = in_memory / (span.tokens + 1)
                assert read["memory mean"][number].item() == pytest.approx(mean, abs=1e-3)


def test_questions_asked_together_are_answered_as_alone(
    config: SedemConfig, documents: list[Document]
) -> None:
    for engine in ("eager", "static"):
        model = opened(config, engine, second_reading=True, answer="auto")
        decider(model).sure.fill_(2.0)
        bank = model.read(documents)
        questions = [RENT, "Who pays the deposit?", "How long does it keep?"]
        together = model.answer(bank, questions, k=2, decoding=SHORT)
        alone = [model.answer(bank, one, k=2, decoding=SHORT) for one in questions]
        assert [(a.text, a.sentences) for a in together] == [(a.text, a.sentences) for a in alone]
        assert any(answer.sentences for answer in alone)


def free_text(model: SeDeM, bank: MemoryBank) -> str:
    """What the model says freely after the sentences."""
    [(_, _, text)] = searches(model, bank)
    ids, logits_V = [], text.log_V
    with torch.no_grad(), model.engine.open_rows(1) as rows:
        [logits_V] = rows.join([0], [text.inputs], [LIMIT])
        while len(ids) < LIMIT and int(logits_V.argmax()) not in end_ids(model.decoder):
            ids.append(int(logits_V.argmax()))
            [logits_V] = rows.step(torch.tensor(ids[-1:]))
    return str(model.decoder.tokenizer.decode(ids)).strip().rstrip("\ufffd")


@pytest.mark.parametrize(
    ("unsupported", "freely"), [((), True), (("maybe",), True), (("Bo",), False), (("7",), False)]
)
def test_a_free_answer_wins_unless_it_is_invented(
    unsupported: tuple[str, ...],
    freely: bool,
    model: SeDeM,
    bank: MemoryBank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decider(model).gap.fill_(-1.0)  # never sure of the quotation
    quoted = model.answer(bank, RENT, k=2, decoding=SHORT)
    decider(model).freely.bias.fill_(1e3)
    decider(model).free_certainty.bias.fill_(-2.0)
    monkeypatch.setattr(rereading, "unsupported", lambda *_: unsupported)
    answer = model.answer(bank, RENT, k=2, decoding=SHORT)
    if not freely:
        assert untimed(answer) == untimed(quoted)
        return
    assert (answer.text, answer.unsupported) == (free_text(model, bank), unsupported)
    assert answer.answer_confidence == pytest.approx(1 / (1 + math.exp(2.0)))
    assert (answer.certainty, answer.alternative) == ("unsure", quoted.text)
    assert answer.sentences == quoted.sentences and answer.answer_tokens == LIMIT


def test_a_free_answer_that_stands_in_the_text_is_marked_there(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(_, _, text)] = searches(model, bank)
    passage = text.passages[0]
    start, end = passage.beginnings[1]
    word = passage.text[start:end]
    found = text.located(word, 0.5)
    assert found is not None and found.text == word and found.confidence == 0.5
    [place] = found.within(passage.block)
    document = bank.documents[passage.document].text
    assert document[slice(*place)] == word
    assert text.located(word[:-1], 0.5) is None
    assert text.located("no such words", 0.5) is None


def test_a_quotation_is_asked_for_and_none_else_is_decoded(model: SeDeM, bank: MemoryBank) -> None:
    decider(model).freely.bias.fill_(1e3)
    answer = model.answer(bank, RENT, k=2, answer="span", decoding=SHORT)
    assert answer.sentences and any(one.answer_spans for one in answer.citations)
    free = model.answer(bank, RENT, k=2, answer="free", decoding=SHORT)
    assert free.sentences == () and free.answer_confidence is None


def test_without_room_for_sentences_memory_decides_alone(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.answer(bank, RENT, decoding=Decoding(LIMIT)).sentences
    monkeypatch.setattr(rereading, "TOKENS", 10_000)
    assert not model.answer(bank, RENT, decoding=Decoding(LIMIT)).sentences


TEXT = "Ada came. He paid 5. It was May. Nobody knew. Rain fell.\nIt was cold. The end."


def spans_at(start: int, *words: str, most: int = 12) -> list[Candidate]:
    """Spans in a passage of `TEXT` from a character on."""
    text = TEXT[start:]
    passage = Passage(0, 3, start, range(len(text)), text)
    places = [text.index(word) for word in words]
    ends = [at + len(word) for at, word in zip(places, words, strict=True)]
    return [
        Candidate(Beginning(passage, at, end, 0.0, 0.0), end, 1, 0.0)
        for at, end in zip(places, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("start", "words", "expected"),
    [
        # The sentence with its neighbours, joined with those of the next span.
        (0, ["May"], ["He paid 5. It was May. Nobody knew. "]),
        (
            0,
            ["cold", "May"],
            ["He paid 5. It was May. Nobody knew. Rain fell.\nIt was cold. The end."],
        ),
        (0, ["Ada"], ["Ada came. He paid 5. "]),
        (0, ["end", "Ada"], ["Ada came. He paid 5. ", "It was cold. The end."]),
        # A passage that begins within a sentence: that one is no neighbour, but may be meant.
        (2, ["paid"], ["He paid 5. It was May. "]),
        (2, ["came"], ["a came. He paid 5. "]),
        # A span that crosses the end of its sentence.
        (0, ["May. Nobody"], ["He paid 5. It was May. Nobody knew. "]),
    ],
)
def test_sentences_come_with_their_neighbours(
    start: int, words: list[str], expected: list[str], model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "TOKENS", 200)
    places = sentences_of_spans(model, spans_at(start, *words))
    assert [(document, TEXT[a:b]) for document, a, b in places] == [(3, one) for one in expected]


def test_no_more_sentences_are_read_than_there_is_room_for(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "TOKENS", 30)
    [place] = sentences_of_spans(model, spans_at(0, "May", "Ada", "end"))
    assert TEXT[place[1] : place[2]] == "He paid 5. It was May. Nobody knew. "
    monkeypatch.setattr(rereading, "TOKENS", 200)
    monkeypatch.setattr(rereading, "SENTENCES", 2)
    assert len(sentences_of_spans(model, spans_at(0, "Ada", "end"))) == 1


def test_rivals_are_compared_by_gap_lead_and_share() -> None:
    assert rival_features(1.5, -2.0, 0.5).tolist() == pytest.approx([1.5, -2.0, math.log(0.5)])


BOOKS = (
    "The lease runs for two years. Either side may end it with three months' notice.\n"
    "Spare tubes: 4, which cost 6.50 euros. Invoice 2291 is due in May.\n"
    "The largest tube is for lorries."
)


@pytest.mark.parametrize(
    ("question", "found", "told"),
    [
        ("How many invoices are there?", "2291", "Invoice 2291 is due in May."),
        ("Which is the smallest tube?", "lorries", "The largest tube is for lorries."),
        ("List the tubes", "Spare", "Spare tubes: 4, which cost 6.50 euros."),
        ("Give me a summary of all tubes", "6.50 euros", "Spare tubes: 4, which cost 6.50 euros."),
        # The sentence itself counts or compares.
        ("How many months are there?", "three", None),
        ("How many tubes are there?", "4", None),
        ("What is the largest tube for?", "lorries", None),
        ("When is the invoice due?", "May", None),
    ],
)
def test_a_question_about_everything_gets_a_sentence_and_not_a_number(
    question: str, found: str, told: str | None, model: SeDeM
) -> None:
    bank = model.read([Document("books", BOOKS)])
    start = BOOKS.index(found)
    [block] = [n for n, one in enumerate(bank.blocks) if one.start <= start < one.end]
    span = FoundSpan(block, start, start + len(found), found, 1, -1.0, 0.0, 0.9, 0.8)
    chosen = Selection([block], [block], [], Scores(torch.zeros(len(bank))))
    prepared = Prepared(Request(bank, question), chosen, None, 0, [])
    answer = told_partly(prepared, Found(Quotation((span,))))
    assert answer.quotation is not None
    [quoted] = answer.quotation.spans
    assert (answer.partly, quoted.text) == (told is not None, told or found)
    assert BOOKS[quoted.start : quoted.end] == quoted.text
    assert quoted.confidence == (None if told else 0.8)
