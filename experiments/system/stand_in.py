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
from collections.abc import Iterator, Mapping
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
        answer_tokens=ANSWER_TOKENS,
        dtype="float32",
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
    # A byte-level tokenizer, like Llama's, of the made texts.
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    ends, letters = ["<|begin_of_text|>", "<|end_of_text|>"], pre_tokenizers.ByteLevel.alphabet()
    settings = {"special_tokens": ends, "initial_alphabet": letters, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, **settings)
    own.train_from_iterator([_words(random.Random(0), TEXT_WORDS)], trainer)
    words = PreTrainedTokenizerFast(tokenizer_object=own, bos_token=ends[0], eos_token=ends[1])
    config = shape_file(name)
    width = HEAD_WIDTH * config.num_attention_heads
    narrow = {"head_dim": HEAD_WIDTH, "hidden_size": width, "intermediate_size": 2 * width}
    start, end = words.bos_token_id, words.eos_token_id
    config.update({**narrow, "vocab_size": len(words), "bos_token_id": start, "eos_token_id": end})
    torch.manual_seed(0)
    empty_model(config).save_pretrained(folder)
    words.save_pretrained(folder)


# Records, in the hub's schemas

RECORDS = {"train": 2 * TWO, "validation": TWO}
COUNTS = {
    "DKYoon/SlimPajama-6B": 3, "UniverseTBD/arxiv-abstracts-large": 24, "rajpurkar/squad": 48
}  # fmt: skip
"""Records, if not `RECORDS`: for windows, a text to hold out, and 40 paragraphs of a question."""
PARAGRAPHS = {
    "hotpotqa/hotpot_qa": 10, "xanhho/2WikiMultihopQA": 10, "dgslibisey/MuSiQue": 20,
    "allenai/qasper": 12, "ccdv/govreport-summarization": 0,
}  # fmt: skip
"""Paragraphs of a question by repository. With `COUNTS`, all that the recipes and sets name."""
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
    library, found = SimpleNamespace(load_dataset=_load_dataset), {"sha": "0" * 40, "siblings": ()}
    info = SimpleNamespace(dataset_info=lambda name, revision: SimpleNamespace(**found))
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
    known = next(known for known in (*PARAGRAPHS, *COUNTS) if known in asked)
    numbers = range(COUNTS.get(known, RECORDS[split]))
    drawn = [_record(known, random.Random(f"{split} {number}"), number) for number in numbers]
    rows = Dataset.from_list(drawn)
    return rows.to_iterable_dataset() if streaming else rows


def _words(rng: random.Random, count: int) -> str:
    """Sentences of ten words."""
    sentences = [" ".join(rng.choices(LEXICON, k=10)).capitalize() for _ in range(0, count, 10)]
    return ". ".join(sentences) + "."


def _record(repository: str, rng: random.Random, number: int) -> dict[str, Any]:
    """One record of a repository.

    The second sentence of the first two paragraphs is evidence. The answer is yes, or its first
    words. The last paragraph of every other record fills a block of sedem-nano.
    """
    count, odd = PARAGRAPHS.get(repository, 0), number % 2 == 1
    lengths = [10] * (count - 1) + [120 if odd else 10] * (count > 0)
    titles, texts = [], []
    for at, length in enumerate(lengths):
        titles.append(f"{rng.choice(LEXICON).capitalize()} {number}-{at}")
        texts.append([_words(rng, length), " " + _words(rng, 10)])
    asked = {}
    if count:
        answer = "yes" if odd else " ".join(texts[0][1].split()[:2])
        asked = {"question": f"What is said in {titles[0]}?", "answer": answer}
    match repository.partition("/")[2]:
        case "hotpot_qa":
            return {
                **{"id": f"hotpot-{number}", "type": "bridge", "level": "hard", **asked},
                "supporting_facts": {"title": titles[:2], "sent_id": [1, 1]},
                "context": {"title": titles, "sentences": texts},
            }
        case "2WikiMultihopQA":
            return {
                **{"_id": f"2wiki-{number}", "type": "comparison", **asked, "entity_ids": ""},
                "context": json.dumps([*zip(titles, texts, strict=True)]),
                "supporting_facts": json.dumps([[title, 1] for title in titles[:2]]),
                "evidences": "[]",
            }
        case "MuSiQue":
            found = enumerate(zip(titles, texts, strict=True))
            shown = [
                {"idx": n, "title": t, "paragraph_text": "".join(own), "is_supporting": n < TWO}
                for n, (t, own) in found
            ]
            more = {"answer_aliases": [], "answerable": True}
            return {"id": f"2hop__{number}", "paragraphs": shown, **asked, **more}
        case "qasper":
            answer = {
                "unanswerable": False,
                "extractive_spans": [] if odd else [asked["answer"]],
                "yes_no": True if odd else None,
                "free_form_answer": "",
                "evidence": [texts[0][1].strip()],
                "highlighted_evidence": [],
            }
            sections = [[part.strip() for part in own] for own in texts]
            given = [{"answer": [answer], "annotation_id": ["0"], "worker_id": ["0"]}]
            questions = {"question": [asked["question"]], "question_id": [f"question-{number}"]}
            return {
                **{
                    "id": f"paper-{number}",
                    "title": f"Paper {number}",
                    "abstract": _words(rng, 40),
                },
                "full_text": {"section_name": titles, "paragraphs": sections},
                "qas": {**questions, "answers": given},
            }
        case "squad":
            context = _words(rng, 20)
            return {
                **{"id": f"squad-{number}", "title": f"Article {number // 12}", "context": context},
                "question": f"What comes first in {number}?",
                "answers": {"text": [context.split()[0]], "answer_start": [0]},
            }
        case "govreport-summarization":
            return {"report": _words(rng, 200), "summary": _words(rng, 20)}
        case "SlimPajama-6B":
            return {"text": _words(rng, TEXT_WORDS), "meta": {"redpajama_set_name": "made"}}
    return {"id": str(number), "title": f"Paper {number}", "abstract": _words(rng, 200)}
