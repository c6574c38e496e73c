"""The bench of the studies: peers answer as they should, and every row has its floors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE

from experiments.speed import (
    beside_llama_cpp,
    comprexit_ttft,
    efficiency,
    hit_rate,
    paying_questions,
)
from experiments.system.answers import Constant
from experiments.system.bench import (
    Detailed,
    EncoderLayers,
    Keeping,
    comprexit_times,
    icae_times,
    measure_memory,
    timed_context,
)
from experiments.system.floors import Ceilings
from experiments.system.measures import measure
from experiments.system.peers import KEEPERS, PEERS, QUESTION_ROOM, sedem_opener, without_early_exit
from experiments.system.scales import NANO, PAPER, SMOL
from experiments.system.stand_in import stand_in
from sedem import Answer, Document, SeDeM
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.backbone.prompts import question_ids
from sedem.engine import int8
from sedem.engine.interface import AnswerInputs
from sedem.errors import ConfigError
from sedem.guidance.independent import keys_values
from sedem.method.encoder import encode
from sedem.method.injection import GrowingCache, RestoredBlocks, prefill
from sedem.selecting.select import encode_questions
from sedem_lab.bench import measure as measuring
from sedem_lab.bench.measure import run_bench
from sedem_lab.bench.subjects import BenchPlan, Subject, checkpoint_of, open_subjects
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.readers import open_method
from sedem_lab.evaluation.storage import kv_bytes_per_token

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


def test_rows_have_floors_and_the_peak_of_memory(plan: BenchPlan) -> None:
    detailed = partial(Detailed, ceilings=Ceilings(1e10, 1e11))
    plan = plan.with_changes(methods=("sedem", "full-context"), contexts=(64, 600))
    document = run_bench(plan, peers("hf", "hf-prefix"), trial=detailed)
    results = {name: rows["64"] for name, rows in document["results"].items()}
    assert list(results) == ["sedem", "full-context", "hf", "hf-prefix"]
    for row in results.values():
        assert all(row["floor"][clock] > 0 for clock in ("online_ttft_ms", "decode_tok_s"))
        assert row["memory"]["peak_bytes"] > 0
    assert set(results["sedem"]["build_stages"]) == {"segment_ms", "encode_ms", "compress_ms"}
    assert results["sedem"]["layers_tok_s"]["n"] == 2 and results["hf"]["layers_tok_s"] is None
    assert results["hf"]["reads_tokens"] == 64
    assert 64 < document["results"]["hf"]["600"]["reads_tokens"] < 512


def test_keeping_is_measured_side_by_side_with_documents_read_once(plan: BenchPlan) -> None:
    apart = {"block_context": "independent"}
    rows = {
        "sedem": sedem_opener("sedem", **apart),
        "sedem-warm": sedem_opener("sedem-warm", warm=True, **apart),
        **peers("text-blocks", "hf-prefix"),
    }
    plan = plan.with_changes(contexts=(120,))
    results = run_bench(plan, rows, trial=Keeping, read_again=False)["results"]
    found = {name: of_name["120"] for name, of_name in results.items()}
    assert list(found) == list(rows)
    for row in found.values():
        assert row["online_ttft_ms"] is None and row["build_tok_s"]["n"] == 1
        assert row["prebuilt_ttft_ms"]["n"] == 2
    assert found["sedem"]["missed_ttft_ms"] is None and found["sedem"]["kept"] is None
    assert found["sedem-warm"]["missed_ttft_ms"]["min"] > 0
    # Keys and values of two heads in two layers above injection; a state is a token.
    assert found["sedem-warm"]["kept"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    # In all four layers; a character of several bytes at the edge of two blocks is in both texts.
    for name in ("hf-prefix", "text-blocks"):
        kept = found[name]["kept"]["bytes_per_token"]
        assert kept == pytest.approx(4 * 2 * 2 * 8 * 4, rel=0.05)


def test_a_model_with_joint_blocks_has_no_warm_row_and_one_sentence_why(plan: BenchPlan) -> None:
    subjects, left_out = open_subjects(
        plan.with_changes(methods=("sedem",)), {"warm": sedem_opener("warm", warm=True)}
    )
    assert [subject.name for subject in subjects] == ["sedem"]
    assert left_out["warm"].startswith("block_context of this model is 'joint'")


def test_the_cold_reader_finds_nothing_and_the_warm_one_everything(
    plan: BenchPlan, documents: list[Document]
) -> None:
    cold, warm = (
        sedem_opener("sedem", warm=warm, block_context="independent")(plan).reader
        for warm in (False, True)
    )
    assert isinstance(warm, KEEPERS) and not isinstance(cold, KEEPERS)
    kept_cold, kept_warm = (reader.model.engine.kept for reader in (cold, warm))  # type: ignore
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


def test_memory_counts_only_the_caches_of_the_measured_pass(
    plan: BenchPlan, documents: list[Document]
) -> None:
    (subject,), _ = open_subjects(plan.with_changes(methods=("sedem",)))
    reader: Any = subject.reader
    measure_memory(reader, documents, torch.device("cpu"))
    caches = reader.model.engine.memory()["caches"]
    reader.answer_together(reader.read(documents), [QUESTION, "How long?"] * 4)
    assert reader.model.engine.memory()["caches"] > 4 * caches > 0
    measure_memory(reader, documents, torch.device("cpu"))
    assert reader.model.engine.memory()["caches"] == caches


def test_memory_is_measured_on_the_given_gpu(
    plan: BenchPlan, documents: list[Document], monkeypatch: pytest.MonkeyPatch
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
    reader: Any = Constant("mute")
    assert measure_memory(reader, documents, second) == {"peak_bytes": 50}
    assert len(asked) == 4 and set().union(*asked.values()) == {second}


def test_hugging_faces_encoder_layers_are_the_encoder(
    model: SeDeM, documents: list[Document]
) -> None:
    layers = EncoderLayers(model.config, open_backbone(model.config.encoder))
    for ids_BP in layers.batches(documents):
        expected = encode(model.encoder, ids_BP[:, 1:], model.config.extract_layers)[0]
        torch.testing.assert_close(layers.states(ids_BP)[:, 1:], expected)


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


def test_memory_counts_hugging_faces_static_cache(
    tiny_checkpoint: str, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    subject = peer("hf-compiled", tiny_checkpoint)
    memory = subject.reader.read(documents)
    subject.reader.answer(memory, "Rent?")
    assert subject.backbone is not None
    positions = memory.ids.shape[1] + QUESTION_ROOM + 4
    size = positions * kv_bytes_per_token(subject.backbone.model.config) // 2 * 4
    assert subject.reader.cache_bytes == size  # type: ignore[attr-defined]


def test_peers_give_the_same_answer_as_full_context() -> None:
    settings = {"max_new_tokens": 8, "device": "cpu"}
    given = MethodSettings(checkpoint="sedem-nano", **settings)
    full = open_method("full-context", given).reader
    others = [peer(name, "sedem-nano", **settings).reader for name in ("hf", "hf-prefix")]
    documents = [Document("one", "The rent is 900 euros."), Document("two", "Bake for an hour.")]
    answers: list[Answer] = []
    for reader in (full, *others):
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
    rows = ["sedem-warm-int8-weights", "hf", "hf-prefix"]
    if find_spec("llama_cpp") is None:
        assert "pip install llama-cpp-python" in result["left_out"]["llama-cpp"]
    else:
        rows.append("llama-cpp")
        assert "llama-cpp-python" in result["versions"]
    assert list(result["results"]) == rows
    kept = [found["64"]["kept"] is not None for found in result["results"].values()]
    assert kept == [True, False, True, True][: len(rows)]
    shown = beside_llama_cpp.markdown(scale).splitlines()
    assert len([line for line in shown if "T=64 | stand-in: 64 |" in line]) >= len(rows) - 1


def test_llama_cpp_needs_a_gguf_file(tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.system.peers.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files, and '.*' is not one"):
        peer("llama-cpp", tiny_checkpoint)


@pytest.mark.slow
def test_a_compiled_step_gives_the_same_answer() -> None:
    readers = [peer(n, "sedem-nano", max_new_tokens=8).reader for n in ("hf", "hf-compiled")]
    for length in (40, 80):
        documents = [Document("one", "The rent is 900 euros and no more. "[:length])]
        for question in ("Rent?", "Euros?", "Rent?"):
            one, other = (reader.answer(reader.read(documents), question) for reader in readers)
            assert one.text == other.text != ""


def test_one_block_of_text_is_plain_text_before_the_question(
    tiny_checkpoint: str, documents: list[Document]
) -> None:
    reader: Any = peer("text-blocks", tiny_checkpoint, k=1).reader
    memory = reader.read(documents)
    backbone: Backbone = reader.backbone
    prefix = question_ids(backbone, QUESTION)
    ids = [prefix[0], *memory.ids[3].tolist(), *prefix[1:]]
    with torch.no_grad():
        expected = backbone.model(torch.tensor([ids])).logits[:, -1]
    start = AnswerInputs(memory, [3], torch.zeros(1), torch.tensor(prefix))
    with reader.engine.open_rows(1) as rows:
        logits_1V = rows.join([0], [start], [1])
        torch.testing.assert_close(logits_1V, expected, rtol=1e-4, atol=1e-4)


def test_blocks_of_text_are_independent_blocks_from_the_first_layer(
    tiny_checkpoint: str, documents: list[Document]
) -> None:
    reader: Any = peer("text-blocks", tiny_checkpoint).reader
    memory = reader.read(documents)
    backbone: Backbone = reader.backbone
    prefix = torch.tensor(question_ids(backbone, QUESTION))
    blocks = [1, 2]
    with torch.no_grad():
        states_NUD = memory.memory(blocks)
        length = states_NUD.shape[1]
        assert [len(memory.ids[block]) for block in blocks] == [length] * 2
        entries = [
            (torch.cat(list(key[:, None]), dim=2), torch.cat(list(value[:, None]), dim=2))
            for key, value in keys_values(backbone, 0, states_NUD)
        ]
        number_1U, cache = torch.arange(2).repeat_interleave(length)[None], GrowingCache()
        cache.upper.stored.update(enumerate(entries))
        filled = prefill(
            backbone, 0, prefix[None], torch.ones_like(prefix[None], dtype=torch.bool), None,
            torch.ones_like(number_1U, dtype=torch.bool),
            blocks=RestoredBlocks(number_1U, "independent"), cache=cache,
        )  # fmt: skip
        expected = backbone.logits(filled.prefix[:, -1])
    start = AnswerInputs(memory, blocks, torch.zeros(2), prefix)
    with reader.engine.open_rows(1) as rows:
        logits_1V = rows.join([0], [start], [1])
        torch.testing.assert_close(logits_1V, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("cold", "missed", "found", "rate"),
    [
        (10, 12, 4, 25.0),
        (10, 10, 4, 0.0),
        (10, 9, 4, 0.0),
        (10, 16, 10, 100.0),
        (10, 16, 11, "never"),
    ],
)
def test_keeping_is_worth_it_from_some_share_of_blocks_found(
    cold: float, missed: float, found: float, rate: float | str
) -> None:
    times = [cold, found, missed, 60.0]
    assert hit_rate(times) == rate
    assert paying_questions(times) == ("never" if found >= cold else 60 / (cold - found))
