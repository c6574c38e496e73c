"""What ships with sedem: sedem-nano with its controls; sedem-smol, and its tools for agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments.quality import LIMITS, by_k, guided_answers
from experiments.system.agents import RANKS
from experiments.system.answers import BUDGETS, HOP_BUDGETS, HOPS, NEW_USER
from experiments.system.cells import Cell
from experiments.system.finding import BOTH, TWICE
from experiments.system.finding import RANKS as RANKED
from experiments.system.models import GUIDED, guided_model, main_model
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import Number, entries, metric_of, ours, scores, study

NANO = "sedem-nano"
BEFORE = "before guided training, in the paper's form"

SEDEM: dict[str, dict[str, Any]] = {
    "K=1": {"k": 1},
    "K=2": {"k": 2},
    "K=4": {"k": 4, "limit": 500},
    "K=2, gold first": {"k": 2, "control": "gold", "limit": 500},
    "K=all": {"k": "all", "limit": 200},
    "K=2, wrong blocks": {"k": 2, "control": "wrong", "limit": 500},
    "no memory": {"k": 2, "control": "none", "limit": 500},
}
"""Ways to answer from memory in the paper's form: table rows, with fields of their cells."""

TEXT: dict[str, dict[str, Any]] = {
    "every paragraph as text": {"method": "full-context", "limit": 200},
    "BM25's two paragraphs as text": {"method": "bm25", "k": 2, "limit": 200},
}
"""Ways to answer from text, with fewer questions: a base model does not stop by itself."""


@ours(drawn=("F1", "EM"))
def shipped_model(scale: Scale) -> Iterator[Number]:
    """The shipped model, its controls and the frozen backbone.

    Answers have at most 32 new tokens.
    """
    for k in BUDGETS:
        for key in scale.ablation:
            yield by_k(f"{NANO}, K={k}", scale, guided_answers(scale, key), k)
    for prefix, rows in ((f"{NANO} {BEFORE}", SEDEM), ("frozen backbone", TEXT)):
        for label, fields in rows.items():
            for key in scale.ablation:
                selects = "control" not in fields and fields.get("k", 1) != 1
                metrics = (metric_of(key), *(["recall@2"] if selects else []))
                limit = scale.limit if scale.stand_in else fields.get("limit")
                own = {**fields, "limit": limit, "max_new_tokens": 32}
                cell = Cell(variant=main_model(scale), questions=key, **own)
                yield from scores(f"{prefix}, {label}", scale.sets[key].title, cell, metrics)
    for key in scale.ablation:
        cell = Cell("block-recall", "bm25", main_model(scale), questions=key)
        label, title = "BM25 over the same blocks", scale.sets[key].title
        yield from scores(label, title, cell, ("recall@2",))


@ours()
def shipped_command(scale: Scale) -> list[Number]:
    """What one command prints of the shipped model."""
    # `sedem eval sedem -k 2 --limit 200` in the paper's form, with the set's own answer limit.
    key, limit = scale.ablation[0], scale.limit if scale.stand_in else 200
    cell = Cell(variant=guided_model(scale), questions=key, k=2, dtype="float32", limit=limit)
    metrics = ("f1", "em", "rouge_l", "recall@1", "recall@2")
    return scores(scale.sets[key].title, "", cell, metrics)


@ours()
def shipped_memory(scale: Scale) -> Iterator[Number]:
    """What memory carries before stage 2, in loss a token."""
    names = ("raw_text", "true_states", "memory", "other_memory", "nothing")
    columns = [(name.replace("_", " "), name, 3) for name in names]
    # The target is the text after a segment, or the segment itself.
    for target in ("continuation", "recall"):
        cell = Cell("memory", variant=main_model(scale))
        yield from entries(f"after stage 1: {target}", cell, *columns, at=target)


@ours()
def shipped_training(scale: Scale) -> Iterator[Number]:
    """What training the shipped model took."""
    columns = (
        ("steps", "steps", 0),
        ("examples", "examples_seen", 0),
        ("minutes", "seconds", 0, 60.0),
        ("trained parameters", "trained_parameters", 0),
        ("machine", "machine.device", 0),
        ("threads", "machine.threads", 0),
    )
    for stage in (*scale.stages, GUIDED) if scale.shipped else scale.stages:
        cell = Cell("training", variant=main_model(scale), stage=stage)
        yield from entries(f"{stage}.yaml", cell, *columns)


@ours()
def slot_types(scale: Scale) -> Iterator[Number]:
    """Answers with slots in fewer bytes."""
    limit, key = scale.limit if scale.stand_in else 300, scale.ablation[0]
    model = Cell(variant=main_model(scale), questions=key, max_new_tokens=32, dtype="float32")
    for slots in ("bfloat16", "int8", "fp8"):
        cell = replace(model, slots=slots, limit=limit)
        yield from entries(slots, cell, ("bytes a token", "bytes_per_token", 0))
        yield from scores(slots, scale.sets[key].title, cell, ("f1", "em", "recall@2"))


# sedem-smol, on a real backbone

QUESTIONS = {
    "squad-10": 100, "squad-10-swapped": 32, "hotpotqa": 16,
    "2wiki": 32, "exact-facts": 50, "household": 22,
}  # fmt: skip
"""Number of questions of each set."""
NANO_QUESTIONS = 300
"""Number of questions of `MAIN` to sedem-nano, which answers faster."""
HOP_QUESTIONS = 40
"""Number of questions of each set that are asked with two hops."""
MAIN, LONG = "squad-10", 30
"""The set that is read in more ways, and the number of its questions with all of a context as text,
which takes seconds."""
TWO_STEPS = ("hotpotqa", "2wiki", "musique", "two-steps")
"""Sets of questions whose evidence is in several documents."""
METRICS = ("f1", "em")
SHOWN = {"squad-10": METRICS, "exact-facts": ("em",), "household": ("em",)}
"""Metrics of a set; of others F1."""
LABELS = {
    "auto, K=1": "sedem-smol, K=1",
    "auto, K=4": "sedem-smol, K=4",
    "auto, K=all": "sedem-smol, every block",
    "one reading, text, K=4": "the same four blocks as text (RAG with the same reader)",
    "auto, text, K=4": "the same four blocks as text, their best sentences read again",
    "one reading, K=4": "sedem-smol, K=4, memory alone",
    "no memory": "sedem-smol, no memory",
    "K=4": "sedem-smol, K=4, never quoted",
    "text, K=4": "the same four blocks as text, never quoted",
}
"""Ways in the order of the table."""


def _asked(scale: Scale, questions: str, measure: str = "ways", **fields: Any) -> Cell:
    own = {"variant": guided_model(scale, SMOL), "limit": QUESTIONS.get(questions), **fields}
    return Cell(measure, questions=questions, max_new_tokens=32, dtype="float32", **own)


@ours()
def real_model(scale: Scale) -> Iterator[Number]:
    """A real backbone.

    Answers are greedy, in float32, and have at most 32 tokens.
    """
    if SMOL not in scale.shipped:
        return
    for key in QUESTIONS:
        title, cell = scale.sets[key].title, _asked(scale, key)
        for way, label in LABELS.items():
            for metric in SHOWN.get(key, ("f1",)):
                number = f"ways.{way}.{metric}"
                yield Number(label, f"{title} {metric.upper()}", None, cell, number)
        if key in LIMITS:
            yield by_k("sedem-nano, K=4", scale, guided_answers(scale, key), 4)
    title = scale.sets[MAIN].title
    whole = {"k": "all", "condition": "text"}
    rows = {
        "every block as text (full context, tuned), never quoted": whole,
        "frozen backbone, every paragraph as text": {"method": "full-context"},
        "frozen backbone, BM25's four paragraphs as text": {"method": "bm25", "k": 4},
    }
    for row, fields in rows.items():
        yield from scores(row, title, _asked(scale, MAIN, "answers", limit=LONG, **fields), METRICS)
    nano = _asked(scale, MAIN, variant=guided_model(scale), limit=NANO_QUESTIONS)
    columns = [(f"{title} {metric.upper()}", metric) for metric in METRICS]
    row = "sedem-nano, K=4, selecting by words too and quoting"
    yield from entries(row, nano, *columns, at="ways.auto, K=4")


@ours()
def real_selection(scale: Scale) -> Iterator[Number]:
    """Evidence that sedem-smol selects."""
    for key in QUESTIONS if SMOL in scale.shipped else ():
        columns = [(f"recall@{k}", f"recall@{k}") for k in (1, 2, 4)]
        yield from entries(scale.sets[key].title, _asked(scale, key), *columns, at="ways.K=4")


@study()
def second_hop(scale: Scale) -> Iterator[Number]:
    """A second hop.

    The paper selects once, and gives no numbers. Questions with evidence in several documents. The
    evidence counts as found if each of these documents has a block among the K.
    """
    for key in TWO_STEPS if SMOL in scale.shipped else ():
        cell = _asked(scale, key, "hops", limit=HOP_QUESTIONS)
        for label in HOPS:
            columns = []
            for k in HOP_BUDGETS:
                columns.append((f"K={k}: all the evidence, %", f"all_found.K={k}, {label}"))
                columns.append((f"K={k}: F1", f"answers.K={k}, {label}.f1"))
            yield from entries(f"{scale.sets[key].title}, {label}", cell, *columns)


@ours(about="{questions} questions to {documents} documents.")
def new_user(scale: Scale) -> Iterator[Number]:
    """A new user's questions.

    Files as a household and a club have them: a lease, minutes, an invoice, an offer in Word,
    e-mails, a table, a book, other languages and encodings.
    """
    columns = (
        ("answerable", "answerable", 0),
        ("evidence cited", "found", 0),
        ("right", "right", 0),
        ("declined", "declined", 0),
        ("with an invented word", "invented", 0),
        ("not answerable or about everything, and said so", "honest", 0),
    )
    for way in NEW_USER if SMOL in scale.shipped else ():
        cell = Cell("new-user", variant=guided_model(scale, SMOL))
        yield from entries(f"sedem-smol, {way}", cell, *columns, at=f"ways.{way}")


@ours(
    about="{questions} questions about {files} papers of {characters:,} characters in all. A "
    "result counts if an accepted answer stands in one of the first k."
)
def tool_servers(scale: Scale) -> Iterator[Number]:
    """The server of tools on the household papers."""
    columns = (
        *((f"recall@{k}, %", f"recall.{k}", 1, 0.01) for k in RANKS),
        ("characters of 5", "characters", 0),
        ("start, s", "started_s", 2),
        ("first answer, s", "first_s", 1),
        ("search, s", "search_s", 2),
        ("after a restart, s", "again_s"),
    )
    if SMOL in scale.shipped:
        cell = Cell("tool-servers", variant=guided_model(scale, SMOL))
        yield from entries("sedem mcp", cell, *columns, at="servers.sedem mcp")


FOUND = {
    "hotpotqa": ("HotpotQA", 100),
    "squad-articles": ("SQuAD articles", 200),
    "covid-papers": ("COVID-QA papers", 200),
    "household": ("household papers", None),
}
"""Sets of whole documents in one bank, and most questions of each."""
FINDERS = (
    *("states", "words", BOTH, TWICE),
    *("BM25", "MiniLM", "BM25 and MiniLM", f"{BOTH}, and MiniLM"),
)


@ours(about="{documents} documents, {blocks:,} blocks, {questions} questions.")
def finding(scale: Scale) -> Iterator[Number]:
    """What finds the evidence.

    All ways rank the same blocks. Times are of the processor, by one thread.
    """
    for key, (title, limit) in FOUND.items() if SMOL in scale.shipped else ():
        cell = Cell("finding", variant=guided_model(scale, SMOL), questions=key, limit=limit)
        columns = [(f"recall@{k}", f"recall@{k}") for k in RANKED]
        if key == "hotpotqa":
            columns += [(f"all sentences@{k}", f"whole@{k}") for k in RANKED[1:]]
        costs = ("CPU ms a question", "ms"), ("bytes a block", "bytes", 0)
        for way in FINDERS:
            yield from entries(f"{title}: {way}", cell, *columns, *costs, at=f"ways.{way}")


SAVINGS = {
    "counted": "file tools, rarest words first",
    "longest": "file tools, names and long words first",
    "sedem": "tools of sedem",
}
"""Ways of an agent to read: rows of the table."""


@ours(
    about="{files} files of {characters:,} characters in all, and a question about each; all ways "
    "read the answer to {by_all}. sedem read the folder once, in {read_s:.0f} s, and tells a model "
    "{told:,} tokens about its tools."
)
def agent_savings(scale: Scale) -> Iterator[Number]:
    """What a scripted agent reads, with tools for files and with those of `sedem mcp`."""
    columns = (
        ("tokens read", "tokens", 0),
        ("median", "median", 0),
        ("tokens where all read the answer", "same", 0),
        ("calls", "calls"),
        ("answer read, %", "found", 0),
        ("seconds, median", "seconds", 2),
    )
    for way, row in SAVINGS.items() if SMOL in scale.shipped else ():
        cell = Cell("agent-savings", variant=guided_model(scale, SMOL))
        yield from entries(row, cell, *columns, at=f"ways.{way}")
