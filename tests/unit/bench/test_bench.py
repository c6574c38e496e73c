"""The bench on tiny models: contexts, methods and documents are complete; no speed is asserted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from sedem import Document
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.checkpoint.folder import BACKBONE, locate
from sedem.errors import ConfigError, DataError
from sedem_lab.baselines.icae import ICAEConfig
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.bench import measure
from sedem_lab.bench.contexts import DOCUMENT, context, demo_text
from sedem_lab.bench.measure import run_bench, spread
from sedem_lab.bench.report import HEADINGS, draw, lines
from sedem_lab.bench.subjects import BenchPlan, checkpoint_of, open_subjects, plan_of
from sedem_lab.evaluation import cost

METHODS = ("sedem", "full-context", "bm25")
FIGURES = ("online_ttft_ms", "prebuilt_ttft_ms", "decode_tok_s", "build_tok_s")


@pytest.fixture(scope="module")
def plan(tiny_checkpoint: str) -> BenchPlan:
    return BenchPlan(
        methods=METHODS, contexts=(64, 600), checkpoint=tiny_checkpoint, runs=2, max_new_tokens=4,
        device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": (8, 5_000_000)}, r"contexts\[1\] is 5000000; input should be less than"),
        ({"rns": 2}, "unknown key 'rns'; did you mean 'runs'"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1; input should be greater"),
        ({"dtype": "int3"}, "dtype is 'int3'; input should be 'float32' or 'bfloat16'"),
        ({"device": "toaster"}, "device is 'toaster'; it can be cpu or cuda"),
    ],
)
def test_an_impossible_plan_is_rejected_with_one_sentence(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(changes)


def test_a_gpu_is_measured_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert plan_of({"device": "cuda:1"}).place == torch.device("cuda", 1)
    assert (plan_of({}).device, plan_of({}).dtype) == ("cuda", "bfloat16")
    assert plan_of({"device": "cpu"}).dtype == "float32"


def test_k_applies_only_to_methods_with_a_selection_budget(plan: BenchPlan) -> None:
    methods = ("sedem", "full-context", "bm25", "longllmlingua")
    subjects, left_out = open_subjects(plan.with_changes(methods=(*methods, "icae"), k=1))
    # A method that cannot run is left out, but one must run.
    assert [subject.name for subject in subjects] == list(methods) and list(left_out) == ["icae"]
    with pytest.raises(ConfigError, match=r"has random weights here; name a --backbone"):
        open_subjects(plan.with_changes(methods=("icae",)))
    documents = [Document(name, f"The {name} is 900 euros.") for name in ("rent", "fee")]
    used = {s.name: s.reader.answer(s.reader.read(documents), "The rent?").k for s in subjects}
    assert used["sedem"] == used["bm25"] == 1 and used["full-context"] == 2


def test_the_document_has_every_figure_of_every_method(plan: BenchPlan, tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    document = run_bench(plan, progress=lambda *done: ticks.append(done))
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
            assert row["stored_bytes_per_token"] > 0
    stages = document["results"]["sedem"]["64"]["stages"]
    assert {"build_ms", "encode_ms", "score_ms", "gather_ms", "prefill_ms"} <= set(stages)
    # Three methods, two contexts, two warm-up and two counted rounds.
    assert ticks[-1] == (3 * 2 * 4, 3 * 2 * 4)
    assert any("no GPU" in note or "GPU is here" in note for note in document["notes"])
    assert document["machine"]["processor"] and document["settings"]["runs"] == 2

    read = {
        name: [row["reads_tokens"] for row in rows.values()]
        for name, rows in document["results"].items()
    }
    assert read["sedem"] == [64, 600]
    assert read["full-context"][0] == 64 < read["full-context"][1] < 512
    table = lines(document)
    (shown,) = [line for line in table if line[:2] == ["600", "full-context"]]
    assert shown[2] == f"{read['full-context'][1]} of 600"
    assert all(len(line) == len(HEADINGS) for line in table)
    for name in ("a.svg", "b.svg", "c.png"):
        draw(document, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_documents_are_read_in_every_round_or_once(
    plan: BenchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    class Counted(measure.Trial):
        def build(self) -> None:
            reads.append(len(self.documents))
            super().build()

    one = plan.with_changes(methods=("full-context",), contexts=(64,))
    for read_again, count in ((True, 4), (False, 1)):
        reads.clear()
        run_bench(one, trial=Counted, read_again=read_again)
        assert len(reads) == count


def test_a_spread_has_its_quartiles_in_order() -> None:
    found = spread([5.0, 1.0, None, 3.0, 2.0, 4.0])
    assert found == {"median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 5.0, "n": 5}
    assert spread([7.0]) == dict.fromkeys(("median", "min", "q1", "q3", "max"), 7.0) | {"n": 1}
    assert spread([None]) is None


# Shapes on random weights


def test_a_public_shape_is_benched_on_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AutoConfig.for_model(
        "llama", vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=16,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    monkeypatch.setattr(cost, "shape_file", lambda name: shape)
    document = run_bench(
        BenchPlan(
            methods=("sedem", "full-context", "icae"), contexts=(300,), runs=1, max_new_tokens=3,
            device="cpu", backbone="Llama-3.2-1B",
        )
    )  # fmt: skip
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
def random_plan(tiny_folder: Callable[..., str]) -> BenchPlan:
    """A folder of 15 layers, so that rag finds its fourteenth."""
    return BenchPlan(
        methods=("sedem", *TRAINED), contexts=(300,), runs=1, max_new_tokens=3, device="cpu",
        backbone=tiny_folder(depth=15, max_position_embeddings=2048),
    )  # fmt: skip


@pytest.mark.slow
def test_every_trained_baseline_is_benched_on_the_shape_of_a_folder(random_plan: BenchPlan) -> None:
    document = run_bench(random_plan)
    assert list(document["results"]) == ["sedem", *TRAINED] and not document["left_out"]
    for rows in document["results"].values():
        # Answers have their full length, since no end token is generated.
        assert rows["300"]["decode_tok_s"]["n"] == 1
    assert any("text is cut by its own tokenizer" in note for note in document["notes"])


def test_a_baseline_on_random_weights_has_the_papers_settings_and_adapters(
    random_plan: BenchPlan,
) -> None:
    with checkpoint_of(random_plan.with_changes(methods=("icae",))) as opened:
        (subject,), _ = open_subjects(opened)
    reader = subject.reader
    assert isinstance(reader, TrainedReader)
    config = reader.config
    assert config.with_changes(backbone="x") == ICAEConfig(backbone="x")
    assert subject.backbone is reader.backbone
    # Two matrices on each of q and v in 15 layers.
    assert len(reader.backbone.lora_parameters()) == 2 * 2 * 15


def test_a_baseline_whose_settings_do_not_fit_a_shape_is_left_out(
    random_plan: BenchPlan, tiny_folder: Callable[..., str], plan: BenchPlan
) -> None:
    document = run_bench(
        random_plan.with_changes(methods=("full-context", "rag"), backbone=tiny_folder())
    )
    assert list(document["results"]) == ["full-context"]
    assert "extract_layer is 14" in document["left_out"]["rag"]
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; .* is given with -m"):
        run_bench(plan.with_changes(backbone=plan.checkpoint))


# Contexts


def test_the_demo_text_is_cut_to_the_exact_length() -> None:
    nano = open_backbone(str(locate("sedem-nano") / BACKBONE))
    for tokens in (1, 512, 513, 20_000):
        documents = context(demo_text(), nano, tokens)
        counts = [len(nano.token_ids(document.text)) for document in documents]
        assert sum(counts) == tokens and counts[:-1] == [DOCUMENT] * (len(documents) - 1)
        assert len({document.name for document in documents}) == len(documents)


def test_a_short_text_is_repeated_and_one_without_words_is_rejected(backbone: Backbone) -> None:
    (document,) = context("One two three. ", backbone, 100)
    assert len(backbone.token_ids(document.text)) == 100
    assert document.text.startswith("One two three. One two three. ")
    with pytest.raises(DataError, match="cannot be cut to 3 tokens"):
        context("   ", backbone, 3)
