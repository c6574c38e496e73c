"""A cell: one measurement, and the file that contains its result.

The file is results/SCALE/STUDY/NAME.json. It contains the numbers, the settings, the machine, the
versions and the commit. STUDY is the study that measured the cell; other studies find it by its
name, which is unique within a scale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.system.scales import Scale
from experiments.system.variants import Variant

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        measure: a key of `measures.MEASURES`, where each is described.
        method: a name of `sedem eval --list`.
        variant: the model; raw-text methods use its backbone.
        stage: the training stage, for "training".
        backbone: the backbone whose cost is counted, or the shape that is timed on random weights.
        questions: key of a set of the scale.
        trained_for: the set that the model was trained for; empty means the evaluation set.
        k: selection budget; None means the set's own.
        control: the blocks that SeDeM uses. With "gold", a trained baseline is given only documents
            with evidence, also in training if the scale says so.
        setting: which recipe for questions, for a trained baseline with several.
        shipped: whether the trained baseline shipped with sedem answers.
        shift: number of tokens by which segment boundaries are moved.
        max_new_tokens: answer limit; None means the set's own.
        dtype: data type of the backbone; empty means the scale's.
        slots: type of the stored slots; empty means bfloat16.
        limit: number of questions; None means the set's own.
        form: a key of `forms.FORMS`; empty means the paper's form.
        condition: form in which the decoder reads blocks; empty means the model's own.
        kept: type in which keys and values of blocks are kept; empty means unchanged.
        answer: for "constant", the answer; empty means the best one on training questions.
    """

    measure: str = "answers"
    method: str = "sedem"
    variant: Variant | None = None
    stage: str = ""
    backbone: str = ""
    questions: str = ""
    trained_for: str = ""
    k: int | str | None = None
    control: str = "selected"
    setting: str = ""
    shipped: bool = False
    shift: int = 0
    max_new_tokens: int | None = None
    dtype: str = ""
    slots: str = ""
    limit: int | None = None
    form: str = ""
    condition: str = ""
    kept: str = ""
    answer: str = ""

    @property
    def name(self) -> str:
        """The name of its file; fields with default values are left out."""
        parts = [
            self.measure if self.measure != "answers" else "",
            f"{self.method}{self.setting}" if self.method != "sedem" else "",
            self.variant.name if self.variant else "",
            self.stage,
            self.backbone,
            self.questions,
            f"trained-{self.trained_for}" if self.trained_for else "",
            "" if self.k is None else f"k{self.k}",
            self.control if self.control != "selected" else "",
            "shipped" if self.shipped else "",
            f"shift{self.shift}" if self.shift else "",
            f"{self.max_new_tokens}-tokens" if self.max_new_tokens else "",
            self.dtype,
            f"slots-{self.slots}" if self.slots else "",
            f"n{self.limit}" if self.limit else "",
            self.form,
            self.condition,
            f"kept-{self.kept}" if self.kept else "",
            self.answer,
        ]
        return ".".join(part for part in parts if part)

    def path(self, scale: Scale) -> Path | None:
        """The file of its result; None if it was not measured."""
        return next(results_of(scale).glob(f"*/{self.name}.json"), None)

    def read(self, scale: Scale) -> dict[str, Any] | None:
        """Its result; None if it was not measured."""
        path = self.path(scale)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def results_of(scale: Scale) -> Path:
    """The folder of a scale's results; nano's and paper's are committed, others are with runs."""
    committed = scale.name in ("nano", "paper")
    return RESULTS / scale.name if committed else scale.runs / "results"
