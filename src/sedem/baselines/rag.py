"""Raw-text RAG with matched supervision: SeDeM's selector picks paragraphs, a tuned reader reads.

The paper's control (appendix Controlled Comparisons): the same late interaction between question
and candidate, trained with the same losses on the same evidence labels, but the candidates are
paragraphs of raw text, and what is picked is read from the first layer on. Keys are projected from
the frozen state of every token at the extraction layer, for there are no slots to pool them into.
The reader has the adapters of SeDeM's decoder.

What the paper leaves open: docs/deviations.md.

Letters: B questions, N paragraphs, J tokens of a paragraph, Q question tokens, R heads, H width of
a head, E width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.baselines.full_context_tuned import FullContextTuned, FullContextTunedConfig
from sedem.baselines.memory import ContextMemory, Remembered
from sedem.baselines.paragraphs import Paragraph, cut_notes, split
from sedem.baselines.trained import GREEDY
from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.inference.generation import Decoding
from sedem.inference.prompts import SEPARATOR, question_ids
from sedem.method.encoder import encode
from sedem.method.selector import Budget, Selector, block_scores, resolve_budget, select
from sedem.types import Answer, Document

ENCODED_TOGETHER = 16
"""Paragraphs."""


@dataclass(frozen=True)
class RAGConfig(FullContextTunedConfig):
    """Settings; the defaults are those of SeDeM on Llama-3.2-1B.

    Attributes:
        extract_layer: layers of the frozen backbone below the selector.
        heads: R.
        k: paragraphs that are read.
        paragraph: tokens of a paragraph; longer ones are cut.
    """

    extract_layer: int = 11
    heads: int = 4
    k: Budget = 2
    paragraph: int = 512

    least: ClassVar[dict[str, int]] = {"extract_layer": 1, "heads": 1, "paragraph": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_budget(self.k, 1)

    @property
    def blocks(self) -> SedemConfig:
        """Paragraphs as blocks of one slot a token, for what SeDeM's selector is trained with."""
        return SedemConfig(
            encoder=self.backbone,
            extract_layers=(self.extract_layer,),
            inject_layer=0,
            segment_length=self.paragraph,
            segmentation="paragraph",
            compression=1,
            selector_heads=self.heads,
        )


@dataclass(frozen=True)
class Index(ContextMemory):
    """Documents that were read, with the keys of their paragraphs.

    Attributes:
        paragraphs: in their order.
        keys: of each `[J, R, H]`, in bfloat16.
    """

    paragraphs: list[Paragraph]
    keys: list[Tensor]


class RAG(FullContextTuned):
    """A trained selector over raw paragraphs, and a trained reader of what it picks."""

    name = "rag"
    picks = True
    Config = RAGConfig

    def __init__(self, config: RAGConfig, backbone: Backbone) -> None:
        if config.extract_layer > backbone.depth:
            raise ConfigError(
                f"extract_layer is {config.extract_layer}, '{backbone.name}' has "
                f"{backbone.depth} layers; give one of them"
            )
        super().__init__(config, backbone)

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """The selector, with SeDeM's start values."""
        width = shape.hidden_size
        return nn.ModuleDict(
            {"selector": Selector(width, width, config.heads, width // config.heads)}
        )

    @property
    def selector(self) -> Selector:
        """R_phi."""
        selector = self.parts()["selector"]
        assert isinstance(selector, Selector)
        return selector

    # Reading

    @torch.no_grad()
    def read(self, documents: Sequence[Document]) -> Index:
        """Read documents once: paragraphs and their keys; no question is needed.

        What is kept counts as the text in UTF-8 and the keys, without which every question would
        have to encode all of it.
        """
        read = super().read(documents)
        paragraphs = split(documents, self.backbone, self.config.paragraph)
        keys = self._keys(paragraphs)
        notes = cut_notes(documents, paragraphs, self.config.paragraph, len(read.ends), self.name)
        stored = read.stored_bytes + sum(2 * key.numel() for key in keys)
        return Index(
            read.documents,
            read.ends,
            Remembered(read.remembered.content, stored, notes),
            paragraphs,
            keys,
        )

    def _keys(self, paragraphs: Sequence[Paragraph]) -> list[Tensor]:
        found: list[Tensor] = []
        for at in range(0, len(paragraphs), ENCODED_TOGETHER):
            rows = [paragraph.ids for paragraph in paragraphs[at : at + ENCODED_TOGETHER]]
            states_NJE = self._states(rows)
            keys_NJRH = self.selector.keys(states_NJE).bfloat16()
            found += [keys[: len(ids)] for keys, ids in zip(keys_NJRH, rows, strict=True)]
        return found

    def _states(self, rows: Sequence[Tensor]) -> Tensor:
        ids_NJ = pad_sequence(list(rows), batch_first=True).to(self.backbone.device)
        return encode(self.backbone, ids_NJ, (self.config.extract_layer,))[0].float()

    # Selecting

    @torch.no_grad()
    def scores(self, memory: Index, question: str) -> Tensor:
        """Score of every paragraph `[N]`."""
        ids_Q = torch.tensor(self.backbone.token_ids(question.strip()))
        queries_BQRH = self.selector.queries(self._states([ids_Q]))
        mask_BQ = torch.ones(queries_BQRH.shape[:2], dtype=torch.bool, device=queries_BQRH.device)
        keys_BNJRH = pad_sequence(memory.keys, batch_first=True)[None]
        lengths_N1 = torch.tensor([[len(key)] for key in memory.keys], device=mask_BQ.device)
        real_BNJ = (torch.arange(keys_BNJRH.shape[2], device=mask_BQ.device) < lengths_N1)[None]
        return block_scores(queries_BQRH, mask_BQ, keys_BNJRH, real_BNJ)[0]

    def together(self, rows: Sequence[Tensor]) -> Tensor:
        """Tokens of some paragraphs as one text, a separator between every two."""
        between = torch.tensor(self.backbone.token_ids(SEPARATOR), device=rows[0].device)
        joined = [part for row in rows for part in (between, row)]
        return torch.cat(joined[1:])

    def picked(self, memory: Index, chosen: Sequence[int]) -> ContextMemory:
        """Some paragraphs as a context of their own; a document is named by its index."""
        paragraphs = [memory.paragraphs[index] for index in chosen]
        ends: list[int] = []
        at = 0
        for paragraph in paragraphs:
            if ends:
                at += len(SEPARATOR)
                ends += [at] * len(self.backbone.token_ids(SEPARATOR))
            ends += (paragraph.ends + at).tolist()
            at += len(paragraph.text)
        return ContextMemory(
            [Document(str(i), p.text) for i, p in zip(chosen, paragraphs, strict=True)],
            ends,
            Remembered(self.together([p.ids for p in paragraphs]).to(self.backbone.device)),
        )

    # Answering

    def answer_all(
        self,
        memories: Sequence[ContextMemory],
        questions: Sequence[str],
        decoding: Decoding = GREEDY,
    ) -> list[Answer]:
        """Answer a question about each memory from its k best paragraphs, in their order."""
        began = time.perf_counter()
        for question in questions:
            self.room(len(question_ids(self.backbone, question)), decoding.max_new_tokens)
        indices = [memory for memory in memories if isinstance(memory, Index)]
        scores = [self.scores(m, q).cpu() for m, q in zip(indices, questions, strict=True)]
        ranked = [select(own, len(own)).tolist() for own in scores]
        best = [sorted(own[: resolve_budget(self.config.k, len(own))]) for own in ranked]
        contexts = [self.picked(m, chosen) for m, chosen in zip(indices, best, strict=True)]
        selecting = (time.perf_counter() - began) * 1e3
        answers = super().answer_all(contexts, questions, decoding)
        return [
            self._located(*parts, selecting)
            for parts in zip(answers, indices, ranked, scores, strict=True)
        ]

    def _located(
        self, answer: Answer, memory: Index, ranked: list[int], scores: Tensor, selecting: float
    ) -> Answer:
        """The answer with its sources where they stand in the documents, and all that it cost."""
        read = {int(citation.document): citation for citation in answer.citations}
        cited = [
            memory.paragraphs[index].cited(rank, float(scores[index]), read[index].end)
            for rank, index in enumerate((i for i in ranked if i in read), start=1)
        ]
        late = {"select_ms", "ttft_ms", "total_ms"}
        return replace(
            answer,
            citations=tuple(cited),
            blocks=len(memory.paragraphs),
            timings={n: ms + selecting * (n in late) for n, ms in answer.timings.items()},
            cut=(*memory.remembered.notes, *answer.cut),
            stored_bytes=memory.stored_bytes,
            context_tokens=len(memory.ends),
            ranking=tuple(memory.paragraphs[index].span for index in ranked),
        )
