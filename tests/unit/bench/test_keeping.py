"""Kept keys and values in the bench: who finds what, when it is worth it, and blocks of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from answers import joined

from sedem import Document
from sedem.answering.prompts import question_ids
from sedem.backbone.decoder import Backbone
from sedem.bench.command import open_subjects, run_bench
from sedem.bench.keeping import WarmSedem, break_even_hit_rate, questions_to_pay
from sedem.bench.plan import Plan
from sedem.bench.table import HEADINGS, lines
from sedem.bench.text_blocks import TextBlocks
from sedem.engine.interface import AnswerInputs
from sedem.engine.static import Static
from sedem.errors import ConfigError
from sedem.evaluation.readers import BoundSedem
from sedem.guidance import independent

QUESTION = "What is the rent?"


@pytest.fixture
def plan(checkpoint: str) -> Plan:
    return Plan(
        methods=("sedem", "text-blocks", "hf-prefix"), contexts=(120,), checkpoint=checkpoint,
        runs=2, answer_tokens=4, device="cpu", kept=("cold", "warm"),
        block_context="independent",
    )  # fmt: skip


def opened(plan: Plan, name: str) -> Any:
    subjects, _ = open_subjects(plan, plan.checkpoint)
    return next(subject.reader for subject in subjects if subject.name == name)


def kept_of(reader: Any) -> Any:
    engine = reader.engine if isinstance(reader, TextBlocks) else reader.model.engine
    assert isinstance(engine, Static)
    return engine.kept


@pytest.mark.parametrize(
    ("cold", "missed", "found", "share"),
    [(10, 12, 4, 0.25), (10, 10, 4, 0.0), (10, 9, 4, 0.0), (10, 16, 10, 1.0), (10, 16, 11, None)],
)
def test_keeping_is_worth_it_from_some_share_of_blocks_found(
    cold: float, missed: float, found: float, share: float | None
) -> None:
    assert break_even_hit_rate(cold, missed, found) == share
    if share is not None and missed > cold:
        assert share * found + (1 - share) * missed == cold


def test_warming_pays_after_some_questions() -> None:
    assert questions_to_pay(warming=60, cold=10, found=4) == 10
    assert questions_to_pay(warming=60, cold=10, found=10) is None


def test_the_cold_reader_finds_nothing_and_the_warm_one_everything(
    plan: Plan, documents: list[Document]
) -> None:
    subjects, left_out = open_subjects(plan.with_changes(methods=("sedem",)), plan.checkpoint)
    assert [subject.name for subject in subjects] == ["sedem", "sedem-warm"] and not left_out
    cold, warm = (subject.reader for subject in subjects)
    assert isinstance(cold, BoundSedem) and not isinstance(cold, WarmSedem)
    assert isinstance(warm, WarmSedem)
    texts = set()
    bank = cold.read(documents)
    for _ in range(2):
        texts.add(cold.answer(bank, QUESTION).text)
    assert (kept_of(cold).hits, kept_of(cold).misses, kept_of(cold).nbytes) == (0, 4, 0)
    bank = warm.read(documents)
    assert warm.warm(bank) == len(bank)
    assert kept_of(warm).nbytes == warm.kept_bytes(bank)
    for memory, counts in ((bank, (2, 0)), (warm.anew(bank), (0, 2))):
        kept_of(warm).hits = kept_of(warm).misses = 0
        texts.add(warm.answer(memory, QUESTION).text)
        assert (kept_of(warm).hits, kept_of(warm).misses) == counts
    assert len(texts) == 1


def test_keeping_is_measured_side_by_side(plan: Plan) -> None:
    document = run_bench(plan.with_changes(batches=(2,)))
    results = {name: rows["120"] for name, rows in document["results"].items()}
    assert list(results) == ["sedem", "sedem-warm", "text-blocks", "hf-prefix"]
    for name, row in results.items():
        assert row["prebuilt_ttft_ms"]["min"] > 0 and row["online_ttft_ms"]["n"] == 2
        assert (row["missed_ttft_ms"] is not None) == (name in ("sedem-warm", "text-blocks"))
        assert (row["warm_ms"] is not None) == (name in ("sedem-warm", "text-blocks"))
    # Keys and values of two layers above injection, and of all four; a state is a token.
    two_heads = 2 * 2 * 8 * 4
    warm, text = results["sedem-warm"], results["text-blocks"]
    assert warm["kept"]["bytes_per_token"] == 2 * two_heads
    # A character of several bytes at the edge of two blocks is in both texts.
    assert text["kept"]["bytes_per_token"] == pytest.approx(4 * two_heads, rel=0.05)
    assert results["hf-prefix"]["kept"]["bytes_per_token"] == pytest.approx(4 * two_heads, rel=0.02)
    assert results["sedem"]["kept"] is None
    assert warm["kept"]["ready"] == warm["kept"]["blocks"] == 8
    # The same blocks, as states or as text.
    assert warm["decoder_tokens"] == 32 == pytest.approx(text["decoder_tokens"], abs=4)
    assert warm["floor"]["prebuilt_ttft_ms"] < results["sedem"]["floor"]["prebuilt_ttft_ms"]
    for name in ("sedem", "sedem-warm"):
        assert results[name]["batches"]["2"]["together"]
    assert any("block_context is set to 'independent'" in note for note in document["notes"])
    assert all(len(line) == len(HEADINGS) for line in lines(document))


def test_a_model_with_joint_blocks_has_no_warm_row_and_one_sentence_why(plan: Plan) -> None:
    document = run_bench(plan.with_changes(methods=("sedem",), block_context=None, runs=1))
    assert list(document["results"]) == ["sedem"]
    assert document["left_out"]["sedem-warm"].startswith("block_context of this model is 'joint'")
    with pytest.raises(ConfigError, match="block_context of this model is 'joint'"):
        run_bench(plan.with_changes(methods=("sedem",), block_context=None, kept=("warm",)))


def test_documents_are_read_once_if_only_answers_are_timed(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = BoundSedem.read

    def counted(self: BoundSedem, documents: Sequence[Document]) -> Any:
        reads.append(len(documents))
        return read(self, documents)

    monkeypatch.setattr(BoundSedem, "read", counted)
    document = run_bench(plan.with_changes(online=False, methods=("sedem",)))
    assert len(reads) == 2
    for rows in document["results"].values():
        row = rows["120"]
        assert row["online_ttft_ms"] is None and row["memory"] is None
        assert row["build_tok_s"]["n"] == 1 and row["prebuilt_ttft_ms"]["n"] == 2
    assert all(len(line) == len(HEADINGS) for line in lines(document))


def test_one_block_of_text_is_plain_text_before_the_question(
    plan: Plan, documents: list[Document]
) -> None:
    reader = opened(plan.with_changes(k=1), "text-blocks")
    memory = reader.read(documents)
    backbone: Backbone = reader.backbone
    prefix = question_ids(backbone, QUESTION)
    ids = [prefix[0], *memory.source.ids[3].tolist(), *prefix[1:]]
    with torch.no_grad():
        expected = backbone.model(torch.tensor([ids])).logits[:, -1]
    start = AnswerInputs(memory.source, [3], torch.zeros(1), torch.tensor(prefix))
    with joined(reader.engine, [start], 1) as (logits_1V, _):
        torch.testing.assert_close(logits_1V, expected, rtol=1e-4, atol=1e-4)


def test_blocks_of_text_are_independent_blocks_from_the_first_layer(
    plan: Plan, documents: list[Document]
) -> None:
    reader = opened(plan, "text-blocks")
    memory = reader.read(documents)
    backbone: Backbone = reader.backbone
    prefix = torch.tensor(question_ids(backbone, QUESTION))
    blocks = [1, 2]
    with torch.no_grad():
        states_NUD = memory.source.memory(blocks)
        length = states_NUD.shape[1]
        assert [len(memory.source.ids[block]) for block in blocks] == [length] * 2
        entries = [
            (torch.cat(list(key[:, None]), dim=2), torch.cat(list(value[:, None]), dim=2))
            for key, value in independent.keys_values(backbone, 0, states_NUD)
        ]
        positions_1U = torch.arange(1, length + 1).repeat(2)[None]
        valid_1U = torch.ones_like(positions_1U, dtype=torch.bool)
        filled = independent.prefill(
            backbone, 0, prefix[None], torch.ones_like(prefix[None], dtype=torch.bool), entries,
            positions_1U, valid_1U,
        )  # fmt: skip
        expected = backbone.logits(filled.prefix[:, -1])
    start = AnswerInputs(memory.source, blocks, torch.zeros(2), prefix)
    with joined(reader.engine, [start], 1) as (logits_1V, _):
        torch.testing.assert_close(logits_1V, expected, rtol=1e-4, atol=1e-4)


def test_text_blocks_reads_the_blocks_that_sedem_selects(
    plan: Plan, documents: list[Document]
) -> None:
    text, sedem = opened(plan, "text-blocks"), opened(plan, "sedem-warm")
    one = text.answer(text.read(documents), QUESTION)
    other = sedem.answer(sedem.read(documents), QUESTION)
    assert one.citations == other.citations and one.k == 2
    assert one.stored_bytes == other.stored_bytes
