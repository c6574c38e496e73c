"""Full context: the backbone reads every document for every question ("Backbone" of the paper).

Raw text goes in at the first layer, keys and values are cached for decoding. What does not fit the
backbone's positions is left out at the end of the context, and the answer says so. Its memory is
the text itself: what an answer says was stored are the bytes of the documents in UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from sedem.backbone.decoder import Backbone
from sedem.engine.device import Clock
from sedem.errors import DataError
from sedem.inference.generation import Decoding, Transcript, generate
from sedem.inference.prompts import context_prompt, question_ids
from sedem.method.injection import prefill, step
from sedem.types import Answer, Citation, Document, check_documents, check_tokens


class FullContext:
    """The frozen backbone reads every document: the paper's "Backbone (Frozen)".

    Args:
        backbone: the decoder.
        decoding: how answers are generated.
        name: what answers are signed with.
    """

    def __init__(self, backbone: Backbone, decoding: Decoding, name: str = "full-context") -> None:
        self.backbone = backbone
        self.decoding = decoding
        self.name = name

    def read(self, documents: Sequence[Document]) -> list[Document]:
        """The documents themselves: raw text has no memory that could be built ahead.

        Raises:
            DataError: there are none, two have one name, or they have no tokens.
        """
        check_documents(documents)
        check_tokens(any(self.backbone.token_ids(document.text) for document in documents))
        return list(documents)

    def answer(self, memory: Sequence[Document], question: str) -> Answer:
        """Answer from all documents, in their order.

        Raises:
            DataError: the question is empty or alone exceeds the backbone's positions.
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
            documents: all of them.
            used: which of them are read, in reading order.
            scores: why each of these; None if they are all there is.
            question: what is asked.
            clock: started when the question came.
        """
        backbone = self.backbone
        clock.lap("select_ms")
        start, *prompt = question_ids(backbone, question)
        room = context_room(backbone, 1 + len(prompt), self.decoding.max_new_tokens)
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
            stored_bytes=sum(len(document.text.encode()) for document in documents),
            context_tokens=self._tokens(documents),
        )

    def _tokens(self, documents: Sequence[Document]) -> int:
        return len(self.backbone.token_ids(context_prompt([d.text for d in documents])))

    def _generate(self, ids_1P: torch.Tensor, clock: Clock) -> Transcript:
        backbone = self.backbone
        nothing_1UD = torch.zeros(1, 0, backbone.width, device=backbone.device)
        valid_1P = torch.ones_like(ids_1P, dtype=torch.bool)
        # Two-depth decoding without memory is plain decoding.
        filled = prefill(
            backbone, 0, ids_1P, valid_1P, nothing_1UD, valid_1P[:, :0], cache=DynamicCache()
        )
        stream = filled.stream
        assert stream is not None

        def advance(ids_B: torch.Tensor, live: Sequence[int]) -> torch.Tensor:
            return backbone.logits(step(backbone, 0, ids_B, stream))

        transcript: Transcript | None = None
        for rows in generate(
            backbone.logits(filled.prefix[:, -1]),
            advance,
            backbone.tokenizer,
            backbone.eos_token_id,
            self.decoding,
        ):
            transcript = rows[0]
            if "ttft_ms" not in clock.timings:
                clock.mark("ttft_ms")
        clock.mark("total_ms")
        assert transcript is not None
        return transcript


def context_room(backbone: Backbone, prompt: int, limit: int) -> int:
    """Positions left for a context.

    Args:
        backbone: reads it.
        prompt: tokens of start, prompt and question.
        limit: of answer tokens.

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
    """The documents that were read, as far as they were, best first.

    Args:
        documents: in reading order.
        seen: characters of the context that fitted the backbone.
        scores: why each of these; None leaves them in order, without scores.
    """
    texts = [document.text for document in documents]
    read: list[tuple[Document, int, float | None]] = []
    given = [None] * len(documents) if scores is None else scores
    for i, (document, score) in enumerate(zip(documents, given, strict=True)):
        left_out = max(0, len(context_prompt(texts[: i + 1])) - seen)
        if left_out < len(document.text.strip()):
            end = len(document.text.rstrip()) - left_out if left_out else len(document.text)
            read.append((document, end, score))
    read.sort(key=lambda entry: -(entry[2] or 0.0))
    return tuple(
        Citation(rank, document.name, 0, end, score, document.text[:end])
        for rank, (document, end, score) in enumerate(read, start=1)
    )
