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
from torch import Tensor
from unit.baselines.conftest import SHORT, SMALL, make, tokens
from unit.training.blocks import check_checkpointing

from sedem import Document, SeDeM
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import answer_ids, context_prompt, question_ids
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem_lab.baselines.registry import TRAINED, reader_class
from sedem_lab.baselines.trained import ContextMemory, TrainedReader
from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.data.labels import gold_documents, some_documents
from sedem_lab.data.question_sets import open_examples
from sedem_lab.evaluation.command import run_evaluation
from sedem_lab.evaluation.config import EvaluationConfig, MethodSettings
from sedem_lab.evaluation.readers import TrainedMethod, open_method
from sedem_lab.training.baseline import QuestionTraining, TextTraining
from sedem_lab.training.question_dataset import QuestionDataset, collate_questions

INVISIBLE = Document("invisible", "\u200b")
RENT, EGGS = "What is the rent?", "How many eggs?"
LONG = [Document("long", "The rent is 900 euros a month. " * 100)]

ALL = {"q_proj", "k_proj", "v_proj", "o_proj"}
ADAPTED = {
    "full-context-tuned": ALL,
    "rag": ALL,
    "icae": {"q_proj", "v_proj"},
    "hmt": {"q_proj", "v_proj"},
    "500x": {"q_proj", "v_proj"},
    "beacon": set(),
    "comprexit": set(),
}
"""Matrices with adapters."""
ADAPTED_IN_DECODING = {"full-context-tuned", "rag", "hmt"}
"""Methods whose adapters are on when an answer is decoded."""
IDLE_IN_TEXT = {"500x": "layers.3.self_attn.q_proj", "beacon": "q.3.weight"}
"""Trained parameters on which no loss depends: nothing reads these queries of the last layer."""
SHIFT = "transport.mass.1.bias"
"""A bias of all scores of a softmax: rounding alone gives it a gradient."""


def drop_invisible_spaces(backbone: Backbone) -> None:
    """Make a backbone's tokenizer ignore zero-width spaces."""
    backbone.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")


def tensors(content: Any) -> list[Tensor]:
    """Copies of the tensors that a method stores for a context."""
    found = [content] if isinstance(content, Tensor) else vars(content).values()
    return [value.clone() for value in found if isinstance(value, Tensor)]


@torch.no_grad()
def logits(reader: TrainedReader, memory: ContextMemory) -> Tensor:
    """Logits of the first answer token to a question."""
    prompt = question_ids(reader.backbone, RENT)
    with reader.decoding_mode():
        seen = reader.context_tokens_used(len(memory.token_ends), len(prompt), 5)
        return reader.prefill([memory.compressed.content], [seen], [prompt]).logits


def test_every_trained_method_is_registered_and_has_small_test_settings() -> None:
    assert set(SMALL) == set(ADAPTED) == set(TRAINED)
    for name in TRAINED:
        assert reader_class(name).name == name


# Reading and answering


def test_an_answer_reports_its_costs_changes_no_memory_and_equals_that_of_a_batch(
    any_reader: TrainedReader, documents: list[Document]
) -> None:
    memory = any_reader.read(documents)
    before = tensors(memory.compressed.content)
    answer = any_reader.answer(memory, RENT)
    after = tensors(memory.compressed.content)
    assert before and all(map(torch.equal, before, after))
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
    asked = [(documents, RENT), (documents[1:], EGGS), (documents[:1], "Pets?")]
    memories = [any_reader.read(given) for given, _ in asked]
    together = any_reader.answer_all(memories, [question for _, question in asked])
    for answer, memory, (_, question) in zip(together, memories, asked, strict=True):
        alone = any_reader.answer(memory, question)
        assert (answer.text, answer.conditioning) == (alone.text, alone.conditioning)


def test_what_cannot_be_read_or_answered_is_rejected(
    any_reader: TrainedReader, documents: list[Document]
) -> None:
    with pytest.raises(DataError, match=r"exceed the 512 positions"):
        any_reader.answer(any_reader.read(documents), "Why? " * 200)
    drop_invisible_spaces(any_reader.backbone)
    with pytest.raises(DataError, match="the text has no tokens; give a document with words"):
        any_reader.read([INVISIBLE])


def test_the_answer_says_what_did_not_fit(any_reader: TrainedReader) -> None:
    answer = any_reader.answer(any_reader.read(LONG), RENT)
    (sentence, *_) = answer.cut
    assert "3,099 tokens" in sentence and any_reader.name in sentence
    (citation,) = answer.citations
    # HMT reads any length; it drops its oldest memory.
    assert (len(citation.text) < len(LONG[0].text)) is (any_reader.name != "hmt")
    assert answer.conditioning and answer.conditioning + SHORT.max_new_tokens <= 512


@pytest.mark.parametrize(
    ("name", "used"),
    [
        # 512 positions, of which 105 are for prompt and answer. Segments of 16 tokens leave 4 slots
        # and one position is for FT: 406 positions hold 101 of the 103 segments.
        ("icae", {1600: 1600, 1633: 1616}),
        # Windows of 16 leave 4 beacons, the first one the sink as well: 101 windows.
        ("beacon", {1615: 1615, 1631: 1615, 1620: 1615, 10: 10}),
        # Windows of 8 have 2 slots.
        ("comprexit", {1628: 1628, 1629: 1624}),
    ],
)
def test_a_long_context_is_truncated_by_whole_segments(
    name: str, used: dict[int, int], tiny_folder: Callable[..., str]
) -> None:
    reader = make(name, tiny_folder())
    assert {length: reader.context_tokens_used(length, 100, 5) for length in used} == used


def test_a_context_of_several_examples_is_read_once(
    any_reader: TrainedReader, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = open_examples(fixtures / "squad.json", distractors=0).examples
    same = [e for e in examples if e.documents == examples[0].documents][:3]
    assert len(same) > 1, "the fixture's first paragraph has one question alone"
    read: list[tuple[Document, ...]] = []
    reading = any_reader.read

    def counted(documents: tuple[Document, ...]) -> ContextMemory:
        read.append(documents)
        return reading(documents)

    monkeypatch.setattr(any_reader, "read", counted)
    given = MethodSettings(checkpoint="some", max_new_tokens=3)
    method = TrainedMethod(any_reader, given)
    once = [answer.text for example in same for answer in method.answer([example])]
    assert len(read) == 1
    separately = [a.text for e in same for a in TrainedMethod(any_reader, given).answer([e])]
    assert once == separately and len(read) == 1 + len(same)


# Training


def test_only_the_parameter_groups_are_trained_and_the_loss_falls(
    any_reader: TrainedReader, fixtures: Path
) -> None:
    stage = QuestionTraining(any_reader).eval()
    questions = squad(any_reader, fixtures)
    # The loss of a batch is the mean of its rows.
    items = [questions[index] for index in range(3)]
    with torch.no_grad():
        together = stage(**collate_questions(items))["loss"]
        alone = [stage(**collate_questions([item]))["loss"] for item in items]
    assert together == pytest.approx(sum(map(float, alone)) / 3, rel=1e-4)
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


def test_adapters_are_on_their_matrices_and_in_decoding_where_they_should_be(
    any_reader: TrainedReader, documents: list[Document]
) -> None:
    names = [name for name, _ in any_reader.backbone.named_parameters() if "lora_" in name]
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in names}
    assert adapted == ADAPTED[any_reader.name]
    memory = any_reader.read(documents)
    before = logits(any_reader, memory)
    with torch.no_grad():
        for parameter in any_reader.backbone.lora_parameters():
            parameter.zero_()
    same = torch.equal(logits(any_reader, memory), before)
    assert same is (any_reader.name not in ADAPTED_IN_DECODING)
    if not adapted:
        with pytest.raises(ConfigError, match="lora_rank is 4, but this method has no adapters"):
            any_reader.config.with_changes(lora_rank=4)


@pytest.mark.parametrize("name", ["icae", "hmt", "500x", "beacon", "comprexit"])
def test_the_loss_on_text_trains_every_part_and_adapter(
    name: str, tiny_folder: Callable[..., str]
) -> None:
    reader = make(name, tiny_folder())
    stage = TextTraining(reader).train()
    reader.progress = 1.0
    context, continuation = tokens(40, 40), tokens(17, 17)
    stage(torch.stack(context), torch.stack(continuation))["loss"].backward()
    trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
    idle = [n for n, p in trained.items() if p.grad is None or not p.grad.any()]
    idle = [n for n in idle if not n.endswith(SHIFT)]
    assert bool(idle) == (name in IDLE_IN_TEXT)
    assert all(IDLE_IN_TEXT[name] in one for one in idle)


def test_checkpointed_layers_train_the_same_and_keep_less(
    any_reader: TrainedReader, fixtures: Path
) -> None:
    questions = squad(any_reader, fixtures)
    batch = collate_questions([questions[index] for index in range(2)])
    stages: list[tuple[torch.nn.Module, dict[str, Any]]] = [(QuestionTraining(any_reader), batch)]
    if any_reader.name not in ("full-context-tuned", "rag"):
        context, continuation = (torch.stack(tokens(n, n, n)) for n in (48, 16))
        text = {"context": context, "continuation": continuation}
        stages.append((TextTraining(any_reader), text))
    for stage, given in stages:

        def train(stage: Any = stage, given: dict[str, Any] = given) -> tuple[Any, Any]:
            stage.zero_grad()
            found = stage(**given)
            found["loss"].backward()
            grads = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
            return found, {name: grad.clone() for name, grad in grads.items()}

        check_checkpointing(stage, any_reader.backbone, train)


def test_adapter_dropout_is_on_only_in_training(tiny_folder: Callable[..., str]) -> None:
    for name in ("icae", "comprexit"):
        reader = make(name, tiny_folder(), lora_dropout=0.5)
        drops = [m for m in reader.modules() if isinstance(m, torch.nn.Dropout)]
        reader.train()
        assert bool(drops) == reader_class(name).Config.adapted
        assert all(module.training for module in drops)
        assert not reader.backbone.model.training
        reader.eval()
        assert not any(module.training for module in drops)


def squad(reader: TrainedReader, fixtures: Path, **options: Any) -> QuestionDataset:
    questions = QuestionDataset(reader, 200, **options)
    questions.add(open_examples(fixtures / "squad.json", records=":1", distractors=1), "evidence")
    return questions


def test_questions_are_prepared_as_they_are_answered(
    backbone: Backbone, fixtures: Path, tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    reader = make("full-context-tuned", tiny_folder())
    memory = squad(reader, fixtures)
    cut = memory.cut
    assert 0 < cut["contexts cut"] <= len(memory)
    kept = sum(len(item.context) for item in memory.items)
    assert cut["tokens"] - cut["tokens left out"] == kept
    for item in memory.items:
        # The last answer token is predicted, not read.
        assert len(item.context) + len(item.prefix) + len(item.answer) <= backbone.max_positions
    for _ in range(2):  # written to disk, and read from it
        stored = squad(reader, fixtures, cache=tmp_path)
        assert (stored.cut, stored.dropped) == (memory.cut, memory.dropped)
        contexts = [item.context.tolist() for item in stored.items]
        assert contexts == [item.context.tolist() for item in memory.items]
    examples = open_examples(fixtures / "squad.json", records=":1", distractors=1).examples
    for item, example in zip(stored.items, examples, strict=True):
        text = context_prompt([document.text for document in example.documents])
        assert item.context.tolist() == reader.backbone.token_ids(text)[: len(item.context)]
        assert item.prefix == question_ids(reader.backbone, example.question)
        assert item.answer == answer_ids(reader.backbone, example.answers[0])
    limited = squad(reader, fixtures, cache=tmp_path, context_limit=50)
    assert max(len(item.context) for item in limited.items) == 50
    assert len(list(tmp_path.glob("examples-*"))) == 2


def test_gold_or_some_documents_are_read_and_those_without_tokens_left_out(
    fixtures: Path, tiny_folder: Callable[..., str], documents: list[Document]
) -> None:
    reader = make("icae", tiny_folder())
    every, gold = squad(reader, fixtures), squad(reader, fixtures, documents="gold")
    one = squad(reader, fixtures, max_paragraphs=1)
    assert gold.cut["tokens"] < every.cut["tokens"]
    assert [item.answer for item in gold.items] == [item.answer for item in every.items]
    assert [i.context.tolist() for i in one.items] == [i.context.tolist() for i in gold.items]
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


# Checkpoints


def test_a_saved_checkpoint_gives_the_same_answers(
    any_reader: TrainedReader, documents: list[Document], tmp_path: Path
) -> None:
    any_reader.save_pretrained(tmp_path / "checkpoint")
    entries = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert entries["method"] == any_reader.name and "sedem_version" in entries
    again = type(any_reader).from_pretrained(tmp_path / "checkpoint")
    again.decoding = SHORT
    assert again.config == any_reader.config
    assert not any(p.requires_grad for p in again.parameters())
    own = dict(any_reader.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in again.named_parameters())
    texts = [r.answer(r.read(documents), RENT).text for r in (any_reader, again)]
    assert texts[0] == texts[1]


def test_a_checkpoint_that_does_not_fit_is_rejected(
    tiny_folder: Callable[..., str], tmp_path: Path, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = Path(tiny_folder())
    monkeypatch.chdir(backbone.parent)
    icae, own, none = tmp_path / "icae", tmp_path / "own", tmp_path / "none"
    make("icae", backbone.name).save_pretrained(icae)
    # It finds its backbone from any folder.
    monkeypatch.chdir(tmp_path)
    assert reader_class("icae").from_pretrained("icae").config.backbone == str(backbone)
    model.save_pretrained(own)
    none.mkdir()
    for method, folder, message in (
        ("full-context-tuned", icae, "a checkpoint of 'icae', not of 'full-context-tuned'"),
        ("icae", own, "a checkpoint of 'sedem', not of 'icae'"),
        ("icae", none, r"has no readable config\.json"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_method(method, MethodSettings(checkpoint=str(folder)))
    with pytest.raises(CheckpointError, match="a checkpoint of 'icae', not of sedem"):
        SeDeM.from_pretrained(icae)
    path = icae / "sedem.safetensors"
    (icae / "manifest.json").unlink()
    weights = load_file(path)
    save_file({**weights, "more": weights["tokens.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match=r"1 are not known \(such as more\)"):
        reader_class("icae").from_pretrained(icae)
    save_file(weights, path)
    shutil.rmtree(icae / "adapter")
    with pytest.raises(CheckpointError, match="is missing; the checkpoint is incomplete"):
        reader_class("icae").from_pretrained(icae)
    with pytest.raises(ConfigError, match=r"icae runs on backbones of .*llama.* has 'olmo2'; choo"):
        make("icae", tiny_folder("olmo2"))


def test_a_changed_backbone_of_the_same_name_is_another_setting(
    tiny_folder: Callable[..., str], fixtures: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "backbone")
    make("icae", str(tmp_path / "backbone")).save_pretrained(tmp_path / "icae")
    config = EvaluationConfig(
        method="icae",
        checkpoint=str(tmp_path / "icae"),
        data=fixtures / "squad.json",
        limit=1,
        max_new_tokens=2,
    )
    first = run_evaluation(config, out=tmp_path / "out")
    assert run_evaluation(config, out=tmp_path / "out") == first
    shutil.copytree(tiny_folder(seed=5), tmp_path / "backbone", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="holds results of other settings"):
        run_evaluation(config, out=tmp_path / "out")


# Settings


HMT_AT_8 = "segment_length is 8, but memory at both ends and 4 sensory tokens"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("icae", {"lora_rank": -1}, "lora_rank is -1; input should be greater"),
        ("icae", {"lora_dropout": 1.5}, r"lora_dropout is 1.5; input should be less"),
        ("icae", {"lora_targets": ("q",)}, r"lora_targets\[0\] is 'q'; it can be q_proj"),
        ("icae", {"memory": 0}, "memory is 0"),
        ("icae", {"compression": 0}, "compression is 0"),
        ("icae", {"autoencode": 2}, "autoencode is 2"),
        ("icae", {"unscored": -1}, "unscored is -1"),
        ("500x", {"memory": 0}, "memory is 0"),
        ("500x", {"limit": 0}, "limit is 0"),
        ("500x", {"limit": 509}, "limit is 509 and memory 4, together more than the 512"),
        ("hmt", {"memory": 0}, "memory is 0"),
        ("hmt", {"segment_length": 8}, HMT_AT_8),
        ("hmt", {"recall_context": 1}, "recall_context is 1, but a segment has 2 memory vectors"),
        ("hmt", {"recall_from": 1.5}, "recall_from is 1.5; input should be less"),
        ("hmt", {"segment_length": 600}, "segment_length is 600, more than the 512 positions"),
        ("beacon", {"window": 1}, "window is 1"),
        ("beacon", {"ratio": 3}, "a ratio is 3; it must divide the window of 16"),
        ("beacon", {"ratios": ()}, r"ratios is \(\); tuple should have"),
        ("beacon", {"ratios": [2, 12]}, "a ratio is 12"),
        ("beacon", {"sink": 3}, "sink is 3; it must end before the first beacon"),
        ("comprexit", {"piece": 0}, "piece is 0"),
        ("comprexit", {"iterations": 0}, "iterations is 0"),
        ("comprexit", {"floor": 2}, "floor is 2"),
        ("comprexit", {"entropy": 0.0}, "entropy is 0"),
        ("comprexit", {"piece": 20}, "piece is 20, window 8 and compression 4"),
        ("rag", {"heads": 0}, "heads is 0"),
        ("rag", {"paragraph": 0}, "paragraph is 0"),
        ("rag", {"extract_layer": 0}, "extract_layer is 0"),
        ("rag", {"extract_layer": 9}, "extract_layer is 9, .* has 4 layers"),
        ("rag", {"k": 0}, "k is 0"),
    ],
)
def test_impossible_settings_are_rejected(
    name: str, changes: dict[str, Any], message: str, tiny_folder: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, tiny_folder(), **changes)


LAST_SEGMENT = "a last segment of 498 positions and an answer of up to 64"


@pytest.mark.parametrize(
    ("name", "changes", "given", "message"),
    [
        ("full-context-tuned", {}, (30, 12), "is not trained on text; give its recipe questions"),
        ("icae", {}, (8, 2), "text.continuation is 2 tokens and model.unscored 2"),
        ("hmt", {}, (20, 10), "are 30 tokens, a segment has 32; no memory would be used"),
        ("500x", {"limit": 400}, (401, 2), "text.context is 401 tokens and model.limit 400"),
        ("beacon", {}, (8, 7), "text.continuation are 15 tokens and model.window is 16"),
        ("hmt", {"segment_length": 500}, (1000, 10, 64), LAST_SEGMENT),
        ("500x", {"limit": 400}, (50, 446, 64), "from position 4 on, exceed the 512 positions"),
    ],
)
def test_texts_and_questions_that_do_not_fit_are_rejected(
    name: str,
    changes: dict[str, Any],
    given: tuple[int, ...],
    message: str,
    tiny_folder: Callable[..., str],
) -> None:
    reader = make(name, tiny_folder(), **changes)
    with pytest.raises((ConfigError, DataError), match=message):
        if len(given) == 2:
            reader.text_loss(*(torch.ones(1, length, dtype=torch.long) for length in given))
        else:
            reader.context_tokens_used(*given)
