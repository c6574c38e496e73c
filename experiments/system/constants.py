"""One answer to every question, chosen on training data: the score reached without reading."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.system.cells import Cell
from experiments.system.scales import ROOT, Scale
from sedem.evaluation.metrics import normalize, token_f1
from sedem.types import Answer, Document

if TYPE_CHECKING:
    from sedem.data.examples import Example
    from sedem.training.recipe import DataSource

RULER = "ruler-qa2"
"""A schema without training questions."""


def constant_cell(questions: str, answer: str = "") -> Cell:
    """The cell of a constant answer to a set.

    Args:
        questions: key of the set.
        answer: the answer; empty means the best one on training questions.
    """
    return Cell("constant", questions=questions, answer=answer)


def measure_constant(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Give one answer to every question of a set and score it like any other method.

    Args:
        cell: the set, and the answer unless it is chosen.
        scale: gives sets and recipes.
        data: folder of the data files.

    Returns:
        The result of the harness. The settings contain the answer. If it was chosen, they also
        contain the questions used to choose it, and its mean F1 on them.
    """
    from sedem.data.question_sets import identify
    from sedem.evaluation.readers import evaluate_reader
    from sedem.evaluation.run import sample

    questions = scale.sets[cell.questions]
    settings: dict[str, Any] = {
        **identify(questions.found(data), questions.split),
        "schema": questions.schema,
        "records": questions.records,
        "options": dict(questions.options),
        "limit": questions.limit,
        "seed": 0,
        "answer": cell.answer,
    }
    if not cell.answer:
        training, sources = training_questions(scale, cell.questions, data)
        settings["answer"], f1 = best_constant(training)
        settings["chosen"] = {"sources": sources, "questions": len(training), "f1": round(f1, 2)}
    examples = sample(questions.examples(data), questions.limit, 0)
    out = scale.runs / "evaluation" / cell.name
    return evaluate_reader(Constant(settings["answer"]), examples, out, settings=settings)


class Constant:
    """A reader that never reads.

    Args:
        text: its answer to every question.
    """

    name = "constant"

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, documents: Sequence[Document]) -> None:
        """Keep nothing."""

    def answer(self, memory: None, question: str) -> Answer:
        """Return the constant answer; nothing is timed."""
        return Answer(self.text, (), 0, 0, {}, "end", self.name)


def best_constant(examples: Sequence[Example]) -> tuple[str, float]:
    """The reference with the highest mean F1 over all questions, and that F1.

    Ties are broken by frequency, then by order.
    """
    spelled: dict[str, str] = {}
    counts: Counter[str] = Counter()
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for place, example in enumerate(examples):
        for reference in example.answers:
            plain = normalize(reference)
            spelled.setdefault(plain, reference)
            counts[plain] += 1
            for token in plain.split():
                holders[token].add(place)
    best, total = "", -1.0
    for plain, _ in counts.most_common():
        # Only questions that share a token can score, and each scores at most 100.
        sharing = sorted(set().union(*(holders[token] for token in plain.split())))
        if 100.0 * len(sharing) <= total:
            continue
        found = sum(token_f1(plain, examples[place].answers) for place in sharing)
        if found > total:
            best, total = spelled[plain], found
    return best, total / len(examples)


def training_questions(
    scale: Scale, questions: str, data: Path
) -> tuple[list[Example], list[dict[str, Any]]]:
    """The training questions of an evaluation set, and their sources.

    These are the stage-2 training questions of the main configuration with the schema of the set.

    Args:
        scale: gives sets and recipes.
        questions: key of the set.
        data: folder of the data files.
    """
    from sedem.data.question_sets import open_examples
    from sedem.training.recipe import load_recipe
    from sedem.training.sources import located
    from sedem.training.stages import Stage2Recipe

    if scale.name == "smoke":
        # Every model of this scale is trained on the fixtures.
        return scale.sets[questions].examples(data), []
    path = ROOT / "recipes" / "nano" / "stage2.yaml"
    if scale.name == "paper":
        path = scale.recipe("stage2", scale.backbones[0], questions)
    found, sources = [], []
    for source in load_recipe(Stage2Recipe, path).data.training:
        if _schema(source, data) not in (scale.sets[questions].schema, questions):
            continue
        location, options = located(source, data)
        found += open_examples(location, source.set, records=source.records, **options).examples
        sources.append(source.model_dump(include={"path", "set", "records", "options"}))
    return found, sources


def _schema(source: DataSource, data: Path) -> str:
    """The schema of a recipe's data source; public names are schemas."""
    from sedem.data.question_sets import sniff

    path = data / source.path
    return source.set or (sniff(path) if path.exists() else source.path)
