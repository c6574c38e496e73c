"""What a caller of `SeDeM` and of every other reader may rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import LEASE, POSITIONS, RECIPE
from tokenizers import normalizers

from sedem import Answer, Decoding, Document, MemoryBank, Reader, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import InMemory
from sedem.baselines.bm25 import BM25
from sedem.baselines.full_context import FullContext
from sedem.errors import BankError, ConfigError, DataError
from sedem.inference.requests import Request, choose
from sedem.quantization import Quantized

RENT = "What is the rent?"
QUESTIONS = (
    RENT,
    "Pets?",
    "How long does the pie keep, and with which fruit or seed is it served in Görlitz? 🥧",
    "When may the tenant leave the flat in Mill Lane 4?",
)
SHORT = Decoding(max_new_tokens=12)


def build(config: SedemConfig, backbone: Backbone, **changes: object) -> SeDeM:
    """A model with fresh parts and some settings changed."""
    torch.manual_seed(1)
    return SeDeM(config.with_changes(**changes), backbone, backbone).eval()


def untimed(answer: Answer) -> Answer:
    """An answer without what no two runs share."""
    return replace(answer, timings={})


def assert_cites(answer: Answer, documents: Sequence[Document]) -> None:
    """Citations are exact, ranked and as many as k says."""
    texts = {document.name: document.text for document in documents}
    assert [c.rank for c in answer.citations] == list(range(1, answer.k + 1))
    assert all(texts[c.document][c.start : c.end] == c.text for c in answer.citations)
    assert all(0 <= c.start < c.end for c in answer.citations)
    if answer.model == "full-context":
        assert {c.score for c in answer.citations} == {None}
    else:
        scores = [c.score for c in answer.citations if c.score is not None]
        assert len(scores) == answer.k and scores == sorted(scores, reverse=True)
    assert 0 <= answer.k <= answer.blocks


@pytest.fixture
def bank(model: SeDeM, documents: list[Document]) -> MemoryBank:
    return model.read(documents)


# Citations


@pytest.mark.parametrize("segmentation", ["window", "paragraph"])
@pytest.mark.parametrize("block_slots", [None, 2, 8])
@pytest.mark.parametrize("k", [1, 3, "all"])
def test_citations_are_exact(
    k: int | str,
    block_slots: int | None,
    segmentation: str,
    config: SedemConfig,
    backbone: Backbone,
    documents: list[Document],
) -> None:
    model = build(config, backbone, segmentation=segmentation, block_slots=block_slots)
    bank = model.read(documents)
    for question in QUESTIONS[:2]:
        answer = model.answer(bank, question, k=k, decoding=Decoding(max_new_tokens=2))
        assert_cites(answer, documents)
        assert answer.blocks == len(bank)
        assert answer.k == (len(bank) if k == "all" else k)


def test_citations_are_the_best_blocks_with_their_scores(model: SeDeM, bank: MemoryBank) -> None:
    scores = model.scores(bank, RENT)
    best = scores.argsort(descending=True).tolist()[:5]
    answer = model.answer(bank, RENT, k=5, decoding=SHORT)
    assert [bank.citation(i, r, float(scores[i])) for r, i in enumerate(best, 1)] == list(
        answer.citations
    )


def test_no_block_of_a_paragraph_reaches_into_the_next(
    config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, segmentation="paragraph")
    answer = model.answer(model.read(documents), RENT, k="all", decoding=Decoding(2))
    assert len(answer.citations) > 3
    assert not any("\n\n" in citation.text for citation in answer.citations)


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_every_compressor_reads_answers_and_cites(
    kind: str, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, compressor=kind)
    bank = model.read(documents)
    answers = model.answer(bank, QUESTIONS, decoding=SHORT)
    for answer in answers:
        assert_cites(answer, documents)
    whole = model.answer(bank, RENT, k="all", decoding=Decoding(2))
    # Learned queries look at the whole segment; so does what is cited for them.
    spans = sorted((c.start, c.end) for c in whole.citations if c.document == "lease.txt")
    assert spans == [(i, min(i + 16, len(LEASE))) for i in range(0, len(LEASE), 16)]


def test_compressors_are_not_one_and_the_same(
    config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    texts = set()
    for kind in ("linear", "mlp", "query"):
        model = build(config, backbone, compressor=kind)
        answers = model.answer(model.read(documents), QUESTIONS, decoding=SHORT)
        texts.add(tuple(answer.text for answer in answers))
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("layers", "mixing"), [((1, 3), "uniform"), ((1, 2, 4), "learned"), ((3, 1), "learned")]
)
def test_mixtures_of_layers_read_and_answer(
    layers: tuple[int, ...],
    mixing: str,
    config: SedemConfig,
    backbone: Backbone,
    documents: list[Document],
) -> None:
    model = build(config, backbone, extract_layers=layers, layer_mixing=mixing)
    if mixing == "learned":
        with torch.no_grad():
            model.mixture.logits.copy_(torch.arange(len(layers)) * 2.0)
    mixed = model.read(documents)
    assert_cites(model.answer(mixed, RENT, decoding=SHORT), documents)
    alone = build(config, backbone, extract_layers=layers[-1:]).read(documents)
    everything = range(len(mixed))
    assert not torch.equal(mixed.memory(everything), alone.memory(everything))


def test_slots_behind_no_text_are_neither_scored_nor_answered_from(model: SeDeM) -> None:
    bank = model.read([Document("a.txt", "Short."), Document("b.txt", LEASE)])
    memory = bank.memory(range(len(bank))).clone()
    padding = bank.slot_tokens(range(len(bank))) == 0
    # One question after another would find itself in such a slot.
    noise = torch.randn(int(padding.sum()), memory.shape[-1], generator=torch.manual_seed(2))
    memory[padding] = noise.to(memory.dtype)
    noisy = replace(bank, pieces=[InMemory(Quantized(memory))], places=[])
    for question in QUESTIONS:
        assert torch.equal(model.scores(noisy, question), model.scores(bank, question))
        one, other = (model.answer(b, question, k="all", decoding=SHORT) for b in (bank, noisy))
        assert untimed(one) == untimed(other)


# Selection budgets


def test_k_of_a_number_of_all_and_of_none(model: SeDeM, bank: MemoryBank) -> None:
    def used(k: Any) -> int:
        return model.answer(bank, RENT, k=k, decoding=SHORT).k

    assert used(1) == 1
    assert used(None) == model.config.k == 2
    assert used(len(bank)) == used("all") == used(len(bank) + 1) == used(10**9) == len(bank)


@pytest.mark.parametrize("k", [0, -1, 1.5, "2", "many", "", True, [2]], ids=repr)
def test_a_k_that_means_nothing_is_refused_and_named(
    k: Any, model: SeDeM, bank: MemoryBank
) -> None:
    words = rf"k is {re.escape(repr(k))}; it must be a whole number of at least 1, or 'all'"
    with pytest.raises(ConfigError, match=words):
        model.answer(bank, RENT, k=k)
    with pytest.raises(ConfigError, match=words):
        list(model.stream(bank, RENT, k=k))


def test_all_blocks_need_no_selection(model: SeDeM, bank: MemoryBank) -> None:
    everything = model.answer(bank, RENT, k="all", decoding=SHORT)
    forced = model.answer(bank, RENT, blocks=range(len(bank)), decoding=SHORT)
    assert untimed(everything) == untimed(forced)


# Forced blocks


def test_forced_blocks_are_used_scored_and_ranked_whatever_their_order(
    model: SeDeM, bank: MemoryBank
) -> None:
    scores = model.scores(bank, RENT)
    one, other = (model.answer(bank, RENT, blocks=b, decoding=SHORT) for b in ([7, 2], [2, 7]))
    assert untimed(one) == untimed(other)
    ranked = sorted([2, 7], key=lambda index: -scores[index])
    assert [(c.start, c.score) for c in one.citations] == [
        (bank.blocks[index].start, float(scores[index])) for index in ranked
    ]


def test_forcing_what_would_be_selected_changes_nothing(model: SeDeM, bank: MemoryBank) -> None:
    best = model.scores(bank, RENT).argsort(descending=True).tolist()[:3]
    assert untimed(model.answer(bank, RENT, k=3, decoding=SHORT)) == untimed(
        model.answer(bank, RENT, k=1, blocks=best, decoding=SHORT)
    )


def test_other_blocks_give_another_answer(model: SeDeM, bank: MemoryBank) -> None:
    texts = {model.answer(bank, RENT, blocks=[i], decoding=SHORT).text for i in range(6)}
    assert len(texts) > 1


def test_no_blocks_at_all_is_the_decoder_on_the_bare_question(
    model: SeDeM, bank: MemoryBank
) -> None:
    answer = model.answer(bank, RENT, blocks=[], decoding=SHORT)
    assert (answer.k, answer.citations, answer.blocks) == (0, (), len(bank))
    bare = FullContext(model.decoder, SHORT)
    assert answer.text == bare.answer([], RENT).text


@pytest.mark.parametrize("index", [-1, 29, 10**6])
def test_a_forced_block_that_is_not_there_is_refused_with_both_numbers(
    index: int, model: SeDeM, bank: MemoryBank
) -> None:
    assert len(bank) == 29
    with pytest.raises(ConfigError, match=f"block {index} was asked for, the bank has 29"):
        model.answer(bank, RENT, blocks=[0, index])


# Order and placement


@pytest.mark.parametrize("order", ["document", "score"])
def test_blocks_stand_in_the_order_that_was_chosen(
    order: str, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, block_order=order)
    bank = model.read(documents)
    scores = model.scores(bank, RENT)
    selection = choose(model, Request(bank, RENT, k=6), scores)
    assert selection.ranked == scores.argsort(descending=True).tolist()[:6]
    assert selection.ranked != sorted(selection.ranked), "this bank must tell the orders apart"
    expected = sorted(selection.ranked) if order == "document" else selection.ranked
    assert selection.arranged == expected


def answers_of(config: SedemConfig, backbone: Backbone, **changes: object) -> list[Answer]:
    model = build(config, backbone, **changes)
    bank = model.read([Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)])
    return model.answer(bank, QUESTIONS, k=6, decoding=SHORT)


@pytest.mark.parametrize(
    ("setting", "one", "other"),
    [("block_order", "document", "score"), ("start_placement", "front", "between")],
)
def test_order_and_placement_reach_the_decoder_and_leave_selection_alone(
    setting: str, one: str, other: str, config: SedemConfig, backbone: Backbone
) -> None:
    first = answers_of(config, backbone, **{setting: one})
    second = answers_of(config, backbone, **{setting: other})
    assert [a.citations for a in first] == [a.citations for a in second]
    assert [a.text for a in first] != [a.text for a in second]


# Batches


@pytest.mark.parametrize("placement", ["front", "between"])
def test_many_questions_are_answered_as_one_by_one(
    placement: str, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, start_placement=placement)
    bank = model.read(documents)
    # More than are answered together.
    questions = [f"{question} {'again ' * n}" for n in range(5) for question in QUESTIONS]
    together = model.answer(bank, questions, decoding=SHORT)
    alone = [model.answer(bank, question, decoding=SHORT) for question in questions]
    assert [a.text for a in together] == [a.text for a in alone]
    for one, other in zip(together, alone, strict=True):
        assert_same_sources(one, other)
    assert model.answer(bank, []) == []


def assert_same_sources(one: Answer, other: Answer) -> None:
    assert (one.k, one.blocks, one.finish_reason, one.cut) == (
        other.k,
        other.blocks,
        other.finish_reason,
        other.cut,
    )
    for left, right in zip(one.citations, other.citations, strict=True):
        assert replace(left, score=0.0) == replace(right, score=0.0)
        assert left.score == pytest.approx(right.score, abs=1e-4)


def test_requests_to_several_banks_with_several_budgets_are_answered_as_one_by_one(
    model: SeDeM, documents: list[Document], bank: MemoryBank
) -> None:
    lease, recipe = (model.read([document]) for document in documents)
    requests = [
        Request(bank, QUESTIONS[0], 5),
        Request(lease, QUESTIONS[3], "all"),
        Request(recipe, QUESTIONS[2], 1),
        Request(lease, QUESTIONS[1]),
        Request(recipe, QUESTIONS[0], blocks=[3, 1]),
        Request(bank, QUESTIONS[1], blocks=[]),
    ]
    together = model.answer_requests(requests, SHORT)
    assert [a.k for a in together] == [5, len(lease), 1, 2, 2, 0]
    for request, answer in zip(requests, together, strict=True):
        alone = model.answer_requests([request], SHORT)[0]
        assert answer.text == alone.text
        assert_same_sources(answer, alone)


def test_one_request_of_a_batch_that_cannot_be_answered_is_told(
    model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(DataError, match="the question is empty"):
        model.answer(bank, [RENT, " "])


# Streams


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(max_new_tokens=40),
        Decoding(max_new_tokens=1),
        Decoding(max_new_tokens=40, temperature=1.5, seed=3),
        Decoding(max_new_tokens=40, stop=("X", "r")),
    ],
    ids=["greedy", "one token", "sampled", "stop"],
)
def test_streamed_pieces_make_up_the_answer(
    decoding: Decoding, question: str, model: SeDeM, bank: MemoryBank
) -> None:
    stream = model.stream(bank, question, k=3, decoding=decoding)
    assert stream.answer is None
    pieces = list(stream)
    expected = model.answer(bank, question, k=3, decoding=decoding)
    assert "".join(pieces) == expected.text
    assert stream.answer is not None
    assert untimed(stream.answer) == untimed(expected)
    assert all(pieces)
    assert next(stream, None) is None


def test_a_long_answer_comes_in_many_pieces(model: SeDeM, bank: MemoryBank) -> None:
    assert len(list(model.stream(bank, RENT, decoding=Decoding(max_new_tokens=40)))) > 3


def test_a_stream_that_is_given_up_leaves_the_model_usable(model: SeDeM, bank: MemoryBank) -> None:
    before = model.answer(bank, RENT, decoding=SHORT)
    stream = model.stream(bank, RENT, decoding=Decoding(max_new_tokens=40))
    next(stream)
    del stream
    assert torch.is_grad_enabled()
    assert untimed(model.answer(bank, RENT, decoding=SHORT)) == untimed(before)


def test_two_streams_do_not_disturb_each_other(model: SeDeM, bank: MemoryBank) -> None:
    expected = [model.answer(bank, question, decoding=SHORT).text for question in QUESTIONS[:2]]
    streams = [model.stream(bank, question, decoding=SHORT) for question in QUESTIONS[:2]]
    texts = ["", ""]
    for _ in range(SHORT.max_new_tokens + 1):
        for number, stream in enumerate(streams):
            texts[number] += next(stream, "")
    assert texts == expected


# Times and repetition


def test_times_are_there_and_in_order(model: SeDeM, bank: MemoryBank) -> None:
    stream = model.stream(bank, RENT, decoding=SHORT)
    list(stream)
    assert stream.answer is not None
    for answer in (model.answer(bank, RENT, decoding=SHORT), stream.answer):
        times = answer.timings
        assert {"select_ms", "ttft_ms", "total_ms"} <= times.keys()
        assert all(value >= 0 for value in times.values())
        assert 0 < times["select_ms"] < times["ttft_ms"] < times["total_ms"]


def test_the_same_question_gets_the_same_answer(model: SeDeM, bank: MemoryBank) -> None:
    sampled = Decoding(max_new_tokens=12, temperature=1.0, seed=5)
    for decoding in (SHORT, sampled):
        one, two = (model.answer(bank, RENT, k=4, decoding=decoding) for _ in range(2))
        assert untimed(one) == untimed(two)
    other = model.answer(bank, RENT, k=4, decoding=replace(sampled, seed=6))
    assert other.text != two.text


def test_reading_twice_gives_the_same_bank(model: SeDeM, documents: list[Document]) -> None:
    one, two = model.read(documents), model.read(documents)
    assert torch.equal(one.memory(range(len(one))), two.memory(range(len(two))))
    assert one.blocks == two.blocks


# Questions and banks that cannot be


@pytest.mark.parametrize("question", ["", " ", "\n\t\u00a0"])
def test_an_empty_question_is_refused(question: str, model: SeDeM, bank: MemoryBank) -> None:
    for ask in (model.answer, model.scores):
        with pytest.raises(DataError, match="the question is empty; ask something"):
            ask(bank, question)


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(
    model: SeDeM, bank: MemoryBank
) -> None:
    """JSON can hold one; files and tokenizers cannot."""
    half = r"'\\ud83e' at character 2"
    with pytest.raises(DataError, match=rf"the question is not Unicode text \({half}"):
        model.answer(bank, "A \ud83e")
    with pytest.raises(DataError, match=rf"document 'a\.txt' is not Unicode text \({half}"):
        Document("a.txt", "A \ud83e pie")
    with pytest.raises(DataError, match=r"the name of a document is not Unicode text"):
        Document("\udce9.txt", "A pie")


@pytest.mark.parametrize("size", [512, 10_000])
def test_a_question_longer_than_the_encoder_reads_is_refused_with_both_numbers(
    size: int, model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(
        DataError, match=f"the question has {size:,} tokens, the model reads at most 511; ask"
    ):
        model.answer(bank, "?" * size)


def test_a_question_that_leaves_no_room_for_an_answer_is_refused(
    model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(ConfigError, match=r"positions, the decoder has 512; ask something shorter"):
        model.answer(bank, "?" * 480, k=1)


@pytest.mark.parametrize("question", ["\0", "🥧", "¿Qué?", "מה המחיר?", "a\nb", "<end>", "�"])
def test_questions_of_any_characters_are_answered(
    question: str, model: SeDeM, bank: MemoryBank
) -> None:
    assert_cites(model.answer(bank, question, decoding=SHORT), bank.documents)


def test_an_empty_bank_is_refused(model: SeDeM, bank: MemoryBank) -> None:
    for document in list(bank.documents):
        bank.remove(document.name)
    for ask in (model.answer, model.scores):
        with pytest.raises(BankError, match="the bank holds no documents; add some with 'sedem"):
            ask(bank, RENT)


# Positions


def positions_of(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, int]:
    found = re.search(
        r"(?P<states>[\d,]+) selected states, (?P<prompt>[\d,]+) prompt tokens and an answer of up "
        r"to (?P<answer>[\d,]+) tokens make (?P<sum>[\d,]+) positions, the decoder has "
        r"(?P<room>[\d,]+); use k of at most (?P<most>[\d,]+)$",
        str(error.value),
    )
    assert found is not None, str(error.value)
    return {name: int(number.replace(",", "")) for name, number in found.groupdict().items()}


@pytest.mark.parametrize("block_slots", [4, 2, 8])
@pytest.mark.parametrize("segmentation", ["window", "paragraph"])
def test_states_beyond_the_positions_are_refused_and_the_k_that_is_offered_is_the_largest(
    segmentation: str, block_slots: int, config: SedemConfig, backbone: Backbone
) -> None:
    model = build(config, backbone, block_slots=block_slots, segmentation=segmentation)
    text = "\n\n".join(f"{LEASE} Paragraph {n}.\n\nYes {n}." for n in range(4))
    bank = model.read([Document("long.txt", text)])
    with pytest.raises(ConfigError) as error:
        model.answer(bank, RENT, k="all", decoding=SHORT)
    told = positions_of(error)
    assert told["states"] == sum(sum(block.slot_tokens) for block in bank.blocks)
    assert told["sum"] == told["states"] + told["prompt"] + told["answer"]
    assert (told["answer"], told["room"]) == (12, POSITIONS)
    assert model.answer(bank, RENT, k=told["most"], decoding=SHORT).k == told["most"]
    with pytest.raises(ConfigError, match=f"use k of at most {told['most']}$"):
        model.answer(bank, RENT, k=told["most"] + 1, decoding=SHORT)


def test_what_does_not_fit_is_refused_before_it_is_decompressed(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = model.read([Document("long.txt", LEASE * 3)])

    def unexpected(*_: object) -> None:
        pytest.fail("decompressed what cannot be used")

    monkeypatch.setattr(model.decompressor, "forward", unexpected)
    with pytest.raises(ConfigError, match="the decoder has 512"):
        model.answer(bank, RENT, k="all")


def test_reading_is_not_bound_by_the_positions(model: SeDeM) -> None:
    bank = model.read([Document("long.txt", LEASE * 9)])
    answer = model.answer(bank, RENT, decoding=SHORT)
    assert answer.blocks == -(-9 * len(LEASE) // 16) > POSITIONS / 16


# Every reader


READERS = ("sedem", "full-context", "bm25")


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, model: SeDeM) -> Reader:
    """Each method in turn, on one and the same backbone."""
    readers: dict[str, Reader] = {
        "sedem": model,
        "full-context": FullContext(model.decoder, SHORT),
        "bm25": BM25(model.decoder, SHORT, 1),
    }
    return readers[request.param]


def test_a_reader_reads_once_and_answers_often(reader: Reader, documents: list[Document]) -> None:
    memory = reader.read(documents)
    answers = [reader.answer(memory, question) for question in QUESTIONS]
    for answer in answers:
        assert_cites(answer, documents)
        assert answer.text == answer.text.strip()
        assert answer.finish_reason in ("end", "stop", "length")
        assert answer.model == reader.name
        assert answer.blocks >= answer.k > 0
        times = answer.timings
        assert 0 <= times["select_ms"] < times["ttft_ms"] <= times["total_ms"]
        assert bool(answer.cut) == (answer.finish_reason == "length")
        assert all(isinstance(sentence, str) and sentence for sentence in answer.cut)
    assert len({answer.text for answer in answers}) > 1
    again = reader.answer(memory, QUESTIONS[0])
    assert untimed(again) == untimed(answers[0])


def test_an_answer_of_any_reader_is_json(reader: Reader, documents: list[Document]) -> None:
    answer = reader.answer(reader.read(documents), RENT)
    entries = json.loads(json.dumps(answer.to_dict()))
    assert set(entries) == {
        "answer",
        "citations",
        "k",
        "blocks",
        "timings",
        "finish_reason",
        "model",
        "cut",
        "conditioning",
        "stored_bytes",
        "context_tokens",
    }
    assert entries["answer"] == answer.text
    assert set(entries["citations"][0]) == {"rank", "document", "start", "end", "score", "text"}


@pytest.mark.parametrize("question", ["", " \n"])
def test_every_reader_refuses_an_empty_question(
    question: str, reader: Reader, documents: list[Document]
) -> None:
    with pytest.raises(DataError, match="the question is empty"):
        reader.answer(reader.read(documents), question)


def test_every_reader_refuses_half_a_surrogate_pair(
    reader: Reader, documents: list[Document]
) -> None:
    with pytest.raises(DataError, match="the question is not Unicode text"):
        reader.answer(reader.read(documents), "A \ud83e")


@pytest.mark.parametrize("question", ["???", "the", "日本語"])
def test_every_reader_answers_a_question_without_words_of_the_documents(
    question: str, reader: Reader, documents: list[Document]
) -> None:
    assert_cites(reader.answer(reader.read(documents), question), documents)


def test_every_reader_refuses_a_context_without_tokens(reader: Reader, model: SeDeM) -> None:
    for backbone in (model.encoder, model.decoder):
        backbone.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(DataError, match="the text has no tokens; give a document with words"):
        reader.read([Document("invisible.txt", "\u200b")])


@pytest.mark.parametrize("text", ["...", "the of", "日本語", "🥧"])
def test_every_reader_reads_documents_without_words(text: str, reader: Reader) -> None:
    documents = [Document("odd.txt", text)]
    answer = reader.answer(reader.read(documents), RENT)
    assert [c.document for c in answer.citations] == ["odd.txt"]


def test_no_reader_is_silent_about_what_does_not_fit(
    reader: Reader, documents: list[Document]
) -> None:
    """SeDeM refuses; readers of raw text leave the rest out and say so."""
    long = [Document("long.txt", LEASE * 3), *documents]
    memory = reader.read(long)
    if isinstance(reader, SeDeM):
        with pytest.raises(ConfigError, match="positions, the decoder has 512"):
            reader.answer(memory, RENT, k="all")
        return
    answer = reader.answer(memory, RENT)
    words = r"the context has ([\d,]+) tokens, only its first ([\d,]+) fit the model"
    if isinstance(reader, BM25):
        assert "bm25 cut those of more than 256" in answer.cut[0]
        return
    told = re.fullmatch(words, answer.cut[0])
    assert told is not None, answer.cut
    has, fit = (int(number.replace(",", "")) for number in told.groups())
    assert has >= len(LEASE * 3) > fit
    assert fit + len(f"\n\nQuestion: {RENT}\nAnswer:") + 1 + SHORT.max_new_tokens == POSITIONS


def test_a_reader_of_raw_text_cites_only_what_it_read(model: SeDeM) -> None:
    """What was cut off conditioned nothing."""
    texts = {"a.txt": f"  {LEASE}\n", "b.txt": f"\n{LEASE}", "c.txt": "lost"}
    documents = [Document(name, text) for name, text in texts.items()]
    reader = FullContext(model.decoder, SHORT)
    answer = reader.answer(reader.read(documents), RENT)
    assert_cites(answer, documents)
    fit = int(re.search(r"first (\d+) fit", answer.cut[0]).group(1))
    cited = {c.document: c.text for c in answer.citations}
    assert cited == {"a.txt": documents[0].text, "b.txt": f"\n{LEASE}"[: fit - len(LEASE) - 1]}
    assert answer.blocks == 3
    # Of a long paragraph BM25 reads pieces, with a blank line between two of them.
    picking = BM25(model.decoder, SHORT, "all")
    answer = picking.answer(picking.read(documents), RENT)
    assert_cites(answer, documents)
    fit = int(re.search(r"first (\d+) fit", answer.cut[1]).group(1))
    assert sum(len(c.text) + 2 for c in answer.citations) - 2 == fit
    assert answer.blocks == 5 > answer.k


def test_bm25_reads_the_paragraphs_that_share_words_with_the_question(model: SeDeM) -> None:
    documents = [Document(f"{n}.txt", text) for n, text in enumerate([RECIPE, LEASE, "Nothing."])]
    reader = BM25(model.decoder, SHORT, 1)
    memory = reader.read(documents)
    assert [c.document for c in reader.answer(memory, "Which deposit and rent?").citations] == [
        "1.txt"
    ]
    assert [c.document for c in reader.answer(memory, "eggs, flour, salt").citations] == ["0.txt"]
    two = BM25(model.decoder, SHORT, 2)
    assert len(two.answer(two.read(documents), "rent").citations) == 2
    for k in (99, "all"):
        many = BM25(model.decoder, SHORT, k)
        assert many.answer(many.read(documents[2:]), "rent").k == 1
    for k in (0, -1, "many"):
        none = BM25(model.decoder, SHORT, k)
        with pytest.raises(ConfigError, match=f"k is {k!r}; it must be a whole number"):
            none.answer(memory, RENT)


def test_full_context_reads_documents_in_their_order(model: SeDeM) -> None:
    documents = [Document("a.txt", LEASE[:100]), Document("b.txt", RECIPE[:100])]
    reader = FullContext(model.decoder, SHORT)
    one, other = (reader.answer(reader.read(d), RENT) for d in (documents, documents[::-1]))
    assert [c.document for c in one.citations] == ["a.txt", "b.txt"]
    assert [c.document for c in other.citations] == ["b.txt", "a.txt"]
    assert one.text != other.text


def test_a_question_too_long_for_raw_text_is_refused_with_the_numbers(
    model: SeDeM, documents: list[Document]
) -> None:
    for reader in (FullContext(model.decoder, SHORT), BM25(model.decoder, SHORT, 1)):
        with pytest.raises(DataError, match=r"520 tokens and an answer of up to 12 exceed the 512"):
            reader.answer(reader.read(documents), "?" * 500)
