"""Examples as a trained baseline learns from them: context, prompt, answer, in tokens.

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
from sedem.training.items import Items
from sedem.training.prepare import targets

Given = Literal["all", "gold"]


@dataclass(frozen=True)
class QuestionItem:
    """One example.

    Attributes:
        context: tokens of its documents, as far as the method takes them.
        prefix: start token, prompt and question.
        answer: target tokens, end token included.
    """

    context: NDArray[np.int32]
    prefix: list[int]
    answer: list[int]


@dataclass
class Questions(Items[QuestionItem]):
    """All examples of a training, the same as stage 2 would see, tokenized for one method.

    Attributes:
        reader: says how much of a context it takes.
        answer_limit: examples with longer answers are left out, counted.
        documents: every document of an example, or those with evidence alone.
        context_limit: tokens of a context that are used at most, for the memory of the machine;
            None means what the method takes.
        max_paragraphs: documents of an example that are used at most; None means all.
        seed: of which are used.
        cut: contexts that were shortened, their tokens and the tokens left out.
    """

    reader: TrainedReader
    answer_limit: int
    documents: Given = "all"
    context_limit: int | None = None
    max_paragraphs: int | None = None
    seed: int = 0
    cut: Counter[str] = field(default_factory=Counter)

    def item(self, example: Example, labelling: Labelling) -> QuestionItem | None:
        """Context, prompt and answer of an example.

        Args:
            example: the example.
            labelling: where documents are "gold": "evidence" are those of its labels, "answer"
                those that hold an answer string.
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
    """Examples as a batch: `contexts`, one tensor each, `ids`, `valid` and `labels`."""
    contexts = [torch.from_numpy(item.context.astype(np.int64)) for item in items]
    return {"contexts": contexts, **targets([(item.prefix, item.answer) for item in items])}
