"""Datasets and batches of blocks on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.method.compressor import encode
from sedem.method.selector import Selector
from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.training.block_batch import BlockCollator
from sedem_lab.training.block_dataset import BlockDataset

HEADS, WIDTH, BLOCKS = 2, 8, 6


def asked(turned: Tensor, selector: Selector, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """States of a question `[Q, E]` and keys `[N, J, R, H]`; block 4 has its turned states."""
    hidden_QE = torch.randn(3, HEADS * WIDTH, generator=generator)
    keys_NJRH = torch.randn(BLOCKS, 3, HEADS, WIDTH, generator=generator)
    projected = selector.norm_query(hidden_QE) @ turned.T
    keys_NJRH[4] = projected.unflatten(-1, (HEADS, WIDTH))
    return hidden_QE, F.normalize(keys_NJRH, dim=-1)


def windows(count: int, after: int = 5, length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens, so that no two windows are alike."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 258, (count, length + after), generator=generator)
    return {"context": ids[:, :length], "continuation": ids[:, length:]}


def repeated(examples: ExampleSet, count: int) -> list[Example]:
    """Examples with several documents, again and again."""
    usable = [example for example in examples.examples if len(example.documents) > 1]
    return [replace(one, id=f"{one.id} {n}") for n, one in enumerate(islice(cycle(usable), count))]


def block_dataset(model: SeDeM, examples: ExampleSet, **options: Any) -> BlockDataset:
    dataset = BlockDataset(model, answer_limit=64)
    dataset.add(examples, "evidence", **options)
    return dataset


def collator(dataset: BlockDataset, **changes: Any) -> BlockCollator:
    options = {"max_blocks": 100, "budgets": (2,), "seed": 0, "cache": None, **changes}
    return BlockCollator(dataset, **options)


def model_of_shape(backbone: Backbone, config: SedemConfig, **changes: Any) -> SeDeM:
    torch.manual_seed(1)
    return SeDeM(config.with_changes(**changes), backbone, backbone).eval()


@torch.no_grad()
def memory_of(model: SeDeM, batch: dict[str, Any]) -> Tensor:
    """Memory that a batch's slot index gathers `[B, N, J, D]`, zero where there is no slot."""
    states = encode(model.encoder, batch["segment_ids"], model.config.extract_layers)
    memory_SMD = model.compressor(model.mixture(states), batch["segment_mask"])
    padding = torch.zeros(1, memory_SMD.shape[2])
    return torch.cat([memory_SMD.flatten(0, 1), padding])[batch["slot_index"]]


def check_checkpointing(
    stage: nn.Module, backbone: Backbone, train: Callable[[], tuple[Any, Any]]
) -> None:
    """Losses and gradients are equal with and without it, and fewer bytes are kept for them."""
    stage.train()
    found, kept = [], []
    for backbone.checkpointing in (False, True):
        torch.manual_seed(0)  # of the adapters' dropout
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found.append(train())
        kept.append(sum(saved.values()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert kept[1] < kept[0]


def full_batch(model: SeDeM, rows: int, blocks: int, budget: int = 2) -> dict[str, Any]:
    """Examples of stage 2 without padding."""
    config, segments = model.config, rows * blocks
    evidence = torch.zeros(rows, blocks, dtype=torch.bool)
    evidence[:, 1] = True
    return {
        "segment_ids": torch.randint(2, 250, (segments, config.segment_length)),
        "segment_mask": torch.ones(segments, config.segment_length, dtype=torch.bool),
        "slot_index": torch.arange(segments * config.slots).view(rows, blocks, config.slots),
        "slot_tokens": torch.full((rows, blocks, config.slots), config.compression),
        "blocks": torch.ones(rows, blocks, dtype=torch.bool),
        "evidence": evidence,
        "question_ids": torch.randint(2, 250, (rows, 6)),
        "question_mask": torch.ones(rows, 6, dtype=torch.bool),
        "ids": torch.randint(2, 250, (rows, 10)),
        "valid": torch.ones(rows, 10, dtype=torch.bool),
        "labels": torch.randint(2, 250, (rows, 4)),
        "coins": torch.rand(rows),
        "budget": budget,
        "condition": "memory",
        "texts": [],
        "sentences": [],
    }
