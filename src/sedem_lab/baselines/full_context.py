"""Full context: the backbone reads every document for every question ("Backbone" of the paper).

Raw text enters at the first layer; keys and values are cached for decoding. A context longer than
the backbone's positions is truncated at its end, and the answer says so. The memory is the text
itself, so `stored_bytes` counts the documents in UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sedem.answering.decoding import Decoding, Transcript
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import context_prompt, end_ids, question_ids
from sedem.engine.device import Clock
from sedem.engine.interface import Step
from sedem.errors import DataError
from sedem.method.injection import GrowingCache
from sedem.types import Answer, Citation, Document, check_documents, check_tokens
from sedem_lab.baselines.soft_prompt import prefill_result, run_embeddings


class FullContext:
    """The frozen backbone reads every document: the paper's "Backbone (Frozen)"."""

    name = "full-context"
    has_selection_budget = False

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        self.backbone = backbone
        self.decoding = decoding

    def read(self, documents: Sequence[Document]) -> list[Document]:
        """Return the documents: for raw text there is no memory to build in advance.

        Raises:
            DataError: there are no documents, two share a name, or they have no tokens.
        """
        check_documents(documents)
        check_tokens(any(self.backbone.token_ids(document.text) for document in documents))
        return list(documents)

    def answer(self, memory: Sequence[Document], question: str) -> Answer:
        """Answer from all documents, in order.

        Raises:
            DataError: the question is empty, or it alone exceeds the backbone's positions.
        """
        clock = Clock(self.backbone.device)
        return self.answer_from(memory, None, question, clock)

    @torch.no_grad()
    def answer_from(
        self,
        documents: Sequence[Document],
        scores: Sequence[float] | None,
        question: str,
        clock: Clock,
    ) -> Answer:
        """Answer from documents, in reading order.

        Args:
            scores: score of each document; None if nothing was selected.
            clock: a clock that was started when the question arrived.
        """
        backbone = self.backbone
        clock.lap("select_ms")
        start, *prompt = question_ids(backbone, question)
        room = free_positions(backbone, 1 + len(prompt), self.decoding.max_new_tokens)
        prompt_text = context_prompt([document.text for document in documents])
        encoded = backbone.tokenize([prompt_text], offsets=True)
        context, offsets = encoded["input_ids"][0], encoded["offset_mapping"][0]
        cut, seen = [], len(prompt_text)
        if len(context) > room:
            cut.append(
                f"the context has {len(context):,} tokens, only its first {room:,} fit the model"
            )
            seen = offsets[room - 1][1] if room else 0
        ids_1P = torch.tensor([[start, *context[:room], *prompt]], device=backbone.device)
        cache = GrowingCache()
        states_1PD = run_embeddings(backbone, [backbone.embed(ids_1P[0])], cache)
        filled = prefill_result(backbone, states_1PD[:, -1], cache, [ids_1P.shape[1]])
        (transcript,) = generate_timed(
            backbone, filled.logits, filled.advance, self.decoding, clock
        )
        assert transcript.finish_reason is not None
        citations = cite(documents, seen, scores)
        return Answer(
            text=transcript.text,
            citations=citations,
            k=len(citations),
            blocks=len(documents),
            timings=dict(clock.timings),
            finish_reason=transcript.finish_reason,
            model=self.name,
            cut=(*cut, *transcript.cut()),
            conditioning=ids_1P.shape[1],
            stored_bytes=text_bytes(documents),
            context_tokens=len(context),
        )

    def _tokens(self, documents: Sequence[Document]) -> int:
        return len(self.backbone.token_ids(context_prompt([d.text for d in documents])))


def text_bytes(documents: Sequence[Document]) -> int:
    """Size of the documents' texts in UTF-8."""
    return sum(len(document.text.encode()) for document in documents)


def generate_timed(
    backbone: Backbone, logits: torch.Tensor, advance: Step, decoding: Decoding, clock: Clock
) -> list[Transcript]:
    """Generate the answers of a batch from the logits of their first tokens `[B, V]`.

    The clock, which was started when the question arrived, marks `ttft_ms` and `total_ms`.
    """
    ends, choose = end_ids(backbone), decoding.chooser(logits.device)
    rows = [Transcript(backbone.tokenizer, ends, decoding) for _ in range(len(logits))]
    while True:
        ids_B = choose(logits)
        for row, token in zip(rows, ids_B.tolist(), strict=True):
            if row.finish_reason is None:
                row.add(token)
        if "ttft_ms" not in clock.timings:
            clock.mark("ttft_ms")
        if all(row.finish_reason is not None for row in rows):
            clock.mark("total_ms")
            return rows
        logits = advance(ids_B)


def free_positions(backbone: Backbone, prompt: int, limit: int) -> int:
    """Positions that prompt and answer leave free for a context.

    Args:
        prompt: number of tokens of start token, prompt and question.

    Raises:
        DataError: prompt and answer alone exceed the backbone's positions.
    """
    room = backbone.max_positions - prompt - limit
    if room < 0:
        raise DataError(
            f"the question's {prompt - 1:,} tokens and an answer of up to {limit} exceed the "
            f"{backbone.max_positions:,} positions of '{backbone.name}'; ask something shorter"
        )
    return room


def cite(
    documents: Sequence[Document], seen: int, scores: Sequence[float] | None = None
) -> tuple[Citation, ...]:
    """Cite the documents, or the parts of them, that the backbone read; the best score first.

    Args:
        seen: how many leading characters of the context fit the backbone.
        scores: score of each document; None keeps the reading order and cites without scores.
    """
    texts = [document.text for document in documents]
    read: list[tuple[Document, int, float | None]] = []
    known = [None] * len(documents) if scores is None else scores
    for i, (document, score) in enumerate(zip(documents, known, strict=True)):
        left_out = max(0, len(context_prompt(texts[: i + 1])) - seen)
        if left_out < len(document.text.strip()):
            end = len(document.text.rstrip()) - left_out if left_out else len(document.text)
            read.append((document, end, score))
    read.sort(key=lambda entry: -(entry[2] or 0.0))
    return tuple(
        Citation(rank, document.name, 0, end, score, document.text[:end])
        for rank, (document, end, score) in enumerate(read, start=1)
    )
