"""The bench on tiny models: contexts, methods and documents are complete; no speed is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from sedem import Answer, Document
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.baselines.icae import ICAEConfig
from sedem.baselines.registry import TRAINED
from sedem.baselines.trained import TrainedReader
from sedem.bench import command
from sedem.bench.command import PARTS, measure_cold_start, run_bench
from sedem.bench.contexts import DOCUMENT, context, source
from sedem.bench.measure import spread
from sedem.bench.memory import measure_memory, weights_bytes
from sedem.bench.plan import Plan
from sedem.bench.report import draw, lines
from sedem.bench.subjects import Subject, WarmSedem, checkpoint_of, open_subjects
from sedem.checkpoint.folder import locate
from sedem.checkpoint.portable import BACKBONE
from sedem.engine import int8
from sedem.engine.static import Static
from sedem.errors import ConfigError, DataError, SedemError
from sedem.evaluation import cost, results
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import BoundSedem

METHODS = ("sedem", "full-context", "bm25")
FIGURES = ("online_ttft_ms", "prebuilt_ttft_ms", "decode_tok_s", "build_tok_s")
QUESTION = "What is the rent?"


@pytest.fixture(scope="module")
def plan(tiny_checkpoint: str) -> Plan:
    return Plan(
        methods=METHODS, contexts=(64, 600), checkpoint=tiny_checkpoint, runs=2, answer_tokens=4,
        device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def independent(plan: Plan) -> Plan:
    return plan.with_changes(
        methods=("sedem",), contexts=(120,), kept=("cold", "warm"), block_context="independent"
    )


def alone(plan: Plan, **changes: Any) -> Subject:
    (subject,), _ = open_subjects(plan.with_changes(methods=("sedem",), **changes), plan.checkpoint)
    return subject


class Mute:
    """A reader without weights or caches."""

    name = "mute"

    def read(self, documents: Sequence[Document]) -> list[Document]:
        return list(documents)

    def answer(self, memory: list[Document], question: str) -> Answer:
        timings = {"ttft_ms": 1.0, "total_ms": 2.0}
        return Answer("", (), 0, len(memory), timings, "end", self.name)


def test_a_trained_baseline_is_measured_on_random_weights_only(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"has random weights here; name a --backbone"):
        open_subjects(plan.with_changes(methods=("icae",)), plan.checkpoint)


def test_k_applies_only_to_methods_with_a_selection_budget(plan: Plan) -> None:
    methods = ("sedem", "full-context", "bm25", "longllmlingua")
    subjects, left_out = open_subjects(plan.with_changes(methods=methods, k=1), plan.checkpoint)
    assert [subject.name for subject in subjects] == list(methods) and not left_out
    documents = [Document(name, f"The {name} is 900 euros.") for name in ("rent", "fee")]
    used = {s.name: s.reader.answer(s.reader.read(documents), "The rent?").k for s in subjects}
    assert used["sedem"] == used["bm25"] == 1 and used["full-context"] == 2


def test_the_document_has_every_figure_of_every_method(plan: Plan, tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    document = run_bench(
        plan.with_changes(batches=(1, 2)), tmp_path / "out", lambda *done: ticks.append(done)
    )
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == document
    assert list(document["results"]) == list(METHODS)
    for method, rows in document["results"].items():
        assert list(rows) == ["64", "600"]
        for row in rows.values():
            named = [row[name] for name in FIGURES] + list(row["stages"].values())
            for entry in filter(None, named):
                assert entry["min"] <= entry["q1"] <= entry["median"] <= entry["q3"] <= entry["max"]
                assert entry["n"] == 2
            assert all(row[name]["min"] > 0 for name in FIGURES[:3])
            assert (row["build_tok_s"] is not None) == (method != "full-context")
            memory = row["memory"]
            caches = memory["caches_bytes"]
            assert memory["weights_bytes"] > 0 and (caches > 0) == (method == "sedem")
            resident = memory["weights_bytes"] + caches
            assert min(memory["peak_bytes"], memory["steady_bytes"]) >= resident
            assert list(row["batches"]) == ["1", "2"]
            for batch in row["batches"].values():
                assert batch["together"] == (method == "sedem")
                assert batch["questions_per_s"]["n"] == 2
            assert row["stored_bytes_per_token"] > 0
    stages = document["results"]["sedem"]["64"]["stages"]
    assert {"encode_ms", "score_ms", "gather_ms", "prefill_ms"} <= set(stages)
    # Three methods, two contexts, two warm-up and two counted rounds.
    assert ticks[-1] == (3 * 2 * 4, 3 * 2 * 4)
    assert any("no GPU" in note or "GPU is here" in note for note in document["notes"])
    assert document["machine"]["processor"] and document["settings"]["weights_sha256"]

    read = {
        name: [row["reads_tokens"] for row in rows.values()]
        for name, rows in document["results"].items()
    }
    assert read["sedem"] == [64, 600]
    assert read["full-context"][0] == 64 < read["full-context"][1] < 512
    headings, *table = lines(document)
    (shown,) = [line for line in table if line[:2] == ["600", "full-context"]]
    assert shown[2] == f"{read['full-context'][1]} of 600"
    assert all(len(line) == len(headings) for line in table) and "floor" not in headings

    for name in ("a.svg", "b.svg", "c.png"):
        draw(document, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_a_study_adds_peers_and_entries_of_rows(plan: Plan) -> None:
    def broken(settings: MethodSettings) -> Subject:
        raise ConfigError("nothing can be compiled on this machine (no compiler)")

    document = run_bench(
        plan.with_changes(methods=("full-context",), contexts=(64,), runs=1),
        peers={"mute": lambda settings: Subject("mute", Mute(), None), "broken": broken},
        detail=lambda trial: {"more": trial.subject.name},
    )
    rows = {name: found["64"]["more"] for name, found in document["results"].items()}
    assert rows == {"full-context": "full-context", "mute": "mute"}
    assert document["left_out"]["broken"].startswith("nothing can be compiled")
    assert document["settings"]["peers"] == ["mute", "broken"]


# Memory


def test_merged_weights_count_in_addition_to_frozen_ones(plan: Plan) -> None:
    merged, plain = alone(plan), alone(plan, engine="eager")
    assert weights_bytes(merged.reader) > weights_bytes(plain.reader)


def test_memory_counts_only_the_caches_of_the_measured_pass(
    plan: Plan, documents: list[Document]
) -> None:
    reader, device = alone(plan).reader, torch.device("cpu")
    assert isinstance(reader, BoundSedem)
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


# Rows of SeDeM


def test_memory_types_and_int8_weights_are_methods_of_their_own(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_multiplies_exactly", lambda: True)
    plan = plan.with_changes(
        methods=("sedem",), contexts=(64,), runs=1, memory=("bfloat16", "fp8"),
        weights=("full", "int8"),
    )  # fmt: skip
    subjects, _ = open_subjects(plan, plan.checkpoint)
    plain, quantized = (subject.reader for subject in subjects[:2])
    assert isinstance(plain, BoundSedem) and isinstance(quantized, BoundSedem)
    assert plain.model is quantized.model
    found = run_bench(plan)["results"]
    assert list(found) == ["sedem", "sedem-fp8", "sedem-int8-weights", "sedem-fp8-int8-weights"]
    rows = [found[name]["64"] for name in found]
    # A slot of 32 values: 64 bytes, or 32 and a scale.
    assert rows[1]["stored_bytes_per_token"] < 0.7 * rows[0]["stored_bytes_per_token"]
    # The int8 matrices stand beside the exact ones.
    assert rows[2]["memory"]["weights_bytes"] > rows[0]["memory"]["weights_bytes"]


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


def test_the_cold_reader_finds_nothing_and_the_warm_one_everything(
    independent: Plan, documents: list[Document]
) -> None:
    subjects, left_out = open_subjects(independent, independent.checkpoint)
    assert [subject.name for subject in subjects] == ["sedem", "sedem-warm"] and not left_out
    cold, warm = (subject.reader for subject in subjects)
    assert isinstance(cold, BoundSedem) and not isinstance(cold, WarmSedem)
    assert isinstance(warm, WarmSedem)
    engines = cold.model.engine, warm.model.engine
    assert isinstance(engines[0], Static) and isinstance(engines[1], Static)
    kept_cold, kept_warm = (engine.kept for engine in engines)
    bank = cold.read(documents)
    texts = {cold.answer(bank, QUESTION).text for _ in range(2)}
    assert (kept_cold.hits, kept_cold.misses, kept_cold.nbytes) == (0, 4, 0)
    bank = warm.read(documents)
    assert warm.warm(bank) == len(bank)
    assert kept_warm.nbytes == warm.kept_bytes(bank)
    for memory, counts in ((bank, (2, 0)), (warm.anew(bank), (0, 2))):
        kept_warm.hits = kept_warm.misses = 0
        texts.add(warm.answer(memory, QUESTION).text)
        assert (kept_warm.hits, kept_warm.misses) == counts
    assert len(texts) == 1


def test_keeping_is_measured_side_by_side_with_documents_read_once(
    independent: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = BoundSedem.read

    def counted(self: BoundSedem, documents: Sequence[Document]) -> Any:
        reads.append(len(documents))
        return read(self, documents)

    monkeypatch.setattr(BoundSedem, "read", counted)
    document = run_bench(independent.with_changes(online=False))
    assert len(reads) == 2
    cold, warm = (document["results"][name]["120"] for name in ("sedem", "sedem-warm"))
    for row in (cold, warm):
        assert row["online_ttft_ms"] is None and row["memory"] is None
        assert row["build_tok_s"]["n"] == 1 and row["prebuilt_ttft_ms"]["n"] == 2
    assert cold["missed_ttft_ms"] is None and warm["missed_ttft_ms"]["min"] > 0
    assert cold["kept"] is None and warm["kept"]["ready"] == warm["kept"]["blocks"] == 8
    # Keys and values of two heads in two layers above injection; a state is a token.
    assert warm["kept"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert any("block_context is set to 'independent'" in note for note in document["notes"])


def test_a_model_with_joint_blocks_has_no_warm_row_and_one_sentence_why(independent: Plan) -> None:
    joint = independent.with_changes(block_context=None, runs=1)
    document = run_bench(joint)
    assert list(document["results"]) == ["sedem"]
    assert document["left_out"]["sedem-warm"].startswith("block_context of this model is 'joint'")
    with pytest.raises(ConfigError, match="block_context of this model is 'joint'"):
        run_bench(joint.with_changes(kept=("warm",)))


def test_a_spread_has_its_quartiles_in_order() -> None:
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found == {"median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 5.0, "n": 5}
    assert set(spread([7.0]).values()) == {7.0, 1}


# Folders of results


def test_an_interrupted_run_resumes_and_names_every_machine(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    plan = plan.with_changes(methods=("full-context",), runs=1)
    measured: list[int] = []

    def counted(text: str, backbone: Backbone, tokens: int) -> list[Document]:
        measured.append(tokens)
        return context(text, backbone, tokens)

    monkeypatch.setattr(command, "context", counted)

    def run(commit: str, *contexts: int) -> dict[str, Any]:
        made = {"machine": {"device": commit}, "versions": {}, "commit": {"id": commit}}
        monkeypatch.setattr(results, "provenance", lambda device: made)
        return run_bench(plan.with_changes(contexts=contexts), out)

    first = run("one", 64)
    assert first["commit"] == {"id": "one"} and "earlier" not in first
    both = run("three", 80, 64)
    assert measured == [64, 80]
    assert both["results"]["full-context"]["64"] == first["results"]["full-context"]["64"]
    assert both["commit"] == {"id": "three"}
    assert [made["commit"] for made in both["earlier"]] == [{"id": "one"}]
    again = run("another", 64)
    assert again["commit"] == {"id": "one"} and "earlier" not in again
    with pytest.raises(ConfigError, match="results of other settings"):
        run_bench(plan.with_changes(runs=2), out)

    (out / "provenance.json").unlink()
    old = run("another", 64, 96)
    assert old["commit"] == {"id": "another"}
    assert [made["commit"] for made in old["earlier"]] == [{"id": "one"}]
    (out / "context-64.json").write_text('{"full')
    with pytest.raises(ConfigError, match=r"context-64\.json' is damaged"):
        run("another", 64)


# Shapes on random weights


def test_a_public_shape_is_benched_on_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AutoConfig.for_model(
        "llama", vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=16,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    monkeypatch.setattr(cost, "shape_file", lambda name: shape)
    document = run_bench(
        Plan(
            methods=("sedem", "full-context", "icae"), contexts=(300,), runs=1, answer_tokens=3,
            device="cpu", backbone="Llama-3.2-1B",
        )
    )  # fmt: skip
    settings = document["settings"]
    assert settings["backbone"] == "llama-3.2-1b"
    assert not any(name.endswith("_sha256") for name in settings if name != "text_sha256")
    (note,) = [note for note in document["notes"] if "llama-3.2-1b on random weights" in note]
    assert "answers are noise" in note and "sedem-nano's tokenizer" in note
    for rows in document["results"].values():
        assert rows["300"]["reads_tokens"] >= 300
        assert rows["300"]["online_ttft_ms"]["median"] > 0
    # Three blocks of 32 slots of width 32 in bfloat16 for 300 tokens.
    assert document["results"]["sedem"]["300"]["stored_bytes_per_token"] == 3 * 32 * 32 * 2 / 300
    # One segment of 128 slots.
    assert document["results"]["icae"]["300"]["stored_bytes_per_token"] == 128 * 32 * 2 / 300


@pytest.fixture
def random_plan(tiny_folder: Callable[..., str]) -> Plan:
    """A folder of 15 layers, so that rag finds its fourteenth."""
    return Plan(
        methods=("sedem", *TRAINED), contexts=(300,), runs=1, answer_tokens=3, device="cpu",
        backbone=tiny_folder(depth=15, max_position_embeddings=2048),
    )  # fmt: skip


@pytest.mark.slow
def test_every_trained_baseline_is_benched_on_the_shape_of_a_folder(random_plan: Plan) -> None:
    document = run_bench(random_plan)
    assert list(document["results"]) == ["sedem", *TRAINED] and not document["left_out"]
    for rows in document["results"].values():
        # Answers have their full length, since no end token is generated.
        assert rows["300"]["decode_tok_s"]["n"] == 1
    assert len(document["settings"]["shape_sha256"]) == 64
    assert any("text is cut by its own tokenizer" in note for note in document["notes"])


def test_a_baseline_on_random_weights_has_the_papers_settings_and_adapters(
    random_plan: Plan,
) -> None:
    plan = random_plan.with_changes(methods=("icae",))
    with checkpoint_of(plan) as checkpoint:
        (subject,), _ = open_subjects(plan, checkpoint)
    reader = subject.reader
    assert isinstance(reader, TrainedReader)
    config = reader.config
    assert config.with_changes(backbone="x") == ICAEConfig(backbone="x")
    assert subject.backbone is reader.backbone
    # Two matrices on each of q and v in 15 layers.
    assert len(reader.backbone.lora_parameters()) == 2 * 2 * 15


def test_a_baseline_whose_settings_do_not_fit_a_shape_is_left_out(
    random_plan: Plan, tiny_folder: Callable[..., str]
) -> None:
    document = run_bench(
        random_plan.with_changes(methods=("full-context", "rag"), backbone=tiny_folder())
    )
    assert list(document["results"]) == ["full-context"]
    assert "extract_layer is 14" in document["left_out"]["rag"]


# Cold start


def test_the_parts_of_a_cold_start_add_up(tiny_checkpoint: str) -> None:
    found = measure_cold_start(tiny_checkpoint, "static", runs=1)
    assert tuple(found) == PARTS
    *parts, whole = found.values()
    assert min(parts) > 0 and sum(parts) == pytest.approx(whole)


def test_a_process_that_fails_is_named(
    tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PROCESS", "import sys; sys.exit(f'engine is {sys.argv[3]}')")
    with pytest.raises(SedemError, match=f"asks '{tiny_checkpoint}' ended with: engine is quick"):
        measure_cold_start(tiny_checkpoint, "quick", runs=1)


# Contexts


@pytest.mark.parametrize("tokens", [1, 512, 513, 20_000])
def test_the_demo_text_is_cut_to_the_exact_length(tokens: int) -> None:
    nano = open_backbone(str(locate("sedem-nano") / BACKBONE))
    documents = context(source(None)[0], nano, tokens)
    counts = [len(nano.token_ids(document.text)) for document in documents]
    assert sum(counts) == tokens
    assert counts[:-1] == [DOCUMENT] * (len(documents) - 1)
    assert len({document.name for document in documents}) == len(documents)


def test_a_short_text_is_repeated_and_one_without_words_is_rejected(backbone: Backbone) -> None:
    (document,) = context("One two three. ", backbone, 100)
    assert len(backbone.token_ids(document.text)) == 100
    assert document.text.startswith("One two three. One two three. ")
    with pytest.raises(DataError, match="cannot be cut to 3 tokens"):
        context("   ", backbone, 3)
