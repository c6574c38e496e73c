"""Table lora_ablation: the decoder with and without adapters."""

from __future__ import annotations

from experiments.system import ablation, paper
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import BASE, Variant

FROZEN = Variant("frozen-decoder", stage2=("model.lora_rank=0",))
DECODERS = (
    ("frozen decoder", FROZEN, "frozen_decoder_f1"),
    ("adapted decoder", BASE, "adapted_decoder_f1"),
)


def numbers(scale: Scale) -> list[Number]:
    """SeDeM with a frozen and with an adapted decoder."""
    rows = []
    for label, variant, column in DECODERS:
        printed = {
            f"{key} f1": paper.number("tab:lora_ablation", column, dataset=paper.DATASETS[key])
            for key in ("hotpotqa", "qasper")
        }
        rows.append((label, variant, printed))
    return ablation.numbers(scale, rows)


STUDY = Study("lora", "Adapters on the decoder (Table lora_ablation)", numbers)

if __name__ == "__main__":
    command(STUDY)()
