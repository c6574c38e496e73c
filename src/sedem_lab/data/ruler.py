"""RULER's qa_2: questions of HotpotQA among as many paragraphs as fit a length in tokens.

The random draws follow the public generator: the same file, tokenizer and seed give the same
questions over the same documents in the same order. The context of a question contains all
paragraphs of its own record, and others drawn from the whole set. Bisection on the first question
finds how many. A question whose context is still too long drops ten documents at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sedem.config import Flag, Whole, WholeAbove0, WholeFrom0
from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.examples import Example, ExampleSet, distinct_answers, whole
from sedem_lab.data.multihop import ParagraphQuestion, parse, usable
from sedem_lab.data.records import Records, within
from sedem_lab.data.tokenizer import Tokenizer, open_tokenizer

STEP = 10
"""The minimum documents that bisection tries, and the number dropped at a time."""

SLACK = 3
"""Bisection tries up to this many times the documents of the first estimate."""

# The wording of the public set; lengths are comparable only with the same wording.
_ORDER = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
TEMPLATE = (
    f"{_ORDER}\n\nThe following are given documents.\n\n{{context}}\n\n{_ORDER}\n\n"
    "Question: {query} Answer:"
)


def read(
    records: Records,
    *,
    length: WholeAbove0 = 4096,
    count: WholeAbove0 = 500,
    seed: Whole = 42,
    tokenizer: str | None = None,
    answer_tokens: WholeFrom0 = 32,
    repeat: Flag = False,
) -> ExampleSet:
    """The set for one length.

    Args:
        records: HotpotQA in any layout; the public set uses its validation split.
        length: tokens of context, template and answer together.
        tokenizer: folder or hub id of the tokenizer; None means sedem-nano's.
        repeat: use paragraphs several times if the set has too few.

    Raises:
        DataError: the set has too few paragraphs for the length; names the largest length.
    """
    result = ExampleSet("ruler-qa2", [])
    questions = [question for _, question in usable(records, parse, result)]
    if not questions:
        raise DataError("the set has no question for RULER's qa_2; give HotpotQA")
    sampler = _ContextSampler(questions, open_tokenizer(tokenizer), length, answer_tokens, seed)
    wanted, texts = sampler.documents(), sampler.texts
    if wanted > len(texts) and not repeat:
        every = sampler.tokens(0, sampler.draw(0, len(texts))) + answer_tokens
        raise DataError(
            f"length is {length:,}, but the {len(texts):,} paragraphs of the set make only "
            f"{every:,} tokens; ask for at most that, give a larger set, or set repeat"
        )
    for index, question in enumerate(questions[:count]):
        chosen = sampler.fitting(index, wanted)
        if chosen is None:
            result.drop(f"its own paragraphs exceed {length} tokens", question.id)
            continue
        with within(f"question '{question.id}'"):
            documents = tuple(
                Document(f"Document {i + 1}", shown(i, texts[number]))
                for i, number in enumerate(chosen)
            )
        own = sampler.numbers(index)
        gold = {own[i] for i in question.gold}
        evidence = tuple(whole(i, documents) for i, n in enumerate(chosen) if n in gold)
        answers = distinct_answers(question.answers)
        result.examples.append(
            Example(question.id, documents, question.question, answers, evidence)
        )
    return result


class _ContextSampler:
    """Draws contexts. All draws use one random generator, so their order matters.

    `texts` has the distinct paragraphs of the set, sorted.
    """

    def __init__(
        self,
        questions: Sequence[ParagraphQuestion],
        tokenizer: Tokenizer,
        length: int,
        answer_tokens: int,
        seed: int,
    ) -> None:
        self.questions = questions
        self.texts = sorted({p.text("") for question in questions for p in question.paragraphs})
        self._numbers = {text: number for number, text in enumerate(self.texts)}
        self.tokenizer = tokenizer
        self.length = length
        self.room = length - answer_tokens
        self.seed = seed
        self.rng = random.Random(seed)

    def numbers(self, index: int) -> list[int]:
        """Numbers of a question's own paragraphs."""
        return [self._numbers[p.text("")] for p in self.questions[index].paragraphs]

    def draw(self, index: int, documents: int) -> list[int]:
        """Paragraphs of a question's context, shuffled."""
        own = self.numbers(index)
        every = len(self.texts)
        if documents < every:
            known = set(own)
            others = [number for number in range(every) if number not in known]
            wanted = min(max(0, documents - len(own)), len(others))
            chosen = own + self.rng.sample(others, wanted)
        else:
            rounds = -(-documents // every)
            chosen = (list(range(every)) * rounds)[:documents]
        # The public generator shuffles every context with the seed itself.
        random.Random(self.seed).shuffle(chosen)
        return chosen

    def tokens(self, index: int, chosen: list[int]) -> int:
        """Tokens of the context in its template."""
        context = "\n\n".join(shown(i, self.texts[number]) for i, number in enumerate(chosen))
        query = self.questions[index].question
        return self.tokenizer.count(TEMPLATE.format(context=context, query=query))

    def documents(self) -> int:
        """The largest number of documents with which the first question fits."""
        each = self.tokens(0, self.draw(0, STEP)) / STEP
        low, high = STEP, max(int(self.length / each * SLACK), 2 * STEP)
        best = STEP
        while low <= high:
            middle = (low + high) // 2
            if self.tokens(0, self.draw(0, middle)) <= self.room:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def fitting(self, index: int, documents: int) -> list[int] | None:
        """A context of at most `documents` documents that fits; None if its own are too long."""
        own = len(self.questions[index].paragraphs)
        while True:
            chosen = self.draw(index, documents)
            if self.tokens(index, chosen) <= self.room:
                return chosen
            if documents <= own:
                return None
            documents = max(documents - STEP, own)


def shown(index: int, text: str) -> str:
    """A document as the public set shows it."""
    return f"Document {index + 1}:\n{text}"
