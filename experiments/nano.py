"""sedem-nano and its results: `python -m experiments.nano run --data DIR` fills, `table` renders.

One JSON file a cell in results/nano, with settings, machine and versions; a cell that is there is
not measured again, so that a killed run goes on. `table` writes the tables of README.md and of the
model card from these files and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import paper

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "nano"
FACTS = Path(__file__).parent / "data" / "exact-facts-evaluation.jsonl.xz"
SHIPPED = ROOT / "checkpoints" / "sedem-nano"
CARD = SHIPPED / "README.md"
PICTURE = ROOT / "docs" / "nano-results.svg"

app = typer.Typer(add_completion=False, no_args_is_help=True)


@dataclass(frozen=True)
class Questions:
    """A set of evaluation questions: no training recipe reads these records."""

    title: str
    path: str
    schema: str
    records: str | None = None
    limit: int = 1000


SETS = {
    "squad-10": Questions("SQuAD-10", "squad/dev-24-articles.json", "squad"),
    "exact-facts": Questions("exact facts", str(FACTS), "own"),
    "hotpotqa": Questions("HotpotQA", "hotpotqa/hf-schema-300-b.jsonl", "hotpotqa"),
    "2wiki": Questions("2Wiki", "2wikimultihopqa/native-500.json", "2wikimultihopqa", "400:"),
    "musique": Questions("MuSiQue", "musique/native-100.json", "musique", "60:"),
    "covidqa": Questions("COVID-QA", "covidqa/covidqa-98-papers.json", "covidqa", "70:", 200),
}


@dataclass(frozen=True)
class Reading:
    """One way to answer: a row of the tables."""

    name: str
    title: str
    method: str = "sedem"
    k: int | str | None = None
    control: str = "selected"
    limit: int | None = None
    max_new_tokens: int = 32
    dtype: str = "bfloat16"
    sets: tuple[str, ...] = field(default=("squad-10", "exact-facts"))


EVERY = tuple(SETS)
SEDEM = (
    Reading("k1", "K=1, selected", k=1),
    Reading("k2", "**K=2, selected**", k=2, sets=EVERY),
    Reading("k4", "K=4, selected", k=4, limit=500, sets=EVERY),
    Reading("gold-k2", "K=2, gold first", k=2, control="gold", limit=500),
    Reading("all", "every block", k="all", limit=200),
    Reading("wrong-k2", "K=2, wrong blocks", k=2, control="wrong", limit=500),
    Reading("none", "no memory", k=2, control="none", limit=500, sets=EVERY),
)
# What `sedem eval sedem --data FILE -k 2 --limit 500` gives as it stands.
COMMAND = Reading(
    "command", "", k=2, limit=500, max_new_tokens=64, dtype="float32", sets=("squad-10",)
)
# A base model does not stop by itself: fewer examples, the interval says so.
TEXT = (
    Reading("full-context", "every paragraph as text", "full-context", limit=200, sets=EVERY),
    Reading("bm25", "BM25's two paragraphs as text", "bm25", k=2, limit=200, sets=EVERY),
)


@app.command()
def run(
    data: Annotated[Path, typer.Option(help="Folder of the public sets.")],
    label: Annotated[str, typer.Option(help="What the model's cells are called.")] = "c2",
    model: Annotated[str, typer.Option(help="Checkpoint.")] = str(SHIPPED),
    stage1: Annotated[str | None, typer.Option(help="Measure this checkpoint's memory.")] = None,
    cache: Annotated[Path, typer.Option(help="Folder for tokenized text.")] = Path("runs/cache"),
    text: Annotated[bool, typer.Option(help="Measure the raw-text readers too.")] = False,
    only: Annotated[str | None, typer.Option(help="Cells whose name holds this.")] = None,
) -> None:
    """Measure what is not measured yet."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for reading in (*SEDEM, COMMAND, *(TEXT if text else ())):
        for name in reading.sets:
            owner = label if reading.method == "sedem" else "text"
            cell = f"{owner}-{name}-{reading.name}"
            jobs[cell] = lambda r=reading, n=name, c=cell: _answers(r, SETS[n], data, model, c)
    for name in ("squad-10", "exact-facts"):
        jobs[f"bm25-blocks-{name}"] = lambda n=name: _block_recall(SETS[n], data, model)
    if stage1 is not None:
        jobs[f"{label}-continuation"] = lambda: _continuation(stage1, data, cache)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for cell, job in jobs.items():
        path = RESULTS / f"{cell}.json"
        if path.is_file() or (only and only not in cell):
            continue
        path.write_text(json.dumps(job(), indent=1) + "\n", encoding="utf-8")
        typer.echo(f"{cell}: {_headline(json.loads(path.read_text(encoding='utf-8')))}")


def _answers(
    reading: Reading, questions: Questions, data: Path, model: str, cell: str
) -> dict[str, Any]:
    from sedem.evaluation.command import run_evaluation

    result = run_evaluation(
        reading.method,
        data / questions.path,
        checkpoint=model,
        schema=questions.schema,
        records=questions.records,
        limit=reading.limit or questions.limit,
        k=reading.k,
        control=reading.control,
        max_new_tokens=reading.max_new_tokens,
        dtype=reading.dtype,
        out=Path("runs/nano/evaluation") / cell,
    )
    # Where a checkpoint lay on the machine that measured it says nothing; its digest does.
    result["settings"]["checkpoint"] = Path(model).name
    return result


def _block_recall(questions: Questions, data: Path, model: str) -> dict[str, Any]:
    """BM25 over the very blocks that the selector chooses among."""
    from sedem import SeDeM
    from sedem.bank.blocks import BlockRow
    from sedem.baselines.bm25 import bm25_scores, index_texts
    from sedem.data import labels
    from sedem.data.question_sets import open_examples
    from sedem.evaluation.metrics import recall_at, summarize
    from sedem.evaluation.run import sample
    from sedem.method.segments import segment_text
    from sedem.provenance import provenance
    from sedem.types import Document

    opened = SeDeM.from_pretrained(model)
    options = {"seed": 0} if questions.schema == "squad" else {}
    path = data / questions.path
    every = open_examples(path, questions.schema, records=questions.records, **options).examples
    cuts: dict[str, list[tuple[int, int]]] = {}

    def blocks(document: Document) -> list[tuple[int, int]]:
        if document.text not in cuts:
            length, how = opened.config.segment_length, opened.config.segmentation
            cut = segment_text(document.text, opened.encoder, length, how)
            ends = cut.ends.gather(1, cut.lengths[:, None] - 1)[:, 0]
            cuts[document.text] = list(zip(cut.starts[:, 0].tolist(), ends.tolist(), strict=True))
        return cuts[document.text]

    recalls: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for example in sample(every, questions.limit, 0):
        rows = [
            BlockRow(number, start, end, ())
            for number, document in enumerate(example.documents)
            for start, end in blocks(document)
        ]
        texts = [example.documents[row.document].text[row.start : row.end] for row in rows]
        scores = bm25_scores(index_texts(texts), len(texts), example.question)
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        evidence = labels.from_evidence(rows, example.evidence)
        for k, values in recalls.items():
            values.append(recall_at(ranked, evidence, k))
    return {f"recall@{k}": summarize(v) for k, v in recalls.items()} | provenance()


def _continuation(stage1: str, data: Path, cache: Path) -> dict[str, Any]:
    from experiments.losses import memory_losses
    from sedem.training.recipe import load_recipe
    from sedem.training.run import Stage1Recipe

    places = [f"data_root={data}", f"cache={cache}"]
    path = ROOT / "recipes" / "nano" / "stage1.yaml"
    return memory_losses(Path(stage1), load_recipe(Stage1Recipe, path, places))


@app.command()
def ship(checkpoint: Annotated[Path, typer.Argument(help="Stage 2's final checkpoint.")]) -> None:
    """Put a trained model into checkpoints/sedem-nano, small enough to travel."""
    from sedem import SeDeM

    opened = SeDeM.from_pretrained(checkpoint, device="cpu", engine="eager")
    opened.save_pretrained(SHIPPED, with_backbone=True, int8=True)


@app.command()
def trained(
    cell: Annotated[str, typer.Argument(help="LABEL-STAGE, such as c2-stage1.")],
    folder: Annotated[Path, typer.Argument(help="Output of that training run.")],
) -> None:
    """Keep what a training run cost and how its losses went."""
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    optimization = summary.pop("recipe")["optimization"]
    path = RESULTS / f"training-{cell}.json"
    path.write_text(json.dumps({"optimization": optimization, **summary}, indent=1) + "\n")


@app.command()
def table() -> None:
    """Write the tables of README.md and of the model card, and the picture, from the cells."""
    cells = read_cells()
    draw(cells, PICTURE)
    for path in (ROOT / "README.md", CARD):
        path.write_text(fill(path.read_text(encoding="utf-8"), cells), encoding="utf-8")


def read_cells() -> dict[str, Any]:
    """Every measured cell by name."""
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in RESULTS.glob("*.json")}


def fill(text: str, cells: dict[str, Any]) -> str:
    """A text with the tables between its `<!-- table NAME -->` and `<!-- end -->` marks renewed."""

    def renewed(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]](cells)}\n<!-- end -->"

    return re.sub(r"(<!-- table ([\w-]+) -->)\n.*?<!-- end -->", renewed, text, flags=re.DOTALL)


def main_table(cells: dict[str, Any]) -> str:
    """SQuAD-10 and exact facts: every reading, the shipped model beside the other compression."""
    lines = [
        "| | SQuAD-10 F1 | recall@2 | exact facts EM | recall@2 |",
        "|---|---|---|---|---|",
    ]
    for label, model in (("c2", "sedem-nano (C=2)"), ("c4", "same recipe, C=4")):
        rows = [r for r in SEDEM if f"{label}-squad-10-{r.name}" in cells]
        lines += [f"| {model}: {r.title} | {_row(cells, label, r)} |" for r in rows]
    lines += [f"| frozen backbone, {r.title} | {_row(cells, 'text', r)} |" for r in TEXT]
    squad, facts = (
        _interval(cells.get(f"bm25-blocks-{name}"), "recall@2")
        for name in ("squad-10", "exact-facts")
    )
    lines.append(f"| BM25 over the same blocks | | {squad} | | {facts} |")
    return "\n".join(lines)


def _row(cells: dict[str, Any], owner: str, reading: Reading) -> str:
    ranks = reading.control == "selected" and reading.method != "full-context"
    return " | ".join(
        _interval(cells.get(f"{owner}-{name}-{reading.name}"), metric)
        for name, answer in (("squad-10", "f1"), ("exact-facts", "em"))
        for metric in (answer, "recall@2" if ranks else "")
    )


PRINTED = (
    ("llama-3.2-1b", "Backbone (Frozen)", "Llama-3.2-1B frozen"),
    ("llama-3.2-1b", "SeDeM", "SeDeM, Llama-3.2-1B, C=4"),
    ("llama-3.2-3b", "SeDeM", "SeDeM, Llama-3.2-3B, C=4"),
)


def paper_table(cells: dict[str, Any]) -> str:
    """Sets that the paper has too: its numbers beside ours, which nothing makes comparable."""
    names = ("hotpotqa", "2wiki", "musique")
    lines = [
        "| F1 | " + " | ".join(SETS[name].title for name in names) + " |",
        "|---|---|---|---|",
    ]
    for backbone, method, title in PRINTED:
        where = {"backbone": paper.BACKBONES[backbone], "method": method}
        row = [paper.number("tab:main_qa_results", f"{name}_f1", **where) for name in names]
        lines.append(f"| paper: {title} | " + " | ".join(f"{value:g}" for value in row) + " |")
    ours = [("c2", r) for r in SEDEM if r.sets == EVERY] + [("text", r) for r in TEXT]
    for owner, reading in ours:
        who = "sedem-nano" if owner == "c2" else "nano-llama (33M) frozen"
        row = [_interval(cells.get(f"{owner}-{n}-{reading.name}"), "f1") for n in names]
        lines.append(f"| ours: {who}, {reading.title.replace('*', '')} | {' | '.join(row)} |")
    return "\n".join(lines)


def continuation_table(cells: dict[str, Any]) -> str:
    """What memory carries before stage 2: losses per token under each condition."""
    columns = ("raw_text", "true_states", "memory", "other_memory", "nothing")
    lines = [
        "| loss per token | " + " | ".join(c.replace("_", " ") for c in columns) + " |",
        "|---|---|---|---|---|---|",
    ]
    for label, after in (("c2-regress", "the regression"), ("c2", "stage 1")):
        for target in ("continuation", "recall"):
            values = cells.get(f"{label}-continuation", {}).get(target)
            if values is not None:
                row = " | ".join(f"{values[c]['mean']:.3f}" for c in columns)
                lines.append(f"| after {after}: {target} | {row} |")
    return "\n".join(lines)


def command_table(cells: dict[str, Any]) -> str:
    """What one command prints."""
    cell = cells.get("c2-squad-10-command", {})
    metrics = [name for name in ("f1", "em", "rouge_l", "recall@1", "recall@2") if name in cell]
    return "\n".join(
        [
            "| " + " | ".join(metrics) + " |",
            "|" + "---|" * len(metrics),
            "| " + " | ".join(_interval(cell, name) for name in metrics) + " |",
        ]
    )


def training_table(cells: dict[str, Any]) -> str:
    """What each recipe took: steps, examples, minutes, parameters."""
    lines = [
        "| recipe | steps | examples | minutes | trained parameters | machine |",
        "|---|---|---|---|---|---|",
    ]
    for stage in ("stage1-regress", "stage1", "stage2", "stage2-more", "stage2-pairs"):
        cell = cells.get(f"training-c2-{stage}")
        if cell is None:
            continue
        machine, count = cell["machine"], sum(cell["trained_parameters"].values())
        lines.append(
            f"| {stage}.yaml | {cell['steps']:,} | {cell['examples_seen']:,} | "
            f"{cell['seconds'] / 60:.0f} | {count:,} | {machine['device']}, "
            f"{machine['threads']} threads |"
        )
    return "\n".join(lines)


TABLES = {
    "main": main_table,
    "paper": paper_table,
    "continuation": continuation_table,
    "training": training_table,
    "command": command_table,
}


def draw(cells: dict[str, Any], path: Path) -> None:
    """The two main columns as bars with their intervals."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sedem"
    from matplotlib import pyplot

    columns = (("squad-10", "f1", "SQuAD-10, F1"), ("exact-facts", "em", "exact facts, EM"))
    owned = [("c2", r) for r in SEDEM] + [("text", r) for r in TEXT]
    figure, axes = pyplot.subplots(1, 2, figsize=(9.8, 3.8), sharey=True, layout="constrained")
    names = [reading.title.replace("*", "") for _, reading in owned]
    for axis, (questions, metric, title) in zip(axes, columns, strict=True):
        for row, (owner, reading) in enumerate(owned):
            cell = cells.get(f"{owner}-{questions}-{reading.name}")
            if cell is None:
                continue
            mean, (low, high) = cell[metric]["mean"], cell[metric]["interval"]
            color = "#9fb3c8" if owner == "text" else "#2f855a"
            color = "#d9a441" if reading.control in ("wrong", "none") else color
            axis.barh(row, mean, color=color, xerr=[[mean - low], [high - mean]], ecolor="#52606d")
        axis.set_title(title, fontsize=11)
        axis.set_yticks(range(len(names)), names)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.supxlabel(
        "green: sedem-nano   yellow: its controls   blue: the frozen backbone reads text   "
        "(95 % intervals)",
        fontsize=9,
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _interval(cell: dict[str, Any] | None, metric: str) -> str:
    if cell is None or metric not in cell:
        return ""
    value = cell[metric]
    low, high = value["interval"]
    return f"{value['mean']:.1f} ({low:.1f}-{high:.1f})"


def _headline(cell: dict[str, Any]) -> str:
    shown: Iterable[str] = ("f1", "em", "recall@1", "recall@2", "recall@4")
    scores = [f"{name} {cell[name]['mean']}" for name in shown if name in cell]
    return ", ".join(scores) or "measured"


if __name__ == "__main__":
    app()
