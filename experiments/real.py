"""sedem-smol, the model on a real backbone: its answers, and its tools for agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from experiments.quality import LIMITS, by_k, guided_answers
from experiments.system.agents import RANKS
from experiments.system.answers import HOP_BUDGETS, HOPS, NEW_USER
from experiments.system.cells import Cell
from experiments.system.models import guided_model
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import Number, entries, ratio_of, scores, study
from experiments.system.timing import ASKED

QUESTIONS = {
    "squad-10": 100,
    "squad-10-swapped": 32,
    "hotpotqa": 16,
    "2wiki": 32,
    "exact-facts": 50,
    "household": 22,
}
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
QUOTING_NANO = "sedem-nano, K=4, selecting by words too and quoting"


def _asked(scale: Scale, questions: str) -> Cell:
    return Cell(
        "ways",
        variant=guided_model(scale, SMOL),
        questions=questions,
        limit=QUESTIONS.get(questions),
        max_new_tokens=32,
        dtype="float32",
    )


@study(
    "A real backbone",
    "The paper gives no numbers. Answers are greedy, in float32, and have at most 32 tokens.",
    drawn=("F1",),
)
def real_model(scale: Scale) -> Iterator[Number]:
    """Scores by way to answer; those of sedem-nano in the last row."""
    for key in QUESTIONS if SMOL in scale.shipped else ():
        title, cell = scale.sets[key].title, _asked(scale, key)
        for way, label in LABELS.items():
            for metric in SHOWN.get(key, ("f1",)):
                number = f"ways.{way}.{metric}"
                yield Number(label, f"{title} {metric.upper()}", None, cell, number)
        if key in LIMITS:
            yield by_k("sedem-nano, K=4", scale, guided_answers(scale, key), 4)
    if SMOL in scale.shipped:
        yield from _more_ways(scale)


def _more_ways(scale: Scale) -> Iterator[Number]:
    cell = replace(_asked(scale, MAIN), measure="answers", limit=LONG)
    rows = {
        "every block as text (full context, tuned), never quoted": replace(
            cell, k="all", condition="text"
        ),
        "frozen backbone, every paragraph as text": replace(cell, method="full-context"),
        "frozen backbone, BM25's four paragraphs as text": replace(cell, method="bm25", k=4),
    }
    for row, one in rows.items():
        yield from scores(row, scale.sets[MAIN].title, one, METRICS)
    nano = replace(_asked(scale, MAIN), variant=guided_model(scale), limit=NANO_QUESTIONS)
    for metric in METRICS:
        column = f"{scale.sets[MAIN].title} {metric.upper()}"
        yield Number(QUOTING_NANO, column, None, nano, f"ways.auto, K=4.{metric}")


@study("Evidence that sedem-smol selects", "The paper gives no numbers.")
def real_selection(scale: Scale) -> Iterator[Number]:
    """Recall of the evidence by set."""
    for key in QUESTIONS if SMOL in scale.shipped else ():
        for k in (1, 2, 4):
            number = f"ways.K=4.recall@{k}"
            yield Number(scale.sets[key].title, f"recall@{k}", None, _asked(scale, key), number)


@study(
    "A second hop",
    "The paper selects once, and gives no numbers. Questions with evidence in several documents. "
    "The evidence counts as found if each of these documents has a block among the K.",
)
def second_hop(scale: Scale) -> Iterator[Number]:
    """How often all the evidence is selected, and F1, by set and hops."""
    for key in TWO_STEPS if SMOL in scale.shipped else ():
        cell = replace(_asked(scale, key), measure="hops", limit=HOP_QUESTIONS)
        for label in HOPS:
            columns = []
            for k in HOP_BUDGETS:
                way = f"K={k}, {label}"
                columns.append((f"K={k}: all the evidence, %", f"all_found.{way}"))
                columns.append((f"K={k}: F1", f"answers.{way}.f1"))
            yield from entries(f"{scale.sets[key].title}, {label}", cell, *columns)


@study(
    "A new user's questions",
    "The paper gives no numbers. Files as a household and a club have them: a lease, minutes, an "
    "invoice, an offer in Word, e-mails, a table, a book, other languages and encodings.",
    about="{questions} questions to {documents} documents.",
)
def new_user(scale: Scale) -> Iterator[Number]:
    """Counts of what is found, right and said honestly, with the defaults and at K=4."""
    if SMOL not in scale.shipped:
        return
    cell = Cell("new-user", variant=guided_model(scale, SMOL))
    for way in NEW_USER:
        yield from entries(
            f"sedem-smol, {way}",
            cell,
            ("answerable", f"ways.{way}.answerable", 0),
            ("evidence cited", f"ways.{way}.found", 0),
            ("right", f"ways.{way}.right", 0),
            ("declined", f"ways.{way}.declined", 0),
            ("with an invented word", f"ways.{way}.invented", 0),
            ("not answerable or about everything, and said so", f"ways.{way}.honest", 0),
        )


@study(
    "Times of quotations",
    "The paper gives no numbers. Single questions to ten paragraphs, K=4, keys and values of all "
    "blocks kept. A quotation comes as a whole.",
    about="Medians over {questions} questions.",
)
def answering_times(scale: Scale) -> Iterator[Number]:
    """Times of sedem-smol by way to answer, and how many times that of a free answer each is."""
    if SMOL not in scale.shipped:
        return
    cell = replace(_asked(scale, MAIN), measure="answer-times", limit=8, k=4)
    columns = {"first token, ms": "ttft_ms", "whole answer, ms": "total_ms"}
    for way in ASKED:
        for column, name in columns.items():
            of_way, free = (
                Number(way, column, None, cell, f"times.{one}.{name}", digits=0)
                for one in (way, "free")
            )
            yield from (of_way, ratio_of(way, f"{column}: times free's", None, [of_way, free]))


# Tools for agents

SERVERS = {"sedem mcp": "sedem mcp", "attemory": "attemory 0.1.3, SmolLM2-135M"}


@study(
    "A search for passages",
    "The paper gives no numbers of this kind.",
    about="{questions} questions to {blocks:,} blocks, medians, after one search as a warm-up.",
)
def passage_search(scale: Scale) -> Iterator[Number]:
    """Milliseconds of the pass over a question, and of the whole search."""
    if SMOL in scale.shipped:
        yield from entries(
            "sedem-smol",
            Cell("passages", variant=guided_model(scale, SMOL)),
            ("pass over the question, ms", "pass_ms"),
            ("search, ms", "search_ms"),
            ("beyond the pass, ms", "beyond_ms"),
        )


@study(
    "Servers of tools on the household papers",
    "The paper gives no numbers of this kind.",
    about="{questions} questions about {files} papers of {characters:,} characters in all. A "
    "result counts if an accepted answer stands in one of the first k.",
)
def tool_servers(scale: Scale) -> Iterator[Number]:
    """Recall, size of five results, and seconds by server."""
    if SMOL not in scale.shipped:
        return
    cell = Cell("tool-servers", variant=guided_model(scale, SMOL))
    for server, label in SERVERS.items():
        if scale.stand_in and server != "sedem mcp":
            continue
        place = f"servers.{server}"
        yield from entries(
            label,
            cell,
            *((f"recall@{k}, %", f"{place}.recall.{k}", 1, 0.01) for k in RANKS),
            ("characters of 5", f"{place}.characters", 0),
            ("start, s", f"{place}.started_s", 2),
            ("first answer, s", f"{place}.first_s", 1),
            ("search, s", f"{place}.search_s", 2),
        )
        if server == "sedem mcp":
            yield Number(label, "after a restart, s", None, cell, f"{place}.again_s")
