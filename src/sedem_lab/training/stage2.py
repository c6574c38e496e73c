"""Stage 2: selection, decompression, injection and answer, trained together (section 4).

Letters: B batch, S segments, T tokens, C tokens of a slot, N blocks, J slots of a block, K selected
blocks, Q question tokens, P prefix and answer tokens, A answer tokens, E encoder width, D decoder
width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from sedem.config import Number, NumberAbove0
from sedem.engine.eager import condition
from sedem.errors import ConfigError
from sedem.guidance import text_count
from sedem.method.losses import IGNORED, reconstruction_loss
from sedem.model import SeDeM
from sedem_lab.training.block_batch import (
    BlockBatch,
    BlockCollator,
    frozen_states,
    real_tokens,
    rows_at,
)
from sedem_lab.training.block_dataset import BlockItem
from sedem_lab.training.fit import Trainable
from sedem_lab.training.predictions import Predictions
from sedem_lab.training.selection_losses import (
    Conditioning,
    SelectionLosses,
    choose_blocks,
    evidence_recall,
)
from sedem_lab.training.targets import with_texts


class Stage2Losses(SelectionLosses):
    """Weights and temperatures of stage 2; the defaults are the paper's.

    Attributes:
        reconstruct: lambda_rec of stage 2.
        conditioning: which blocks the answer is conditioned on; a name in `CONDITIONING`.
        distill: weight of the distillation from the same model as it reads the same blocks as text,
            in batches that read memory. Ours; 0 turns it off.
    """

    distill: Number = 0.0
    distill_temperature: NumberAbove0 = 1.0
    reconstruct: Number = 0.1
    pool_weight: Number = 1.0
    conditioning: Conditioning = "gold-then-selected"


class Stage2(Trainable):
    """Trains compressor, decompressor, selector and the decoder's adapters.

    Args:
        model: the model to train, adapters of its decoder included.
        collator: makes batches; None if `collate` is not called.
        logits_at_once: as in `Optimization`.
    """

    def __init__(
        self,
        model: SeDeM,
        losses: Stage2Losses,
        collator: BlockCollator | None,
        logits_at_once: int | None = None,
    ) -> None:
        super().__init__()
        self.logits_at_once = logits_at_once
        self.model = model
        self.losses = losses
        self.collator = collator
        if losses.reconstruct and model.config.decompressor == "none":
            raise ConfigError(
                f"losses.reconstruct is {losses.reconstruct}, but a model without a decompressor "
                "restores no states: set it to 0"
            )
        self.freeze_others()

    def train(self, mode: bool = True) -> Self:
        """Set training mode; frozen backbones stay in evaluation mode, without dropout."""
        super().train(mode)
        self.model.eval()
        return self

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate; a part may have none."""
        model = self.model
        return {
            "compressor": [*model.mixture.parameters(), *model.compressor.parameters()],
            "decompressor": list(model.decompressor.parameters()),
            "selector": list(model.selector.parameters()),
            "lora": model.decoder.lora_parameters(),
            "guidance": [] if model.guidance is None else list(model.guidance.parameters()),
        }

    def collate(self, items: list[BlockItem]) -> dict[str, Any]:
        """Collate examples into the arguments of `forward`."""
        assert self.collator is not None
        return self.collator(items, self.epoch)

    tokens = staticmethod(real_tokens)

    def forward(self, **batch: Unpack[BlockBatch]) -> dict[str, Tensor]:
        """Losses of a batch of examples.

        Returns:
            `loss` (equation of the stage-2 objective), its parts, and `recall`: among the examples
            with evidence, the share that have some among the selector's K best blocks.
        """
        model, weights = self.model, self.losses
        states, question_states = frozen_states(batch, model.encoder, model.config.extract_layers)
        hidden_STE = model.mixture(states.float())
        memory_SMD = model.compressor(hidden_STE, batch["segment_mask"])
        memory_BNJD = rows_at(memory_SMD.flatten(0, 1), batch["slot_index"])
        scores_BN = model.selector(
            model.mixture(question_states.float()),
            batch["question_mask"],
            memory_BNJD,
            batch["slot_tokens"] > 0,
        )
        progress = self.progress if self.training else 1.0
        chosen_BK = choose_blocks(scores_BN, batch, weights.conditioning, progress)
        predicted = self._predict(batch, memory_BNJD, scores_BN, chosen_BK)
        answer = predicted.next_token_loss(batch["labels"])
        select = weights.compute(scores_BN, batch)
        loss = answer + weights.select * select
        parts = {"answer": answer, "select": select}
        if weights.distill and batch["condition"] == "memory":
            with torch.no_grad():
                read: BlockBatch = {**batch, "condition": "text"}
                teacher = self._predict(read, memory_BNJD, scores_BN, chosen_BK)
            parts["distill"] = predicted.distillation_loss(
                teacher, batch["labels"] != IGNORED, weights.distill_temperature
            )
            loss = loss + weights.distill * parts["distill"]
        # This decompresses every block, selected or not: several times the work of the answer.
        if weights.reconstruct:
            parts["reconstruct"] = reconstruction_loss(
                model.decompressor(memory_SMD),
                model.compressor.target(hidden_STE).detach(),
                batch["segment_mask"],
                model.config.compression,
                weights.pool_weight,
            )
            loss = loss + weights.reconstruct * parts["reconstruct"]
        return {"loss": loss, **parts, "recall": evidence_recall(scores_BN, batch)}

    def _predict(
        self, batch: BlockBatch, memory_BNJD: Tensor, scores_BN: Tensor, chosen_BK: Tensor
    ) -> Predictions:
        """Predictions of the answer `[B, A]`, given the question and the chosen blocks.

        Only the blocks that are read as memory are decompressed, as in inference.
        """
        model, ids, valid = self.model, batch["ids"], batch["valid"]
        count = text_count(batch["condition"], chosen_BK.shape[1])
        # The decoder sees blocks in document order.
        texts_BK, chosen_BK = (
            part.sort(1).values for part in chosen_BK.tensor_split([count], dim=1)
        )
        if count:
            rows = zip(batch["texts"], texts_BK.tolist(), strict=True)
            # An example with fewer blocks than K has no block at the remaining places.
            texts = batch["sentences"] or [
                [texts[n] for n in chosen if n < len(texts) and texts[n]] for texts, chosen in rows
            ]
            chat = model.config.chat_template
            ids, valid = with_texts(model.decoder, ids, valid, texts, chat=chat)
        rows_B1 = torch.arange(len(chosen_BK), device=chosen_BK.device)[:, None]
        filled = condition(
            model,
            ids,
            valid,
            memory_BNJD[rows_B1, chosen_BK],
            batch["slot_tokens"][rows_B1, chosen_BK],
            scores_BN.gather(1, chosen_BK),
        )
        states_BAD = filled.prefix[:, -batch["labels"].shape[1] :]
        return Predictions(model.decoder.logits, states_BAD, self.logits_at_once)
