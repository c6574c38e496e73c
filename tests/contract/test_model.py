"""What a caller of `SeDeM` and of every other reader may rely on."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answers import QUESTIONS, RENT, SHORT, assert_cites, untimed
from conftest import LEASE, POSITIONS
from tokenizers import normalizers

from sedem import Answer, Decoding, Document, DocumentReader, MemoryBank, SeDeM
from sedem.errors import BankError, ConfigError, DataError
from sedem_lab.baselines.bm25 import BM25
from sedem_lab.baselines.full_context import FullContext

# What is read


def test_files_and_folders_are_read_by_their_paths(
    model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("a.txt", "texts/b.md", "texts/c.txt"):
        Path(name).write_text(f"The text of {name}.", "utf-8")
    assert Document.from_file("a.txt") == Document("a.txt", "The text of a.txt.")
    own = Document("own", "Own text.")
    for given, names in (
        ("texts", ["texts/b.md", "texts/c.txt"]),
        (["a.txt"], ["a.txt"]),
        (Path("a.txt"), ["a.txt"]),
        (["a.txt", Path("texts"), own], ["a.txt", "texts/b.md", "texts/c.txt", "own"]),
        (own, ["own"]),
        ((one for one in [own]), ["own"]),
    ):
        assert model.read(given).names == names
    for path, words in (
        ("nosuch", "there is no file or folder 'nosuch'"),
        ("nosuch.pdf", "there is no file or folder 'nosuch.pdf'"),
        ([own, "texts/d.txt"], "there is no file or folder 'texts/d.txt'"),
        (5, "5 is no document; give paths"),
        (["a.txt", None], "None is no document"),
        (b"a.txt", "b'a.txt' is no document"),
    ):
        with pytest.raises(DataError, match=words):
            model.read(path)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="'texts' is a folder"):
        Document.from_file("texts")


def test_a_bank_and_a_model_say_what_they_are(
    model: SeDeM, bank: MemoryBank, documents: list[Document], tmp_path: Path
) -> None:
    assert [*bank] == documents and bank.names == [one.name for one in documents]
    assert documents[0].name in bank and documents[0] in bank
    assert "none.txt" not in bank and Document(documents[0].name, "Other.") not in bank
    assert 5 not in bank
    held = f"{len(documents)} documents, {len(bank)} blocks"
    assert repr(bank).startswith("MemoryBank(") and held in repr(bank)
    bank.save(tmp_path / "kept.bank")
    assert "1 document, " in repr(model.read(documents[:1]))
    assert repr(MemoryBank.open(tmp_path / "kept.bank")) == (
        f"MemoryBank('{tmp_path / 'kept.bank'}', {held})"
    )
    assert repr(model) == f"SeDeM('{model.name}', decoder '{model.decoder.name}', on cpu)"


def test_questions_can_be_awaited(model: SeDeM, bank: MemoryBank) -> None:
    async def ask() -> list[Answer]:
        asked = (model.aanswer(bank, one, decoding=SHORT, k=2) for one in QUESTIONS)
        return await asyncio.gather(*asked)

    expected = [model.answer(bank, one, decoding=SHORT, k=2) for one in QUESTIONS]
    assert [one.text for one in asyncio.run(ask())] == [one.text for one in expected]


# Citations


def test_citations_are_the_best_blocks_with_their_scores(model: SeDeM, bank: MemoryBank) -> None:
    scores = model.scores(bank, RENT)
    best = scores.argsort(descending=True).tolist()[:5]
    answer = model.answer(bank, RENT, k=5, decoding=SHORT)
    expected = [bank.citation(i, r, float(scores[i])) for r, i in enumerate(best, 1)]
    assert [replace(one, state_score=one.score) for one in expected] == list(answer.citations)


# Options


def test_an_unknown_option_is_rejected_by_name(model: SeDeM, bank: MemoryBank) -> None:
    for ask in (model.answer, model.stream):
        with pytest.raises(TypeError, match="unexpected keyword argument 'blokcs'"):
            ask(bank, RENT, blokcs=[0])  # type: ignore[call-overload]


# Selection budgets


def test_k_may_be_a_number_all_or_the_models_own(model: SeDeM, bank: MemoryBank) -> None:
    def used(k: Any) -> int:
        return model.answer(bank, RENT, k=k, decoding=SHORT).k

    assert used(1) == 1
    assert used(None) == model.config.k == 2
    assert used(len(bank)) == used("all") == used(len(bank) + 1) == used(10**9) == len(bank)


@pytest.mark.parametrize("k", [0, -1, 1.5, "2", "many", "", True, [2]], ids=repr)
def test_a_bad_k_is_refused_by_name(k: Any, model: SeDeM, bank: MemoryBank) -> None:
    words = rf"k is {re.escape(repr(k))}; it must be a whole number of at least 1, or 'all'"
    with pytest.raises(ConfigError, match=words):
        model.answer(bank, RENT, k=k)
    with pytest.raises(ConfigError, match=words):
        list(model.stream(bank, RENT, k=k))


# Forced blocks


def test_forced_blocks_are_used_and_ranked_by_score_in_any_order(
    model: SeDeM, bank: MemoryBank
) -> None:
    scores = model.scores(bank, RENT)
    one, other = (model.answer(bank, RENT, blocks=b, decoding=SHORT) for b in ([7, 2], [2, 7]))
    assert untimed(one) == untimed(other)
    ranked = sorted([2, 7], key=lambda index: -scores[index])
    assert [(c.start, c.score) for c in one.citations] == [
        (bank.blocks[index].start, float(scores[index])) for index in ranked
    ]


# Streams


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
    decoding: Decoding, model: SeDeM, bank: MemoryBank
) -> None:
    for question in QUESTIONS:
        stream = model.stream(bank, question, k=3, decoding=decoding)
        assert stream.answer is None
        pieces = list(stream)
        expected = model.answer(bank, question, k=3, decoding=decoding)
        assert "".join(pieces) == expected.text
        assert stream.answer is not None
        assert untimed(stream.answer) == untimed(expected)
        assert all(pieces)
        assert next(stream, None) is None
        for times in (stream.answer.timings, expected.timings):
            assert 0 < times["select_ms"] < times["ttft_ms"] <= times["total_ms"]


# Bad questions and banks


def test_half_a_surrogate_pair_is_no_document() -> None:
    """JSON can hold one; files and tokenizers cannot."""
    half = r"'\\ud83e' at character 2"
    with pytest.raises(DataError, match=rf"document 'a\.txt' is not Unicode text \({half}"):
        Document("a.txt", "A \ud83e pie")
    with pytest.raises(DataError, match=r"the name of a document is not Unicode text"):
        Document("\udce9.txt", "A pie")


def test_an_empty_question_or_bank_has_no_scores(model: SeDeM, bank: MemoryBank) -> None:
    with pytest.raises(DataError, match="the question is empty; ask something"):
        model.scores(bank, " ")
    for document in list(bank.documents):
        bank.remove(document.name)
    for ask in (model.answer, model.scores):
        with pytest.raises(BankError, match="the bank holds no documents; add some with 'sedem"):
            ask(bank, RENT)


# Every reader


READERS = ("sedem", "full-context", "bm25")


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, model: SeDeM) -> DocumentReader:
    """Each method in turn, on the same backbone."""
    readers: dict[str, DocumentReader] = {
        "sedem": model,
        "full-context": FullContext(model.decoder, SHORT),
        "bm25": BM25(model.decoder, SHORT, 1),
    }
    return readers[request.param]


def test_a_reader_reads_once_and_answers_often(
    reader: DocumentReader, documents: list[Document]
) -> None:
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
    entries = json.loads(json.dumps(again.to_dict()))
    assert set(entries) == {
        "answer", "citations", "k", "blocks", "timings", "finish_reason", "model", "cut",
        "conditioning", "stored_bytes", "context_tokens", "confidence",
        "answer_confidence", "unsupported", "certainty", "alternative", "sentences",
        "reasoning",
    }  # fmt: skip
    assert entries["answer"] == again.text
    assert set(entries["citations"][0]) == {
        "rank", "document", "start", "end", "score", "text", "page",
        "state_score", "word_score", "words", "answer_spans", "also",
    }  # fmt: skip


def test_every_reader_refuses_questions_and_contexts_without_text(
    reader: DocumentReader, documents: list[Document], model: SeDeM
) -> None:
    memory = reader.read(documents)
    for question in ("", " \n", "\n\t\u00a0"):
        with pytest.raises(DataError, match="the question is empty; ask something"):
            reader.answer(memory, question)
    half = r"the question is not Unicode text \('\\ud83e' at character 2"
    with pytest.raises(DataError, match=half):
        reader.answer(memory, "A \ud83e")
    for backbone in (model.encoder, model.decoder):
        backbone.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(DataError, match="the text has no tokens; give a document with words"):
        reader.read([Document("invisible.txt", "\u200b")])


def test_every_reader_takes_questions_and_documents_without_words(
    reader: DocumentReader, documents: list[Document]
) -> None:
    memory = reader.read(documents)
    for question in ("???", "the", "日本語", "\0", "🥧", "a\nb", "<end>", "\ufffd"):
        assert_cites(reader.answer(memory, question), documents)
    for text in ("...", "the of", "日本語", "🥧"):
        answer = reader.answer(reader.read([Document("odd.txt", text)]), RENT)
        assert [c.document for c in answer.citations] == ["odd.txt"]


def test_every_reader_reports_text_that_does_not_fit(
    reader: DocumentReader, documents: list[Document]
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
