"""Losses of given answers and texts, and ranks of slots: finer than scores for small models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sedem.data.examples import Example
    from sedem.training.stages import Stage1Recipe


def memory_losses(checkpoint: Path, recipe: Stage1Recipe) -> dict[str, Any]:
    """Losses on held-out windows from memory alone, after stage 1.

    Args:
        checkpoint: the final checkpoint of a stage-1 run.
        recipe: gives the text and the held-out windows.

    Returns:
        By target (continuation, recall) and condition: mean, interval and number of windows.
    """
    import torch

    from sedem import SeDeM
    from sedem.data.corpus import TokenizedCorpus
    from sedem.data.windows import Windows
    from sedem.evaluation.continuation import continuation_losses
    from sedem.provenance import provenance

    source, dtype = recipe.text, recipe.optimization.backbone_dtype
    model = SeDeM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), engine="eager")
    path = Path(recipe.data_root) / source.path
    corpus = TokenizedCorpus.open(path, model.encoder, Path(recipe.cache), source.exclude_titles)
    held_out = range(len(corpus) - source.held_out, len(corpus))
    lengths = model.config.segment_length, source.continuation
    windows = Windows(corpus, *lengths, 0, held_out, source.evaluation_windows)
    return continuation_losses(model, windows, lambda done, total: None) | provenance()


def answer_losses(
    checkpoint: Path, examples: Sequence[Example], dtype: str, *, k: int | str, blocks: int | str
) -> dict[str, Any]:
    """Loss per token of the first reference, with the evidence among the K blocks.

    Args:
        checkpoint: a trained model.
        examples: questions with evidence.
        dtype: type of the backbones.
        k: selected blocks, or "all".
        blocks: number of blocks of an example, or "all"; the evidence is included, the others are
            sampled.

    Returns:
        `answer_loss`: mean, interval and number of examples; `mixture`: weights of the extraction
        layers.
    """
    import torch

    from sedem import SeDeM
    from sedem.data.examples import ExampleSet
    from sedem.evaluation.metrics import summarize
    from sedem.method.selector import resolve_budget
    from sedem.provenance import provenance
    from sedem.training.block_batch import BlockCollator
    from sedem.training.block_dataset import BlockDataset
    from sedem.training.stage2 import Stage2, Stage2Losses

    model = SeDeM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), engine="eager")
    dataset = BlockDataset(model, answer_limit=128)
    dataset.add(ExampleSet("questions", list(examples)), "evidence")
    given, selected = (resolve_budget(n, dataset.most_blocks) for n in (blocks, k))
    collator = BlockCollator(dataset, max_blocks=given, budgets=[selected], seed=0, cache=None)
    stage = Stage2(model, Stage2Losses(reconstruct=0.0, conditioning="gold"), collator).eval()
    with torch.no_grad():
        values = [float(stage(**stage.collate([item]))["answer"]) for item in dataset.items]
    weights = model.mixture.weights().tolist()
    mixture = dict(zip(map(str, model.config.extract_layers), weights, strict=True))
    return {"answer_loss": summarize(values, digits=4), "mixture": mixture} | provenance()


def losses_by_budget(
    checkpoint: Path, examples: Sequence[Example], dtype: str, budgets: Sequence[int]
) -> dict[str, Any]:
    """Loss per token of the first reference, given the selector's K best blocks, at several K.

    Args:
        checkpoint: a trained model.
        examples: questions with evidence.
        dtype: type of the backbones.
        budgets: the values of K.

    Returns:
        `budgets` has mean, interval and number of examples by K, `change` the same of the paired
        differences to the first K, `losses` those of single examples, and `recall` the share of
        examples with evidence among the K best blocks, in percent.
    """
    import torch

    from sedem import SeDeM
    from sedem.data.examples import ExampleSet
    from sedem.evaluation.metrics import summarize
    from sedem.provenance import provenance
    from sedem.training.block_batch import BlockCollator, frozen_states
    from sedem.training.block_dataset import BlockDataset
    from sedem.training.stage2 import Stage2, Stage2Losses

    model = SeDeM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), engine="eager")
    dataset = BlockDataset(model, answer_limit=128)
    dataset.add(ExampleSet("questions", list(examples)), "evidence")
    most = max(len(item.blocks) for item in dataset.items)
    collator = BlockCollator(dataset, max_blocks=most, budgets=budgets, seed=0, cache=None)
    stage = Stage2(model, Stage2Losses(reconstruct=0.0, conditioning="selected"), collator).eval()
    losses: dict[int, list[float]] = {k: [] for k in budgets}
    recalled: dict[int, list[float]] = {k: [] for k in budgets}
    with torch.no_grad():
        for item in dataset.items:
            batch = stage.collate([item])
            # The same states for every K: documents and questions are read once.
            batch["states"], batch["question_states"] = frozen_states(
                batch, model.encoder, model.config.extract_layers
            )
            for k in budgets:
                parts = stage(**{**batch, "budget": k})
                losses[k].append(float(parts["answer"]))
                recalled[k].append(100 * float(parts["recall"]))
    first = losses[budgets[0]]
    changes = {
        k: [one - other for one, other in zip(found, first, strict=True)]
        for k, found in losses.items()
    }
    return {
        "budgets": {str(k): summarize(found, digits=4) for k, found in losses.items()},
        "change": {str(k): summarize(found, digits=4) for k, found in changes.items()},
        "losses": {str(k): [round(loss, 4) for loss in found] for k, found in losses.items()},
        "recall": {str(k): summarize(found) for k, found in recalled.items()},
        "tau": None if model.guidance is None else float(model.guidance.tau.detach()),
        **provenance(),
    }


def slot_ranks(checkpoint: Path, examples: Sequence[Example], dtype: str) -> dict[str, Any]:
    """Normalized effective rank of memory slots, in percent of their number.

    Args:
        checkpoint: the model.
        examples: their documents are read, each text once.
        dtype: data type of the backbones.

    Returns:
        `effective_rank`: mean, interval and number of blocks.
    """
    import torch

    from sedem import Document, SeDeM
    from sedem.evaluation.rank import block_slots, normalized_effective_rank
    from sedem.provenance import provenance

    model = SeDeM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), engine="eager")
    texts = dict.fromkeys(d.text for example in examples for d in example.documents)
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    ranks = normalized_effective_rank(block_slots(model, documents))
    return {"effective_rank": ranks} | provenance()


def icae_ranks(checkpoint: Path, examples: Sequence[Example], dtype: str) -> dict[str, Any]:
    """Normalized effective rank of ICAE's slots, segment by segment, each context read once.

    Args:
        checkpoint: a checkpoint of ICAE.
        examples: their contexts are read.
        dtype: data type of the backbone.

    Returns:
        `effective_rank`: mean, interval and number of segments.
    """
    import torch

    from sedem.answering.prompts import context_prompt
    from sedem.baselines.icae import ICAE
    from sedem.evaluation.rank import normalized_effective_rank
    from sedem.provenance import provenance

    reader = ICAE.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    contexts = dict.fromkeys(context_prompt([d.text for d in e.documents]) for e in examples)
    with torch.no_grad():
        ranks = normalized_effective_rank(
            slots_MD.float()
            for context in contexts
            for slots_MD in reader.compress(reader.backbone.token_ids(context)).content.states
        )
    return {"effective_rank": ranks} | provenance()
