"""Full context: the backbone reads every document for every question ("Backbone" of the paper).

Raw text enters at the first layer; keys and values are cached for decoding. A context longer than
the backbone's positions is truncated at its end, and the answer says so. The memory is the text
itself, so `stored_bytes` counts the documents in UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from sedem.answering.decoding import (
    Decoding,
    Transcript,
    context_prompt,
    end_ids,
    generate,
    question_ids,
)
from sedem.backbone.decoder import Backbone
from sedem.baselines.memory import text_bytes
from sedem.engine.device import Clock
from sedem.engine.interface import Step
from sedem.errors import DataError
from sedem.method.injection import prefill, step
from sedem.types import Answer, Citation, Document, check_documents, check_tokens


class FullContext:
    """The frozen backbone reads every document: the paper's "Backbone (Frozen)".

    Args:
        name: name of the method in its answers.
    """

    def __init__(self, backbone: Backbone, decoding: Decoding, name: str = "full-context") -> None:
        self.backbone = backbone
        self.decoding = decoding
        self.name = name

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
        return self.answer_from(memory, range(len(memory)), None, question, clock)

    @torch.no_grad()
    def answer_from(
        self,
        documents: Sequence[Document],
        used: Sequence[int],
        scores: Sequence[float] | None,
        question: str,
        clock: Clock,
    ) -> Answer:
        """Answer from some of the documents.

        Args:
            used: indices of the documents to read, in reading order.
            scores: score of each document in `used`; None if nothing was selected.
            clock: a clock that was started when the question arrived.
        """
        backbone = self.backbone
        clock.lap("select_ms")
        start, *prompt = question_ids(backbone, question)
        room = free_positions(backbone, 1 + len(prompt), self.decoding.max_new_tokens)
        prompt_text = context_prompt([documents[index].text for index in used])
        encoded = backbone.tokenize([prompt_text], offsets=True)
        context, offsets = encoded["input_ids"][0], encoded["offset_mapping"][0]
        cut, seen = [], len(prompt_text)
        if len(context) > room:
            cut.append(
                f"the context has {len(context):,} tokens, only its first {room:,} fit the model"
            )
            seen = offsets[room - 1][1] if room else 0
        ids_1P = torch.tensor([[start, *context[:room], *prompt]], device=backbone.device)
        transcript = self._generate(ids_1P, clock)
        assert transcript.finish_reason is not None
        citations = cite([documents[index] for index in used], seen, scores)
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
            context_tokens=self._tokens(documents),
        )

    def _tokens(self, documents: Sequence[Document]) -> int:
        return len(self.backbone.token_ids(context_prompt([d.text for d in documents])))

    def _generate(self, ids_1P: torch.Tensor, clock: Clock) -> Transcript:
        backbone = self.backbone
        no_memory_1UD = torch.zeros(1, 0, backbone.width, device=backbone.device)
        valid_1P = torch.ones_like(ids_1P, dtype=torch.bool)
        # Two-depth decoding without memory is plain decoding.
        filled = prefill(
            backbone, 0, ids_1P, valid_1P, no_memory_1UD, valid_1P[:, :0], cache=DynamicCache()
        )
        stream = filled.stream
        assert stream is not None

        def advance(ids_B: torch.Tensor) -> torch.Tensor:
            return backbone.logits(step(backbone, 0, ids_B, stream))

        (transcript,) = generate_timed(
            backbone, backbone.logits(filled.prefix[:, -1]), advance, self.decoding, clock
        )
        return transcript


def generate_timed(
    backbone: Backbone, logits: torch.Tensor, advance: Step, decoding: Decoding, clock: Clock
) -> list[Transcript]:
    """Generate the answers of a batch; the clock marks `ttft_ms` and `total_ms`.

    Args:
        backbone: gives the tokenizer and the end token.
        logits: logits of the first answer token `[B, V]`.
        advance: runs one more token of every row.
        clock: a clock that was started when the question arrived.
    """
    transcripts: list[Transcript] = []
    for rows in generate(logits, advance, backbone.tokenizer, end_ids(backbone), decoding):
        transcripts = rows
        if "ttft_ms" not in clock.timings:
            clock.mark("ttft_ms")
    clock.mark("total_ms")
    return transcripts


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
