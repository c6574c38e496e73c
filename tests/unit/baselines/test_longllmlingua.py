"""LongLLMLingua against the tokens that the official code keeps, and against plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sedem import Document
from sedem.answering.decoding import Decoding
from sedem.backbone.loading import open_backbone
from sedem.errors import DataError
from sedem_lab.baselines import longllmlingua
from sedem_lab.baselines.longllmlingua import (
    RESTRICTIVE_STATEMENT,
    LongLLMLingua,
    plan_windows,
    prune_tokens,
)
from sedem_lab.baselines.paragraphs import split
from sedem_lab.data.question_sets import open_examples

FIXTURES = Path(__file__).parents[2] / "fixtures"
OFFICIAL = json.loads((FIXTURES / "longllmlingua.json").read_text(encoding="utf-8"))["examples"]
SHORT = Decoding(max_new_tokens=4)
QUESTION = "What is the rent?"


@pytest.fixture
def wide(tiny_folder: Callable[..., str]) -> LongLLMLingua:
    """On a backbone with enough positions for real contexts in bytes."""
    folder = tiny_folder(max_position_embeddings=16384)
    return LongLLMLingua(open_backbone(folder), SHORT)


@pytest.fixture
def small(tiny_folder: Callable[..., str]) -> LongLLMLingua:
    """On a backbone with 512 positions, with short windows."""
    reader = LongLLMLingua(open_backbone(tiny_folder()), SHORT)
    reader.window, reader.extra = 20, 10
    return reader


def lease(count: int, name: str = "lease") -> list[Document]:
    """Documents of one paragraph of 33 tokens each."""
    return [
        Document(f"{name} {i}", f"In the year {1900 + i} the rent was {i}0.") for i in range(count)
    ]


@pytest.mark.parametrize("official", OFFICIAL, ids=[str(o["id"]) for o in OFFICIAL])
def test_it_keeps_the_tokens_that_the_official_code_keeps(
    official: dict[str, object], wide: LongLLMLingua, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = open_examples(FIXTURES / str(official["set"])).examples
    (example,) = (e for e in examples if e.id == official["id"])
    # The official run did not cut paragraphs, and this length cuts none.
    paragraphs = split(example.documents, wide.backbone, wide.backbone.max_positions)
    question = example.question.strip()
    chosen = wide.select(paragraphs, question)
    assert [-score for score in chosen.scores] == pytest.approx(official["surprise"], abs=1e-3)
    assert chosen.kept == official["kept"]
    left: list[Tensor] = []

    def recorded(backbone: object, ids_P: Tensor, *rest: object) -> Tensor:
        left.append(prune_tokens(backbone, ids_P, *rest))  # type: ignore[arg-type]
        return left[0]

    monkeypatch.setattr(longllmlingua, "prune_tokens", recorded)
    text = wide.prune([paragraphs[i] for i in chosen.kept], question, chosen.rates)
    ids = wide.backbone.token_ids(
        question + "\n\n" + "\n\n".join(paragraphs[i].text for i in chosen.kept)
    )
    kept = [ids[i] for i in left[0].tolist()]
    assert kept == official["ids"]
    assert text == wide.backbone.tokenizer.decode(kept)


def naive_nll(reader: LongLLMLingua, ids: list[int]) -> list[float]:
    """NLL of each token after the first, by Hugging Face's forward."""
    logits = reader.backbone.model(input_ids=torch.tensor([ids])).logits[0]
    log_p = logits.log_softmax(-1)
    return [-float(log_p[i, token]) for i, token in enumerate(ids[1:])]


@torch.no_grad()
def test_a_paragraph_is_ranked_by_the_nll_of_the_question_after_it(small: LongLLMLingua) -> None:
    text = "The rent is 900 euros."
    asked = QUESTION + RESTRICTIVE_STATEMENT
    start, *ids = [small.backbone.bos_token_id, *small.backbone.token_ids(text + asked)]
    wanted = naive_nll(small, [start, *ids])[-len(asked) :]
    found = small.question_nll(text, QUESTION)
    assert found == pytest.approx(sum(wanted) / len(wanted), rel=1e-4)


def test_a_paragraph_that_fills_a_window_begins_no_other() -> None:
    plan = plan_windows([19, 40, 1], [0.5, 0.2, 0.1], 20)
    assert plan == [[(19, 0.5)], [(20, 0.2)], [(20, 0.2)], [(1, 0.1)]]


@torch.no_grad()
def test_one_window_is_pruned_by_contrastive_perplexity(small: LongLLMLingua) -> None:
    question, text = torch.randint(2, 250, (7,)), torch.randint(2, 250, (40,))
    ids = torch.cat([question, text])
    kept = prune_tokens(small.backbone, ids, 7, [[(40, 0.5)]], 40).tolist()
    with_it = naive_nll(small, ids.tolist())[7:]
    without = naive_nll(small, text.tolist())
    worth = [w - q for w, q in zip(without, with_it, strict=True)]
    # 39 tokens have one after them: int(39 * 0.5) - 1 of them are above the threshold.
    best = sorted(range(39), key=lambda i: -worth[i])[:18]
    assert kept == [7 + i for i in sorted([*best, 39])]


@torch.no_grad()
def test_tokens_after_the_last_whole_window_are_kept_and_a_short_text_is_one_window(
    small: LongLLMLingua,
) -> None:
    ids = torch.randint(2, 250, (57,))
    plan = plan_windows([50], [0.3], 20)
    kept = prune_tokens(small.backbone, ids, 7, plan, 20).tolist()
    assert kept[-11:] == list(range(46, 57))  # 19 and 20 tokens were pruned
    assert 12 < len(kept) < 30
    ids = ids[:27]
    kept = prune_tokens(small.backbone, ids, 7, plan_windows([20], [0.4], 200), 200).tolist()
    assert 2 < len(kept) < 10 and kept[-1] == 26
    assert prune_tokens(small.backbone, ids[:8], 7, [[(3, 0.4)]], 200).tolist() == [7]


# Answers


def test_an_answer_cites_the_paragraphs_that_were_kept(small: LongLLMLingua) -> None:
    documents = lease(8)
    answer = small.answer(small.read(documents), QUESTION)
    texts = {d.name: d.text for d in documents}
    assert 0 < answer.k == len(answer.citations) < answer.blocks == 8
    for rank, citation in enumerate(answer.citations, start=1):
        assert citation.rank == rank
        assert texts[citation.document][citation.start : citation.end] == citation.text
    assert answer.ranking is not None and len(answer.ranking) == 8
    kept = [(c.document, c.start, c.end) for c in answer.citations]
    assert list(answer.ranking[: answer.k]) == kept
    assert answer.context_tokens == 8 * 33 + 7 * 2
    assert answer.stored_bytes == 8 * 33
    assert answer.conditioning and answer.conditioning < 200
    limited = ("the answer was cut off at its limit of 4 tokens",)
    assert answer.cut == (limited if answer.finish_reason == "length" else ())


def test_what_was_not_ranked_or_was_cut_is_noted_and_what_cannot_be_scored_refused(
    small: LongLLMLingua,
) -> None:
    one = small.answer([Document("a", "The rent is 900 euros a month.")], QUESTION)
    assert one.cut[0] == "the context is one paragraph, so longllmlingua ranked nothing"
    long = [Document("long", "The rent is 900 euros a month. " * 40)]
    answer = small.answer(long, QUESTION)
    assert answer.cut[0] == (
        "the context has 1,239 tokens in 1 paragraph; longllmlingua cut those of more than 256, "
        "so it ranks 5 pieces"
    )
    many = small.answer(lease(90), QUESTION)
    assert "does not fit the model's 512 positions" in many.cut[0]
    with pytest.raises(DataError, match=r"the question is empty"):
        small.answer(lease(2), " ")
    with pytest.raises(DataError, match=r"the question has 314 tokens, longllmlingua has room for"):
        small.answer(lease(2), "Why? " * 50)
