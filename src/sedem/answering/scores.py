"""Scores of requests for all blocks of their banks, or only for those of some documents.

Letters: B questions, Q question tokens, N blocks, E encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sedem.answering.requests import Request, auto_budget, budget_of
from sedem.bank import search
from sedem.bank.file import unknown_document
from sedem.bank.memory_bank import BankReader
from sedem.errors import ConfigError
from sedem.method.selector import resolve_budget
from sedem.modules import SedemModules


def score_requests(
    model: SedemModules, requests: Sequence[Request], hidden_BQE: Tensor, mask_BQ: Tensor
) -> list[Tensor]:
    """Return scores `[N]` for each request, on the CPU; requests to one bank are scored together.

    Args:
        requests: the requests; blocks of documents that a request leaves out score -inf.
        mask_BQ: False where a question token is padding.

    Raises:
        ConfigError: the documents of a request cannot be used.
        UnknownDocumentError: a bank has no document of a requested name.
    """
    by_bank: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        by_bank.setdefault(id(request.bank), []).append(row)
    scores: dict[int, Tensor] = {}
    for rows in by_bank.values():
        bank = requests[rows[0]].bank
        every = any(needs_every_score(model, requests[row]) for row in rows)
        together = len(rows) == len(requests)
        asked = (hidden_BQE, mask_BQ) if together else (hidden_BQE[rows], mask_BQ[rows])
        bank_scores_BN = search.score_questions(model.selector, bank, *asked, every=every)
        scores |= zip(rows, bank_scores_BN.cpu(), strict=True)
    return [
        of_documents(request.bank, request.documents, scores[row])
        for row, request in enumerate(requests)
    ]


def of_documents(
    bank: BankReader, documents: Sequence[int | str] | None, scores_N: Tensor
) -> Tensor:
    """Return the scores of some documents' blocks; -inf for all other blocks.

    Args:
        documents: names or indexes of its documents; None means all.

    Raises:
        ConfigError, UnknownDocumentError: as `document_indexes`.
    """
    if documents is None:
        return scores_N
    wanted = document_indexes(bank, documents)
    among_N = torch.from_numpy(np.isin(bank.blocks.documents, wanted))
    return scores_N.masked_fill(~among_N, -torch.inf)


def document_indexes(bank: BankReader, documents: Sequence[int | str]) -> list[int]:
    """Return the indexes of some documents of a bank.

    Raises:
        ConfigError: no documents are given, or an index is outside the bank.
        UnknownDocumentError: the bank has no document of a given name.
    """
    if not documents:
        raise ConfigError("documents is empty; give at least one, or leave it out to ask them all")
    names, wanted = bank.documents.names, set(documents)
    by_name = {name: index for index, name in enumerate(names) if name in wanted}
    indexes = []
    for document in documents:
        if isinstance(document, str):
            if document not in by_name:
                raise unknown_document("the bank", document, names)
            indexes.append(by_name[document])
        elif 0 <= document < len(names):
            indexes.append(document)
        else:
            raise ConfigError(
                f"document {document} was asked for, the bank has {len(names)}, the first is 0"
            )
    return indexes


def needs_every_score(model: SedemModules, request: Request) -> bool:
    """Whether an answer depends on more scores than those of a large bank's candidates."""
    if request.blocks is not None or request.documents is not None or request.ranking:
        return True
    auto = auto_budget(model, request.k)
    if auto is not None:
        # `blocks_for_mass` uses that many of the best scores.
        return auto[2] > search.CANDIDATES
    return resolve_budget(budget_of(model, request.k), len(request.bank)) > search.CANDIDATES
