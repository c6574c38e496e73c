"""A cell: one measurement, and the file that contains its result.

The file is results/SCALE/STUDY/NAME.json. It contains the numbers, the settings, the machine, the
versions and the commit. STUDY is the study that measured the cell; other studies find it by its
name, which is unique within a scale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.system.models import (
    PAPER_FORM,
    PLANNED,
    Planned,
    Variant,
    baseline_checkpoint,
    checkpoint,
    run_of_stage,
)
from experiments.system.scales import Scale, recipe_exists
from sedem_lab.baselines.registry import METHODS, TRAINED
from sedem_lab.data.examples import Example
from sedem_lab.evaluation.run import sample

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
        shift: number of tokens by which segment boundaries are moved.
        max_new_tokens: answer limit; None means the set's own.
        dtype: data type of the backbone; empty means the scale's.
        slots: type of the stored slots; empty means bfloat16.
        limit: number of questions; None means the set's own.
        form: a key of `models.FORMS`; empty means the paper's form.
        condition: form in which the decoder reads blocks; empty means the model's own.
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
    shift: int = 0
    max_new_tokens: int | None = None
    dtype: str = ""
    slots: str = ""
    limit: int | None = None
    form: str = ""
    condition: str = ""
    answer: str = ""

    @property
    def name(self) -> str:
        """The name of its file; fields with default values are left out."""
        kind = self.measure if self.measure != "answers" else ""
        method = f"{self.method}{self.setting}" if self.method != "sedem" else ""
        control = self.control if self.control != "selected" else ""
        model = self.variant.name if self.variant else ""
        parts = [kind, method, model, self.stage, self.backbone, self.questions]
        parts += [f"trained-{self.trained_for}" if self.trained_for else ""]
        parts += ["" if self.k is None else f"k{self.k}", control]
        parts += [f"shift{self.shift}" if self.shift else ""]
        parts += [f"{self.max_new_tokens}-tokens" if self.max_new_tokens else "", self.dtype]
        parts += [f"slots-{self.slots}" if self.slots else ""]
        parts += [f"n{self.limit}" if self.limit else "", self.form, self.condition, self.answer]
        return ".".join(filter(None, parts))

    def path(self, scale: Scale) -> Path | None:
        """The file of its result; None if it was not measured."""
        place = results_of(scale).absolute(), self.name
        if not (place in _FOUND and _FOUND[place].is_file()):
            known = next(place[0].glob(f"*/{self.name}.json"), None)
            if known is None:
                return None
            _FOUND[place] = known
        return _FOUND[place]

    def read(self, scale: Scale) -> dict[str, Any] | None:
        """Its result, which all readers share; None if it was not measured."""
        path = self.path(scale)
        return None if path is None else _parsed(path, path.stat().st_mtime_ns)


_FOUND: dict[tuple[Path, str], Path] = {}
"""Files of results by folder and name: a page has thousands of numbers, of a few hundred files."""


@cache
def _parsed(path: Path, changed: int) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def results_of(scale: Scale) -> Path:
    """The folder of a scale's results; nano's and paper's are committed, others are with runs."""
    committed = scale.name in ("nano", "paper") and not scale.stand_in and not scale.changes
    return RESULTS / scale.name if committed else scale.runs / "results"


def checkpoint_of(cell: Cell, scale: Scale, data: Path) -> Path:
    """The checkpoint of a cell's method; it is trained first if it is missing."""
    variant = cell.variant
    assert variant is not None, f"{cell.name} needs a variant"
    asked = scale.sets.get(cell.questions)
    trained_for = cell.trained_for or (asked.trained_for if asked else "")
    trained_for = trained_for or cell.questions or scale.ablation[0]
    if cell.method not in TRAINED:
        return checkpoint(variant, scale, trained_for, data, cell.form or PAPER_FORM)
    own = variant.backbone or scale.backbones[0], trained_for, data
    gold = cell.control == "gold" and scale.gold_trained
    return baseline_checkpoint(cell.method, scale, *own, setting=cell.setting, gold=gold)


def train(cell: Cell, scale: Scale, data: Path) -> None:
    """Train the models that a cell is measured on, if they are missing."""
    if cell.variant is None or cell.measure == "lengths":
        return
    if cell.measure in ("memory", "training"):
        run_of_stage(cell.variant, scale, cell.stage or "stage1", data)
    else:
        checkpoint_of(cell, scale, data)


def trainings(cell: Cell, scale: Scale, data: Path) -> dict[Path, Planned]:
    """The runs that a cell needs by their folders, finished ones too; nothing is trained."""
    token = PLANNED.set({})
    try:
        train(cell, scale, data)
        return PLANNED.get() or {}
    finally:
        PLANNED.reset(token)


def shareable(cell: Cell, scale: Scale, data: Path, count: int) -> bool:
    """Whether so many processes can share the batches of every run that a cell still needs."""
    return all(
        (folder / "training.json").is_file() or run.recipe.optimization.accumulation % count == 0
        for folder, run in trainings(cell, scale, data).items()
    )


def answer_tokens(cell: Cell, scale: Scale) -> int:
    """The limit of an answer of a cell, in tokens."""
    limit = cell.max_new_tokens or scale.sets[cell.questions].max_new_tokens
    return min(limit, scale.answer_tokens or limit)


def examples_of(cell: Cell, scale: Scale, data: Path) -> list[Example]:
    """The sample of questions of a cell."""
    questions = scale.sets[cell.questions]
    return sample(questions.examples(data), cell.limit or questions.limit, 0)


# The methods of the paper's tables, by the paper's names and ours.

PEERS = {
    "Backbone (Frozen)": "full-context",
    "Backbone (Fine-Tuned)": "full-context-tuned",
    "LongLLMLingua": "longllmlingua",
    "HMT": "hmt",
    "ICAE": "icae",
    "500xCompressor": "500x",
    "Activation Beacon": "beacon",
    "ComprExIT (reference)": "comprexit",
    "ComprExIT (matched)": "comprexit",
    "SeDeM": "sedem",
}
SETTINGS = {"ComprExIT (matched)": "128"}
"""The recipes of a method that has several; the first recipe has no name."""
PAPER_SETTINGS = {"Activation Beacon": "1024"}
"""The same where they are the paper's own, but compress nothing in the contexts of other scales."""
PAPER_SETS = {"comprexit": ("hotpotqa", "2wiki")}
"""The sets that the paper trains a method for, if not all; the paper scale trains no others."""
SELECTING = ("sedem", "bm25", "rag")
"""Methods with a selection budget."""


def paper_cell(scale: Scale, method: str, variant: Variant, questions: str) -> Cell | None:
    """The answers of a method, by the paper's name, at the set's own K; see `answer_cell`."""
    name = PEERS[method]
    k = scale.sets[questions].k if name == "sedem" else None
    setting = SETTINGS.get(method, "")
    if scale.name == "paper":
        setting = PAPER_SETTINGS.get(method, setting)
    return answer_cell(scale, variant, questions, name, k=k, setting=setting)


def answer_cell(
    scale: Scale, variant: Variant, questions: str, method: str = "sedem", **fields: Any
) -> Cell | None:
    """The answers of a method to a set; None if sedem lacks the method.

    Args:
        variant: the model, or the one whose backbone the method uses.
        method: its name in `sedem eval --list`. A trained one has no cell without a recipe for the
            backbone, nor at paper scale on a set that the paper does not train it for.
        fields: other fields of the cell. Without `limit`, slow methods have the scale's number of
            questions. Without `k`, raw-text RAG picks as many paragraphs as SeDeM picks blocks.
    """
    if method not in METHODS:
        return None
    asked = scale.sets[questions]
    backbone = variant.backbone or scale.backbones[0]
    recipe = scale.baseline_recipe(method, "questions", backbone, fields.get("setting", ""))
    if method in TRAINED and not recipe_exists(recipe):
        return None
    if scale.name == "paper" and questions not in PAPER_SETS.get(method, (questions,)):
        return None
    limit = scale.costly_limit if method == "bm25" or method in TRAINED else None
    limit = scale.slowest_limit if method == "longllmlingua" else limit
    if limit and asked.limit and asked.limit <= limit:
        limit = None
    fields = {"limit": limit, **fields}
    if method == "rag":
        fields.setdefault("k", asked.k)
    return Cell(method=method, variant=variant, questions=questions, **fields)


def answers_by_k(scale: Scale, questions: str, variant: Variant, limit: int, **fields: Any) -> Cell:
    """Answers at every K over the same banks, in at most 32 tokens at nano; see "budgets"."""
    limit, tokens = (limit, 32) if scale.name == "nano" else (scale.limit, None)
    own = {"limit": limit, "max_new_tokens": tokens, "dtype": "float32", **fields}
    return Cell("budgets", variant=variant, questions=questions, **own)
