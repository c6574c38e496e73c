"""`sedem adapt`: both training stages on a user's own documents, without labels.

Everything is kept in a working folder next to the checkpoint, OUT.work: the documents, the
questions made from them, and a recipe and a run for each stage. Existing results are reused, so a
killed adaptation resumes. The recipes also work with `sedem train`, like any others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sedem.checkpoint.folder import unfinished
from sedem.checkpoint.hub import CARD_FILE
from sedem.checkpoint.model_card import SUMMARY_FILE, adapted_card
from sedem.checkpoint.portable import portable_name
from sedem.config import CONFIG_FILE
from sedem.data.custom_questions import dump
from sedem.data.document_questions import questions
from sedem.data.document_split import packed, split_documents, tokens_of
from sedem.durable_files import write_text
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem.provenance import provenance
from sedem.training.adapt_measure import Scores, held_out_scores
from sedem.training.adapt_recipes import (
    BATCH,
    DOCUMENTS,
    HELD_OUT,
    QUESTIONS,
    Adaptation,
    continuation_of,
    recipes,
    start_of,
    steps_of,
)
from sedem.training.recipe import as_yaml, load_recipe
from sedem.training.run_setup import FINAL, processes
from sedem.training.stages import Stage1Recipe, Stage2Recipe, train_stage1, train_stage2
from sedem.types import Document

REQUEST_FILE, REPORT_FILE, BEFORE_FILE = "request.json", "adaptation.json", "before.json"
STAGE1_FILE, STAGE2_FILE = "stage1.yaml", "stage2.yaml"
MOST_QUESTIONS, MOST_HELD_OUT = 10_000, 200
"""Maximum questions made from the training documents, and from the held-out ones."""


@dataclass(frozen=True)
class Sizes:
    """Amount of data to train and to measure on.

    Attributes:
        documents: number of documents.
        tokens: number of their tokens.
        held_out_documents: number of held-out documents; 0 if it is the last part of a single one.
        held_out_tokens: number of held-out tokens.
        windows: approximate number of windows of stage 1.
        questions: number of questions of stage 2.
        questions_not_used: number of questions left out because of the maximum.
        held_out_questions: number of questions about the held-out text.
    """

    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    windows: int
    questions: int
    questions_not_used: int
    held_out_questions: int


def working_folder(out: Path) -> Path:
    """The folder of an adaptation's data, recipes and runs."""
    return out.with_name(f"{out.name}.work")


def finished(wanted: Adaptation, documents: Sequence[Document], out: Path) -> dict[str, Any] | None:
    """The report of a finished adaptation; None if it is not finished.

    Raises:
        CheckpointError: the folder contains something else.
        ConfigError: the folder contains another adaptation.
    """
    if not out.exists():
        return None
    if not (out / REPORT_FILE).is_file():
        raise CheckpointError(f"'{out}' exists already; give the name of a new folder")
    report: dict[str, Any] = json.loads((out / REPORT_FILE).read_text(encoding="utf-8"))
    _check_same(report["request"], _request(wanted, documents), out)
    return report


def prepare(
    wanted: Adaptation, documents: Sequence[Document], out: Path
) -> tuple[Sizes, tuple[int, int]]:
    """Write documents, questions and recipes into the working folder, unless they exist.

    Returns:
        The amount of data, and the steps of both stages.

    Raises:
        DataError: there is not enough text.
        ConfigError: the folder contains another adaptation, or the backbone cannot be used.
    """
    with processes().main_process_first():
        return _prepare(wanted, documents, working_folder(out))


def adapt(out: Path) -> dict[str, Any]:
    """Run the prepared training to its end, and write the checkpoint.

    Args:
        out: folder of the checkpoint.

    Returns:
        The report, which the checkpoint also contains: request, sizes, steps, and scores on the
        held-out data before and after training.
    """
    folder = working_folder(out)
    first = load_recipe(Stage1Recipe, folder / STAGE1_FILE)
    second = load_recipe(Stage2Recipe, folder / STAGE2_FILE)
    before = _before(first, second, folder / BEFORE_FILE)
    if not (Path(first.run.output) / SUMMARY_FILE).is_file():
        train_stage1(first)
    if not (Path(second.run.output) / SUMMARY_FILE).is_file():
        train_stage2(second)
    final = Path(second.run.output) / FINAL
    after = held_out_scores(first, second, str(final), "after")
    report = _report(folder, before, after, (first, second))
    if processes().is_main_process:
        _write(final, report, out)
    processes().wait_for_everyone()
    return report


def _prepare(
    wanted: Adaptation, documents: Sequence[Document], folder: Path
) -> tuple[Sizes, tuple[int, int]]:
    place, request = folder / REQUEST_FILE, _request(wanted, documents)
    if place.is_file():
        written = json.loads(place.read_text(encoding="utf-8"))
        _check_same(written["request"], request, folder)
        return Sizes(**written["sizes"]), tuple(written["steps"])
    config, backbone, start = start_of(wanted)
    training, held_out = split_documents(documents, wanted.held_out, wanted.seed)
    learned = questions(training, training, count=MOST_QUESTIONS, seed=wanted.seed)
    asked = questions(held_out, [*training, *held_out], count=MOST_HELD_OUT, seed=wanted.seed)
    width = config.segment_length + continuation_of(config)
    texts = [packed(some, backbone, width) for some in (training, held_out)]
    tokens = [tokens_of(some, backbone) for some in texts]
    windows = [sum(count // width for count in some) for some in tokens]
    sizes = Sizes(
        documents=len(documents),
        tokens=sum(map(sum, tokens)),
        held_out_documents=len(held_out) if len(documents) > 1 else 0,
        held_out_tokens=sum(tokens[1]),
        windows=windows[0],
        questions=len(learned.examples),
        questions_not_used=sum(learned.noted.values()),
        held_out_questions=len(asked.examples),
    )
    _check_enough(sizes, windows[1], width)
    steps = steps_of(wanted, sizes.windows, sizes.questions)
    folder.mkdir(parents=True, exist_ok=True)
    dump(learned.examples, folder / QUESTIONS)
    dump(asked.examples, folder / HELD_OUT)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for some in texts for text in some]
    write_text(folder / DOCUMENTS, "".join(f"{line}\n" for line in lines))
    first, second = recipes(wanted, config, start, folder.resolve(), steps, len(texts[1]))
    write_text(folder / STAGE1_FILE, as_yaml(first))
    write_text(folder / STAGE2_FILE, as_yaml(second))
    entries = {"request": request, "sizes": asdict(sizes), "steps": steps}
    # Written last: a folder that contains this file is complete.
    write_text(place, json.dumps(entries, indent=1) + "\n")
    return sizes, steps


def _check_enough(sizes: Sizes, held_out_windows: int, width: int) -> None:
    """Refuse documents that are too short to train on or to measure on."""
    enough = min(sizes.windows, sizes.questions) >= BATCH
    if enough and held_out_windows and sizes.held_out_questions:
        return
    raise DataError(
        f"the documents have {sizes.tokens:,} tokens, of which {sizes.held_out_tokens:,} are held "
        f"out; to train, {sizes.windows} windows of {width} tokens and {sizes.questions} questions "
        f"are left, and at least {BATCH} of each are needed; to measure, {held_out_windows} and "
        f"{sizes.held_out_questions}, and one of each is needed: give more or longer documents"
    )


def _request(wanted: Adaptation, documents: Sequence[Document]) -> dict[str, Any]:
    """The request, without folder and file names, which should not travel with a checkpoint."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode()).digest())
    entries = wanted.to_dict()
    return {**entries, "backbone": _told(wanted.backbone), "documents": digest.hexdigest()}


def _told(backbone: str) -> str:
    name = portable_name(backbone)
    return Path(name).name if Path(name).is_absolute() else name


def _check_same(written: Mapping[str, Any], request: Mapping[str, Any], folder: Path) -> None:
    changed = [name for name in request if written.get(name) != request[name]]
    if changed:
        told = ", ".join(
            "the documents differ"
            if name == "documents"
            else f"{name} was {written.get(name)}, is {request[name]}"
            for name in changed
        )
        raise ConfigError(
            f"'{folder}' holds another adaptation ({told}); give the same arguments and documents "
            "to go on with it, give another --out, or remove it"
        )


def _before(first: Stage1Recipe, second: Stage2Recipe, place: Path) -> Scores:
    """Scores before any training, measured only once."""
    if not place.is_file():
        scores = held_out_scores(first, second, first.start_from, "before")
        if processes().is_main_process:
            write_text(place, json.dumps(scores) + "\n")
        return scores
    return dict(json.loads(place.read_text(encoding="utf-8")))


def _report(
    folder: Path, before: Scores, after: Scores, stages: Sequence[Stage1Recipe | Stage2Recipe]
) -> dict[str, Any]:
    """The contents of the model card, in JSON types."""
    entries = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    runs = [
        json.loads((Path(stage.run.output) / SUMMARY_FILE).read_text(encoding="utf-8"))
        for stage in stages
    ]
    return {
        **entries,
        "batch": BATCH,
        "seconds": sum(run["seconds"] for run in runs),
        "trained_parameters": runs[-1]["trained_parameters"],
        "scores": {name: [before[name], after[name]] for name in after},
        **provenance(),
    }


def _write(final: Path, report: Mapping[str, Any], out: Path) -> None:
    """Write the checkpoint with its card; it appears complete or not at all."""
    entries = json.loads((final / CONFIG_FILE).read_text(encoding="utf-8"))
    with unfinished(out) as place:
        shutil.copytree(final, place, dirs_exist_ok=True)
        write_text(place / CARD_FILE, adapted_card(out.name, entries, report))
        write_text(place / REPORT_FILE, json.dumps(report, indent=1) + "\n")
