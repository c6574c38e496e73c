"""Training of raw-text RAG: L_ret for its selector, the answer's cross-entropy for its reader.

Examples are cut, labelled, sampled and batched by what stage 2 uses, with a block for a paragraph
and a slot for a token, so that the supervision is matched.

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
from sedem.training.fit import fit
from sedem.training.prepare import Collator, Item, Prepared
from sedem.training.run import read_mixture
from sedem.training.selecting import (
    CONDITIONING,
    ConditionedLosses,
    SelectionBatch,
    conditioned,
    frozen_states,
    recall,
    rows_at,
)


@dataclass(frozen=True)
class RAGBlocks:
    """Paragraphs of a reader as blocks, for the data of stage 2.

    Attributes:
        encoder: the backbone.
        decoder: the backbone.
        config: their shape.
    """

    encoder: Backbone
    decoder: Backbone
    config: SedemConfig

    @classmethod
    def of(cls, reader: RAG) -> RAGBlocks:
        """Those of a reader."""
        return cls(reader.backbone, reader.backbone, reader.config.blocks)


class RAGTraining(BaselineTraining):
    """Trains selector and adapters; neither loss reaches the other's part.

    Args:
        reader: what is trained.
        losses: weights.
        collator: makes batches.
        context_limit: tokens of picked paragraphs that are read at most.
    """

    reader: RAG

    def __init__(
        self,
        reader: RAG,
        losses: ConditionedLosses,
        collator: Collator,
        context_limit: int | None = None,
    ) -> None:
        super().__init__(reader)
        self.losses = losses
        self.collator = collator
        self.context_limit = context_limit

    def collate(self, items: list[Item]) -> dict[str, Any]:
        """Examples as the arguments of `forward`."""
        return self.collator(items)

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Tokens of paragraphs, questions to the selector, prompts and answers."""
        return int(sum(batch[name].sum() for name in ("segment_mask", "question_mask", "valid")))

    def forward(self, **batch: Unpack[SelectionBatch]) -> dict[str, Tensor]:
        """Losses of a batch of examples; a block is a paragraph and a slot a token.

        Args:
            batch: the examples.

        Returns:
            `loss`, its parts `answer` and `select`, and `recall`: the share of examples with
            evidence among the selector's own K paragraphs.
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
        own_BN = scores_BN.detach()
        chosen_BK = conditioned(own_BN, evidence_BN, batch["coins"], share, batch["budget"])
        chosen_BK = chosen_BK.sort(1).values
        tokens_BNJ = rows_at(batch["segment_ids"].flatten(), index_BNJ)
        contexts = [
            self._context(tokens_BNJ[b], real_BNJ[b], chosen_BK[b], valid_BP[b])
            for b in range(len(chosen_BK))
        ]
        answer = self.reader.question_loss(contexts, batch["ids"], valid_BP, batch["labels"])[
            "loss"
        ]
        select = self.losses.of(scores_BN, evidence_BN, batch["blocks"], question_mask_BQ)
        return {
            "loss": answer + self.losses.select * select,
            "answer": answer,
            "select": select,
            "recall": recall(own_BN, evidence_BN, batch["budget"]),
        }

    def _context(
        self, tokens_NJ: Tensor, real_NJ: Tensor, chosen_K: Tensor, valid_P: Tensor
    ) -> Tensor:
        """Tokens of an example's chosen paragraphs, as far as there are positions for them."""
        rows = [tokens_NJ[n][real_NJ[n]] for n in chosen_K.tolist() if bool(real_NJ[n].any())]
        room = self.reader.backbone.max_positions - int(valid_P.sum())
        return self.reader.join(rows)[: min(room, self.context_limit or room)]


def train_rag(recipe: BaselineRecipe, output: Path) -> Path:
    """Train from a recipe's questions.

    Args:
        recipe: of `rag`.
        output: folder of the run, claimed.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the recipe gives no questions, or only documents with evidence.
    """
    chosen = recipe.data
    if chosen is None or chosen.documents != "all":
        raise ConfigError(
            "rag learns to pick among all documents; give it questions (data) with documents: all"
        )
    reader = open_reader(recipe)
    assert isinstance(reader, RAG)
    prepared = Prepared(RAGBlocks.of(reader), chosen.answer_limit)
    training, evaluation = read_mixture(prepared, chosen, Path(recipe.data_root))
    collator = Collator(
        prepared,
        max_blocks=chosen.max_paragraphs or max(len(item.blocks) for item in prepared.items),
        budgets=(resolve_budget(reader.config.k, sys.maxsize),),
        seed=recipe.optimization.seed,
        cache=Path(recipe.cache) if chosen.cache_states else None,
    )
    stage = RAGTraining(
        reader, recipe.losses or ConditionedLosses(), collator, chosen.context_limit
    )
    return fit(
        stage,
        reader,
        recipe,
        output,
        training,
        evaluation,
        noted={"left_out": dict(prepared.dropped)},
        best=True,
    )
