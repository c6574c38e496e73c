"""The bench end to end on a tiny model: the document is complete; no test asserts a speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sedem import Answer, Document
from sedem.backbone.decoder import Backbone
from sedem.bench import command
from sedem.bench.command import open_subjects, run_bench
from sedem.bench.contexts import context
from sedem.bench.floors import busy
from sedem.bench.memory import measure_memory, weights_bytes
from sedem.bench.peers import PEERS, QUESTION_ROOM, HuggingFace
from sedem.bench.plan import Plan
from sedem.bench.plot import draw
from sedem.bench.table import HEADINGS, lines
from sedem.engine import int8
from sedem.errors import ConfigError
from sedem.evaluation import results
from sedem.evaluation.readers import BoundSedem
from sedem.evaluation.storage import kv_bytes_per_token
from sedem.method.encoder import encode

METHODS = ("sedem", "full-context", "bm25", "hf", "hf-prefix")
FIGURES = ("online_ttft_ms", "prebuilt_ttft_ms", "decode_tok_s", "build_tok_s")


@pytest.fixture(scope="module")
def plan(checkpoint: str) -> Plan:
    return Plan(
        methods=METHODS, contexts=(64, 600), checkpoint=checkpoint, runs=3, answer_tokens=4,
        device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_run(plan: Plan) -> dict[str, Any]:
    """The document of one round of every method, which no test may change."""
    return run_bench(plan.with_changes(runs=1))


def spreads(row: dict[str, Any]) -> list[dict[str, float]]:
    named = [row[name] for name in FIGURES] + list(row["stages"].values())
    return [entry for entry in named if entry is not None]


def test_k_applies_only_to_methods_with_a_selection_budget(plan: Plan) -> None:
    methods = ("sedem", "full-context", "bm25", "longllmlingua")
    subjects, left_out = open_subjects(plan.with_changes(methods=methods, k=1), plan.checkpoint)
    assert [subject.name for subject in subjects] == list(methods) and not left_out
    documents = [Document(name, f"The {name} is 900 euros.") for name in ("rent", "fee")]
    used = {s.name: s.reader.answer(s.reader.read(documents), "The rent?").k for s in subjects}
    assert used["sedem"] == used["bm25"] == 1 and used["full-context"] == 2


def test_the_document_has_every_figure_of_every_method(plan: Plan, tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    plan = plan.with_changes(batches=(1, 2), blocks=(40,))
    document = run_bench(plan, tmp_path / "out", lambda *done: ticks.append(done))
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == document
    assert list(document["results"]) == list(METHODS)
    for method, rows in document["results"].items():
        assert list(rows) == ["64", "600"]
        for tokens, row in rows.items():
            for entry in spreads(row):
                assert entry["min"] <= entry["q1"] <= entry["median"] <= entry["q3"] <= entry["max"]
                assert entry["n"] == 3
            for name in FIGURES[:3]:
                assert row[name]["min"] > 0
                assert row["floor"][name] > 0
            memory = row["memory"]
            assert memory["weights_bytes"] > 0 and (memory["caches_bytes"] > 0) == (
                method == "sedem"
            )
            resident = memory["weights_bytes"] + memory["caches_bytes"]
            assert min(memory["peak_bytes"], memory["steady_bytes"]) >= resident
            assert list(row["batches"]) == ["1", "2"]
            for batch in row["batches"].values():
                assert batch["together"] == (method == "sedem")
                assert batch["questions_per_s"]["n"] == 3
            assert row["stored_bytes_per_token"] > 0, (method, tokens)
    (selection,) = document["selection"].values()
    assert (selection["blocks"], selection["tokens"]) == (40, 640)
    assert selection["score_ms"]["n"] == 3 and selection["floor_ms"] > 0
    # Five methods, two contexts, two warm-up and three counted rounds; then those of the bank.
    assert ticks[-1] == (5 * 2 * 5 + 5, 5 * 2 * 5 + 5)
    assert any("no GPU" in note or "GPU is here" in note for note in document["notes"])
    assert document["machine"]["processor"] and document["settings"]["weights_sha256"]


def test_the_table_says_how_much_a_method_reads(one_run: dict[str, Any]) -> None:
    results = one_run["results"]
    read = {name: [row["reads_tokens"] for row in rows.values()] for name, rows in results.items()}
    assert read["sedem"] == [64, 600]
    assert read["full-context"][0] == read["hf"][0] == 64
    assert 64 < read["full-context"][1] < 512 and 64 < read["hf"][1] < 512
    (shown,) = [line for line in lines({"results": results}) if line[:2] == ["600", "hf"]]
    assert shown[2] == f"{read['hf'][1]} of 600"
    assert all(len(line) == len(HEADINGS) for line in lines({"results": results}))


def test_merged_weights_count_in_addition_to_frozen_ones(plan: Plan) -> None:
    (merged,), _ = open_subjects(plan.with_changes(methods=("sedem",)), plan.checkpoint)
    (plain,), _ = open_subjects(
        plan.with_changes(methods=("sedem",), engine="eager"), plan.checkpoint
    )
    assert weights_bytes(merged.reader) > weights_bytes(plain.reader)


def test_memory_counts_only_the_caches_of_the_measured_pass(
    plan: Plan, documents: list[Document]
) -> None:
    (subject,), _ = open_subjects(plan.with_changes(methods=("sedem",)), plan.checkpoint)
    reader = subject.reader
    assert isinstance(reader, BoundSedem)
    device = torch.device("cpu")
    first = measure_memory(reader, documents, "Rent?", device)
    assert first is not None
    engine = reader.model.engine
    assert first["caches_bytes"] == engine.memory()["caches"] > 0
    reader.answer_together(reader.read(documents), ["Rent?", "How long?"] * 4)
    assert engine.memory()["caches"] > 4 * first["caches_bytes"]
    again = measure_memory(reader, documents, "Rent?", device)
    assert again is not None and again["caches_bytes"] == first["caches_bytes"]


def test_memory_is_measured_on_the_given_gpu(
    documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = torch.device("cuda:1")
    asked: dict[str, set[object]] = {}

    def watch(name: str, found: int) -> None:
        def ask(device: object = None) -> int:
            asked.setdefault(name, set()).add(device)
            return found

        monkeypatch.setattr(torch.cuda, name, ask)

    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated"):
        watch(name, 100)
    watch("max_memory_allocated", 150)
    memory = measure_memory(Mute(), documents, "Rent?", second)
    assert memory is not None and memory["peak_bytes"] == 50
    assert len(asked) == 4 and set().union(*asked.values()) == {second}


def test_memory_counts_hugging_faces_static_cache(
    plan: Plan, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    plan = plan.with_changes(methods=("hf-compiled",))
    (subject,), _ = open_subjects(plan, plan.checkpoint)
    memory = subject.reader.read(documents)
    subject.reader.answer(memory, "Rent?")
    assert subject.backbone is not None
    positions = memory.ids.shape[1] + QUESTION_ROOM + plan.answer_tokens
    size = positions * kv_bytes_per_token(subject.backbone.model.config) // 2 * 4
    found = measure_memory(subject.reader, documents, "Rent?", torch.device("cpu"))
    assert found is not None and found["caches_bytes"] == size
    assert min(found["steady_bytes"], found["peak_bytes"]) >= found["weights_bytes"] + size


class Mute:
    """A reader without weights or caches."""

    name = "mute"

    def read(self, documents: Sequence[Document]) -> list[Document]:
        return list(documents)

    def answer(self, memory: list[Document], question: str) -> Answer:
        return Answer("", (), 0, len(memory), {}, "end", self.name)


def test_build_speed_is_reported_for_a_bank_but_not_for_text(one_run: dict[str, Any]) -> None:
    rows = {name: rows["64"] for name, rows in one_run["results"].items()}
    assert rows["full-context"]["build_tok_s"] is None
    assert rows["sedem"]["build_tok_s"]["median"] > 0
    stages = rows["sedem"]["build_stages"]
    assert set(stages) == {"segment_ms", "encode_ms", "compress_ms"}
    # The encoder's time is a difference of two passes, so a busy machine can make it zero.
    assert min(stages["segment_ms"], stages["compress_ms"]) > 0 <= stages["encode_ms"]
    assert {"encode_ms", "score_ms", "gather_ms", "prefill_ms"} <= set(rows["sedem"]["stages"])
    # A cached prefix stores keys and values of every layer, a bank a quarter of one state.
    assert rows["hf-prefix"]["stored_bytes_per_token"] > 4 * rows["sedem"]["stored_bytes_per_token"]


def test_memory_types_are_measured_as_methods_that_share_a_model(plan: Plan) -> None:
    plan = plan.with_changes(
        methods=("sedem",), contexts=(64,), runs=1, memory=("bfloat16", "int8")
    )
    subjects, _ = open_subjects(plan, plan.checkpoint)
    plain, quantized = (subject.reader for subject in subjects)
    assert isinstance(plain, BoundSedem) and isinstance(quantized, BoundSedem)
    assert plain.model is quantized.model
    results = run_bench(plan)["results"]
    assert list(results) == ["sedem", "sedem-int8"]
    sizes = [results[name]["64"]["stored_bytes_per_token"] for name in results]
    # A slot of 32 values: 64 bytes, or 32 and a scale.
    assert sizes[1] < 0.7 * sizes[0]
    assert [line[1] for line in lines({"results": results})[1:]] == list(results)


def test_int8_weights_are_measured_as_methods_of_their_own(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_multiplies_exactly", lambda: True)
    plan = plan.with_changes(
        methods=("sedem",), contexts=(64,), runs=1, memory=("bfloat16", "fp8"),
        weights=("full", "int8"),
    )  # fmt: skip
    results = run_bench(plan)["results"]
    assert list(results) == [
        "sedem", "sedem-fp8", "sedem-int8-weights", "sedem-fp8-int8-weights"
    ]  # fmt: skip
    full, rounded = (results[name]["64"] for name in ("sedem", "sedem-int8-weights"))
    assert rounded["decode_tok_s"]["median"] > 0
    assert rounded["floor"]["decode_tok_s"] > full["floor"]["decode_tok_s"]
    assert rounded["floor"]["prebuilt_ttft_ms"] == full["floor"]["prebuilt_ttft_ms"]
    # The int8 matrices stand beside the exact ones.
    assert rounded["memory"]["weights_bytes"] > full["memory"]["weights_bytes"]


def test_a_machine_without_int8_leaves_such_rows_out(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_multiplies_exactly", lambda: False)
    plan = plan.with_changes(methods=("sedem",), weights=("full", "int8"))
    subjects, left_out = open_subjects(plan, plan.checkpoint)
    assert [subject.name for subject in subjects] == ["sedem"]
    assert "int8 instructions" in left_out["sedem-int8-weights"]
    with pytest.raises(ConfigError, match="int8 instructions"):
        open_subjects(plan.with_changes(weights=("int8",)), plan.checkpoint)


def test_hugging_faces_encoder_layers_are_timed_for_comparison(
    plan: Plan, documents: list[Document]
) -> None:
    (subject,), _ = open_subjects(plan.with_changes(methods=("sedem",)), plan.checkpoint)
    assert isinstance(subject.reader, BoundSedem) and subject.layers is not None
    model, layers = subject.reader.model, subject.layers
    for ids_BP in layers.batches(documents):
        expected = encode(model.encoder, ids_BP[:, 1:], model.config.extract_layers)[0]
        torch.testing.assert_close(layers.states(ids_BP)[:, 1:], expected)
    results = run_bench(plan.with_changes(methods=("sedem", "hf"), contexts=(64,), runs=1))[
        "results"
    ]
    assert results["sedem"]["64"]["layers_tok_s"]["median"] > 0
    assert results["hf"]["64"]["layers_tok_s"] is None


def test_an_interrupted_run_resumes(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = plan.with_changes(contexts=(64,), runs=1)
    before = run_bench(first, out)
    measured: list[int] = []

    def counted(text: str, backbone: Backbone, tokens: int) -> list[Document]:
        measured.append(tokens)
        return context(text, backbone, tokens)

    monkeypatch.setattr(command, "context", counted)
    after = run_bench(first.with_changes(contexts=(64, 80)), out)
    assert measured == [80]
    for method in METHODS:
        kept, again = before["results"][method]["64"], after["results"][method]["64"]
        assert kept["online_ttft_ms"] == again["online_ttft_ms"]
    with pytest.raises(ConfigError, match="results of other settings"):
        run_bench(first.with_changes(runs=2), out)


def test_provenance_names_every_machine_that_measured_a_part(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    plan = plan.with_changes(methods=("hf",), runs=1)

    def run(commit: str, *contexts: int) -> dict[str, Any]:
        made = {"machine": {"device": commit}, "versions": {}, "commit": {"id": commit}}
        monkeypatch.setattr(results, "provenance", lambda device: made)
        ceilings = command.Ceilings(float(len(commit)), 1e11)
        monkeypatch.setattr(command, "measure_ceilings", lambda device, dtype: ceilings)
        return run_bench(plan.with_changes(contexts=contexts), out)

    first = run("one", 64)
    assert first["commit"] == {"id": "one"} and "earlier" not in first
    both = run("three", 80, 64)
    assert both["commit"] == {"id": "three"}
    assert [made["commit"] for made in both["earlier"]] == [{"id": "one"}]
    # Nothing is left to measure, so neither provenance nor ceilings change.
    assert run("another", 80, 64) == both
    again = run("another", 64)
    assert again["commit"] == {"id": "one"} and "earlier" not in again
    (out / "bench.json").write_text('{"ceil')
    with pytest.raises(ConfigError, match=r"bench\.json' is damaged"):
        run("another", 64)
    (out / "bench.json").write_text(json.dumps(again))

    (out / "provenance.json").unlink()
    old = run("another", 64, 96)
    assert old["commit"] == {"id": "another"}
    assert [made["commit"] for made in old["earlier"]] == [{"id": "one"}]


def test_a_folder_that_cannot_be_written_is_an_error(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a folder for results"):
        run_bench(plan, tmp_path / "file" / "out")


def test_a_peer_that_cannot_run_is_left_out_with_its_reason(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(HuggingFace):
        def __init__(self, *arguments: object) -> None:
            raise ConfigError("nothing can be compiled on this machine (no compiler)")

    monkeypatch.setitem(PEERS, "hf-compiled", (Broken, ""))
    methods = ("full-context", "hf-compiled")
    document = run_bench(plan.with_changes(methods=methods, contexts=(64,), runs=1))
    assert list(document["results"]) == ["full-context"]
    assert document["left_out"]["hf-compiled"].startswith("nothing can be compiled")


def test_peers_give_the_same_answer_as_full_context() -> None:
    methods = ("full-context", "hf", "hf-prefix")
    subjects, _ = open_subjects(Plan(methods=methods, answer_tokens=8, device="cpu"), "sedem-nano")
    documents = [Document("one", "The rent is 900 euros."), Document("two", "Bake for an hour.")]
    answers: list[list[Answer]] = []
    for subject in subjects:
        memory = subject.reader.read(documents)
        answers.append([subject.reader.answer(memory, "Rent?") for _ in range(2)])
    texts = {answer.text for pair in answers for answer in pair}
    assert len(texts) == 1 and texts != {""}
    assert len({answer.conditioning for pair in answers for answer in pair}) == 1


@pytest.mark.slow
def test_a_compiled_step_gives_the_same_answer() -> None:
    plan = Plan(methods=("hf", "hf-compiled"), answer_tokens=8, device="cpu")
    subjects, left_out = open_subjects(plan, "sedem-nano")
    assert not left_out
    for length in (40, 80):
        documents = [Document("one", "The rent is 900 euros and no more. "[:length])]
        for question in ("Rent?", "Euros?", "Rent?"):
            one, other = (s.reader.answer(s.reader.read(documents), question) for s in subjects)
            assert one.text == other.text != ""


def test_the_plot_is_drawn_reproducibly(one_run: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "c.png"):
        draw(one_run, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<?xml") and (tmp_path / "c.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("ttft", "rate", "is_busy"), [(2.0, 5.0, False), (0.9, 5.0, True), (2.0, 11.0, True)]
)
def test_a_figure_better_than_its_floor_tells_of_a_busy_machine(
    ttft: float, rate: float, is_busy: bool
) -> None:
    row = {
        "online_ttft_ms": None,
        "prebuilt_ttft_ms": {"median": ttft},
        "decode_tok_s": {"median": rate},
        "floor": {"online_ttft_ms": 5.0, "prebuilt_ttft_ms": 1.0, "decode_tok_s": 10.0},
    }
    assert bool(busy({"sedem": {"512": row}, "hf": {"512": {**row, "floor": None}}})) == is_busy
    assert not busy({"hf": {"512": {**row, "floor": None}}})
