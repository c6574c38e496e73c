"""The passages of a bank that a question finds: exact quotations, without an answer.

The blocks with the best scores are widened to whole sentences; those that then overlap or touch
are one passage. A block of much more text than a passage is narrowed to the sentences with most of
the question's words.

Letters: N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sedem.backbone.prompts import check_question
from sedem.bank.memory_bank import Snapshot
from sedem.config import PASSAGES, PER_DOCUMENT
from sedem.engine.interface import Engine
from sedem.errors import ConfigError
from sedem.guidance import matches_of, total_weight
from sedem.method.segments import sentences_of
from sedem.method.selector import top_k
from sedem.modules import SedemModules
from sedem.selecting.plan import Request, Scores, Selection, plan_of
from sedem.selecting.select import count_candidates, select
from sedem.types import Citation

LENGTH = 500
"""Characters of a passage; about one block."""
REACH = 400
"""Most characters by which a block is widened on each side."""
LONGEST = 2_000
"""Most characters of a passage of several blocks; beyond, each text stays in one of two."""
LOOKED_AT = 32
"""Blocks that are looked at for each passage: others may be of a document that has enough."""


@dataclass
class _Hit:
    """A passage that later blocks may still extend; `block` is its best one."""

    block: int
    document: int
    start: int
    end: int
    text: str


@torch.no_grad()
def find_passages(
    model: SedemModules,
    engine: Engine,
    request: Request,
    passages: int = PASSAGES,
    per_document: int = PER_DOCUMENT,
) -> tuple[list[Citation], Selection]:
    """Find the best passages for a question.

    Args:
        request: the question and its bank; options of reading and answering do not count.

    Returns:
        The passages, best first, and the selection that they come from.

    Raises:
        ConfigError: a number is below 1, or an option cannot be used.
        DataError, BankError: as `selecting.select`.
    """
    for name, number in (("k", passages), ("per_document", per_document)):
        if number < 1:
            raise ConfigError(f"{name} is {number}; it must be at least 1")
    plan = plan_of(model, request)
    bank, documents = plan.bank, plan.bank.documents
    if not len(bank):
        check_question(plan.question)
        return [], Selection([], [], [], Scores(torch.zeros(0)))
    [selection] = select(model, engine, [plan])
    scores = selection.scores
    wanted = min(count_candidates(scores.total), passages * max(LOOKED_AT, per_document))
    # Blocks are joined to passages, from the best block on.
    hits, counts = list[_Hit](), dict[int, int]()
    for block in top_k(scores.total, wanted).tolist():
        document = bank.rows([block])[0].document
        if counts.get(document, 0) == per_document:
            continue
        hit = _widened(bank, block, scores)
        # Passages that overlap or touch: one character of white space may be between them.
        same = [
            one
            for one in hits
            if one.document == document and one.start <= hit.end + 1 and hit.start <= one.end + 1
        ]
        if not same and len(hits) == passages:
            break
        counts[document] = counts.get(document, 0) + 1
        start = min(one.start for one in (*same, hit))
        end = max(one.end for one in (*same, hit))
        if not same:
            hits.append(hit)
        elif end - start <= LONGEST:
            hits = [one for one in hits if one not in same[1:]]
            same[0].start, same[0].end = start, end
            same[0].text = documents.text(document, start, end)
        elif len(hits) < passages:
            # Together they are too long, so this one is what the others leave of it.
            start, end = hit.start, hit.end
            for one in same:
                if one.start <= start:
                    start = max(start, one.end)
                else:
                    end = min(end, one.start)
            rest = hit.text[max(0, start - hit.start) : max(0, end - hit.start)]
            start += len(rest) - len(rest.lstrip())
            if text := rest.strip():
                hits.append(replace(hit, start=start, end=start + len(text), text=text))
    found = [
        Citation(
            rank,
            documents.name(hit.document),
            hit.start,
            hit.end,
            text=hit.text,
            page=documents.page(hit.document, hit.start),
            also=documents.copies(hit.document),
            **scores.cited(hit.block),
        )
        for rank, hit in enumerate(hits, start=1)
    ]
    return found, selection


def _widened(bank: Snapshot, block: int, scores: Scores) -> _Hit:
    """Return the text of a block with the beginning and the end of its first and last sentence."""
    [row], documents = bank.rows([block]), bank.documents
    base = max(0, row.start - REACH)
    stop = min(row.end + REACH, documents.characters(row.document))
    text = documents.text(row.document, base, stop)
    sentences = sentences_of(text)
    # The first is not the beginning of a sentence, and the last no end, unless the text ends there.
    borders = sentences[base > 0 : len(sentences) - (stop < documents.characters(row.document))]
    start, end = row.start - base, row.end - base
    if end - start > 2 * LENGTH:
        # A long block is narrowed to the part with most of the question's words.
        words = () if scores.words is None else scores.words.words
        matches = matches_of(text, {one.text: one.weight for one in words if block in one.blocks})

        def weight(first: int) -> float:
            return total_weight(one for one in matches if first <= one.start < first + LENGTH)

        inside = (at for at in sentences if start < at < end - LENGTH // 2)
        start = max([start, *inside], key=weight)
        last = min(end, start + LENGTH)
        if last < end and (space := text.rfind(" ", start + 1, last)) > 0:
            last = space
        end = last
    start = max((at for at in borders if at <= start), default=start)
    end = min((at for at in borders if at >= end), default=end)
    start += len(text[start:end]) - len(text[start:end].lstrip())
    end -= len(text[start:end]) - len(text[start:end].rstrip())
    return _Hit(block, row.document, base + start, base + end, text[start:end])
