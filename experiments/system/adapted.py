"""A backbone adapted to documents without labels, and the models it is compared with.

The documents come from the study recipes: articles of stage 1, and the paragraphs of the first
questions of stage 2 without their questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.system.scales import Scale, tiny_backbone
from experiments.system.variants import flow

if TYPE_CHECKING:
    from sedem.types import Document

ARTICLES = 40
"""Maximum number of articles among the documents."""
COMPRESSION = 2
"""C, as in sedem-nano."""
STEPS = {"smoke": (2, 2), "nano": (150, 100)}
"""Steps of both stages by scale; the study is about small backbones."""


def without_labels(scale: Scale, data: Path) -> Path:
    """Train like `sedem adapt`.

    Args:
        scale: gives backbone, documents and steps.
        data: folder that the recipes' data paths are relative to.

    Returns:
        The final checkpoint of the second stage, in the folder of that run.
    """
    from sedem.training.adapt import Adaptation, adapt, finished, prepare, working_folder

    wanted = Adaptation(
        backbone=_backbone(scale),
        compression=COMPRESSION,
        steps=STEPS[scale.name],
    )
    out, documents = scale.runs / "adapt" / "adapted", _documents(scale, data)
    if finished(wanted, documents, out) is None:
        prepare(wanted, documents, out)
        adapt(out)
    return working_folder(out) / "stage2" / "final"


def with_labels(scale: Scale, data: Path) -> Path:
    """Train the second stage of the adaptation on the labelled questions of the study recipes."""
    from experiments.system.training import run_recipe

    run = without_labels(scale, data).parent
    questions = _entries(scale, "stage2")["data"]["training"]
    overrides = [
        f"data_root={data}",
        f"data.training={flow(questions)}",
        "data.evaluation=[]",
        f"run.output={scale.runs / 'adapt' / 'labelled'}",
    ]
    return run_recipe(run.with_name("stage2.yaml"), overrides) / "final"


def untrained_checkpoint(scale: Scale, data: Path) -> Path:
    """Write the checkpoint that `sedem init` makes from the backbone."""
    from sedem.checkpoint.folder import write
    from sedem.checkpoint.untrained import untrained

    folder = scale.runs / "adapt" / "untrained"
    if not folder.is_dir():
        model = untrained(_backbone(scale))
        write(folder, model.config, model.parts(), model.decoder)
    return folder


ADAPTED: Mapping[str, Callable[[Scale, Path], Path]] = {
    "untrained": untrained_checkpoint,
    "without labels": without_labels,
    "with labels": with_labels,
}
"""The functions that make the checkpoints, by what their backbone was trained with."""


def _entries(scale: Scale, stage: str) -> dict[str, Any]:
    """A study recipe with the overrides of the scale."""
    from sedem.training.recipe import read_entries

    recipe = scale.recipe(stage, scale.backbones[0], scale.ablation[0])
    own = scale.stage1 if stage == "stage1" else scale.stage2
    return read_entries(recipe, [*scale.overrides, *own])


def _backbone(scale: Scale) -> str:
    if scale.name == "smoke":
        tiny_backbone()
    return str(_entries(scale, "stage1")["model"]["encoder"])


def _documents(scale: Scale, data: Path) -> list[Document]:
    from sedem import Document
    from sedem.data.articles import read_articles
    from sedem.data.question_sets import open_examples
    from sedem.training.recipe import DataSource
    from sedem.training.sources import located

    text = _entries(scale, "stage1")["text"]
    articles = [
        Document(title, article)
        for title, article in read_articles(data / text["path"], slice(ARTICLES))
        if title not in text.get("exclude_titles", ())
    ]
    source = DataSource.from_entries(_entries(scale, "stage2")["data"]["training"][0], "the recipe")
    location, options = located(source, data)
    examples = open_examples(location, source.set, records=source.records, **options).examples
    paragraphs = dict.fromkeys(d.text for example in examples for d in example.documents)
    return articles + [Document(f"paragraph {i}", text) for i, text in enumerate(paragraphs)]
