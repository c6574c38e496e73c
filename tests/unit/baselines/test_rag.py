"""Raw-text RAG: the selector against plain loops, training, and answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.baselines.conftest import make

from sedem import Document
from sedem.backbone.prompts import context_prompt, question_ids
from sedem.errors import ConfigError
from sedem.method.injection import GrowingCache, RestoredBlocks, keys_values, prefill
from sedem_lab.baselines.paragraphs import split
from sedem_lab.baselines.rag import RAG
from sedem_lab.data.question_sets import open_examples
from sedem_lab.evaluation.command import run_evaluation
from sedem_lab.evaluation.config import EvaluationConfig
from sedem_lab.training import baseline
from sedem_lab.training.baseline import BaselineRecipe, RAGTraining, blocks_of, train_baseline
from sedem_lab.training.block_batch import BlockCollator
from sedem_lab.training.block_dataset import BlockDataset
from sedem_lab.training.selection_losses import ConditionedLosses

RENT = "What is the rent?"
TEXTS = [
    Document("a", "Beat the eggs.\n\n  The rent is 900 euros.\nIt is due in May.\n\n\nBake it."),
    Document("b", "Serve with plums, as in Görlitz; it keeps two days in a cool place."),
]


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("rag", tiny_folder(), paragraph=48)


def naive_scores(reader: RAG, documents: list[Document], question: str) -> list[float]:
    """MaxSim in plain loops over Hugging Face's hidden states."""
    backbone, selector = reader.backbone, reader.selector

    def states(text: str) -> Tensor:
        ids = torch.tensor([[backbone.bos_token_id, *backbone.token_ids(text)]])
        with backbone.without_lora():
            found = backbone.model(input_ids=ids, output_hidden_states=True).hidden_states
        return found[reader.config.extract_layer][0, 1:]

    scores, queries = [], selector.w_query(selector.norm_query(states(question)))
    for paragraph in split(documents, backbone, reader.config.paragraph):
        total = 0.0
        keys = selector.w_key(selector.norm_key(states(paragraph.text)))
        for q in queries:
            for head in range(4):
                own = q[8 * head : 8 * head + 8]
                total += max(
                    float(F.cosine_similarity(own, k[8 * head : 8 * head + 8], dim=0)) for k in keys
                )
        scores.append(total / 4)
    return scores


@torch.no_grad()
def test_scores_are_late_interaction_over_frozen_states_of_paragraphs(reader: RAG) -> None:
    paragraphs = split(TEXTS, reader.backbone, 48)
    assert [p.text for p in paragraphs[:3]] == [
        "Beat the eggs.",
        "The rent is 900 euros.\nIt is due in May.",
        "Bake it.",
    ]
    texts = {d.name: d.text for d in TEXTS}
    for p in paragraphs:
        assert texts[p.document][p.start : p.end] == p.text
        assert len(p.ids) == len(p.ends) and int(p.ends[-1]) == len(p.text)
    wanted = naive_scores(reader, TEXTS, RENT)
    assert len(wanted) == 5  # the second document is cut
    found = reader.scores(reader.read(TEXTS), RENT)
    assert found.tolist() == pytest.approx(wanted, abs=0.1)  # keys are kept in bfloat16


def test_the_best_paragraphs_are_read_in_document_order(reader: RAG) -> None:
    reader.config = reader.config.with_changes(k=3)
    memory = reader.read(TEXTS)
    answer = reader.answer(memory, RENT)
    scores = reader.scores(memory, RENT)
    best = sorted(range(5), key=lambda i: -float(scores[i]))
    spans = [p.span for p in memory.paragraphs]
    assert answer.ranking == tuple(spans[i] for i in best)
    cited = [(c.document, c.start, c.end) for c in answer.citations]
    assert cited == [spans[i] for i in best[:3]]
    assert [c.score for c in answer.citations] == [float(scores[i]) for i in best[:3]]
    selected = reader.selected(memory, sorted(best[:3]))
    text = context_prompt([memory.paragraphs[i].text for i in sorted(best[:3])])
    assert (
        reader.backbone.tokenizer.decode(selected.compressed.content[:, 0]).split() == text.split()
    )
    assert selected.token_ends[-1] == len(text)
    assert (answer.k, answer.blocks) == (3, 5)
    keys = sum(2 * 32 * len(p.ids) for p in memory.paragraphs)
    assert answer.stored_bytes == sum(len(d.text.encode()) for d in TEXTS) + keys
    timings = answer.timings
    assert timings["select_ms"] < timings["ttft_ms"] <= timings["total_ms"]
    # Only the selected paragraphs are read.
    reader.config = reader.config.with_changes(k=1)
    one = reader.answer(memory, RENT)
    alone = reader.read([Document("only", one.citations[0].text)])
    assert reader.answer(alone, RENT).text == one.text


@torch.no_grad()
def test_independent_paragraphs_are_read_from_what_each_computes_alone(
    tiny_folder: Callable[..., str],
) -> None:
    reader: RAG = make("rag", tiny_folder(), paragraph=48, block_context="independent")
    backbone = reader.backbone
    rows = [paragraph.ids for paragraph in reader.read(TEXTS).paragraphs[:3]]
    prompt = question_ids(backbone, RENT)
    context = reader.join(rows)
    assert context[:, 0].tolist() == torch.cat(rows).tolist()  # without separators
    filled = reader.prefill([context], [len(context)], [prompt])

    alone = [keys_values(backbone, 0, backbone.embed(row)[None]) for row in rows]
    cache = GrowingCache()
    for blocks in alone:
        for layer, pair in enumerate(blocks):
            cache.upper.update(*pair, layer)
    number = torch.cat([torch.full((len(row),), index) for index, row in enumerate(rows)])[None]
    ids = torch.tensor([prompt])
    valid, real = torch.ones_like(ids).bool(), torch.ones_like(number).bool()
    apart = RestoredBlocks(number, "independent")
    wanted = prefill(backbone, 0, ids, valid, None, real, blocks=apart, cache=cache)
    logits = backbone.logits(wanted.prefix[:, -1])
    torch.testing.assert_close(filled.logits, logits, atol=1e-5, rtol=1e-5)

    other = reader.join(rows[::-1])
    again = reader.prefill([other], [len(other)], [prompt])
    torch.testing.assert_close(again.logits, filled.logits, atol=1e-5, rtol=1e-5)
    reader.config = reader.config.with_changes(block_context="joint")
    joint = reader.prefill([context], [len(context)], [prompt])
    assert not torch.allclose(joint.logits, filled.logits, atol=1e-2)

    # They are cited like joint ones.
    reader.config = reader.config.with_changes(k=3)
    apart = make("rag", tiny_folder(), paragraph=48, k=3, block_context="independent")
    first, second = (own.answer(own.read(TEXTS), RENT) for own in (reader, apart))
    assert second.citations == first.citations
    assert second.conditioning == first.conditioning - 2 * len(reader.separator)  # type: ignore[operator]


# Training


def prepared(reader: RAG, fixtures: Path) -> BlockDataset:
    found = BlockDataset(blocks_of(reader), 200)
    found.add(open_examples(fixtures / "squad.json", records=":1", distractors=2), "evidence")
    return found


def stage_of(reader: RAG, fixtures: Path, cache: Path | None = None, **losses: Any) -> RAGTraining:
    collator = BlockCollator(
        prepared(reader, fixtures), max_blocks=99, budgets=(1,), seed=0, cache=cache
    )
    return RAGTraining(reader, ConditionedLosses(**losses), collator)


def record_contexts(reader: RAG) -> list[Tensor]:
    """A list that collects the contexts of every later call of `question_loss`."""
    contexts_read: list[Tensor] = []
    question_loss = reader.question_loss

    def recorded(contexts: Any, *rest: Any) -> dict[str, Tensor]:
        contexts_read.extend(contexts)
        return question_loss(contexts, *rest)

    reader.question_loss = recorded  # type: ignore[method-assign]
    return contexts_read


@torch.no_grad()
def test_training_and_answering_compute_the_same_scores(
    tiny_folder: Callable[..., str], fixtures: Path, tmp_path: Path
) -> None:
    reader: RAG = make("rag", tiny_folder(), paragraph=128)
    stage = stage_of(reader, fixtures, tmp_path, conditioning="selected").eval()
    example = open_examples(fixtures / "squad.json", records=":1", distractors=2).examples[0]
    memory = reader.read(example.documents)
    scores = reader.scores(memory, example.question)
    seen: list[Tensor] = []
    reader.selector.register_forward_hook(lambda *inputs: seen.append(inputs[-1]))
    read = record_contexts(reader)
    parts = stage(**stage.collate([stage.collator.dataset[0]]))
    assert seen[0][0].tolist() == pytest.approx(scores.tolist(), abs=0.3)  # states in bfloat16
    best = int(scores.argmax())
    assert read[0][:, 0].tolist() == memory.paragraphs[best].ids.tolist()
    assert parts["loss"] == pytest.approx(float(parts["answer"] + parts["select"]), rel=1e-5)
    spans = [(example.documents[e.document].name, e.start, e.end) for e in example.evidence]
    evidence = torch.tensor(
        [
            any(
                name == p.document and start < p.end and p.start < end for name, start, end in spans
            )
            for p in memory.paragraphs
        ]
    )
    logits = seen[0][0] / 0.07
    wanted = -logits.log_softmax(0)[evidence].mean()
    hinge = (2.0 - seen[0][0][evidence][:, None] + seen[0][0][~evidence][None]).clamp_min(0).mean()
    assert float(parts["select"]) == pytest.approx(float(wanted + 0.5 * hinge), rel=1e-4)


def test_gold_paragraphs_are_read_and_each_loss_trains_only_its_part(
    tiny_folder: Callable[..., str], fixtures: Path
) -> None:
    reader: RAG = make("rag", tiny_folder(), paragraph=128)
    stage = stage_of(reader, fixtures, conditioning="gold").train()
    item = stage.collator.dataset[0]
    batch = stage.collate([item])
    dataset = stage.collator.dataset
    labelled = zip(item.blocks, item.evidence, strict=True)
    segments, _, _ = dataset.slots([block for block, label in labelled if label])
    gold = [dataset.segments[row].tolist() for row in segments[:, 0].tolist()]
    read = record_contexts(reader)
    parts = stage(**batch)
    assert read[0][:, 0].tolist() in gold
    selector, lora = list(reader.selector.parameters()), reader.backbone.lora_parameters()
    for loss, other in (("answer", selector), ("select", lora)):
        kept = {"allow_unused": True, "retain_graph": True}
        assert all(g is None for g in torch.autograd.grad(parts[loss], other, **kept))
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(parts["select"], selector))


def test_a_trained_model_answers_with_any_budget(
    question_recipe: Callable[..., BaselineRecipe], fixtures: Path
) -> None:
    recipe = question_recipe("rag", losses=ConditionedLosses(normalize_scores=True))
    assert recipe.data is not None
    recipe = recipe.with_changes(data=recipe.data.with_changes(cache_states=True, max_paragraphs=4))
    final = train_baseline(recipe)
    config = EvaluationConfig(
        method="rag",
        checkpoint=str(final),
        data=fixtures / "squad.json",
        options={"distractors": 1},
        limit=3,
        max_new_tokens=4,
    )
    one, two = (run_evaluation(config.with_changes(k=k)) for k in (1, 2))
    assert one["conditioning"]["mean"] < two["conditioning"]["mean"]
    assert one["counts"]["not_answered"] == 0
    assert one["counts"]["ranked_every_block"] == 3
    assert 0 <= one["recall@1"]["mean"] <= 100


def test_training_starts_from_the_selector_and_the_examples_that_the_recipe_asks_for(
    question_recipe: Callable[..., BaselineRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(baseline, "fit", lambda *fitted, **_: given.extend(fitted))
    recipe = question_recipe("rag", new_selector="independent")
    assert recipe.data is not None
    train_baseline(recipe.with_changes(data=recipe.data.with_changes(evidence_only=True)))
    stage, reader, _, training, _ = given
    weights = reader.selector.w_query.weight.clone()
    assert not torch.equal(weights, reader.selector.w_key.weight)
    reader.selector.restart("independent", recipe.optimization.seed)
    assert torch.equal(reader.selector.w_query.weight, weights)
    assert all(any(item.evidence) for item in training)
    assert stage.collator.max_blocks == stage.collator.dataset.most_blocks


def test_settings_of_other_methods_are_rejected(
    question_recipe: Callable[..., BaselineRecipe],
) -> None:
    recipe = question_recipe("rag")
    assert recipe.data is not None
    with pytest.raises(ConfigError, match="rag learns to pick among all documents"):
        train_baseline(recipe.with_changes(data=recipe.data.with_changes(documents="gold")))
    data = recipe.data.with_changes(evidence_only=True)
    for only in ({"losses": ConditionedLosses()}, {"new_selector": "shared"}, {"data": data}):
        with pytest.raises(ConfigError, match="only to methods that pick paragraphs, but 'icae'"):
            train_baseline(question_recipe("icae").with_changes(**only))
