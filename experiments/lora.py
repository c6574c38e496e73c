"""The decoder with and without adapters."""

from __future__ import annotations

from experiments import ablation, paper
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import BASE, Variant

FROZEN = Variant("frozen-decoder", stage2=("model.lora_rank=0",))


def numbers(scale: Scale) -> list[Number]:
    """SeDeM with a frozen and with an adapted decoder."""
    rows = []
    for label, variant, column in (
        ("frozen decoder", FROZEN, "frozen_decoder_f1"),
        ("adapted decoder", BASE, "adapted_decoder_f1"),
    ):
        printed = {
            f"{key} f1": paper.number("tab:lora_ablation", column, dataset=name)
            for key, name in (("hotpotqa", "HotpotQA-Distractor"), ("qasper", "QASPER"))
        }
        rows.append((label, variant, printed))
    return ablation.numbers(scale, rows)


STUDY = Study("lora", "Adapters on the decoder (Table lora_ablation)", numbers)
app = command(STUDY)

if __name__ == "__main__":
    app()
