"""Figure codec_granularity_ablation: segment length T at one C, compression C at one T."""

from __future__ import annotations

from experiments.system import ablation
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import BASE, Variant

T, C = 128, 4


def numbers(scale: Scale) -> list[Number]:
    """Two sweeps; the paper draws them and prints no numbers."""
    rows: list[ablation.Row] = [(f"T={t}", _variant(t, C), {}) for t in scale.segment_lengths]
    rows += [(f"C={c}", _variant(T, c), {}) for c in scale.compressions]
    return ablation.numbers(scale, rows)


def _variant(segment_length: int, compression: int) -> Variant:
    if (segment_length, compression) == (T, C):
        return BASE
    changes = (f"model.segment_length={segment_length}", f"model.compression={compression}")
    # The selected blocks hold the same amount of text, whatever their size.
    k = max(1, 2 * T // segment_length)
    budgets = (f"data.budgets=[{k}]", f"data.max_blocks={k + 2}")
    # A recalled passage must fit into a segment.
    continuation = (f"text.continuation={min(64, segment_length)}",)
    name = f"t{segment_length}-c{compression}"
    return Variant(name, changes, continuation, budgets, k=k)


STUDY = Study(
    "granularity",
    "Granularity: segment length at C=4, compression at T=128 (Figure codec_granularity_ablation)",
    numbers,
    "The paper gives no numbers: quality falls with C, and grows with T up to 512. At T=32 losses "
    "are over 32 tokens, elsewhere over 64.",
    drawn=("loss",),
)

if __name__ == "__main__":
    command(STUDY)()
