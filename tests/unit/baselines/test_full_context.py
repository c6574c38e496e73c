"""What the readers of raw text read, cite and refuse: full context, also fine-tuned, and BM25."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from answers import RENT, SHORT, assert_cites
from conftest import LEASE, RECIPE
from unit.baselines.conftest import check_question_loss, make, tokens

from sedem import Document, SeDeM
from sedem.answering.decoding import Decoding
from sedem.backbone.loading import open_backbone
from sedem.engine.device import Clock
from sedem.errors import ConfigError, DataError
from sedem.method.injection import GrowingCache
from sedem_lab.baselines import full_context
from sedem_lab.baselines.bm25 import BM25
from sedem_lab.baselines.full_context import FullContext, generate_timed
from sedem_lab.baselines.soft_prompt import prefill_result, run_embeddings


def test_a_question_too_long_for_raw_text_is_refused_with_the_numbers(
    model: SeDeM, documents: list[Document]
) -> None:
    for reader in (FullContext(model.decoder, SHORT), BM25(model.decoder, SHORT, 1)):
        with pytest.raises(DataError, match=r"520 tokens and an answer of up to 12 exceed the 512"):
            reader.answer(reader.read(documents), "?" * 500)


def test_only_what_was_read_is_cited(model: SeDeM) -> None:
    """Text that does not fit the positions conditioned nothing; BM25 reads it in pieces."""
    texts = {"a.txt": f"  {LEASE}\n", "b.txt": f"\n{LEASE}", "c.txt": "lost"}
    documents = [Document(name, text) for name, text in texts.items()]
    whole, pieces = FullContext(model.decoder, SHORT), BM25(model.decoder, SHORT, "all")
    answer = whole.answer(whole.read(documents), RENT)
    assert_cites(answer, documents)
    fit = int(re.search(r"first (\d+) fit", answer.cut[0]).group(1))
    cited = {c.document: c.text for c in answer.citations}
    assert cited == {"a.txt": texts["a.txt"], "b.txt": texts["b.txt"][: fit - len(LEASE) - 1]}
    assert answer.blocks == 3
    answer = pieces.answer(pieces.read(documents), RENT)
    assert_cites(answer, documents)
    fit = int(re.search(r"first (\d+) fit", answer.cut[1]).group(1))
    assert sum(len(c.text) + 2 for c in answer.citations) - 2 == fit
    assert answer.blocks == 5 > answer.k


def test_rows_of_a_batch_are_those_of_hugging_face_and_each_ends_alone(
    tiny_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = open_backbone(tiny_folder(tie_word_embeddings=False))
    prompts = torch.tensor([[0, 50, 60, 70], [0, 80, 90, 100]])

    def rows(end: int) -> list[list[int]]:
        """Greedy tokens by both loops, each row without its end and what follows."""
        whole = backbone.model.generate(
            prompts, do_sample=False, max_new_tokens=12, eos_token_id=end, pad_token_id=end
        )[:, 4:].tolist()
        expected = [row[: row.index(end)] if end in row else row for row in whole]
        cache, clock = GrowingCache(), Clock(backbone.device)
        states = run_embeddings(backbone, [backbone.embed(ids) for ids in prompts], cache)
        filled = prefill_result(backbone, states[:, -1], cache, [4, 4])
        monkeypatch.setattr(full_context, "end_ids", lambda _: [end])
        found = generate_timed(backbone, filled.logits, filled.advance, Decoding(12), clock)
        assert [row.ids for row in found] == expected
        assert [row.finish_reason == "end" for row in found] == [len(row) < 12 for row in expected]
        assert 0 < clock.timings["ttft_ms"] < clock.timings["total_ms"]
        return expected

    first, second = rows(10**6)
    assert [len(first), len(second)] == [12, 12]
    at, end = next((i, t) for i, t in enumerate(first) if i > 1 and t not in first[:i] + second)
    assert rows(end) == [first[:at], second]


# BM25


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
        with pytest.raises(ConfigError, match=f"k is {k!r}; it must be a whole number"):
            BM25(model.decoder, SHORT, k)


def test_paragraphs_are_read_in_document_order_however_they_score(model: SeDeM) -> None:
    documents = [
        Document("low.txt", "Pets need a word."),
        Document("high.txt", "The rent: rent is paid."),
        Document("other.txt", "Take two eggs."),
    ]
    question = "rent, rent or pets?"
    reader = BM25(model.decoder, SHORT, 2)
    answer = reader.answer(reader.read(documents), question)
    assert [c.document for c in answer.citations] == ["high.txt", "low.txt"]
    whole = FullContext(model.decoder, SHORT)
    in_order, by_score = (
        whole.answer(whole.read(picked), question).text
        for picked in (documents[:2], documents[1::-1])
    )
    assert answer.text == in_order != by_score


# Fine-tuned full context


def test_without_training_the_tuned_reader_equals_the_frozen_one(
    tiny_folder: Callable[..., str], documents: list[Document]
) -> None:
    reader = make("full-context-tuned", tiny_folder())
    with torch.no_grad():
        for parameter in reader.backbone.lora_parameters():
            parameter.zero_()
    decoding = reader.decoding = Decoding(max_new_tokens=8)
    frozen = FullContext(open_backbone(tiny_folder()), decoding)
    for given in (documents, [Document("long", "The rent is 900 euros. " * 50)]):
        own = reader.answer(reader.read(given), "What is the rent?")
        other = frozen.answer(frozen.read(given), "What is the rent?")
        for name in ("text", "citations", "conditioning", "stored_bytes", "context_tokens"):
            assert getattr(own, name) == getattr(other, name), name
        assert len(own.cut) == len(other.cut)


@torch.no_grad()
def test_the_loss_matches_hugging_faces_forward(tiny_folder: Callable[..., str]) -> None:
    reader = make("full-context-tuned", tiny_folder())
    contexts = tokens(30, 12)
    check_question_loss(reader, contexts, reader.backbone.embed)
