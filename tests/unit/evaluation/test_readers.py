"""The costs that an answer reports, against what the model saw and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sedem import Decoding, Document, MemoryBank, SeDeM
from sedem.backbone.prompts import context_prompt
from sedem.errors import DataError
from sedem.selecting.plan import Request
from sedem_lab.baselines.bm25 import BM25
from sedem_lab.baselines.full_context import FullContext
from sedem_lab.baselines.longllmlingua import LongLLMLingua
from sedem_lab.data.examples import Evidence, Example
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.readers import SedemMethod

QUESTION, SHORT = "What is the rent?", Decoding(max_new_tokens=4)


@contextmanager
def seen_by_the_last_layer(model: SeDeM) -> Iterator[list[int]]:
    """Positions of each call of the decoder's last layer."""
    seen: list[int] = []

    def note(layer: Any, inputs: tuple[torch.Tensor, ...], *_: Any) -> None:
        seen.append(inputs[0].shape[1])

    handle = model.decoder.model.get_decoder().layers[-1].register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


READERS: dict[str, Callable[[SeDeM], Any]] = {
    "sedem": lambda model: model,
    "full-context": lambda model: FullContext(model.decoder, SHORT),
    "bm25": lambda model: BM25(model.decoder, SHORT, 1),
    "longllmlingua": lambda model: LongLLMLingua(model.decoder, SHORT),
}


@pytest.mark.parametrize("name", READERS)
def test_costs_are_those_of_what_is_seen_stored_and_read(
    name: str, model: SeDeM, documents: list[Document]
) -> None:
    reader = READERS[name](model)
    memory = reader.read(documents)
    with seen_by_the_last_layer(model) as seen:
        answer = reader.answer(memory, QUESTION)
    if name != "longllmlingua":  # it reads the context several times to prune it
        assert answer.conditioning == seen[0] > len(QUESTION)
    if name == "sedem":
        stored = memory.memory(range(len(memory)))
        assert stored.dtype == torch.bfloat16
        # Two bytes per number, including padding.
        assert answer.stored_bytes == stored.nbytes
        assert answer.context_tokens == sum(len(model.encoder.token_ids(d.text)) for d in documents)
    else:
        assert answer.stored_bytes == sum(len(d.text.encode("utf-8")) for d in documents)
        text = context_prompt([d.text for d in documents])
        assert answer.context_tokens == len(model.decoder.token_ids(text))


def test_every_block_is_ranked_on_request(model: SeDeM, documents: list[Document]) -> None:
    bank: MemoryBank = model.read(documents)
    plain = model.answer(bank, QUESTION, k=2, decoding=SHORT)
    assert plain.ranking is None
    (answer,) = model.answer_requests([Request(bank, QUESTION, 2, ranking=True)], SHORT)
    assert answer.ranking is not None
    spans = [(documents[b.document].name, b.start, b.end) for b in bank.blocks]
    assert sorted(answer.ranking) == sorted(spans)
    cited = [(c.document, c.start, c.end) for c in answer.citations]
    assert list(answer.ranking[:2]) == cited
    scores = model.scores(bank, QUESTION).tolist()
    by_score = [scores[spans.index(span)] for span in answer.ranking]
    assert by_score == sorted(scores, reverse=True)
    assert "ranking" not in answer.to_dict()


def test_bm25_ranks_every_paragraph_and_reads_those_it_picks(model: SeDeM) -> None:
    parts = ["The lease is signed.", "Beat the eggs with flour and salt.", "Bake it for an hour."]
    one = Document("book.txt", " \n\n\n".join(parts) + "\n")
    reader = BM25(model.decoder, SHORT, 1)
    answer = reader.answer(reader.read([one]), "eggs, flour, salt")
    (citation,) = answer.citations
    assert citation.text == parts[1] == one.text[citation.start : citation.end]
    assert (answer.k, answer.blocks) == (1, 3)
    assert answer.ranking is not None
    assert {one.text[start:end] for _, start, end in answer.ranking} == set(parts)
    assert answer.ranking[0] == ("book.txt", citation.start, citation.end)
    alone = FullContext(model.decoder, SHORT)
    read = alone.answer(alone.read([Document("eggs", parts[1])]), "eggs, flour, salt")
    assert (answer.text, answer.conditioning) == (read.text, read.conditioning)
    assert answer.stored_bytes == len(one.text)
    assert answer.context_tokens == len(model.decoder.token_ids(one.text.strip()))


def test_bm25_cuts_a_paragraph_of_more_than_half_the_positions_and_says_so(model: SeDeM) -> None:
    reader = BM25(model.decoder, SHORT, 1)
    answer = reader.answer(reader.read([Document("a", "The rent is due. " * 40)]), QUESTION)
    assert (answer.k, answer.blocks) == (1, 3)
    assert "in 1 paragraph; bm25 cut those of more than 256, so it ranks 3 pieces" in answer.cut[0]


def test_only_gold_documents_are_read(model: SeDeM, documents: list[Document]) -> None:
    labelled = Example("a", tuple(documents), QUESTION, ("900 euros",), (Evidence(0, 0, 40),))
    settings = MethodSettings(
        checkpoint="tiny", k="all", control="gold-documents", max_new_tokens=4
    )
    method = SedemMethod(model, settings)
    (answer,) = method.answer([labelled])
    assert {citation.document for citation in answer.citations} == {"lease.txt"}
    assert answer.k == answer.blocks == len(model.read(documents[:1]))
    with pytest.raises(DataError, match="example 'b' has no evidence, so no gold document"):
        method.answer([Example("b", tuple(documents), QUESTION, ("900 euros",))])
