"""Score a bank's blocks for some questions: every block, or only a large bank's candidates.

Late-interaction scores of several questions are computed together, in bounded memory. In a large
bank, the candidates are the blocks whose codes are nearest to a question (`codes`), and those with
its words. docs/performance.md reports how much of the evidence was measured to be among them.

Letters: B questions, Q question tokens, X question tokens of all questions, N blocks, J slots of a
block, L slots of all blocks, P padded slots, R heads, H width of a head, W words of a code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.codes import ROW, SAMPLE, Codes, CodesFile, CodeSpace, codes_path, mean_keys
from sedem.bank.database import damaged, delete_database
from sedem.bank.keys import key_index, key_parts, keys_of
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.errors import BankError, DamagedBankError
from sedem.method.selector import Selector
from sedem.quantization import Quantized, join

logger = logging.getLogger(__name__)

COARSE_FROM = 100_000
"""Largest bank in which all blocks are scored; larger banks are searched for candidates."""
CANDIDATES = 256
"""Candidates of a question by codes."""
CANDIDATES_ALONE = 1024
"""The same for a question without candidates by words."""
WORD_CANDIDATES = 128
"""Candidates of a question by words: evidence that has them is among the first."""
COLUMNS = 64
"""On a CPU, a product has a multiple of this many columns: leftover columns would be summed in
another order. So a block's score is bit-identical in any part of its bank."""
PRODUCTS = 2**16
"""Cosines of one head that are computed at once on a CPU; more would not fit its cache."""
PRODUCTS_ON_GPU = 2**24
"""The same for a GPU, which is faster on large products: 256 MB with four heads."""


@torch.no_grad()
def score_questions(
    selector: Selector,
    bank: BankReader,
    query_BQRH: Tensor,
    mask_BQ: Tensor,
    *,
    every: bool = True,
    also: Sequence[Tensor] = (),
) -> Tensor:
    """Score a bank's blocks for several questions in one pass over the bank.

    Args:
        selector: the selector whose keys the bank's blocks have.
        query_BQRH: unit vectors, one for each question token and head.
        mask_BQ: False where a question token is padding.
        every: whether to score every block even of a large bank. Otherwise, in a bank of more than
            `COARSE_FROM` blocks, only each question's candidates are scored.
        also: candidates of each question by words; empty means none.

    Returns:
        fp32 scores `[B, N]`; -inf for a block that is not a candidate.

    Raises:
        BankError: the bank is empty.
    """
    if not len(bank):
        raise BankError("the bank holds no documents; add some with 'sedem build BANK FILE...'")
    if not every and len(bank) > COARSE_FROM:
        return _candidate_scores(bank, selector, query_BQRH, mask_BQ, also)
    index, slots = key_index(bank, selector), bank.blocks.slots
    scores = [
        key_scores(query_BQRH, mask_BQ, part, index.padding_of(blocks, slots))
        for blocks, part in key_parts(bank, selector)
    ]
    return torch.cat(scores, 1)


def _candidate_scores(
    bank: BankReader,
    selector: Selector,
    query_BQRH: Tensor,
    mask_BQ: Tensor,
    also: Sequence[Tensor],
) -> Tensor:
    """Score each question's candidates exactly `[B, N]`; other blocks score -inf."""
    codes = bank_codes(bank, selector)
    scores_BN = query_BQRH.new_full((len(query_BQRH), len(bank)), -torch.inf, dtype=torch.float32)
    for row, (query_QRH, mask_Q) in enumerate(zip(query_BQRH, mask_BQ, strict=True)):
        query_E = query_QRH[: int(mask_Q.sum())].float().mean(0).flatten().cpu()
        words_n = also[row] if also else torch.zeros(0, dtype=torch.long)
        count = CANDIDATES if len(words_n) else CANDIDATES_ALONE
        found_n = codes.nearest(query_E, min(count, len(bank)))
        candidates = torch.cat([found_n, words_n]).unique().tolist()
        padding_P = (bank.slot_tokens(candidates).flatten() == 0).nonzero()[:, 0]
        keys_NJRH = keys_of(bank, selector, candidates)
        question = slice(row, row + 1)
        exact_1N = key_scores(query_BQRH[question], mask_BQ[question], keys_NJRH, padding_P)
        scores_BN[row, candidates] = exact_1N[0]
    return scores_BN


@torch.no_grad()
def bank_codes(bank: BankReader, selector: Selector) -> Codes:
    """Return the codes of all blocks, and keep them in a file beside a bank that is one file.

    Only the codes of blocks that are new are made. Without a place for the file they are made
    again by the next process.
    """
    now = bank.snapshot()
    index = key_index(now, selector)
    if index.codes is None:
        index.codes = _stored_codes(now, selector)
    if index.codes is None:
        space = _fit(now, selector)
        parts = [_codes_of(now, selector, space, part_n) for part_n in _rows(np.arange(len(now)))]
        index.codes = Codes.of(space, np.concatenate(parts))
    return index.codes


def _stored_codes(now: Snapshot, selector: Selector, *, again: bool = True) -> Codes | None:
    """Return the codes in the file beside a bank, which gets those it lacks; None without one.

    A damaged file is deleted and made again.
    """
    path = now.path
    if path is None:
        return None
    (view,) = now.views
    ids_N = view.columns.ids[now.held.start : now.held.stop]
    try:
        with closing(CodesFile(path, view.head.id, selector.digest())) as file:
            space = file.space(lambda: _fit(now, selector))
            if len(space.mean_E) != selector.w_key.out_features:
                raise damaged(file.path, "its mean is not that of this selector's keys")
            codes_NW, is_known_N = file.read(ids_N, space.words)
            missing_n = np.flatnonzero(~is_known_N)
            if len(missing_n):
                logger.warning("making codes of %d blocks of bank '%s'", len(missing_n), path)
            for part_n in _rows(missing_n):
                codes_NW[part_n] = _codes_of(now, selector, space, part_n)
                file.add(ids_N[part_n], codes_NW[part_n])
    except DamagedBankError:
        delete_database(codes_path(path))
        return _stored_codes(now, selector, again=False) if again else None
    except BankError as error:
        logger.warning("%s; the codes of the bank are not stored", error)
        return None
    return Codes.of(space, codes_NW)


def _fit(bank: Snapshot, selector: Selector) -> CodeSpace:
    """Fit a space of codes to blocks from all over a bank."""
    sample_n = np.linspace(0, len(bank) - 1, min(SAMPLE, len(bank))).astype(np.int64)
    return CodeSpace.fit(_means(bank, selector, sample_n))


def _codes_of(
    bank: Snapshot, selector: Selector, space: CodeSpace, blocks_n: NDArray[np.int64]
) -> NDArray[np.uint64]:
    return space.codes(_means(bank, selector, blocks_n))


def _means(bank: Snapshot, selector: Selector, blocks_n: NDArray[np.int64]) -> Tensor:
    """Return the mean keys of some blocks `[n, E]`."""
    parts = []
    for part in scan_ranges(len(blocks_n)):
        blocks = blocks_n[part.start : part.stop].tolist()
        padding_P = (bank.slot_tokens(blocks).flatten() == 0).nonzero()[:, 0]
        parts.append(mean_keys(keys_of(bank, selector, blocks), padding_P))
    return torch.cat(parts)


def _rows(blocks_n: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split blocks into what a row of the file holds."""
    for start in range(0, len(blocks_n), ROW):
        yield blocks_n[start : start + ROW]


def key_scores(
    query_BQRH: Tensor, query_mask_BQ: Tensor, keys_NJRH: Quantized, padding_P: Tensor
) -> Tensor:
    """Compute `selector.block_scores` for questions that share one bank, in bounded memory.

    Args:
        query_BQRH: unit vectors, one for each question token and head.
        query_mask_BQ: False where a question token is padding, on the CPU; padding is on the right.
        keys_NJRH: unit vectors in their stored type; never copied as a whole.
        padding_P: indices of padding among the N * J slots, in order, on the CPU.

    Returns:
        fp32 scores `[B, N]`.
    """
    blocks, slots = keys_NJRH.values.shape[:2]
    lengths = query_mask_BQ.sum(1).tolist()
    # The tokens of all questions are concatenated, so a long question does not pad the others.
    query_XRH = torch.cat([row[:count] for row, count in zip(query_BQRH, lengths, strict=True)])
    on_gpu = query_BQRH.device.type != "cpu"
    score = _scores_of_all_heads if on_gpu else _scores_head_by_head
    products = (PRODUCTS_ON_GPU if on_gpu else PRODUCTS) // (slots * max(1, len(query_XRH)))
    whole = 1 if on_gpu else _whole(slots)
    step = max(1, products // whole) * whole
    scores = []
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        first, last = torch.searchsorted(padding_P, torch.tensor([start, stop]) * slots).tolist()
        part_padding_P = padding_P[first:last] - start * slots
        if on_gpu:
            # A copy from unpinned memory would wait until the questions are encoded.
            part_padding_P = part_padding_P.pin_memory()
        part_padding_P = part_padding_P.to(query_XRH.device, non_blocking=True)
        total_XN = score(query_XRH, keys_NJRH[start:stop], part_padding_P)
        add = torch.Tensor.sum if on_gpu else _sum_in_order
        rows = [add(tokens_QN, 0) for tokens_QN in total_XN.split(lengths)]
        scores.append(torch.stack(rows) / query_XRH.shape[1])
    return torch.cat(scores, 1)


def _scores_head_by_head(query_XRH: Tensor, keys_NJRH: Quantized, padding_P: Tensor) -> Tensor:
    """Sum each token's best cosine per block over heads `[X, N]`; fits a CPU's cache."""
    wanted = len(keys_NJRH.values)
    keys_NJRH = _with_whole_columns(keys_NJRH)
    blocks, slots, heads = keys_NJRH.values.shape[:3]
    values_NJRH = _multipliable(keys_NJRH.values)
    total_XN = query_XRH.new_zeros(len(query_XRH), blocks, dtype=torch.float32)
    for head in range(heads):
        # One head at a time: its keys are a strided matrix, which the product does not copy.
        cosine_XL = _products(query_XRH[:, head], values_NJRH[:, :, head].flatten(0, 1).T)
        if keys_NJRH.scales is not None:
            cosine_XL *= keys_NJRH.scales[:, :, head].flatten()
        # Masked before the maximum: a padded slot at zero would beat a negative cosine.
        cosine_XL.index_fill_(1, padding_P, -torch.inf)
        total_XN += cosine_XL.view(-1, blocks, slots).amax(-1)
    return total_XN[:, :wanted]


def _whole(slots: int) -> int:
    """Return the smallest number of blocks with a multiple of `COLUMNS` slots."""
    return COLUMNS // math.gcd(slots, COLUMNS)


def _with_whole_columns(keys_NJRH: Quantized) -> Quantized:
    """Pad keys with copies of the first blocks to a multiple of `COLUMNS` slots."""
    blocks, slots = keys_NJRH.values.shape[:2]
    missing = -blocks % _whole(slots)
    if not missing:
        return keys_NJRH
    return join([keys_NJRH, keys_NJRH[[row % blocks for row in range(missing)]]])


def _sum_in_order(tokens_QN: Tensor, dim: int) -> Tensor:
    """Sum over question tokens; `sum` would add the last of many columns in another order."""
    total_N = tokens_QN[0].clone()
    for row_N in tokens_QN[1:]:
        total_N += row_N
    return total_N


def _scores_of_all_heads(query_XRH: Tensor, keys_NJRH: Quantized, padding_P: Tensor) -> Tensor:
    """Do the same in one product, for a GPU, where a call costs more than a little arithmetic."""
    blocks, slots = keys_NJRH.values.shape[:2]
    values_LRH = _multipliable(keys_NJRH.values).flatten(0, 1)
    cosine_RXL = _products(query_XRH.transpose(0, 1), values_LRH.permute(1, 2, 0))
    if keys_NJRH.scales is not None:
        cosine_RXL *= keys_NJRH.scales.flatten(0, 1).T[:, None]
    if len(padding_P):
        cosine_RXL.index_fill_(2, padding_P, -torch.inf)
    return cosine_RXL.unflatten(-1, (blocks, slots)).amax(-1).sum(0)


def _multipliable(values: Tensor) -> Tensor:
    """Convert stored values to a type for products: float32 on a CPU, bfloat16 on a GPU.

    Both represent int8 and fp8 exactly, so scales can be applied to the products.
    """
    if values.device.type == "cpu":
        return values.float()
    return values if values.dtype == torch.float32 else values.bfloat16()


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return products `[X, L]` or `[R, X, L]` in float32, even under autocast.

    Queries are `[X, H]` or `[R, X, H]`, keys `[H, L]` or `[R, H, L]`; bfloat16 keys have heads.
    """
    with torch.autocast(queries.device.type, enabled=False):
        if keys.dtype == torch.float32:
            return queries.float() @ keys
        return torch.bmm(queries.to(keys.dtype), keys, out_dtype=torch.float32)
