"""Examples as context, prompt and answer tokens, for baselines that read the whole context.

Letters: B batch, P prompt and answer tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sedem.backbone.prompts import all_answer_ids, all_question_ids, context_prompt
from sedem.types import Document
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.data.examples import Example
from sedem_lab.data.labels import Labelling, gold_documents, labelling_of, some_documents
from sedem_lab.training.example_dataset import ExampleDataset, Ragged
from sedem_lab.training.targets import targets

Documents = Literal["all", "gold"]


@dataclass(frozen=True)
class QuestionItem:
    """The tokens of one example."""

    context: NDArray[np.int32]  # its documents, truncated to what the method takes
    prefix: list[int]  # start token, prompt and question
    answer: list[int]  # end token included


@dataclass
class QuestionDataset(ExampleDataset[QuestionItem]):
    """All examples of a training run, as stage 2 would use them, tokenized for one method.

    `cut` counts the shortened contexts, all context tokens, and the tokens left out.

    Attributes:
        answer_limit: examples with more answer tokens are left out and counted.
        documents: "all" takes every document of an example, "gold" only those with evidence or,
            with answer labels, those that contain an answer string.
        context_limit: maximum tokens of a context, to bound memory use; None means as many as the
            method takes.
        max_paragraphs: maximum documents of an example, or "all".
        seed: decides which documents are sampled.
    """

    reader: TrainedReader
    answer_limit: int
    documents: Documents = "all"
    context_limit: int | None = None
    max_paragraphs: int | Literal["all"] = "all"
    seed: int = 0

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that decide tokens, documents, and how contexts are cut."""
        backbone = self.reader.backbone
        return {
            "kind": "questions",
            "method": [self.reader.name, self.reader.config.to_dict(), backbone.max_positions],
            "tokenizer": [backbone.vocabulary, backbone.bos_token_id, backbone.eos_token_id],
            "documents": [self.documents, self.max_paragraphs, self.seed],
            "limits": [self.answer_limit, self.context_limit],
        }

    def prepare(self, batches: Iterator[list[Example]], labelling: Labelling) -> dict[str, Ragged]:
        """Context, prompt and answer of each example."""
        parts = [[Ragged.of([])] * 3]
        backbone = self.reader.backbone
        for batch in batches:
            answers = all_answer_ids(backbone, [example.answers[0] for example in batch])
            chosen = [
                (example, answer, documents)
                for example, answer in zip(batch, answers, strict=True)
                if (documents := self._chosen_documents(example, len(answer), labelling))
            ]
            if not chosen:
                continue
            texts = [context_prompt([d.text for d in documents]) for _, _, documents in chosen]
            contexts = backbone.tokenize(texts)["input_ids"]
            prefixes = all_question_ids(backbone, [example.question for example, _, _ in chosen])
            rows = []
            for (_, answer, _), context, prefix in zip(chosen, contexts, prefixes, strict=True):
                if not context:
                    self.dropped["documents without tokens"] += 1
                    continue
                kept = self.reader.context_tokens_used(len(context), len(prefix), len(answer))
                kept = min(kept, self.context_limit or kept)
                self.cut["tokens"] += len(context)
                if kept < len(context):
                    self.cut["contexts cut"] += 1
                    self.cut["tokens left out"] += len(context) - kept
                rows.append((context[:kept], prefix, answer))
            parts += [[Ragged.of(own) for own in zip(*rows, strict=True)]] if rows else []
        joined = map(Ragged.joined, zip(*parts, strict=True))
        return dict(zip(("contexts", "prefixes", "answers"), joined, strict=True))

    def example_lengths(self) -> NDArray[np.int64]:
        """Count the tokens of context, prompt and answer."""
        return np.sum([array.lengths for array in self.arrays.values()], axis=0)

    def item(self, number: int) -> QuestionItem:
        """The item of a prepared example."""
        prefix, answer = (self.arrays[name][number].tolist() for name in ("prefixes", "answers"))
        return QuestionItem(self.arrays["contexts"][number], prefix, answer)

    def _chosen_documents(
        self, example: Example, answer: int, labelling: Labelling
    ) -> tuple[Document, ...]:
        """The documents of an example that are read; empty if the example cannot be used."""
        if answer > self.answer_limit:
            self.dropped[f"answer longer than {self.answer_limit} tokens"] += 1
            return ()
        own = labelling_of(example, labelling)
        if self.documents == "gold":
            documents = gold_documents(example, own)
            if not documents:
                self.dropped["no gold document"] += 1
            return documents
        if isinstance(self.max_paragraphs, int):
            return some_documents(example, self.max_paragraphs, own, self.seed)
        return example.documents


def collate_questions(items: list[QuestionItem]) -> dict[str, Any]:
    """Collate examples into a batch: `contexts`, one tensor each, `ids`, `valid` and `labels`."""
    contexts = [torch.from_numpy(item.context.astype(np.int64)) for item in items]
    return {"contexts": contexts, **targets([(item.prefix, item.answer) for item in items])}
