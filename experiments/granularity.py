"""Figure codec_granularity_ablation: segment length T at one C, compression C at one T."""

from __future__ import annotations

from experiments.system import ablation
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import BASE, Variant

T, C, A = 128, 4, 64


def numbers(scale: Scale) -> list[Number]:
    """Two sweeps; the paper draws them without printing numbers."""
    rows: list[ablation.Row] = [
        (f"T={t}", _variant(scale, t, C), {}) for t in scale.segment_lengths
    ]
    rows += [(f"C={c}", _variant(scale, T, c), {}) for c in scale.compressions]
    return ablation.numbers(scale, rows)


def _variant(scale: Scale, segment_length: int, compression: int) -> Variant:
    if (segment_length, compression) == (T, C):
        return BASE
    changes = (f"model.segment_length={segment_length}", f"model.compression={compression}")
    # A recalled passage must fit into a segment.
    after = min(A, segment_length)
    stage1: tuple[str, ...] = (f"text.continuation={after}",)
    stage2: tuple[str, ...] = ()
    # The selected blocks contain the same amount of text, whatever their size.
    k = max(1, 2 * T // segment_length)
    if scale.disabled[0] != "all":
        stage2 = (f"data.budgets=[{k}]", f"data.max_blocks={k + 2}")
    if scale.name == "paper":
        stage1 += _budget(scale, segment_length + after)
    name = f"t{segment_length}-c{compression}"
    return Variant(name, changes, stage1, stage2, k=k)


def _budget(scale: Scale, width: int) -> tuple[str, ...]:
    """As many tokens of text for every window width; a text contains fewer long windows."""
    from sedem.training.recipe import read_entries

    text = read_entries(scale.recipe("stage1", scale.backbones[0], ""))["text"]
    windows, read = text["windows"] * (T + A) // width, text["tokens"] * (1 + width // 512)
    return f"text.windows={windows}", f"text.tokens={read}"


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
