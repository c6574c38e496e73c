"""Answers that quote the documents: which spans are compared, and where the answer stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from answers import RENT, SHORT, build, joined, opened, prepared_for, untimed
from conftest import LEASE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.decoding import Decoding
from sedem.answering.rereading import find_quotation
from sedem.answering.spans import JOINERS, Candidate, Quotation, SpanSearch
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import end_ids
from sedem.engine.interface import Rows
from sedem.errors import ConfigError
from sedem.folding import folded
from sedem.guidance.spans import LEAST
from sedem.selecting.plan import Prepared, Request


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
    decoder = slow.decoder
    for span in [*spans[::4], max(spans, key=lambda one: one.tokens)]:
        ids = decoder.token_ids(f" {span.text}")
        assert len(ids) == span.tokens
        with joined(slow.engine, [prepared.inputs], 20) as (logits_1V, rows):
            logs = [logits_1V[0].log_softmax(-1)]
            logs += [rows.step(torch.tensor([token]))[0].log_softmax(-1) for token in ids]
        ends = [logs[-1][end].item() for end in end_ids(decoder)]
        values = [log_V[token].item() for log_V, token in zip(logs, ids, strict=False)]
        expected = sum(max(value, LEAST) for value in (*values, *ends))
        assert span.likelihood == pytest.approx(expected, abs=1e-3)


def test_spans_begin_in_selected_blocks_and_end_with_words(model: SeDeM, bank: MemoryBank) -> None:
    prepared, spans = compared(model, Request(bank, RENT, 3))
    blocks = {block: bank.blocks[block] for block in prepared.selection.ranked}
    assert {one.beginning.passage.block for one in spans} <= set(blocks)
    for span in spans:
        passage, text = span.beginning.passage, span.text
        block = blocks[passage.block]
        start = passage.start + span.beginning.at
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
    assert found.tokens < 24
    for number, one in enumerate(found.spans):
        document = bank.documents[bank.blocks[one.block].document].text
        assert document[one.start : one.end] == one.text
        assert (one.start, one.end) in found.within(one.block)
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


def test_blocks_read_as_text_are_quoted_too(model: SeDeM, bank: MemoryBank) -> None:
    answer = model.answer(bank, RENT, k=1, condition="text", answer="span")
    assert answer.text in answer.citations[0].text


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
