"""The bench of the studies: peers answer as they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE

from experiments.speed import beside_llama_cpp, comprexit_ttft, efficiency
from experiments.system.bench import Keeping, comprexit_times, icae_times, timed_context
from experiments.system.measures import measure
from experiments.system.peers import PEERS, WarmSedem, without_early_exit
from experiments.system.scales import NANO, PAPER, SMOL
from experiments.system.stand_in import stand_in
from sedem import Answer, Document, SeDeM
from sedem.backbone.prompts import question_ids
from sedem.engine import int8
from sedem.errors import ConfigError
from sedem.selecting.select import encode_questions
from sedem_lab.bench import measure as measuring
from sedem_lab.bench.measure import run_bench
from sedem_lab.bench.subjects import BenchPlan, Subject, checkpoint_of, open_subjects
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.readers import open_method

QUESTION = "What is the rent?"
SMALL, SHAPE = stand_in(PAPER), "llama-3.2-1b"


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is asserted, so none needs to be exact."""
    monkeypatch.setattr(measuring, "WARM_UP", 0)


def peer(name: str, checkpoint: str, **settings: Any) -> Subject:
    return PEERS[name](
        BenchPlan(**{"checkpoint": checkpoint, "max_new_tokens": 4, "device": "cpu"} | settings)
    )


@pytest.fixture
def plan(tiny_checkpoint: str) -> BenchPlan:
    return BenchPlan(
        methods=(), contexts=(64,), checkpoint=tiny_checkpoint, runs=2, max_new_tokens=4,
        device="cpu",
    )  # fmt: skip


def peers(*names: str) -> dict[str, Any]:
    return {name: PEERS[name] for name in names}


def test_keeping_is_measured_side_by_side_with_documents_read_once(plan: BenchPlan) -> None:
    rows = peers("sedem", "sedem-warm", "hf-prefix")
    plan = plan.with_changes(contexts=(120,))
    results = run_bench(plan, rows, trial=Keeping, read_again=False)["results"]
    found = {name: of_name["120"] for name, of_name in results.items()}
    assert list(found) == list(rows)
    for row in found.values():
        assert row["online_ttft_ms"] is None and row["build_tok_s"]["n"] == 1
        assert row["prebuilt_ttft_ms"]["n"] == 2
    assert found["sedem"]["kept"] is None
    # Keys and values of two heads in two layers above injection, and in all four.
    assert found["sedem-warm"]["kept"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert found["hf-prefix"]["kept"]["bytes_per_token"] == pytest.approx(4 * 2 * 2 * 8 * 4, 0.05)


def test_a_model_with_joint_blocks_has_no_warm_row_and_one_sentence_why(plan: BenchPlan) -> None:
    plan, name = plan.with_changes(methods=("sedem",)), "sedem-warm-int8-weights"
    subjects, left_out = open_subjects(plan, peers(name))
    assert [subject.name for subject in subjects] == ["sedem"]
    assert left_out[name].startswith("block_context of this model is 'joint'")


def test_the_cold_reader_finds_nothing_and_the_warm_one_everything(
    plan: BenchPlan, documents: list[Document]
) -> None:
    cold, warm = (PEERS[name](plan).reader for name in ("sedem", "sedem-warm"))
    assert isinstance(warm, WarmSedem) and not isinstance(cold, WarmSedem)
    kept_cold, kept_warm = (reader.model.engine.kept for reader in (cold, warm))  # type: ignore
    bank = cold.read(documents)
    texts = {cold.answer(bank, QUESTION).text for _ in range(2)}
    assert (kept_cold.hits, kept_cold.misses, kept_cold.nbytes) == (0, 4, 0)
    bank = warm.read(documents)
    assert kept_warm.nbytes == warm.kept_bytes(bank) > 0
    kept_warm.hits = kept_warm.misses = 0
    texts.add(warm.answer(bank, QUESTION).text)
    assert (kept_warm.hits, kept_warm.misses) == (2, 0)
    assert len(texts) == 1


def test_an_encoder_that_runs_all_layers_gives_the_same_states(
    tiny_checkpoint: str, documents: list[Document]
) -> None:
    ran: list[int] = []
    encodings = []
    for prepare in (lambda model: model, without_early_exit):
        model = prepare(SeDeM.from_pretrained(tiny_checkpoint, engine="static"))
        engine: Any = model.engine
        bank = model.read(documents)
        states, _ = encode_questions(model, engine, [QUESTION])
        encodings.append((bank.memory(range(len(bank))), states, model.scores(bank, QUESTION)))
        ran.append(len(engine.encoder.layers))
    assert ran == [model.config.extract_layer, model.encoder.depth] == [3, 4]
    assert all(torch.equal(one, other) for one, other in zip(*encodings, strict=True))
    with pytest.raises(ConfigError, match="the engine is 'eager'"):
        without_early_exit(SeDeM.from_pretrained(tiny_checkpoint, engine="eager"))


TIMED = {
    "icae": (icae_times(SMALL, SHAPE, "qasper"), efficiency, ["sedem-all-layers"]),
    "comprexit": (comprexit_times(SMALL), comprexit_ttft, ["sedem-all-blocks", "comprexit-128"]),
}
"""A cell of the paper's tables of times by method, with its study and peers."""


@pytest.mark.parametrize("method", ["icae", pytest.param("comprexit", marks=pytest.mark.slow)])
def test_the_papers_tables_of_times_are_measured_on_stand_ins(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell, study, names = TIMED[method]
    measure(cell, SMALL, tmp_path, study.name)
    result = cell.read(SMALL)
    assert result is not None and list(result["results"]) == ["sedem", method, *names]
    assert not result["left_out"] and result["settings"]["k"] == cell.k
    # The path of the folder, which is another one on every machine, is not in the result.
    assert result["settings"]["backbone"] == SHAPE
    assert not any(str(tmp_path) in note or "runs/" in note for note in result["notes"])
    number = next(n for n in study.numbers(SMALL) if n.cell == cell)
    assert number.ours(SMALL) is not None


def test_a_peer_compresses_pieces_of_128_tokens(tiny_folder: Callable[..., str]) -> None:
    plan = BenchPlan(backbone=tiny_folder(), methods=("comprexit",), device="cpu", max_new_tokens=3)
    with checkpoint_of(plan) as opened:
        (method, short), _ = open_subjects(opened, peers("comprexit-128"))
    readers: list[Any] = [method.reader, short.reader]
    assert [reader.config.piece for reader in readers] == [512, 128]


def test_contexts_of_the_papers_times_have_its_lengths() -> None:
    sizes = {}
    for key in PAPER.sets:
        if key in ("hotpotqa", "2wiki", "musique", "qasper"):
            cell = icae_times(PAPER, "llama-3.2-3b", key)
            sizes[key] = (cell.k, timed_context(cell, PAPER))
    assert sizes == {
        "hotpotqa": (2, 1299), "2wiki": (2, 834), "musique": (4, 2288), "qasper": (8, 5248)
    }  # fmt: skip
    assert timed_context(comprexit_times(PAPER), PAPER) == 1536


def test_a_prefix_cache_gives_the_answer_of_full_context() -> None:
    settings = {"max_new_tokens": 8, "device": "cpu"}
    given = MethodSettings(checkpoint="sedem-nano", **settings)
    full = open_method("full-context", given).reader
    cached = peer("hf-prefix", "sedem-nano", **settings).reader
    documents = [Document("one", "The rent is 900 euros."), Document("two", "Bake for an hour.")]
    answers: list[Answer] = []
    for reader in (full, cached):
        memory = reader.read(documents)
        answers += [reader.answer(memory, "Rent?") for _ in range(2)]
    assert len({answer.text for answer in answers}) == 1 and answers[0].text
    assert len({answer.conditioning for answer in answers}) == 1


@pytest.fixture
def gguf_checkpoint(tiny_gguf: Path, tmp_path: Path) -> str:
    """An untrained SeDeM with independent blocks, on a tiny GGUF file."""
    model = SeDeM.from_pretrained(tiny_gguf, engine="eager")
    model.config = model.config.with_changes(block_context="independent")
    model.save_pretrained(tmp_path / "smol")
    return str(tmp_path / "smol")


def test_llama_cpp_has_the_logits_of_a_prefix_cache(gguf_checkpoint: str) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    own, theirs = (peer(n, gguf_checkpoint).reader for n in ("llama-cpp", "hf-prefix"))
    contexts = [[Document("one", LEASE)], [Document("two", RECIPE)]]
    memories = [[reader.read(documents) for documents in contexts] for reader in (own, theirs)]
    # The context that was read last, then one that llama.cpp has dropped.
    for number in (1, 1, 0):
        pair = [(own, memories[0][number]), (theirs, memories[1][number])]
        assert torch.equal(*(memory.ids for _, memory in pair))
        prompt_1P = torch.tensor([question_ids(own.backbone, QUESTION)[1:]])
        with torch.no_grad():
            started = [reader.prefill(memory, prompt_1P) for reader, memory in pair]
            found = [[logits_1V, step(torch.tensor([7]))] for logits_1V, step in started]
        # Its keys and values are float16.
        torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
        assert pair[0][1].stored_bytes < pair[1][1].stored_bytes
    answers = [reader.answer(reader.read(contexts[0]), QUESTION) for reader in (own, theirs)]
    assert len({answer.conditioning for answer in answers}) == 1
    assert all("ttft_ms" in answer.timings for answer in answers)


@pytest.mark.skipif(not int8._multiplies_exactly(), reason="this machine cannot multiply int8")
def test_sedem_is_measured_beside_llama_cpp_or_one_sentence_says_why_not(
    gguf_checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scale = replace(NANO, stand_in=True, shipped={SMOL: Path(gguf_checkpoint)})
    (cell,) = beside_llama_cpp.cells(scale)
    measure(cell, scale, tmp_path, "beside_llama_cpp")
    result = cell.read(scale)
    assert result is not None and result["settings"]["k"] == 4
    rows = ["sedem-warm-int8-weights", "hf-prefix"]
    if find_spec("llama_cpp") is None:
        assert "pip install llama-cpp-python" in result["left_out"]["llama-cpp"]
    else:
        rows.append("llama-cpp")
        assert "llama-cpp-python" in result["versions"]
    assert list(result["results"]) == rows
    assert all(found["64"]["kept"] is not None for found in result["results"].values())
    shown = beside_llama_cpp.markdown(scale).splitlines()
    assert len([line for line in shown if "T=64 | stand-in: 64 |" in line]) >= len(rows) - 1


def test_llama_cpp_needs_a_gguf_file(tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.system.peers.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files, and '.*' is not one"):
        peer("llama-cpp", tiny_checkpoint)
