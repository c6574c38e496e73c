from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.training.blocks import block_dataset, collator

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.backbone.prompts import answer_ids, question_ids, with_texts
from sedem.bank.blocks import partition
from sedem.engine.eager import start_decoding
from sedem.engine.interface import AnswerInputs
from sedem.method.compressor import encode
from sedem.method.injection import prefill
from sedem.method.segments import segment_text
from sedem.selecting.plan import Request, Scores, plan_of, prepare
from sedem.selecting.select import choose
from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.training.stage2 import Stage2, Stage2Losses


def staged(model: SeDeM, examples: ExampleSet, losses: Stage2Losses, budget: int = 2) -> Stage2:
    dataset = block_dataset(model, examples)
    return Stage2(model, losses, collator(dataset, budgets=(budget,)))


def items(stage: Stage2) -> list[Any]:
    assert stage.collator is not None
    return stage.collator.dataset.items


@pytest.fixture
def adapted(model: SeDeM) -> SeDeM:
    """A model with nonzero adapters and restored states at the decoder's scale."""
    model.decoder.add_lora(2, 4)
    torch.manual_seed(2)
    for parameter in model.decoder.lora_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.decompressor.spread.fill_(3.0)
    return model


# The losses written out with loops


class Naive:
    """One example computed alone, unpadded, block by block."""

    def __init__(self, model: SeDeM, example: Example) -> None:
        self.model, self.example, config = model, example, model.config
        self.blocks: list[Tensor] = []
        self.tokens: list[int] = []
        self.evidence: list[bool] = []
        self.reconstructions: list[tuple[Tensor, Tensor]] = []
        for number, document in enumerate(example.documents):
            segments = segment_text(
                document.text, model.encoder, config.segment_length, config.segmentation
            )
            slots: list[Tensor] = []
            real: list[int] = []
            for ids, length in zip(segments.ids, segments.lengths.tolist(), strict=True):
                hidden = self.encode(ids[:length])
                parts = hidden.split(config.compression)
                own = [model.compressor.w_in(part.mean(0)) for part in parts]
                restored = torch.cat(
                    [
                        model.decompressor(slot[None])[: len(part)]
                        for slot, part in zip(own, parts, strict=True)
                    ]
                )
                self.reconstructions.append((restored, model.compressor.w_in(hidden)))
                missing = config.slots - len(own)
                slots += [*own, *[torch.zeros_like(own[0])] * missing]
                real += [*map(len, parts), *[0] * missing]
            rows, slots_NJ = partition(segments, number, config.compression, config.slots_per_block)
            for row, indices in zip(rows, slots_NJ.tolist(), strict=True):
                kept = [i for i in indices if i >= 0 and real[i]]
                self.blocks.append(torch.stack([slots[i] for i in kept]))
                self.tokens.append(sum(real[i] for i in kept))
                self.evidence.append(
                    any(
                        span.document == number and span.start < row.end and row.start < span.end
                        for span in example.evidence
                    )
                )

    def encode(self, ids: Tensor) -> Tensor:
        return self.model.mixture(
            encode(self.model.encoder, ids[None], self.model.config.extract_layers)
        )[0]

    def scores(self) -> list[float]:
        """s_n: the best cosine of each question token, summed over tokens, averaged over heads."""
        selector = self.model.selector
        ids = torch.tensor(self.model.encoder.token_ids(self.example.question))
        queries_QRH = selector.queries(self.encode(ids))
        scores = []
        for block in self.blocks:
            keys_JRH = selector.keys(block)
            total = 0.0
            for head in range(selector.heads):
                for query in queries_QRH[:, head]:
                    total += max(float(query @ key) for key in keys_JRH[:, head])
            scores.append(total / selector.heads)
        return scores

    def answer_loss(self, chosen: list[int]) -> Tensor:
        """L_LM: mean over answer tokens; chosen blocks in document order."""
        model = self.model
        restored = torch.cat(
            [model.decompressor(self.blocks[n])[: self.tokens[n]] for n in sorted(chosen)]
        )
        prefix = question_ids(model.decoder, self.example.question)
        answer = answer_ids(model.decoder, self.example.answers[0])
        ids = torch.tensor([[*prefix, *answer[:-1]]])
        filled = prefill(
            model.decoder,
            model.config.inject_layer,
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            restored[None],
            torch.ones(1, len(restored), dtype=torch.bool),
        )
        logits = model.decoder.logits(filled.prefix[0])
        total = logits.new_zeros(())
        for t, token in enumerate(answer):
            total = total - logits[len(prefix) - 1 + t].log_softmax(0)[token]
        return total / len(answer)

    def select_parts(self, losses: Stage2Losses, scores: list[float]) -> tuple[float, float | None]:
        """InfoNCE and margin; the margin is None if every block is evidence."""
        scale = losses.selection_temperature
        if losses.normalize_scores:
            scale *= len(self.model.encoder.token_ids(self.example.question))
        positive = [s for s, label in zip(scores, self.evidence, strict=True) if label]
        negative = [s for s, label in zip(scores, self.evidence, strict=True) if not label]
        top = max(scores)
        log_sum = top / scale + math.log(sum(math.exp((s - top) / scale) for s in scores))
        contrast = sum(log_sum - s / scale for s in positive) / len(positive)
        pairs = [max(0.0, losses.margin - p + n) for p in positive for n in negative]
        return contrast, sum(pairs) / len(pairs) if pairs else None


def selection(each: list[Naive], losses: Stage2Losses) -> float:
    """L_ret (appendix Selection Supervision); each term averaged over examples that have it."""
    parts = [naive.select_parts(losses, naive.scores()) for naive in each]
    margins = [margin for _, margin in parts if margin is not None]
    contrast = sum(contrast for contrast, _ in parts) / len(parts)
    return contrast + losses.margin_weight * sum(margins) / len(margins)


def reconstruction(pairs: list[tuple[Tensor, Tensor]], losses: Stage2Losses) -> float:
    """L_rec over segments, with slots of four tokens."""
    total = 0.0
    for restored, wanted in pairs:
        direction = F.cosine_similarity(restored, wanted, dim=-1).mean()
        slots = zip(restored.split(4), wanted.split(4), strict=True)
        pooled = [F.cosine_similarity(a.mean(0), b.mean(0), dim=0) for a, b in slots]
        total += float(1 - direction + losses.pool_weight * (1 - sum(pooled) / len(pooled)))
    return total / len(pairs)


def best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda n: -scores[n])[:count]


LOSSES = Stage2Losses(
    select=0.8,
    margin_weight=0.4,
    margin=3.0,
    selection_temperature=0.5,
    reconstruct=0.3,
    pool_weight=0.6,
    conditioning="selected",
)


@pytest.mark.parametrize(
    ("changes", "normalize"),
    [
        ({}, False),
        ({"block_slots": 2}, True),
        ({"block_slots": 8}, False),
        ({"segmentation": "paragraph", "segment_length": 32}, True),
        ({"extract_layers": (1, 3), "layer_mixing": "learned"}, False),
        ({"inject_layer": 1, "decoder": "another of other width, depth and tokens"}, False),
    ],
    ids=lambda value: ",".join(value) or "plain" if isinstance(value, dict) else "",
)
@torch.no_grad()
def test_losses_equal_those_written_out(
    adapted: SeDeM,
    examples: ExampleSet,
    other_decoder: str,
    changes: dict[str, Any],
    normalize: bool,
) -> None:
    torch.manual_seed(3)
    decoder = open_backbone(other_decoder) if "decoder" in changes else adapted.decoder
    model = SeDeM(adapted.config.with_changes(**changes), adapted.encoder, decoder)
    losses = LOSSES.with_changes(normalize_scores=normalize)
    stage = staged(model, examples, losses)
    found = stage(**stage.collate(items(stage)))
    each = [Naive(model, example) for example in examples.examples]
    chosen = [best(naive.scores(), 2) for naive in each]
    answers = [naive.answer_loss(blocks) for naive, blocks in zip(each, chosen, strict=True)]
    hits = [
        any(naive.evidence[n] for n in blocks) for naive, blocks in zip(each, chosen, strict=True)
    ]
    # A document in several examples counts once.
    once: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for example in examples.examples:
        for document in example.documents:
            alone = replace(example, documents=(document,), evidence=())
            once.setdefault(document.text, Naive(model, alone).reconstructions)
    segments = [pair for pairs in once.values() for pair in pairs]
    expected = {
        "answer": float(sum(answers)) / 4,
        "select": selection(each, losses),
        "reconstruct": reconstruction(segments, losses),
        "recall": sum(hits) / 4,
    }
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=2e-4, abs=2e-5), name
    loss = expected["answer"] + 0.8 * expected["select"] + 0.3 * expected["reconstruct"]
    assert float(found["loss"]) == pytest.approx(loss, rel=2e-4)


@torch.no_grad()
def test_examples_without_a_positive_block_do_not_change_the_selection_loss(
    adapted: SeDeM, examples: ExampleSet
) -> None:
    first, second, *_ = examples.examples
    labelled = staged(adapted, ExampleSet("one", [first]), LOSSES)
    unlabelled = {"evidence": (), "answers": ("nowhere",)}
    mixed = staged(adapted, ExampleSet("two", [first, replace(second, **unlabelled)]), LOSSES)
    one, two = (stage(**stage.collate(items(stage))) for stage in (labelled, mixed))
    assert float(two["select"]) == pytest.approx(float(one["select"]), rel=1e-5)
    assert float(two["recall"]) == float(one["recall"])
    bare = staged(adapted, ExampleSet("bare", [replace(first, **unlabelled)]), LOSSES)
    none = bare(**bare.collate(items(bare)))
    assert float(none["select"]) == float(none["recall"]) == 0.0


# Blocks that condition the answer


@torch.no_grad()
def test_the_answer_is_conditioned_on_the_forced_evidence(
    adapted: SeDeM, examples: ExampleSet
) -> None:
    how = LOSSES.with_changes(conditioning="gold-then-selected")
    stage = staged(adapted, examples, how, budget=1).train()
    batch = stage.collate(items(stage))
    found, evaluated = stage(**batch), stage.eval()(**batch)
    losses, own, hits = [], [], []
    for example in examples.examples:
        naive = Naive(adapted, example)
        scores = naive.scores()
        gold = [n for n, label in enumerate(naive.evidence) if label]
        losses.append(float(naive.answer_loss([max(gold, key=lambda n: scores[n])])))
        own.append(float(naive.answer_loss(best(scores, 1))))
        hits.append(naive.evidence[best(scores, 1)[0]])
    assert float(found["answer"]) == pytest.approx(sum(losses) / 4, rel=2e-4)
    # Evaluation conditions as at the end of training.
    assert float(evaluated["answer"]) == pytest.approx(sum(own) / 4, rel=2e-4)
    # Recall counts the selector's own choice, not the forced one.
    assert float(found["recall"]) == pytest.approx(sum(hits) / 4)


# Guided attention, and forms in which blocks are read


def guided(config: SedemConfig, backbone: Backbone, **changes: Any) -> SeDeM:
    torch.manual_seed(1)
    settings = {"guidance": True, "block_context": "independent", **changes}
    model = SeDeM(config.with_changes(**settings), backbone, backbone).eval()
    model.decompressor.spread.fill_(3.0)
    return model


def test_the_answer_trains_selector_and_temperature_through_guidance(
    config: SedemConfig, backbone: Backbone, examples: ExampleSet
) -> None:
    losses = Stage2Losses(select=0.0, reconstruct=0.0, conditioning="selected")
    for guidance in (True, False):
        model = guided(config, backbone, guidance=guidance)
        stage = staged(model, examples, losses).train()
        stage(**stage.collate(items(stage)))["loss"].backward()
        query = model.selector.w_query.weight.grad
        # Without evidence labels and without guidance nothing reaches the selector.
        assert (query is not None and bool(query.abs().sum() > 0)) == guidance
        if model.guidance is not None:
            assert model.guidance.log_tau.grad is not None
            assert float(model.guidance.log_tau.grad) != 0


def answer_logits(
    model: SeDeM, example: Example, condition: Any, chat: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits with which a model answers, and the tokens of the answer."""
    bank = model.read(example.documents)
    plan = plan_of(model, Request(bank, example.question, 3, condition=condition))
    chosen = choose(model, plan, Scores(model.scores(bank, example.question)))
    assert len(chosen.texts) == {"text": min(3, len(bank)), "both": 1, "memory": 0}[condition]
    start = prepare(model, plan, chosen, 1).inputs
    assert start is not None
    assert (258 in start.prefix) == chat
    return logits_after(model, start, example, chat)


def logits_after(
    model: SeDeM, start: AnswerInputs, example: Example, chat: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits after every prefix of the answer, each prefilled on its own, and its tokens."""
    target = torch.tensor(answer_ids(model.decoder, example.answers[0], chat=chat))
    whole, before = torch.cat([start.prefix, target[:-1]]), len(start.prefix)
    rows = [
        start_decoding(model, [replace(start, prefix=whole[: before + n])])[0][0]
        for n in range(len(target))
    ]
    return torch.stack(rows), target


@torch.no_grad()
@pytest.mark.parametrize(
    ("condition", "chat"), [("text", False), ("both", False), ("memory", True), ("both", True)]
)
def test_training_reads_as_answering_does(
    config: SedemConfig,
    chat_backbone: Backbone,
    examples: ExampleSet,
    condition: Any,
    chat: bool,
) -> None:
    model = guided(config, chat_backbone, condition=condition, chat_template=chat)
    dataset = block_dataset(model, examples)
    losses = Stage2Losses(conditioning="selected", reconstruct=0.0, select=0.0)
    collate = collator(dataset, budgets=(3,), conditions={condition: 1.0})
    stage = Stage2(model, losses, collate).train()
    found = stage(**stage.collate(dataset.items))
    expected = []
    for example in examples.examples:
        logits, target = answer_logits(model, example, condition, chat)
        expected.append(float(F.cross_entropy(logits, target)))
    # A bank keeps bfloat16, training does not.
    assert float(found["answer"]) == pytest.approx(sum(expected) / len(expected), rel=5e-3)


@torch.no_grad()
def test_sentences_are_read_instead_of_the_blocks(
    config: SedemConfig, backbone: Backbone, examples: ExampleSet
) -> None:
    model = guided(config, backbone)
    losses = Stage2Losses(conditioning="selected", reconstruct=0.0, select=0.0)
    dataset = block_dataset(model, examples)
    collate = collator(dataset, budgets=(3,), conditions={"text": 1.0}, sentences=1.0)
    stage = Stage2(model, losses, collate).train()
    batch = stage.collate(dataset.items)
    expected = []
    for example, texts in zip(examples.examples, batch["sentences"], strict=True):
        asked = question_ids(model.decoder, example.question)
        prompt = torch.tensor(with_texts(model.decoder, asked, texts))
        # No block is selected.
        start = AnswerInputs(model.read(example.documents), [], torch.zeros(0), prompt)
        expected.append(float(F.cross_entropy(*logits_after(model, start, example))))
    assert float(stage(**batch)["answer"]) == pytest.approx(sum(expected) / len(expected), rel=1e-4)


@torch.no_grad()
def test_memory_learns_from_the_same_blocks_read_as_text(
    config: SedemConfig, backbone: Backbone, examples: ExampleSet
) -> None:
    model = guided(config, backbone)
    dataset = block_dataset(model, examples)
    losses = Stage2Losses(
        conditioning="selected", reconstruct=0.0, select=0.0, distill=0.5, distill_temperature=2.0
    )
    stage = Stage2(model, losses, collator(dataset, budgets=(3,), texts=True)).train()
    found = stage(**stage.collate(dataset.items))
    divergences: list[Tensor] = []
    for example in examples.examples:
        logits = {how: answer_logits(model, example, how)[0] / 2.0 for how in ("memory", "text")}
        own, other = logits["memory"].log_softmax(-1), logits["text"].log_softmax(-1)
        divergences.append((other.exp() * (other - own)).sum(-1))
    expected = float(torch.cat(divergences).mean())
    assert float(found["distill"]) == pytest.approx(expected, rel=1e-2)
    total = found["answer"] + 0.5 * found["distill"]
    assert float(found["loss"]) == pytest.approx(float(total))
