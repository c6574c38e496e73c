"""What a first look with pooled keys misses of exact selection, on a real bank.

    python -m experiments.candidates BANK QUESTIONS [--limit 200]

BANK is a bank on disk, such as `sedem build` makes of many articles; QUESTIONS is a set in SQuAD's
schema. Every block is scored exactly, then by pooled keys of several sizes, and the share of the
exact best K that is among the best C of them is counted.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from experiments.cells import RESULTS
from sedem import MemoryBank, SeDeM
from sedem.bank.coarse_search import pool_keys
from sedem.bank.key_index import key_index, key_parts
from sedem.bank.scores import key_scores
from sedem.data.question_sets import open_examples
from sedem.inference.requests import encode_questions
from sedem.provenance import provenance
from sedem.quantization import join

GROUPS = (1, 2, 4, 8, 16)
COUNTS = (32, 128, 512, 1024, 2048, 4096)
BUDGETS = (1, 2, 4, 10)


@torch.no_grad()
def measure(model: SeDeM, bank: MemoryBank, questions: Sequence[str]) -> dict[str, Any]:
    """Recall of the exact best K among the best C by pooled keys, for each G."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, questions)
    query_BQRH = model.selector.queries(hidden_BQE)
    keys, slots = key_index(bank, model.selector), len(bank.blocks[0].slot_tokens)
    exact, pooled = [], {groups: [] for groups in GROUPS}
    for indices, part in key_parts(bank, model.selector):
        padding_P = keys.padding_of(indices, slots)
        exact.append(key_scores(query_BQRH, mask_BQ, part, padding_P))
        for groups, parts in pooled.items():
            parts.append(pool_keys(part, padding_P, groups))
    exact_BN = torch.cat(exact, 1)
    found = {}
    for groups, parts in pooled.items():
        means, empty = zip(*parts, strict=True)
        nothing_P = torch.cat(empty).flatten().nonzero()[:, 0]
        started = time.process_time()
        rough_BN = key_scores(query_BQRH, mask_BQ, join(means), nothing_P)
        seconds = time.process_time() - started
        found[str(groups)] = {
            "recall": recall(exact_BN, rough_BN),
            "cpu_ms_per_question_and_1000_blocks": round(
                1e6 * seconds / len(questions) / len(bank), 3
            ),
        }
    return found


def recall(exact_BN: Tensor, rough_BN: Tensor) -> dict[str, dict[str, float]]:
    """Percent of the exact best K that are among the best C of a rough order, by C, by K."""
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


def main(
    bank: Path,
    questions: Path,
    limit: Annotated[int, typer.Option(help="A seeded sample of so many questions.")] = 200,
    checkpoint: str = "sedem-nano",
) -> None:
    """Measure and write results/nano/candidates.CHECKPOINT.json."""
    model, opened = SeDeM.from_pretrained(checkpoint), MemoryBank.open(bank)
    opened.check_made_by(model.fingerprint())
    asked = [example.question for example in open_examples(questions, "squad").examples]
    sampled = random.Random(0).sample(asked, min(limit, len(asked)))
    result = {
        "by_pooled_keys_of_a_block": measure(model, opened, sampled),
        "bank": {
            "documents": len(opened.documents),
            "blocks": len(opened),
            "tokens": opened.tokens,
            "dtype": opened.dtype,
        },
        "questions": {"data": questions.name, "limit": len(sampled), "seed": 0},
        "checkpoint": checkpoint,
        **provenance(),
    }
    path = RESULTS / "nano" / f"candidates.{Path(checkpoint).name}.{questions.stem}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(main)
