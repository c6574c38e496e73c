"""Training of raw-text RAG: L_ret for its selector, the answer's cross-entropy for its reader.

Its data comes from the classes of stage 2, with a paragraph as a block and a token as a slot, so
labels, sampling and batches match those of SeDeM.

Letters: S paragraphs of a batch, T tokens, B batch, N paragraphs of an example, J tokens of a
paragraph, Q question tokens, P prefix and answer tokens, A answer tokens, X extraction layers,
E width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.baselines.rag import RAG
from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.method.selector import resolve_budget
from sedem.training.baseline_recipe import BaselineRecipe, open_reader
from sedem.training.baseline_training import BaselineTraining
from sedem.training.block_batch import BlockBatch, BlockCollator, frozen_states, rows_at
from sedem.training.block_dataset import BlockDataset, BlockItem
from sedem.training.fit import fit
from sedem.training.selection_losses import (
    CONDITIONING,
    ConditionedLosses,
    choose_blocks,
    evidence_recall,
)
from sedem.training.sources import read_mixture


@dataclass(frozen=True)
class RAGBlocks:
    """A reader's paragraphs described as blocks; a `BlockModel`.

    Attributes:
        encoder: the reader's backbone.
        decoder: the same backbone.
        config: shape of the blocks.
    """

    encoder: Backbone
    decoder: Backbone
    config: SedemConfig

    @classmethod
    def of(cls, reader: RAG) -> RAGBlocks:
        """Describe the paragraphs of a reader."""
        return cls(reader.backbone, reader.backbone, reader.config.blocks)


class RAGTraining(BaselineTraining):
    """Trains selector and adapters; each loss has gradients for only one of the two.

    Args:
        reader: the reader to train.
        losses: weights of the losses, and the conditioning.
        collator: makes batches.
        context_limit: maximum tokens of the picked paragraphs; None means what the backbone takes.
    """

    reader: RAG

    def __init__(
        self,
        reader: RAG,
        losses: ConditionedLosses,
        collator: BlockCollator,
        context_limit: int | None = None,
    ) -> None:
        super().__init__(reader)
        self.losses = losses
        self.collator = collator
        self.context_limit = context_limit

    def collate(self, items: list[BlockItem]) -> dict[str, Any]:
        """Collate examples into the arguments of `forward`."""
        return self.collator(items, self.epoch)

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens of paragraphs, questions (selector), prompts and answers."""
        return int(sum(batch[name].sum() for name in ("segment_mask", "question_mask", "valid")))

    def forward(self, **batch: Unpack[BlockBatch]) -> dict[str, Tensor]:
        """Losses of a batch of examples; a block is a paragraph and a slot a token.

        Args:
            batch: the examples.

        Returns:
            `loss`, its parts `answer` and `select`, and `recall`: among the examples with evidence,
            the share that have some among the selector's K best paragraphs.
        """
        layers = (self.reader.config.extract_layer,)
        states, question_states = frozen_states(batch, self.reader.backbone, layers)
        evidence_BN, valid_BP = batch["evidence"], batch["valid"]
        question_mask_BQ = batch["question_mask"]
        real_BNJ = batch["slot_tokens"] > 0
        longest = int(real_BNJ.sum(-1).max())
        index_BNJ, real_BNJ = batch["slot_index"][..., :longest], real_BNJ[..., :longest]
        scores_BN = self.reader.selector(
            question_states[0].float(),
            question_mask_BQ,
            rows_at(states[0].float().flatten(0, 1), index_BNJ),
            real_BNJ,
        )
        share = CONDITIONING[self.losses.conditioning](self.progress if self.training else 1.0)
        detached_BN = scores_BN.detach()
        chosen_BK = choose_blocks(detached_BN, evidence_BN, batch["coins"], share, batch["budget"])
        chosen_BK = chosen_BK.sort(1).values
        tokens_BNJ = rows_at(batch["segment_ids"].flatten(), index_BNJ)
        contexts = [
            self._context(tokens_BNJ[b], real_BNJ[b], chosen_BK[b], valid_BP[b])
            for b in range(len(chosen_BK))
        ]
        answer = self.reader.question_loss(contexts, batch["ids"], valid_BP, batch["labels"])[
            "loss"
        ]
        select = self.losses.compute(scores_BN, evidence_BN, batch["blocks"], question_mask_BQ)
        return {
            "loss": answer + self.losses.select * select,
            "answer": answer,
            "select": select,
            "recall": evidence_recall(detached_BN, evidence_BN, batch["budget"]),
        }

    def _context(
        self, tokens_NJ: Tensor, real_NJ: Tensor, chosen_K: Tensor, valid_P: Tensor
    ) -> Tensor:
        """Tokens of an example's chosen paragraphs, truncated to the free positions."""
        rows = [tokens_NJ[n][real_NJ[n]] for n in chosen_K.tolist() if bool(real_NJ[n].any())]
        room = self.reader.backbone.max_positions - int(valid_P.sum())
        return self.reader.join(rows)[: min(room, self.context_limit or room)]


def train_rag(recipe: BaselineRecipe, output: Path) -> Path:
    """Train raw-text RAG on the questions of a recipe.

    Args:
        recipe: a recipe of `rag`.
        output: output folder, claimed by `start_run`.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the recipe has no questions, or uses only documents with evidence.
    """
    chosen = recipe.data
    if chosen is None or chosen.documents != "all":
        raise ConfigError(
            "rag learns to pick among all documents; give questions (data) with documents: all"
        )
    reader = open_reader(recipe)
    assert isinstance(reader, RAG)
    losses = recipe.losses or ConditionedLosses()
    dataset = BlockDataset(RAGBlocks.of(reader), chosen.answer_limit, cache=Path(recipe.cache))
    training, evaluation = read_mixture(
        dataset, chosen, Path(recipe.data_root), selects=losses.select > 0
    )
    collator = BlockCollator(
        dataset,
        max_blocks=chosen.max_paragraphs or dataset.most_blocks,
        budgets=(resolve_budget(reader.config.k, sys.maxsize),),
        seed=recipe.optimization.seed,
        cache=Path(recipe.cache) if chosen.cache_states else None,
    )
    stage = RAGTraining(reader, losses, collator, chosen.context_limit)
    return fit(
        stage,
        reader,
        recipe,
        output,
        training,
        evaluation,
        data_summary={"left_out": dict(dataset.dropped)},
        best=True,
    )
