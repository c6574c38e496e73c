"""Which exact selections a first search with pooled keys misses, on one large bank."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.system.scales import Questions, Scale
from sedem import Document, MemoryBank, SeDeM
from sedem.answering.requests import encode_questions
from sedem.bank.keys import key_index, key_parts
from sedem.bank.scores import key_scores
from sedem.bank.search import pool_keys
from sedem.data.articles import read_articles
from sedem.provenance import provenance
from sedem.quantization import join

GROUPS = (1, 2, 4, 8, 16)
COUNTS = (32, 128, 512, 1024, 2048, 4096)
BUDGETS = (1, 2, 4, 10)
MORE_QUESTIONS = {
    "nano": Questions("SQuAD, training part", "squad/train-44-articles.json", "squad")
}
ARTICLES = {"nano": ("wikipedia/articles.jsonl.xz", 324)}
"""More texts of the bank, by scale: documents of a second set, and first articles of a file."""


def coarse_search(
    checkpoint: Path, scale: Scale, questions: str, data: Path, limit: int | None
) -> dict[str, Any]:
    """Read the documents of a set into one bank, and search it for the set's questions.

    Every block is scored exactly, and by pooled keys of several sizes. The metric is how many of
    the exact best K blocks are among the best C blocks by pooled keys.

    Args:
        checkpoint: the model.
        scale: gives the sets.
        questions: key of the set.
        data: folder of the data files.
        limit: size of the question sample; None means all.
    """
    model, asked = SeDeM.from_pretrained(checkpoint), scale.sets[questions]
    bank = model.read(_documents(scale, asked, data))
    every = [example.question for example in asked.examples(data)]
    sampled = random.Random(0).sample(every, min(limit or len(every), len(every)))
    return {
        "by_pooled_keys_of_a_block": pooled_recall(model, bank, sampled),
        "bank": {
            "documents": len(bank.documents),
            "blocks": len(bank),
            "tokens": bank.tokens,
            "dtype": bank.dtype,
        },
        "questions": {"data": Path(asked.source).name, "limit": len(sampled), "seed": 0},
        "checkpoint": checkpoint.name,
        **provenance(),
    }


def _documents(scale: Scale, asked: Questions, data: Path) -> list[Document]:
    """Every text of the bank, without duplicates."""
    sets = [asked, *([MORE_QUESTIONS[scale.name]] if scale.name in MORE_QUESTIONS else [])]
    texts = [d.text for s in sets for example in s.examples(data) for d in example.documents]
    if scale.name in ARTICLES:
        source, count = ARTICLES[scale.name]
        texts += [text for _, text in read_articles(data / source, slice(count))]
    return [Document(str(number), text) for number, text in enumerate(dict.fromkeys(texts))]


@torch.no_grad()
def pooled_recall(model: SeDeM, bank: MemoryBank, questions: Sequence[str]) -> dict[str, Any]:
    """Recall and time of a first search, by the number of pooled keys per block."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, questions)
    query_BQRH = model.selector.queries(hidden_BQE)
    keys, slots = key_index(bank, model.selector), len(bank.blocks[0].slot_tokens)
    exact: list[Tensor] = []
    pooled: dict[int, list[Any]] = {groups: [] for groups in GROUPS}
    for indices, part in key_parts(bank, model.selector):
        padding_P = keys.padding_of(indices, slots)
        exact.append(key_scores(query_BQRH, mask_BQ, part, padding_P))
        for groups, parts in pooled.items():
            parts.append(pool_keys(part, padding_P, groups))
    exact_BN = torch.cat(exact, 1)
    found = {}
    for groups, parts in pooled.items():
        means, empty = zip(*parts, strict=True)
        empty_P = torch.cat(empty).flatten().nonzero()[:, 0]
        started = time.process_time()
        rough_BN = key_scores(query_BQRH, mask_BQ, join(means), empty_P)
        seconds = time.process_time() - started
        found[str(groups)] = {
            "recall": recall(exact_BN, rough_BN),
            "cpu_ms_per_question_and_1000_blocks": round(
                1e6 * seconds / len(questions) / len(bank), 3
            ),
        }
    return found


def recall(exact_BN: Tensor, rough_BN: Tensor) -> dict[str, dict[str, float]]:
    """Percentage of the exact best K among the best C of a rough order, by K and C."""
    order_BN = rough_BN.argsort(1, descending=True)
    rank_BN = order_BN.argsort(1)
    best_BN = exact_BN.argsort(1, descending=True)
    return {
        f"k{k}": {
            str(count): round(
                100 * (rank_BN.gather(1, best_BN[:, :k]) < count).float().mean().item(), 2
            )
            for count in COUNTS
        }
        for k in BUDGETS
    }
