"""Stand-ins: the cells, recipes and settings of a scale on tiny backbones and a few records.

Only sizes differ, and the type: float32, because bfloat16 takes a CPU twice as long. A backbone is
random and narrow, with its own layers and heads and a small vocabulary. A public set has a few made
records in the hub's schema, and the hub's own library is asked for them by the hub's name. Steps,
windows and questions are two. So a stand-in shows that a cell runs, and nothing else: its numbers
mean nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.system.scales import Questions, Scale
from sedem.backbone.loading import empty_model
from sedem.durable_files import build_once
from sedem_lab.evaluation.cost import shape_file

TWO = 2
"""Steps, windows, questions, and records that are trained on or evaluated."""
ANSWER_TOKENS = 3
HEAD_WIDTH, VOCABULARY = 4, 512
SHORTER = 8
"""Segments, windows and contexts are so many times shorter than in a recipe."""
LENGTHS = ("segment_length", "sensory", "memory", "limit", "window", "piece", "paragraph")
"""Settings of methods that are lengths in tokens; numbers below `SHORT` stay."""
SHORT = 32
MAKER = "meta-llama/"
"""The account whose backbones the paper's recipes name."""


def stand_in(scale: Scale) -> Scale:
    """The stand-in of a scale; its runs and results lie apart."""

    def small(asked: Questions) -> Questions:
        options = dict(asked.options)
        if "length" in options:
            # A context of RULER has at least the paragraphs of its own question, and a tiny model
            # reads no more of it than of 16K.
            length = 2 * min(options["length"], 2**14) // SHORTER
            options |= {"length": length, "repeat": True}
        return replace(asked, records=_few(asked.records), options=options)

    return replace(
        scale,
        stand_in=True,
        sets={key: small(asked) for key, asked in scale.sets.items()},
        held_out={key: small(asked) for key, asked in scale.held_out.items()},
        answer_tokens=ANSWER_TOKENS,
        dtype="float32",
        rates=scale.rates[:1],
    )


def fitted(entries: Mapping[str, Any], scale: Scale) -> list[str]:
    """Overrides that cut a recipe to the size of a stand-in; none for a real run."""
    if not scale.stand_in:
        return []
    changes: dict[str, Any] = {
        "optimization.steps": TWO,
        "optimization.epochs": None,
        "optimization.batch_size": TWO,
        "optimization.accumulation": 1,
        "optimization.bf16": False,
        "optimization.backbone_dtype": "float32",
        "run.log_every": 1,
        "run.save_every": 1,
        "run.workers": 0,
        "cache": str(scale.runs / "cache"),
    }
    if entries["run"].get("eval_every"):
        changes["run.eval_every"] = TWO
    for key in ("encoder", "decoder", "backbone"):
        if name := entries["model"].get(key):
            changes[f"model.{key}"] = str(backbone(name.removeprefix(MAKER).lower(), scale))
    if entries.get("text"):
        changes |= {f"text.{key}": TWO for key in ("windows", "evaluation_windows")}
        changes |= {"text.tokens": 4 * TEXT_WORDS, "text.held_out": 1}
        lengths = [key for key in ("context", "continuation", "join") if key in entries["text"]]
        changes |= {f"text.{key}": max(1, entries["text"][key] // SHORTER) for key in lengths}
    for key in LENGTHS:
        if (length := entries["model"].get(key) or 0) >= SHORT:
            changes[f"model.{key}"] = length // SHORTER
    if ratios := entries["model"].get("ratios"):
        window = entries["model"]["window"] // SHORTER
        changes["model.ratios"] = [ratio for ratio in ratios if window % ratio == 0]
    for part in ("training", "evaluation"):
        if sources := (entries.get("data") or {}).get(part):
            changes[f"data.{part}"] = [
                {**source, "records": _few(source.get("records"))} for source in sources
            ]
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]  # JSON is YAML


def _few(records: str | None) -> str | None:
    """The first two records, or those after them."""
    if records is None:
        return None
    return f":{TWO}" if records.startswith(":") else f"{TWO}:"


# Backbones


def backbone(name: str, scale: Scale) -> Path:
    """The folder of a random backbone with the layers and heads of a public shape."""
    folder = scale.runs / "backbones" / name
    build_once(
        folder,
        lambda place: (place / "model.safetensors").is_file(),
        lambda place: _write_backbone(name, place),
        f"the stand-in of {name}",
    )
    return folder


def _write_backbone(name: str, folder: Path) -> None:
    tokenizer = _tokenizer()
    config = shape_file(name)
    width = HEAD_WIDTH * config.num_attention_heads
    config.update(
        {
            "head_dim": HEAD_WIDTH,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
    )
    torch.manual_seed(0)
    empty_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, like Llama's, of the made texts."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    ends = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=ends,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator([_words(random.Random(0), TEXT_WORDS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token=ends[0], eos_token=ends[1])


# Records, in the hub's schemas

RECORDS = {"train": 2 * TWO, "validation": TWO}
TEXT_WORDS = 1000
"""Words of a text: as many as the longest window of a recipe needs."""
LEXICON = (
    "harbour lease tenant cocoa rent signed river storm winter ledger captain garden music engine "
    "mountain letter bridge market silver orchard lantern chapel copper meadow violin barrel"
).split()


@contextmanager
def records(scale: Scale) -> Iterator[None]:
    """Made records in place of the hub's, if the scale is a stand-in."""
    if not scale.stand_in:
        yield
        return
    library = SimpleNamespace(load_dataset=_load_dataset)
    info = SimpleNamespace(
        dataset_info=lambda name, revision: SimpleNamespace(sha="0" * 40, siblings=())
    )
    with (
        patch("sedem_lab.data.hub._datasets", lambda: library),
        patch("huggingface_hub.HfApi", lambda: info),
    ):
        yield


def _load_dataset(
    name: str,
    config: str | None = None,
    *,
    split: str,
    streaming: bool = False,
    revision: str | None = None,
    data_files: Mapping[str, str] | None = None,
) -> Any:
    """As `datasets.load_dataset`; the configuration and the revision change nothing."""
    asked = data_files[split] if data_files else name
    make = next(make for known, make in SCHEMAS.items() if known in asked)
    count = COUNTS.get(make, RECORDS[split])
    drawn = [make(random.Random(f"{split} {number}"), number) for number in range(count)]
    rows = Dataset.from_list(drawn)
    return rows.to_iterable_dataset() if streaming else rows


def _words(rng: random.Random, count: int) -> str:
    """Sentences of ten words."""
    sentences = [" ".join(rng.choices(LEXICON, k=10)).capitalize() for _ in range(0, count, 10)]
    return ". ".join(sentences) + "."


def _paragraphs(rng: random.Random, number: int, count: int) -> list[tuple[str, list[str]]]:
    """Titles and sentences; the second sentence of the first two paragraphs is evidence.

    The last paragraph of every other record fills a block of sedem-nano.
    """
    lengths = [10] * (count - 1) + [120 if number % 2 else 10]
    return [
        (
            f"{rng.choice(LEXICON).capitalize()} {number}-{at}",
            [_words(rng, length), " " + _words(rng, 10)],
        )
        for at, length in enumerate(lengths)
    ]


def _asked(number: int, paragraphs: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """A question and its answer: yes, or the first words of the evidence."""
    answer = "yes" if number % 2 else " ".join(paragraphs[0][1][1].split()[:2])
    return {"question": f"What is said in {paragraphs[0][0]}?", "answer": answer}


def _hotpot(rng: random.Random, number: int) -> dict[str, Any]:
    found = _paragraphs(rng, number, 10)
    titles = [title for title, _ in found]
    return {
        "id": f"hotpot-{number}",
        **_asked(number, found),
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": titles[:2], "sent_id": [1, 1]},
        "context": {"title": titles, "sentences": [sentences for _, sentences in found]},
    }


def _two_wiki(rng: random.Random, number: int) -> dict[str, Any]:
    found = _paragraphs(rng, number, 10)
    return {
        "_id": f"2wiki-{number}",
        "type": "comparison",
        **_asked(number, found),
        "entity_ids": "",
        "context": json.dumps(found),
        "supporting_facts": json.dumps([[title, 1] for title, _ in found[:2]]),
        "evidences": "[]",
    }


def _musique(rng: random.Random, number: int) -> dict[str, Any]:
    found = _paragraphs(rng, number, 20)
    shown = [
        {"idx": at, "title": title, "paragraph_text": "".join(text), "is_supporting": at < TWO}
        for at, (title, text) in enumerate(found)
    ]
    return {
        "id": f"2hop__{number}",
        "paragraphs": shown,
        **_asked(number, found),
        "answer_aliases": [],
        "answerable": True,
    }


def _qasper(rng: random.Random, number: int) -> dict[str, Any]:
    found = _paragraphs(rng, number, 12)
    asked = _asked(number, found)
    answer = {
        "unanswerable": False,
        "extractive_spans": [] if number % 2 else [asked["answer"]],
        "yes_no": True if number % 2 else None,
        "free_form_answer": "",
        "evidence": [found[0][1][1].strip()],
        "highlighted_evidence": [],
    }
    return {
        "id": f"paper-{number}",
        "title": f"Paper {number}",
        "abstract": _words(rng, 40),
        "full_text": {
            "section_name": [title for title, _ in found],
            "paragraphs": [[part.strip() for part in text] for _, text in found],
        },
        "qas": {
            "question": [asked["question"]],
            "question_id": [f"question-{number}"],
            "answers": [{"answer": [answer], "annotation_id": ["0"], "worker_id": ["0"]}],
        },
    }


def _squad(rng: random.Random, number: int) -> dict[str, Any]:
    context = _words(rng, 20)
    return {
        "id": f"squad-{number}",
        "title": f"Article {number // 12}",
        "context": context,
        "question": f"What comes first in {number}?",
        "answers": {"text": [context.split()[0]], "answer_start": [0]},
    }


def _report(rng: random.Random, number: int) -> dict[str, Any]:
    return {"report": _words(rng, 200), "summary": _words(rng, 20)}


def _page(rng: random.Random, number: int) -> dict[str, Any]:
    return {"text": _words(rng, TEXT_WORDS), "meta": {"redpajama_set_name": "made"}}


def _abstract(rng: random.Random, number: int) -> dict[str, Any]:
    return {"id": str(number), "title": f"Paper {number}", "abstract": _words(rng, 200)}


SCHEMAS = {
    "hotpotqa/hotpot_qa": _hotpot,
    "xanhho/2WikiMultihopQA": _two_wiki,
    "dgslibisey/MuSiQue": _musique,
    "allenai/qasper": _qasper,
    "rajpurkar/squad": _squad,
    "ccdv/govreport-summarization": _report,
    "DKYoon/SlimPajama-6B": _page,
    "UniverseTBD/arxiv-abstracts-large": _abstract,
}
"""The record of every repository that the paper's recipes and sets name."""
COUNTS = {_page: 3, _abstract: 24, _squad: 48}
"""Records, if not `RECORDS`: for windows, a text to hold out, and 40 paragraphs of a question."""
