"""The borders where a file comes in, and generators of what may come."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docx
import torch
from document_files import docx_of, pdf_of
from hypothesis import strategies as st
from safetensors.torch import save

from sedem.checkpoint.hub import summary_of
from sedem.config import SedemConfig
from sedem.errors import DataError
from sedem.reading.document_formats import parse
from sedem.reading.documents import read_document, size_of
from sedem.tensors import load_weights
from sedem.untrusted import DOCUMENT_BYTES, read_bytes
from sedem_lab.baselines.settings import method_of
from sedem_lab.data.corpus import read_texts
from sedem_lab.data.question_sets import identify, open_examples
from sedem_lab.data.tokenizer import open_tokenizer
from sedem_lab.evaluation.cost import cost
from sedem_lab.evaluation.report import report
from sedem_lab.evaluation.results import read_json
from sedem_lab.training.stages import load_run

QUESTION = {
    "id": "1",
    "documents": [{"name": "a.txt", "text": "The rent is 900 euros."}],
    "question": "What is the rent?",
    "answers": ["900 euros"],
    "evidence": [{"document": "a.txt", "start": 0, "end": 22}],
}
HOTPOT = {
    "_id": "1",
    "question": "Who?",
    "answer": "Ann",
    "type": "bridge",
    "level": "easy",
    "supporting_facts": [["Ann", 0]],
    "context": [["Ann", ["Ann lives here.", "So does Bob."]]],
}
CONFIG = SedemConfig(encoder="backbone", extract_layers=(2,), inject_layer=1).to_dict()
BACKBONE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
RECIPE = {
    "model": {"encoder": "b", "extract_layers": [2], "inject_layer": 1},
    "data": {"training": {"path": "t"}},
    "optimization": {"steps": 1, "learning_rate": 1e-3},
    "run": {"output": "o"},
}
METRIC = {"mean": 1.0, "interval": [0.5, 1.5], "n": 1}
METRICS = {
    "em": METRIC,
    "f1": METRIC,
    "recall@1": METRIC,
    "counts": {"examples": 1, "not_answered": 0},
    "settings": {"method": "sedem", "k": 1, "control": "selected"},
}
PREDICTION = {
    "id": "1",
    "question": "What?",
    "references": ["a"],
    "labelled": True,
    "prediction": "a",
    "selected": [{"document": "a", "start": 0, "end": 1, "score": 0.5, "evidence": True}],
    "evidence_ranks": [1],
    "k": 1,
    "blocks": 1,
    "finish_reason": "stop",
    "cut": [],
    "timings": {"ttft_ms": 1.0},
    "conditioning": 9,
    "stored_bytes": 9,
    "context_tokens": 9,
    "batch": 1,
}
WORD = docx.Document()
WORD.add_paragraph("A text.")
SUMMARY = {"steps": 1, "recipe": {}, "evaluation": {"eval_loss": 1.0}}


@dataclass(frozen=True)
class Border:
    """A place where a file comes in.

    Attributes:
        file: name of the file.
        good: what it may hold.
        open: reads the file at a path.
        beside: other files of its folder.
    """

    file: str
    good: bytes
    open: Callable[[Path], object]
    beside: tuple[tuple[str, bytes], ...] = ()

    def place(self, folder: Path) -> Path:
        """Create the folder with the other files; the path of the file itself."""
        folder.mkdir(parents=True)
        for name, content in self.beside:
            (folder / name).write_bytes(content)
        return folder / self.file


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def parse_here(path: Path) -> object:
    """Read a document without the process that limits its parser."""
    size_of(path)
    return parse(path, read_bytes(path, DataError, DOCUMENT_BYTES), "utf-8")


RUN = (("settings.json", b"{}"), ("metrics.json", as_json(METRICS)))
BORDERS = {
    "document": Border("a.txt", b"A text.", read_document),
    "page": Border("a.html", b"<p>A <b>text</b>.</p>", parse_here),
    "pdf": Border("a.pdf", pdf_of(["A text."]), parse_here),
    "word": Border("a.docx", docx_of(WORD), parse_here),
    "corpus": Border("a.jsonl", b'{"text": "A text."}\n', lambda path: list(read_texts(path))),
    "questions": Border("a.jsonl", as_json(QUESTION), open_examples),
    "array": Border("a.json", as_json([QUESTION]), open_examples),
    "object": Border("a.json", as_json(QUESTION), open_examples),
    "public": Border("a.json", as_json([HOTPOT]), open_examples),
    "compressed": Border("a.jsonl.gz", b"", open_examples),
    "zstd": Border("a.jsonl.zst", b"", open_examples),
    "parquet": Border("a.parquet", b"PAR1", lambda path: open_examples(path, "own")),
    "digest": Border("a.jsonl", as_json(QUESTION), identify),
    "recipe": Border("a.yaml", as_json(RECIPE), load_run),
    "baseline recipe": Border("a.yaml", as_json({"method": "icae", **RECIPE}), load_run),
    "config": Border("config.json", as_json(CONFIG), lambda path: SedemConfig.load(path.parent)),
    "baseline config": Border(
        "config.json", as_json({"method": "icae"}), lambda path: method_of(path.parent)
    ),
    "backbone": Border("config.json", as_json(BACKBONE), lambda path: cost(str(path.parent))),
    "tokenizer": Border(
        "tokenizer.json",
        b"{}",
        lambda path: open_tokenizer(str(path.parent)),
        (("config.json", as_json(BACKBONE)),),
    ),
    "weights": Border("a.safetensors", save({"a": torch.zeros(2)}), load_weights),
    "metrics": Border(
        "metrics.json",
        as_json(METRICS),
        lambda path: report([path.parent]),
        (RUN[0], ("predictions.jsonl", as_json(PREDICTION) + b"\n")),
    ),
    "predictions": Border(
        "predictions.jsonl", as_json(PREDICTION), lambda path: report([path.parent] * 2), RUN
    ),
    "signatures": Border("provenance.json", b"{}", read_json),
    "summary": Border("training.json", as_json(SUMMARY), lambda path: summary_of(path.parent)),
}


# Things in place of a file


def hostile_paths(path: Path, size: int) -> Iterator[tuple[str, Path]]:
    """Put one thing after the other in place of a file; its kind, and the path to open."""
    os.mkfifo(path)
    yield "pipe", path
    path.unlink()
    path.symlink_to("/dev/zero")
    yield "device", path
    path.unlink()
    path.symlink_to(path.name)
    yield "loop", path
    path.unlink()
    path.symlink_to("nothing")
    yield "broken link", path
    path.unlink()
    path.mkdir()
    yield "folder", path
    path.rmdir()
    path.touch()
    os.truncate(path, size)
    yield "giant", path
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
        os.chdir(here)
        yield "socket", path
    path.unlink()
    yield "long name", path.with_name("n" * 300 + path.suffix)
    yield "NUL", path.with_name("a\0b" + path.suffix)
    yield "file as folder", Path(__file__) / path.name


# Contents

numbers = st.one_of(
    st.sampled_from(["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "0", "-1", "1e-400"]),
    st.integers(18, 10_000).map(lambda digits: "9" * digits),
    st.integers(60, 300).map(lambda bits: str(-(2**bits))),
)
nested = st.builds(
    lambda depth, pair: pair[0] * depth + "1" + pair[1] * depth,
    st.integers(50, 20_000),
    st.sampled_from([("[", "]"), ('{"a":', "}")]),
)
texts = st.one_of(
    st.text(max_size=20).map(json.dumps),
    st.sampled_from(['"\\ud800"', '"\\u0000"', '"\\u001b]0;x\\u0007"', '"\\u202e"', '""', '" "']),
    st.integers(1000, 100_000).map(lambda length: json.dumps("x" * length)),
)
values = st.one_of(
    numbers,
    nested,
    texts,
    st.sampled_from(["true", "null", "[]", "{}", "[[]]", '{"a": 1}', '{"a": 1, "a": 2}', "[1, 2]"]),
)
"""Values of JSON that a program may stumble over, as they are written."""

ODD_YAML = (
    "a: 2024-99-99", "a: !!int x", "a: !!timestamp x", "a: !!binary x",
    "!!python/object/apply:os.system [ls]", "&a [*a]", "a: *b", "{[1]: 2}", "? {a: 1}\n: 2",
    "1: 2", "<<: 1", "a: 1\na: 2", "base: [1]", "base: a.yaml", 'base: "\\0"', "--- 1\n--- 2",
    "a: 0x_", "a: 0x" + "f" * 20_000, "1:" * 9000 + "1", "2001-1-1 25:61:61", "a: 1:1e999",
)  # fmt: skip
yaml_texts = st.one_of(
    st.integers(5, 40).map(
        lambda levels: (
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, levels))
        )
    ),
    st.integers(50, 15_000).map(lambda depth: "- " * depth + "1"),
    st.sampled_from(ODD_YAML),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every value inside a JSON value, its own included."""
    yield at
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from places(entry, (*at, key))


MARK = "@here@"


def replaced(value: Any, at: tuple[Any, ...]) -> Any:
    """A JSON value with a mark in one place."""
    if not at:
        return MARK
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:])
    return copy


@st.composite
def altered(draw: st.DrawFn, good: bytes) -> bytes:
    """A file with a hostile value in one place, a key twice, cut, flipped or encoded otherwise."""
    try:
        value = json.loads(good)
    except ValueError:
        value = None
    kinds = ["cut", "flipped", "encoded", "random"] + ["value"] * (6 if value is not None else 0)
    kind = draw(st.sampled_from(kinds))
    if kind == "value":
        at = draw(st.sampled_from(sorted(places(value), key=repr)))
        return json.dumps(replaced(value, at)).replace(f'"{MARK}"', draw(values)).encode()
    if kind == "cut":
        return good[: draw(st.integers(0, len(good)))]
    if kind == "flipped" and good:
        content = bytearray(good)
        content[draw(st.integers(0, len(good) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(content)
    if kind == "encoded":
        encoding = draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "utf-7", "utf-16-be"]))
        return good.decode("latin-1").encode(encoding)
    return draw(st.binary(max_size=200))
