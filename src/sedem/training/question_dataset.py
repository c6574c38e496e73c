"""Examples as context, prompt and answer tokens, the training set of a baseline that reads it all.

Letters: B batch, P prompt and answer tokens, A answer tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sedem.baselines.trained import TrainedReader
from sedem.data.examples import Example
from sedem.data.labels import Labelling, gold_documents, some_documents
from sedem.inference.prompts import answer_ids, context_prompt, question_ids
from sedem.training.example_dataset import ExampleDataset
from sedem.training.targets import targets

Documents = Literal["all", "gold"]


@dataclass(frozen=True)
class QuestionItem:
    """One example.

    Attributes:
        context: tokens of its documents, truncated to what the method takes.
        prefix: start token, prompt and question.
        answer: target tokens, end token included.
    """

    context: NDArray[np.int32]
    prefix: list[int]
    answer: list[int]


@dataclass
class QuestionDataset(ExampleDataset[QuestionItem]):
    """All examples of a training run, those that stage 2 would use, tokenized for one method.

    Attributes:
        reader: the method, which says how much of a context it takes.
        answer_limit: examples with more answer tokens are left out and counted.
        documents: "all" takes every document of an example, "gold" only those with evidence.
        context_limit: maximum tokens of a context, to bound memory use; None means as many as the
            method takes.
        max_paragraphs: maximum documents of an example; None means all.
        seed: decides which documents are sampled.
        cut: number of shortened contexts, of all their tokens and of the tokens left out.
    """

    reader: TrainedReader
    answer_limit: int
    documents: Documents = "all"
    context_limit: int | None = None
    max_paragraphs: int | None = None
    seed: int = 0
    cut: Counter[str] = field(default_factory=Counter)

    def convert(self, example: Example, labelling: Labelling) -> QuestionItem | None:
        """Context, prompt and answer of an example.

        Args:
            example: the example.
            labelling: which documents are "gold": with "evidence" those that its labels name, with
                "answer" those that hold an answer string.
        """
        backbone = self.reader.backbone
        answer = answer_ids(backbone, example.answers[0])
        if len(answer) > self.answer_limit:
            self.dropped[f"answer longer than {self.answer_limit} tokens"] += 1
            return None
        documents = example.documents
        if self.documents == "gold":
            documents = gold_documents(example, labelling)
            if not documents:
                self.dropped["no gold document"] += 1
                return None
        elif self.max_paragraphs is not None:
            documents = some_documents(example, self.max_paragraphs, labelling, self.seed)
        context = backbone.token_ids(context_prompt([document.text for document in documents]))
        if not context:
            self.dropped["documents without tokens"] += 1
            return None
        prefix = question_ids(backbone, example.question)
        kept = self.reader.context_tokens_used(len(context), len(prefix), len(answer))
        kept = min(kept, self.context_limit or kept)
        self.cut["tokens"] += len(context)
        if kept < len(context):
            self.cut["contexts cut"] += 1
            self.cut["tokens left out"] += len(context) - kept
        return QuestionItem(np.array(context[:kept], dtype=np.int32), prefix, answer)


def collate_questions(items: list[QuestionItem]) -> dict[str, Any]:
    """Collate examples to a batch: `contexts`, one tensor each, `ids`, `valid` and `labels`."""
    contexts = [torch.from_numpy(item.context.astype(np.int64)) for item in items]
    return {"contexts": contexts, **targets([(item.prefix, item.answer) for item in items])}
