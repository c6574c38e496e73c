"""Segment length T at one C, and compression C at one T: the paper's figure."""

from __future__ import annotations

from experiments import ablation
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import BASE, Variant

T, C = 128, 4


def numbers(scale: Scale) -> list[Number]:
    """Two sweeps; the paper shows them as a picture without numbers."""
    rows = [(f"T={t}", _variant(t, C), {}) for t in scale.segment_lengths]
    rows += [(f"C={c}", _variant(T, c), {}) for c in scale.compressions]
    return ablation.numbers(scale, rows)


def _variant(segment_length: int, compression: int) -> Variant:
    if (segment_length, compression) == (T, C):
        return BASE
    changes = (f"model.segment_length={segment_length}", f"model.compression={compression}")
    # As much text behind the selected blocks, whatever their size.
    k = max(1, 2 * T // segment_length)
    budgets = (f"data.budgets=[{k}]", f"data.max_blocks={k + 2}")
    # A recalled span must fit into a segment.
    continuation = (f"text.continuation={min(64, segment_length)}",)
    name = f"t{segment_length}-c{compression}"
    return Variant(name, changes, continuation, budgets, k=k)


STUDY = Study(
    "granularity",
    "Granularity: segment length at C=4, compression at T=128 (Figure codec_granularity_ablation)",
    numbers,
    "The paper gives no numbers: quality falls with C, and grows with T up to 512. Losses of T=32 "
    "are over 32 tokens, the others over 64.",
    drawn="loss",
)
app = command(STUDY)

if __name__ == "__main__":
    app()
