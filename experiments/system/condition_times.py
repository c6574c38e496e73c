"""Times to the first token when the decoder reads blocks as memory, as text, or as both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from sedem.config import Condition
from sedem.data.examples import Example

CONDITIONS: tuple[Condition, ...] = get_args(Condition)
BUDGETS = (1, 2, 4, 8)
ROUNDS = 3


def condition_times(folder: Path, examples: Sequence[Example], dtype: str) -> dict[str, Any]:
    """Milliseconds to the first token of single questions to prebuilt banks, by condition and K.

    Kept keys and values exist before the first question is timed. Conditions alternate, so that a
    busy machine slows them all down equally. The minimum of `ROUNDS` times counts.

    Args:
        folder: the checkpoint.
        examples: the questions.
        dtype: data type of the backbone.

    Returns:
        `times` by condition and K, and `bytes` per token of context by condition.
    """
    import torch

    from sedem import Decoding, SeDeM
    from sedem.provenance import provenance

    model = SeDeM.from_pretrained(folder, dtype=getattr(torch, dtype))
    times: dict[Condition, dict[int, list[float]]] = {
        condition: {k: [] for k in BUDGETS} for condition in CONDITIONS
    }
    memory = text = tokens = 0
    for example in examples:
        bank = model.read(example.documents)
        if model.config.block_context == "independent":
            model.warm(bank)
        memory += bank.memory_bytes
        text += sum(len(document.text.encode()) for document in example.documents)
        tokens += bank.tokens
        for k in BUDGETS:
            asked: dict[Condition, list[float]] = {condition: [] for condition in CONDITIONS}
            for _ in range(1 + ROUNDS):
                for condition, found in asked.items():
                    answer = model.answer(
                        bank,
                        example.question,
                        k=k,
                        condition=condition,
                        decoding=Decoding(max_new_tokens=1),
                    )
                    found.append(answer.timings["ttft_ms"])
            for condition, (_, *timed) in asked.items():
                times[condition][k].append(min(timed))
    return {
        "times": {
            condition: {str(k): statistics.median(found) for k, found in by_k.items()}
            for condition, by_k in times.items()
        },
        "bytes": {
            # The selector needs the memory of every block, whatever the decoder reads.
            condition: round((memory + (text if condition != "memory" else 0)) / tokens, 1)
            for condition in CONDITIONS
        },
        "questions": len(examples),
        **provenance(),
    }
