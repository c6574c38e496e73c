"""Answers that quote the documents: which spans are compared, and where the answer stands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from answers import RENT, SHORT, build, joined, opened, prepared_for, untimed
from conftest import LEASE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering import spans as quoting
from sedem.answering.spans import (
    JOINERS,
    Candidate,
    Found,
    Passage,
    Quotation,
    SpanSearch,
    TextSearch,
    find_quotation,
    open_text,
    sentences_of_spans,
    told_partly,
)
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import end_ids, with_texts
from sedem.engine.interface import AnswerInputs, Rows
from sedem.errors import ConfigError
from sedem.folding import folded
from sedem.guidance import LEAST, SECOND_FEATURES, SPAN_FEATURES, SecondReading, rival_features
from sedem.selecting.plan import Prepared, Request, Scores, Selection


def compared(model: SeDeM, request: Request, limit: int = 12) -> tuple[Prepared, list[Candidate]]:
    """Return the spans that are compared for a request."""
    prepared = prepared_for(model, request, limit)
    assert prepared.inputs is not None
    with joined(model.engine, [prepared.inputs], limit) as (logits_1V, rows):
        return prepared, SpanSearch(model, rows, 0, prepared, limit, logits_1V[0]).candidates()


def quoted(
    model: SeDeM, rows: Rows, prepared: Prepared, limit: int, logits_V: torch.Tensor
) -> Quotation | None:
    decoding = Decoding(limit)
    return find_quotation(model, model.engine, rows, 0, prepared, decoding, logits_V).quotation


def decoded(model: SeDeM, inputs: AnswerInputs, text: str) -> tuple[list[int], torch.Tensor, float]:
    """Tokens of a span, the logits before it, and its log-probability, one token after another."""
    ids = model.decoder.token_ids(f" {text}")
    with joined(model.engine, [inputs], 20) as (logits_1V, rows):
        logs = [logits_1V[0].log_softmax(-1)]
        logs += [rows.step(torch.tensor([token]))[0].log_softmax(-1) for token in ids]
    ends = [logs[-1][end].item() for end in end_ids(model.decoder)]
    values = [log_V[token].item() for log_V, token in zip(logs, ids, strict=False)]
    return ids, logs[0], sum(max(value, LEAST) for value in (*values, *ends))


def test_an_answer_shows_the_whole_change_of_a_number(model: SeDeM) -> None:
    bank = model.read([Document("minutes", "from 45 to 52")])
    prepared = prepared_for(model, Request(bank, "What is the fee?", 1), 12)
    assert prepared.inputs is not None
    with joined(model.engine, [prepared.inputs], 12) as (logits_1V, rows):
        search = SpanSearch(model, rows, 0, prepared, 12, logits_1V[0])
        [passage] = search.passages
        for at in (passage.text.index("45"), passage.text.index("52")):
            found = search.best([Candidate(passage, at, at + 2, 1, -1.0, 0.0)])
            assert found is not None and found.text == "from 45 to 52"


def test_each_word_of_the_question_beside_a_span_counts_once(model: SeDeM) -> None:
    bank = model.read([Document("lease", "The rent and again the rent is 900 euros.")])
    prepared = prepared_for(model, Request(bank, "Rent?", 1), 12)
    assert prepared.inputs is not None
    with joined(model.engine, [prepared.inputs], 12) as (logits_1V, rows):
        search = SpanSearch(model, rows, 0, prepared, 12, logits_1V[0])
        [passage] = search.passages
        at = passage.text.index("900")
        spans = [Candidate(passage, at, at + 3, 1, -1.0, 0.0)]
        spans.append(Candidate(passage, 4, at + 3, 1, -1.0, 0.0))
        assert search.features(spans)[:, SPAN_FEATURES.index("words")].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("context", ["joint", "independent"])
def test_the_likelihood_of_a_span_is_that_of_decoding_it_and_its_end(
    engine: str, context: str, config: SedemConfig
) -> None:
    changes: dict[str, object] = {"block_context": context, "guidance": True}
    slow, model = (opened(config, name, **changes) for name in ("eager", engine))
    bank = slow.read([Document("lease.txt", LEASE)])
    prepared, spans = compared(model, Request(bank, RENT, 2))
    assert len(spans) >= 3
    for span in [*spans[::4], max(spans, key=lambda one: one.tokens)]:
        ids, _, expected = decoded(slow, prepared.inputs, span.text)
        assert len(ids) == span.tokens
        assert span.likelihood == pytest.approx(expected, abs=1e-3)


def test_spans_begin_in_selected_blocks_and_end_with_words(model: SeDeM, bank: MemoryBank) -> None:
    prepared, spans = compared(model, Request(bank, RENT, 3))
    blocks = {block: bank.blocks[block] for block in prepared.selection.ranked}
    assert {one.passage.block for one in spans} <= set(blocks)
    for span in spans:
        passage, text = span.passage, span.text
        block = blocks[passage.block]
        start = passage.start + span.at
        assert block.start <= start < block.end
        document = bank.documents[block.document].text
        assert document[start : start + len(text)] == text
        assert text == text.strip() and "\n\n" not in text
        after = document[start + len(text) : start + len(text) + 1]
        assert not (text[-1].isalnum() and after.isalnum())
        before = document[start - 1 : start] if start else ""
        assert not (text[0].isalnum() and before.isalnum())


@pytest.mark.parametrize(
    ("question", "repeated"),
    [
        ("What is the deposit?", "deposit"),
        ("WHAT RENT?", "rent"),
        ("Who owns the flat in Mill Lane?", "Mill Lane"),
    ],
)
def test_what_only_repeats_the_question_is_no_answer(
    question: str, repeated: str, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sedem.answering.spans.BEGINNINGS", 1_000)
    monkeypatch.setattr("sedem.answering.spans.LOOK_AHEAD", 11)
    bank = model.read(
        [Document("lease.txt", "The rent of 9 and the deposit. A flat in Mill Lane.")]
    )

    def texts(asked: str) -> set[str]:
        return {one.text for one in compared(model, Request(bank, asked, len(bank)))[1]}

    words = set(folded(question).split())
    found = texts(question)
    assert found and not any(set(folded(one).split()) <= words for one in found)
    # Where it names what to choose from, its words may be the answer.
    assert repeated in texts(f"{question.rstrip('?')} or not?")


def test_the_answer_is_cited_where_it_stands(model: SeDeM, bank: MemoryBank) -> None:
    answer = model.answer(bank, RENT, k=3, answer="span")
    [source] = [one for one in answer.citations if one.answer_spans]
    [(start, end)] = source.answer_spans
    text = next(d.text for d in bank.documents if d.name == source.document)
    assert text[start:end] == answer.text
    assert source.start <= start < source.end
    assert (answer.finish_reason, answer.cut) == ("end", ())
    assert answer.answer_tokens == len(model.decoder.token_ids(f" {answer.text}"))
    # Blocks read as text are quoted, too.
    answer = model.answer(bank, RENT, k=1, condition="text", answer="span")
    assert answer.text in answer.citations[0].text


def test_several_spans_are_quoted_if_the_decoder_goes_on(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    joiner = model.decoder.token_ids(JOINERS[0])[0]
    prepared = prepared_for(model, Request(bank, RENT, 3), 24)
    assert prepared.inputs is not None
    with joined(model.engine, [prepared.inputs], 24) as (logits_1V, rows):
        plain = quoted(model, rows, prepared, 24, logits_1V[0])
        decoded, said = rows.branches, list[list[int]]()

        def branches(row: int, ids_SL: torch.Tensor) -> torch.Tensor:
            logits_SLV = decoded(row, ids_SL).clone()
            logits_SLV[..., joiner] = 1e3
            said.extend(ids_SL.tolist() if len(ids_SL) == 1 else [])
            return logits_SLV

        monkeypatch.setattr(rows, "branches", branches)
        with torch.no_grad():
            model.spans.gap.fill_(1e9)
        found = quoted(model, rows, prepared, 24, logits_1V[0])
    assert plain is not None and len(plain.spans) == 1
    assert found is not None and len(found.spans) > 1
    assert found.text == " and ".join(one.text for one in found.spans)
    assert sum(one.tokens for one in found.spans) < 24
    for number, one in enumerate(found.spans):
        document, *place = one.place
        assert bank.documents[document].text[slice(*place)] == one.text
        assert tuple(place) in found.within(one.passage.block)
        assert not any(one.text in other.text for other in found.spans[:number])
    first = model.decoder.token_ids(f" {found.spans[0].text} and")
    assert said[0] == first


def test_both_engines_quote_the_same_span(config: SedemConfig, documents: list[Document]) -> None:
    slow, fast = (opened(config, name) for name in ("eager", "static"))
    bank = slow.read(documents)
    questions = [RENT, "Pets?", "How long does the pie keep?"]
    for one, other in zip(
        slow.answer(bank, questions, k=4, answer="span"),
        fast.answer(bank, questions, k=4, answer="span"),
        strict=True,
    ):
        assert one.text == other.text
        spans = [[c.answer_spans for c in a.citations] for a in (one, other)]
        assert spans[0] == spans[1]


def test_a_quotation_is_streamed_and_the_row_is_free_again(model: SeDeM, bank: MemoryBank) -> None:
    whole = model.answer(bank, RENT, answer="span")
    stream = model.stream(bank, RENT, answer="span")
    assert list(stream) == [whole.text]
    assert stream.answer is not None and untimed(stream.answer) == untimed(whole)
    with model.scheduler(rows=1) as scheduler:
        for _ in range(3):
            reply = scheduler.submit(Request(bank, RENT, answer="span"))
            assert reply.result().text == whole.text
        free = scheduler.submit(Request(bank, RENT, answer="free"), SHORT).result()
    assert untimed(free) == untimed(model.answer(bank, RENT, answer="free", decoding=SHORT))


def test_the_model_decides_where_the_request_does_not(
    config: SedemConfig, backbone: Backbone, bank: MemoryBank
) -> None:
    quoting, free = (build(config, backbone, answer=how) for how in ("span", "free"))
    assert untimed(quoting.answer(bank, RENT)) == untimed(free.answer(bank, RENT, answer="span"))
    by_default = free.answer(bank, RENT, decoding=SHORT)
    assert untimed(quoting.answer(bank, RENT, answer="free", decoding=SHORT)) == untimed(by_default)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_quotation_keeps_the_limit_of_the_answer(
    tokens: int, model: SeDeM, bank: MemoryBank
) -> None:
    _, spans = compared(model, Request(bank, RENT), limit=tokens + 1)
    assert spans == [] or max(span.tokens for span in spans) <= tokens


def test_there_must_be_words_to_quote(model: SeDeM, bank: MemoryBank) -> None:
    with pytest.raises(ConfigError, match="the selected blocks have no words"):
        model.answer(bank, RENT, blocks=[], answer="span")
    signs = model.read([Document("signs.txt", "... --- !!! ???")])
    with pytest.raises(ConfigError, match="have no words"):
        model.answer(signs, RENT, answer="span")
    free = model.answer(signs, RENT, answer="free", decoding=SHORT)
    assert untimed(model.answer(signs, RENT, answer="auto", decoding=SHORT)) == untimed(free)


def test_auto_quotes_unless_the_likeliest_first_word_is_in_none_of_the_blocks(
    model: SeDeM, bank: MemoryBank
) -> None:
    free, span = (model.answer(bank, RENT, answer=how, decoding=SHORT) for how in ("free", "span"))
    with torch.no_grad():
        model.spans.gap.fill_(1e9)
    assert untimed(model.answer(bank, RENT, answer="auto", decoding=SHORT)) == untimed(span)
    with torch.no_grad():
        model.spans.gap.fill_(-1.0)
    assert untimed(model.answer(bank, RENT, answer="auto", decoding=SHORT)) == untimed(free)
    prepared, _ = compared(model, Request(bank, RENT))
    assert prepared.inputs is not None
    with joined(model.engine, [prepared.inputs], 12) as (logits_1V, rows):
        search = SpanSearch(model, rows, 0, prepared, 12, logits_1V[0])
        found = search.best(search.candidates())
    assert found is not None
    log_V = logits_1V[0].log_softmax(-1)
    first = model.decoder.token_ids(f" {found.text}")[0]
    assert found.gap == pytest.approx(float(log_V.max() - log_V[first]), abs=1e-5)


def test_only_fitted_spans_have_a_confidence(
    config: SedemConfig, backbone: Backbone, bank: MemoryBank, tmp_path: Path
) -> None:
    fitted = build(config, backbone, spans=True, answer="span")
    with torch.no_grad():
        fitted.spans.weight[1], fitted.spans.gap[...] = 2.0, 1.5
        fitted.spans.certainty.weight[:] = torch.tensor([0.5, 0.25])
    fitted.save_pretrained(tmp_path / "fitted")
    opened = SeDeM.from_pretrained(tmp_path / "fitted")
    answer, again = fitted.answer(bank, RENT), opened.answer(bank, RENT)
    assert 0 < (answer.answer_confidence or 0) < 1
    assert (again.text, again.answer_confidence) == (answer.text, answer.answer_confidence)
    assert opened.spans.gap.item() == 1.5
    assert fitted.answer(bank, RENT, answer="free", decoding=SHORT).answer_confidence is None
    plain = build(config, backbone, answer="span")
    assert plain.answer(bank, RENT).answer_confidence is None


SETTINGS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LETTERS = st.sampled_from(
    "ab1 .,\n\u00df\u00e9e\u0301\u6771\u0e17\u0e35\u0e48\U0001f967\u0915\u093f\ufb01$%"
)


@SETTINGS
@given(text=st.text(LETTERS, min_size=1, max_size=60))
def test_every_quotation_is_literal_in_any_script(text: str, model: SeDeM) -> None:
    if not any(character.isalnum() for character in text):
        return
    bank = model.read([Document("any.txt", text)])
    answer = model.answer(bank, RENT, k="all", answer="span")
    spans = [span for citation in answer.citations for span in citation.answer_spans]
    assert spans and all(text[start:end] in answer.text for start, end in spans)
    assert len(spans) > 1 or text[slice(*spans[0])] == answer.text


# The second reading: which sentences are read as text, and how both readings decide together


LIMIT = 12


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has room for few bytes."""
    monkeypatch.setattr(quoting, "TOKENS", 60)


@pytest.fixture
def unsure(config: SedemConfig, backbone: Backbone) -> SeDeM:
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
    unsure: SeDeM, bank: MemoryBank
) -> None:
    answer = unsure.answer(bank, RENT, k=2, decoding=SHORT)
    texts = {document.name: document.text for document in bank.documents}
    assert answer.sentences == tuple(sorted(answer.sentences))
    [(document, (start, end))] = [
        (one.document, span) for one in answer.citations for span in one.answer_spans
    ]
    assert texts[document][start:end] == answer.text
    assert any(name == document and a <= start < b for name, a, b in answer.sentences)
    alone = build(unsure.config.with_changes(second_reading=False), unsure.decoder)
    first = alone.answer(bank, RENT, k=2, decoding=SHORT)
    read = [texts[name][a:b] for name, a, b in answer.sentences]
    prompt = unsure.decoder.token_ids(f"\n\nQuestion: {RENT}\nAnswer:")
    tokens = with_texts(unsure.decoder, [unsure.decoder.bos_token_id, *prompt], read)
    assert answer.conditioning is not None and first.conditioning is not None
    assert answer.conditioning == first.conditioning + len(tokens)
    assert first.sentences == ()


def test_if_memory_is_sure_nothing_is_read_again(unsure: SeDeM, bank: MemoryBank) -> None:
    decider(unsure).sure.fill_(0.0)
    unsure.spans.gap.fill_(1e9)
    alone = build(unsure.config.with_changes(second_reading=False), unsure.decoder)
    alone.spans.gap.data.fill_(1e9)
    assert untimed(unsure.answer(bank, RENT)) == untimed(alone.answer(bank, RENT))


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
    unsure: SeDeM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decider(unsure).sure.fill_(0.0)
    unsure.spans.gap.fill_(1e9)
    monkeypatch.setattr(quoting, "TOKENS", 1)
    bank = unsure.read([Document("a.md", "\n".join(rows)), Document("b.md", "Nothing else.")])
    answer = unsure.answer(bank, question, k=8, decoding=SHORT, documents=["a.md"])
    texts = [bank.documents[0].text[start:end].strip() for _, start, end in answer.sentences]
    assert set(texts) <= {rows[one] for one in expected} and texts


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("context", ["joint", "independent"])
def test_both_readings_give_a_span_the_probability_of_decoding_it(
    engine: str, context: str, config: SedemConfig
) -> None:
    changes: dict[str, object] = {"block_context": context, "second_reading": True}
    slow, unsure = (opened(config, name, **changes) for name in ("eager", engine))
    bank = slow.read([Document("lease.txt", LEASE)])
    for _, memory, text in searches(unsure, bank):
        spans = text.candidates()
        features_CF = text.compared(spans)[1]
        assert features_CF.shape == (len(spans), len(SECOND_FEATURES))
        read = dict(zip(SECOND_FEATURES, features_CF.unbind(1), strict=True))
        known = {one.place: one.likelihood for one in memory.candidates()}
        checked = [number for number, one in enumerate(spans) if one.place in text.remembered]
        assert len(checked) >= 3
        for number in checked[::4]:
            span = spans[number]
            ids, first_V, expected = decoded(slow, text.inputs, span.text)
            assert read["likelihood"][number].item() == pytest.approx(expected, abs=1e-3)
            gap = first_V.max() - first_V[ids[0]]
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
        unsure = opened(config, engine, second_reading=True, answer="auto")
        decider(unsure).sure.fill_(2.0)
        bank = unsure.read(documents)
        questions = [RENT, "Who pays the deposit?", "How long does it keep?"]
        together = unsure.answer(bank, questions, k=2, decoding=SHORT)
        alone = [unsure.answer(bank, one, k=2, decoding=SHORT) for one in questions]
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
    unsure: SeDeM,
    bank: MemoryBank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decider(unsure).gap.fill_(-1.0)  # never sure of the quotation
    quoted = unsure.answer(bank, RENT, k=2, decoding=SHORT)
    decider(unsure).freely.bias.fill_(1e3)
    decider(unsure).free_certainty.bias.fill_(-2.0)
    monkeypatch.setattr(quoting, "unsupported", lambda *_: unsupported)
    answer = unsure.answer(bank, RENT, k=2, decoding=SHORT)
    if not freely:
        assert untimed(answer) == untimed(quoted)
        return
    assert (answer.text, answer.unsupported) == (free_text(unsure, bank), unsupported)
    assert answer.answer_confidence == pytest.approx(1 / (1 + math.exp(2.0)))
    assert (answer.certainty, answer.alternative) == ("unsure", quoted.text)
    assert answer.sentences == quoted.sentences and answer.answer_tokens == LIMIT


def test_a_free_answer_that_stands_in_the_text_is_marked_there(
    unsure: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(_, _, text)] = searches(unsure, bank)
    passage = text.passages[0]
    start, end = passage.borders[0][1]
    word = passage.text[start:end]
    found = text.located(word, 0.5)
    assert found is not None and found.text == word and found.spans[0].confidence == 0.5
    [place] = found.within(passage.block)
    document = bank.documents[passage.document].text
    assert document[slice(*place)] == word
    assert text.located(word[:-1], 0.5) is None
    assert text.located("no such words", 0.5) is None


def test_a_quotation_is_asked_for_and_none_else_is_decoded(unsure: SeDeM, bank: MemoryBank) -> None:
    decider(unsure).freely.bias.fill_(1e3)
    answer = unsure.answer(bank, RENT, k=2, answer="span", decoding=SHORT)
    assert answer.sentences and any(one.answer_spans for one in answer.citations)
    free = unsure.answer(bank, RENT, k=2, answer="free", decoding=SHORT)
    assert free.sentences == () and free.answer_confidence is None


def test_without_room_for_sentences_memory_decides_alone(
    unsure: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsure.answer(bank, RENT, decoding=Decoding(LIMIT)).sentences
    monkeypatch.setattr(quoting, "TOKENS", 10_000)
    assert not unsure.answer(bank, RENT, decoding=Decoding(LIMIT)).sentences


TEXT = "Ada came. He paid 5. It was May. Nobody knew. Rain fell.\nIt was cold. The end."


def spans_at(start: int, *words: str, most: int = 12) -> list[Candidate]:
    """Spans in a passage of `TEXT` from a character on."""
    text = TEXT[start:]
    passage = Passage(0, 3, start, range(len(text)), text)
    places = [text.index(word) for word in words]
    ends = [at + len(word) for at, word in zip(places, words, strict=True)]
    return [Candidate(passage, at, end, 1, 0.0, 0.0) for at, end in zip(places, ends, strict=True)]


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
    start: int,
    words: list[str],
    expected: list[str],
    unsure: SeDeM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quoting, "TOKENS", 200)
    places = sentences_of_spans(unsure.decoder, spans_at(start, *words))
    assert [(document, TEXT[a:b]) for document, a, b in places] == [(3, one) for one in expected]


def test_no_more_sentences_are_read_than_there_is_room_for(
    unsure: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quoting, "TOKENS", 30)
    [place] = sentences_of_spans(unsure.decoder, spans_at(0, "May", "Ada", "end"))
    assert TEXT[place[1] : place[2]] == "He paid 5. It was May. Nobody knew. "
    monkeypatch.setattr(quoting, "TOKENS", 200)
    monkeypatch.setattr(quoting, "SENTENCES", 2)
    assert len(sentences_of_spans(unsure.decoder, spans_at(0, "Ada", "end"))) == 1


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
    question: str, found: str, told: str | None, unsure: SeDeM
) -> None:
    bank = unsure.read([Document("books", BOOKS)])
    start = BOOKS.index(found)
    block = next(n for n, one in enumerate(bank.blocks) if one.start <= start < one.end)
    passage = Passage(block, 0, 0, range(len(BOOKS)), BOOKS)
    span = Candidate(passage, start, start + len(found), 1, -1.0, 0.0, share=0.9, confidence=0.8)
    chosen = Selection([block], [block], [], Scores(torch.zeros(len(bank))))
    prepared = Prepared(Request(bank, question), chosen, None, 0, [])
    answer = told_partly(prepared, Found(Quotation((span,))))
    assert answer.quotation is not None
    [quoted] = answer.quotation.spans
    assert (answer.partly, quoted.text) == (told is not None, told or found)
    assert BOOKS[slice(*quoted.place[1:])] == quoted.text
    assert quoted.confidence == (None if told else 0.8)
