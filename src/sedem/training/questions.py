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
from torch.utils.data import Dataset

from sedem.baselines.trained import TrainedReader
from sedem.data.examples import Example, ExampleSet
from sedem.data.labels import gold_documents
from sedem.prompts import answer_ids, context_prompt, question_ids
from sedem.training.prepare import Labelling, targets

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
class Questions(Dataset[QuestionItem]):
    """All examples of a training, the same as stage 2 would see, tokenized for one method.

    Attributes:
        reader: says how much of a context it takes.
        answer_limit: examples with longer answers are left out, counted.
        documents: every document of an example, or those with evidence alone.
        context_limit: tokens of a context that are used at most, for the memory of the machine;
            None means what the method takes.
        dropped: examples that were left out, and why.
        cut: contexts that were shortened, their tokens and the tokens left out.
    """

    reader: TrainedReader
    answer_limit: int
    documents: Given = "all"
    context_limit: int | None = None
    items: list[QuestionItem] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)

    def add(self, examples: ExampleSet, labelling: Labelling, repeat: int = 1) -> None:
        """Take in a set.

        Args:
            examples: the set.
            labelling: where documents are "gold": "evidence" are those of its labels, "answer"
                those that hold an answer string.
            repeat: how many times each example counts.
        """
        for example in examples.examples:
            item = self._item(example, labelling)
            if item is not None:
                self.items += [item] * repeat

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.items)

    def __getitem__(self, index: int) -> QuestionItem:
        """One example."""
        return self.items[index]

    def _item(self, example: Example, labelling: Labelling) -> QuestionItem | None:
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
        context = backbone.token_ids(context_prompt([document.text for document in documents]))
        prefix = question_ids(backbone, example.question)
        kept = self.reader.seen(len(context), len(prefix), len(answer))
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
