"""Measures of answers: the harness of `sedem eval`, constant answers, and answers at several K."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm.auto import tqdm

from experiments.system.cells import SELECTING, Cell, answer_tokens, checkpoint_of, examples_of
from experiments.system.models import FORMS, PAPER_FORM, recipe_of
from experiments.system.scales import ROOT, SHIPPED, Scale
from experiments.system.stand_in import SHORTER, fitted
from sedem import SeDeM
from sedem.checkpoint.folder import embedded
from sedem.config import Hops
from sedem.guidance import Budget
from sedem.method.segments import paragraphs
from sedem.types import Answer, Document
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.data.examples import Example
from sedem_lab.data.labels import gold_documents
from sedem_lab.data.question_sets import identify, open_examples, sniff
from sedem_lab.data.tokenizer import open_tokenizer
from sedem_lab.evaluation.command import run_evaluation
from sedem_lab.evaluation.compare import compare
from sedem_lab.evaluation.config import EvaluationConfig, MethodSettings
from sedem_lab.evaluation.metrics import normalize, summarize, token_f1
from sedem_lab.evaluation.readers import SedemMethod, evaluate_reader, open_sedem
from sedem_lab.evaluation.records import Record, measure, to_record
from sedem_lab.training.calibration import hop_questions, read_examples
from sedem_lab.training.hops import all_found
from sedem_lab.training.recipe import load_recipe, read_entries
from sedem_lab.training.sources import located
from sedem_lab.training.stages import Stage2Recipe

BUDGETS: tuple[Budget, ...] = (1, 2, 4, 8, "all")
BATCH = 16
RECALLS = ("recall@1", "recall@2", "recall@4")
COMMITTED = {*RECALLS, "recall@10"}
"""The metrics of selection that are committed, of the two dozen of `sedem eval`."""
WAY_METRICS = ("f1", "em", *RECALLS, "conditioning")
"""The metrics of a way that are committed: nine ways with all of them would be long."""


def answers(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The result of the harness of `sedem eval`."""
    assert cell.variant is not None
    questions, folder = scale.sets[cell.questions], checkpoint_of(cell, scale, data)
    config = EvaluationConfig(
        method=cell.method,
        data=questions.found(data),
        checkpoint=str(folder),
        schema_name=questions.schema,
        records=questions.records,
        split=questions.split,
        options=questions.options,
        limit=cell.limit or questions.limit,
        k=questions.k if cell.k is None and cell.method in SELECTING else cell.k,
        control=cell.control,
        condition=cell.condition or None,
        shift=cell.shift // SHORTER if scale.stand_in else cell.shift,
        max_new_tokens=answer_tokens(cell, scale),
        dtype=cell.dtype or scale.dtype,
        # In the paper's form, whatever the shipped model's own is.
        **({"answer": "free", "selection": "states"} if cell.method == "sedem" else {}),
        **({"memory": cell.slots} if cell.slots else {}),
    )
    result = run_evaluation(config, out=scale.runs / "evaluation" / cell.name)
    # Checkpoint folders differ between machines; the result contains the digest of the weights.
    own = f"{cell.method}{cell.setting}" if cell.method in TRAINED else cell.variant.name
    shipped = folder.parent == SHIPPED.parent
    result["settings"]["checkpoint"] = folder.name if shipped else own
    for name in list(result):
        if ("@" in name or name == "mrr") and name not in COMMITTED:
            del result[name]
    return result


def budgets(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Scores at every K of `BUDGETS`, and paired differences to K=1.

    All blocks as text do not fit a small decoder's positions, so text has no K "all".
    """
    condition = cell.condition or None
    form = {"condition": condition, "answer": "free", "selection": "states"}
    tried = {str(k): {"k": k, **form} for k in BUDGETS if k != "all" or condition != "text"}
    return _by_way(cell, scale, data, "budgets", tried, examples_of(cell, scale, data))


TEXT = {"k": 4, "condition": "text"}
WAYS: dict[str, dict[str, Any]] = {
    "K=4": {"k": 4, "answer": "free"},
    "text, K=4": {**TEXT, "answer": "free"},
    "no memory": {"blocks": [], "answer": "free"},
    "auto, K=1": {"k": 1, "answer": "auto"},
    "auto, K=4": {"k": 4, "answer": "auto"},
    "auto, K=all": {"k": "all", "answer": "auto"},
    "auto, text, K=4": {**TEXT, "answer": "auto"},
    "one reading, K=4": {"k": 4, "answer": "auto", "again": False},
    "one reading, text, K=4": {**TEXT, "answer": "auto", "again": False},
}
"""Ways to answer, with fields of their requests; answers are decoded freely, or quoted. `again` is
whether their best sentences are read a second time."""


def ways(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Scores of every one of `WAYS`, and paired differences to the first."""
    return _by_way(cell, scale, data, "ways", WAYS, examples_of(cell, scale, data))


HOUR = ROOT / "tests" / "hour"
NEW_USER: dict[str, dict[str, Any]] = {"as set": {}, "K=1": {"k": 1}}
"""Ways in which a new user's questions are asked, with options of `SeDeM.answer`."""


def new_user(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """What a new user's questions about a folder of files get, as people ask them.

    A question is found if a source of the document that answers it has an accepted answer. It is
    right if the answer has one, and, if the documents do not answer or only some of what it asks
    about was read, if the reply says so.
    """
    lines = (HOUR / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines][: 2 if scale.stand_in else None]
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data))
    bank = model.read(HOUR / "docs")

    def has(accepted: Sequence[str], text: str) -> bool:
        return any(one.casefold() in text.casefold() for one in accepted)

    found: dict[str, dict[str, Any]] = {}
    for way, options in NEW_USER.items():
        counts, wrong = Counter[str](), list[dict[str, str]]()
        for one in tqdm(asked, desc=f"{cell.name}, {way}", unit="question"):
            context = {"context": one["context"]} if "context" in one else {}
            answer = model.answer(bank, one["question"], **options, **context)
            own = one.get("document", " ")
            sources = [c.text for c in answer.citations if c.document.endswith(own)]
            declined = answer.finish_reason == "unanswerable"
            # A note says that only some of the blocks were read.
            partly = any(re.search(r"\d+ of [\d,]+ blocks", note) for note in answer.cut)
            answerable = bool(one["answers"])
            right = has(one["answers"], answer.text) if answerable else declined or partly
            counts["answerable"] += answerable
            counts["found"] += any(has(one["answers"], source) for source in sources)
            counts["right"] += answerable and right
            counts["honest"] += not answerable and right
            counts["declined"] += answerable and declined
            counts["invented"] += bool(answer.unsupported)
            if not right:
                wrong.append({"question": one["question"], "answer": answer.text})
        found[way] = {**counts, "wrong": wrong}
    return {"ways": found, "questions": len(asked), "documents": len(bank.documents)}


HOP_BUDGETS = (4, 8)
HOPS: dict[str, Hops] = {"one hop": 1, "two hops": 2, "auto": "auto"}


def hops(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Scores by K and hops, and how often all documents with evidence are among the K blocks.

    Only questions whose evidence is in several documents are asked.
    """
    several = [one for one in examples_of(cell, scale, data) if len(gold_documents(one)) > 1]
    tried = {
        f"K={k}, {label}": {"k": k, "hops": often, "answer": "auto"}
        for k in HOP_BUDGETS
        for label, often in HOPS.items()
    }
    found = _by_way(cell, scale, data, "answers", tried, several)
    for measured in found["answers"].values():
        for name in set(measured) - {"f1", "em"}:
            del measured[name]
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data), dtype=torch.float32)
    assert model.second_hop is not None
    questions = hop_questions(model, several, read_examples(model, several))
    found["all_found"] = {
        f"K={k}, {label}": summarize([100.0 * one for one in all_of[str(often)]])
        for k in HOP_BUDGETS
        for all_of in [all_found(model.second_hop, model.selector, questions, k)]
        for label, often in HOPS.items()
    }
    return found


def _by_way(
    cell: Cell,
    scale: Scale,
    data: Path,
    name: str,
    tried: Mapping[str, dict[str, Any]],
    examples: Sequence[Example],
) -> dict[str, Any]:
    """Scores by way over the same banks: blocks are read once, and what is kept is reused."""
    dtype, limit = cell.dtype or scale.dtype, answer_tokens(cell, scale)
    checkpoint = str(checkpoint_of(cell, scale, data))
    settings = MethodSettings(
        checkpoint=checkpoint, k=1, dtype=dtype, max_new_tokens=limit, batch=BATCH
    )
    method = open_sedem(settings)
    assert isinstance(method, SedemMethod)
    model, second_reading = method.model, method.model.second_reading
    records: dict[str, list[Record]] = {way: [] for way in tried}
    for start in tqdm(range(0, len(examples), BATCH), desc=cell.name, unit="batch"):
        batch = examples[start : start + BATCH]
        given = method.requests(batch)
        for way, fields in tried.items():
            own = {"blocks": None, **fields}
            again, every = own.pop("again", True), own.get("k") == "all"
            requests = []
            for request, example in zip(given, batch, strict=True):
                if every:
                    own["blocks"] = method.best_that_fit(request.bank, example)
                requests.append(replace(request, **own))
            model.second_reading = second_reading if again else None
            found = model.answer_requests(requests, method.decoding)
            records[way] += [to_record(*pair) for pair in zip(batch, found, strict=True)]
    first = next(iter(records.values()))
    measured = {way: measure(found) for way, found in records.items()}
    return {
        name: {
            way: {metric: own[metric] for metric in WAY_METRICS if metric in own}
            for way, own in measured.items()
        },
        "change": {
            way: {name: one.to_dict() for name, one in compare(first, found, ("f1", "em")).items()}
            for way, found in records.items()
            if found is not first
        },
        "form": {
            **{name: getattr(model.config, name) for name in FORMS[PAPER_FORM]},
            "tau": None if model.guidance is None else float(model.guidance.tau),
            "condition": cell.condition or model.config.condition,
            "dtype": dtype,
            "max_new_tokens": limit,
            "examples": len(examples),
        },
    }


def constant(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The score of one answer to every question, by the same harness: reached without reading.

    The settings contain the answer. If it was chosen on training questions, they also contain those
    questions, and its mean F1 on them.
    """
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
    out = scale.runs / "evaluation" / cell.name
    reader = Constant(settings["answer"])
    return evaluate_reader(reader, examples_of(cell, scale, data), out, settings=settings)


class Constant:
    """A reader that never reads and always gives the same answer."""

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
        if 100.0 * len(sharing) > total:
            found = sum(token_f1(plain, examples[place].answers) for place in sharing)
            if found > total:
                best, total = spelled[plain], found
    return best, total / len(examples)


def training_questions(
    scale: Scale, questions: str, data: Path
) -> tuple[list[Example], list[dict[str, Any]]]:
    """The stage-2 training questions with the schema of an evaluation set, and their sources."""
    path = ROOT / "recipes" / "nano" / "stage2.yaml"
    if scale.name == "paper":
        path = scale.recipe("stage2", scale.backbones[0], questions)
    found, sources = [], []
    for source in load_recipe(Stage2Recipe, path, fitted(read_entries(path), scale)).data.training:
        file = data / source.path
        # Public names are schemas.
        schema = source.set or (sniff(file) if file.exists() else source.path)
        if schema in (scale.sets[questions].schema, questions):
            location, options = located(source, data)
            opened = open_examples(location, source.set, records=source.records, **options)
            found += opened.examples
            sources.append(source.model_dump(include={"path", "set", "records", "options"}))
    return found, sources


def lengths(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Tokens and blocks of every question's documents, and the number of questions of both splits.

    At nano the training split is what the recipes train on. Blocks are windows of T tokens, or
    whole paragraphs.
    """
    assert cell.variant is not None
    asked = scale.sets[cell.questions]
    recipe, overrides = recipe_of(cell.variant, scale, "stage1", cell.questions)
    overrides += fitted(read_entries(recipe, overrides), scale)
    model = read_entries(recipe, overrides)["model"]
    encoder, width = model["encoder"], model["segment_length"]
    tokenizer = open_tokenizer(str(embedded(encoder) or encoder))
    splits = {"validation": asked.examples(data)}
    if asked.split:
        splits["train"] = replace(asked, split="train").examples(data)
    else:
        splits["train"], _ = training_questions(scale, cell.questions, data)
    contexts = [[d.text for d in e.documents] for examples in splits.values() for e in examples]
    texts = [text for context in contexts for text in context]
    own = dict(zip(texts, tokenizer.counts(texts), strict=True))
    counts = [sum(own[text] for text in context) for context in contexts]
    windows = [sum(-(-own[text] // width) for text in context) for context in contexts]
    parts = [sum(len([*paragraphs(text)]) for text in context) for context in contexts]
    return {
        "tokens": {"mean": mean(counts), "max": max(counts)},
        "blocks": {"windows": mean(windows), "paragraphs": mean(parts)},
        "questions": {name: len(examples) for name, examples in splits.items()},
    }
