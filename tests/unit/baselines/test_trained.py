"""Tests that every trained baseline must pass, on a tiny random backbone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from unit.baselines.conftest import SMALL, make

from sedem import Document, SeDeM
from sedem.answering.decoding import Decoding, answer_ids, context_prompt, question_ids
from sedem.backbone.decoder import Backbone
from sedem.baselines import settings
from sedem.baselines.memory import ContextMemory
from sedem.baselines.registry import TRAINED, reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.trained import TrainedReader
from sedem.checkpoint.folder import locate
from sedem.data.examples import Example, ExampleSet
from sedem.data.labels import gold_documents, some_documents
from sedem.data.question_sets import open_examples
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem.evaluation.command import run_evaluation
from sedem.evaluation.config import EvaluationConfig, MethodSettings
from sedem.evaluation.registry import METHODS, default_checkpoint, open_method
from sedem.evaluation.trained import Trained
from sedem.training.baseline import QuestionTraining
from sedem.training.question_dataset import QuestionDataset, collate_questions

SHORT = Decoding(max_new_tokens=5)
INVISIBLE = Document("invisible", "\u200b")
RENT, EGGS = "What is the rent?", "How many eggs?"


def drop_invisible_spaces(backbone: Backbone) -> None:
    """Make a backbone's tokenizer ignore zero-width spaces."""
    backbone.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")


def test_every_trained_method_is_registered_and_has_small_test_settings() -> None:
    assert set(SMALL) == set(TRAINED)
    assert set(TRAINED) <= set(METHODS)
    for name in TRAINED:
        assert reader_class(name).name == name


def test_an_answer_reports_its_costs(any_reader: TrainedReader, documents: list[Document]) -> None:
    memory = any_reader.read(documents)
    answer = any_reader.answer(memory, RENT, decoding=SHORT)
    assert answer.model == any_reader.name
    assert answer.finish_reason in ("end", "length")
    assert answer.timings.keys() >= {"select_ms", "prefill_ms", "ttft_ms", "total_ms"}
    assert answer.timings["ttft_ms"] <= answer.timings["total_ms"]
    assert answer.conditioning and answer.conditioning > len(RENT)
    assert answer.stored_bytes and answer.context_tokens == len(memory.token_ends)
    texts = {document.name: document.text for document in documents}
    for citation in answer.citations:
        assert texts[citation.document][citation.start : citation.end] == citation.text
        assert (citation.score is not None) == any_reader.has_selection_budget
    assert answer.citations and answer.blocks >= len(documents)


def test_a_checkpoint_finds_its_backbone_from_any_folder(
    tiny_folder: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tiny_folder())
    monkeypatch.chdir(folder.parent)
    make("icae", folder.name).save_pretrained(tmp_path / "icae")
    monkeypatch.chdir(tmp_path)
    reader = reader_class("icae").from_pretrained("icae")
    assert reader.config.backbone == str(folder)


def test_a_layout_that_baselines_were_not_checked_on_is_refused(
    tiny_folder: Callable[..., str],
) -> None:
    with pytest.raises(
        ConfigError, match=r"icae runs on backbones of .*llama.* has 'olmo2'; choose"
    ):
        make("icae", tiny_folder("olmo2"))


def test_a_batch_equals_single_answers(
    any_reader: TrainedReader, documents: list[Document]
) -> None:
    if not any_reader.batched:
        pytest.skip("answers one by one")
    asked = [(documents, RENT), (documents[1:], EGGS), (documents[:1], "Pets?")]
    memories = [any_reader.read(given) for given, _ in asked]
    together = any_reader.answer_all(memories, [question for _, question in asked], SHORT)
    for answer, memory, (_, question) in zip(together, memories, asked, strict=True):
        alone = any_reader.answer(memory, question, decoding=SHORT)
        assert (answer.text, answer.conditioning) == (alone.text, alone.conditioning)


def test_adapters_and_parts_change_the_logits(
    any_reader: TrainedReader, tiny_folder: Callable[..., str], documents: list[Document]
) -> None:
    other = make(any_reader.name, tiny_folder(), seed=2)

    def logits(reader: TrainedReader) -> torch.Tensor:
        memory = reader.read(documents)
        prompt = [reader.backbone.bos_token_id, *reader.backbone.token_ids(RENT)]
        with torch.no_grad(), reader.decoding_mode():
            seen = reader.context_tokens_used(len(memory.token_ends), len(prompt), 5)
            return reader.prefill([memory.compressed.content], [seen], [prompt]).logits

    assert not torch.allclose(logits(any_reader), logits(other))


def test_the_answer_says_what_did_not_fit(tiny_folder: Callable[..., str]) -> None:
    long = [Document("long", "The rent is 900 euros a month. " * 400)]
    for name in TRAINED:
        reader = make(name, tiny_folder())
        answer = reader.answer(reader.read(long), RENT, decoding=SHORT)
        (sentence, *_) = answer.cut
        assert "12,399 tokens" in sentence and reader.name in sentence
        (citation,) = answer.citations
        # HMT reads any length; it drops its oldest memory.
        assert (len(citation.text) < len(long[0].text)) is (name != "hmt")


def test_a_question_too_long_is_rejected(
    any_reader: TrainedReader, documents: list[Document]
) -> None:
    with pytest.raises(DataError, match=r"exceed the 512 positions"):
        any_reader.answer(any_reader.read(documents), "Why? " * 200)


def test_a_context_without_tokens_is_rejected(any_reader: TrainedReader) -> None:
    drop_invisible_spaces(any_reader.backbone)
    with pytest.raises(DataError, match="the text has no tokens; give a document with words"):
        any_reader.read([INVISIBLE])


# Training


def test_only_the_parameter_groups_are_trained_and_the_loss_falls(
    any_reader: TrainedReader, fixtures: Path
) -> None:
    stage = QuestionTraining(any_reader)
    questions = squad(any_reader, fixtures)
    trained = [p for group in stage.parameter_groups().values() for p in group]
    assert {id(p) for p in trained} == {id(p) for p in stage.parameters() if p.requires_grad}
    stage.train()
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    batch = collate_questions([questions[i] for i in range(2)])
    before = {name: p.clone() for name, p in any_reader.backbone.named_parameters()}
    losses = []
    for _ in range(8):
        loss = stage(**batch)["loss"]
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, parameter in any_reader.backbone.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name]), name


def test_the_loss_of_a_batch_is_the_mean_of_its_rows(
    any_reader: TrainedReader, fixtures: Path
) -> None:
    questions = squad(any_reader, fixtures)
    stage = QuestionTraining(any_reader).eval()
    items = [questions[index] for index in range(3)]
    with torch.no_grad():
        together = stage(**collate_questions(items))["loss"]
        alone = [stage(**collate_questions([item]))["loss"] for item in items]
    assert together == pytest.approx(sum(map(float, alone)) / 3, rel=1e-4)


def test_adapter_dropout_is_on_only_in_training(tiny_folder: Callable[..., str]) -> None:
    for name in TRAINED:
        reader = make(name, tiny_folder(), lora_dropout=0.5)
        drops = [m for m in reader.modules() if isinstance(m, torch.nn.Dropout)]
        reader.train()
        assert bool(drops) == reader_class(name).Config.adapted
        assert all(module.training for module in drops)
        assert not reader.backbone.model.training
        reader.eval()
        assert not any(module.training for module in drops)


def squad(reader: TrainedReader, fixtures: Path, **settings: Any) -> QuestionDataset:
    questions = QuestionDataset(reader, 200, **settings)
    questions.add(open_examples(fixtures / "squad.json", records=":1", distractors=1), "evidence")
    return questions


def test_contexts_are_truncated_in_training_as_in_answering(
    backbone: Backbone, fixtures: Path, tiny_folder: Callable[..., str]
) -> None:
    reader = make("full-context-tuned", tiny_folder())
    questions = squad(reader, fixtures)
    cut = questions.cut
    assert 0 < cut["contexts cut"] <= len(questions)
    kept = sum(len(item.context) for item in questions.items)
    assert cut["tokens"] - cut["tokens left out"] == kept
    for item in questions.items:
        # The last answer token is predicted, not read.
        assert len(item.context) + len(item.prefix) + len(item.answer) <= backbone.max_positions
    assert max(len(i.context) for i in squad(reader, fixtures, context_limit=50).items) == 50


def test_questions_on_disk_equal_those_prepared_and_one_by_one(
    fixtures: Path, tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    reader = make("full-context-tuned", tiny_folder())
    memory = squad(reader, fixtures)
    for _ in range(2):
        kept = squad(reader, fixtures, cache=tmp_path)
        assert (kept.cut, kept.dropped) == (memory.cut, memory.dropped)
        assert [i.context.tolist() for i in kept.items] == [
            i.context.tolist() for i in memory.items
        ]
    examples = open_examples(fixtures / "squad.json", records=":1", distractors=1).examples
    for item, example in zip(kept.items, examples, strict=True):
        text = context_prompt([document.text for document in example.documents])
        assert item.context.tolist() == reader.backbone.token_ids(text)[: len(item.context)]
        assert item.prefix == question_ids(reader.backbone, example.question)
        assert item.answer == answer_ids(reader.backbone, example.answers[0])
    squad(reader, fixtures, cache=tmp_path, context_limit=50)
    assert len(list(tmp_path.glob("examples-*"))) == 2


def test_gold_documents_only(fixtures: Path, tiny_folder: Callable[..., str]) -> None:
    reader = make("icae", tiny_folder())
    every, gold = squad(reader, fixtures), squad(reader, fixtures, documents="gold")
    assert len(every) == len(gold)
    assert gold.cut["tokens"] < every.cut["tokens"]
    assert [item.answer for item in gold.items] == [item.answer for item in every.items]


def test_an_example_without_tokens_is_left_out_and_counted(
    tiny_folder: Callable[..., str], documents: list[Document]
) -> None:
    reader = make("icae", tiny_folder())
    drop_invisible_spaces(reader.backbone)
    questions = QuestionDataset(reader, 200)
    given = (tuple(documents), (INVISIBLE,))
    examples = [Example(str(i), own, RENT, ("900 euros",)) for i, own in enumerate(given)]
    questions.add(ExampleSet("two", examples), "evidence")
    assert len(questions) == 1
    assert questions.dropped == {"documents without tokens": 1}


def test_sampled_documents_are_the_evidence_and_a_seeded_sample(fixtures: Path) -> None:
    examples = open_examples(fixtures / "hotpotqa-native.json").examples
    for example in examples:
        some = some_documents(example, 4)
        assert len(some) == 4 and set(gold_documents(example)) <= set(some)
        order = [example.documents.index(document) for document in some]
        assert order == sorted(order)
        assert some == some_documents(example, 4)
        assert set(some_documents(example, 1)) <= set(gold_documents(example))
        assert some_documents(example, 100) == example.documents
    assert any(some_documents(e, 4) != some_documents(e, 4, seed=1) for e in examples)


def test_training_reads_at_most_max_paragraphs(
    fixtures: Path, tiny_folder: Callable[..., str]
) -> None:
    reader = make("icae", tiny_folder())
    one, gold = squad(reader, fixtures, max_paragraphs=1), squad(reader, fixtures, documents="gold")
    assert [i.context.tolist() for i in one.items] == [i.context.tolist() for i in gold.items]


def test_a_context_of_several_examples_is_read_once(
    any_reader: TrainedReader, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = open_examples(fixtures / "squad.json", distractors=0).examples
    same = [e for e in examples if e.documents == examples[0].documents]
    assert len(same) > 1, "the fixture's first paragraph has one question alone"
    read: list[tuple[Document, ...]] = []
    reading = any_reader.read

    def counted(documents: tuple[Document, ...]) -> ContextMemory:
        read.append(documents)
        return reading(documents)

    monkeypatch.setattr(any_reader, "read", counted)
    settings = MethodSettings(checkpoint="some", max_new_tokens=3)
    method = Trained(any_reader, settings)
    once = [answer.text for example in same for answer in method.answer([example])]
    assert len(read) == 1
    separately = [
        a.text for example in same for a in Trained(any_reader, settings).answer([example])
    ]
    assert once == separately and len(read) == 1 + len(same)


# Checkpoints


def test_a_saved_checkpoint_gives_the_same_answers(
    any_reader: TrainedReader, documents: list[Document], tmp_path: Path
) -> None:
    any_reader.save_pretrained(tmp_path / "checkpoint")
    entries = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert entries["method"] == any_reader.name and "sedem_version" in entries
    again = type(any_reader).from_pretrained(tmp_path / "checkpoint")
    assert again.config == any_reader.config
    assert not any(p.requires_grad for p in again.parameters())
    own = {n: p for n, p in any_reader.named_parameters()}
    assert all(torch.equal(p, own[n]) for n, p in again.named_parameters())
    texts = [r.answer(r.read(documents), RENT, decoding=SHORT).text for r in (any_reader, again)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", TRAINED)
def test_shipped_settings_are_loaded_and_saved_byte_for_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = locate(default_checkpoint(name)) / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    monkeypatch.setattr(settings, "version", lambda package: written[f"{package}_version"])
    config = reader_class(name).Config.load(path.parent)
    assert isinstance(config.lora_targets, tuple)
    config.save(tmp_path, name)
    assert (tmp_path / "config.json").read_bytes() == path.read_bytes()


def test_missing_and_unexpected_weights_are_errors(
    tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    make("icae", tiny_folder()).save_pretrained(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "sedem.safetensors"
    (tmp_path / "checkpoint" / "manifest.json").unlink()
    weights = load_file(path)
    save_file({**weights, "more": weights["tokens.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match=r"1 are not known \(such as more\)"):
        reader_class("icae").from_pretrained(tmp_path / "checkpoint")
    save_file(weights, path)
    shutil.rmtree(tmp_path / "checkpoint" / "adapter")
    with pytest.raises(CheckpointError, match="is missing; the checkpoint is incomplete"):
        reader_class("icae").from_pretrained(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_method_is_rejected(
    tiny_folder: Callable[..., str], tmp_path: Path, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    icae, own = tmp_path / "icae", tmp_path / "own"
    make("icae", tiny_folder()).save_pretrained(icae)
    model.save_pretrained(own)
    with pytest.raises(
        CheckpointError, match="a checkpoint of 'icae', not of 'full-context-tuned'"
    ):
        open_method("full-context-tuned", MethodSettings(checkpoint=str(icae)))
    with pytest.raises(CheckpointError, match="a checkpoint of 'sedem', not of 'icae'"):
        open_method("icae", MethodSettings(checkpoint=str(own)))
    with pytest.raises(CheckpointError, match="a checkpoint of 'icae', not of sedem"):
        SeDeM.from_pretrained(icae)
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_method("icae", MethodSettings(checkpoint=str(tmp_path / "none")))
    assert default_checkpoint("bm25") == "sedem-nano"
    assert default_checkpoint("icae") == "icae-nano"


def test_a_changed_backbone_of_the_same_name_is_another_setting(
    tiny_folder: Callable[..., str], fixtures: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "backbone")
    make("icae", str(tmp_path / "backbone")).save_pretrained(tmp_path / "icae")

    config = EvaluationConfig(
        method="icae",
        checkpoint=str(tmp_path / "icae"),
        data=fixtures / "squad.json",
        options={"distractors": 1},
        limit=1,
        max_new_tokens=2,
    )

    def evaluated() -> dict[str, Any]:
        return run_evaluation(config, out=tmp_path / "out")

    first = evaluated()
    assert evaluated() == first
    shutil.copytree(tiny_folder(seed=5), tmp_path / "backbone", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="holds results of other settings"):
        evaluated()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": -1}, "lora_rank is -1; it must be 0 or more"),
        ({"lora_rank": True}, "lora_rank is True; a whole number is needed"),
        ({"lora_alpha": 2.0}, r"lora_alpha is 2.0; a whole number is needed"),
        ({"lora_dropout": 1.5}, r"lora_dropout is 1.5; it must be from 0 to 1"),
        ({"lora_dropout": True}, "lora_dropout is True; a number is needed"),
        ({"lora_targets": "q_proj"}, "lora_targets is 'q_proj'; a list is needed"),
        ({"lora_rnk": 4}, "unknown key 'lora_rnk'; did you mean 'lora_rank'"),
        ({"lora_targets": ("q",)}, r"lora_targets\[0\] is 'q'; it can be q_proj"),
    ],
)
def test_impossible_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReaderConfig(backbone="some", **changes)
