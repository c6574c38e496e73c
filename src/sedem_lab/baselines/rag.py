"""Raw-text RAG with matched supervision: SeDeM's selector over paragraphs, and a trained reader.

This is the paper's control (appendix Controlled Comparisons). Question and candidates interact late
as in SeDeM, and the selector is trained with the same losses on the same evidence labels. However,
the candidates are paragraphs of raw text, and the reader reads the selected ones from the first
layer on. There are no slots to pool, so keys are projected from the frozen state of every token at
the extraction layer. The reader has the adapters of SeDeM's decoder.

Its paragraphs can also be independent of each other, as in Block-Attention (2409.15355) and
TurboRAG (2410.07590): keys and values of a paragraph then depend on nothing else and can be kept.

Choices that the paper leaves open: docs/deviations.md.

Letters: B questions, N paragraphs, J tokens of a paragraph, U tokens of the selected paragraphs,
Q question tokens, P prompt and answer tokens, A answer tokens, R heads, H width of a head, E width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import SEPARATOR, question_ids
from sedem.config import SedemConfig, WholeAbove0, WidthAbove0
from sedem.errors import ConfigError
from sedem.method.compressor import encode
from sedem.method.selector import Selector, block_scores, resolve_budget, top_k
from sedem.types import Answer, Document
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.full_context_tuned import FullContextTuned, FullContextTunedConfig
from sedem_lab.baselines.paragraphs import Paragraph, split, split_notes
from sedem_lab.baselines.settings import SelectionBudget
from sedem_lab.baselines.soft_prompt import PrefillResult, prefill_soft_prompts, run_soft_prompts
from sedem_lab.baselines.trained import CompressedContext, ContextMemory

ENCODED_TOGETHER = 16
"""Paragraphs in one batch of the encoder."""


class RAGConfig(FullContextTunedConfig):
    """Settings; the defaults are those of SeDeM on Llama-3.2-1B.

    Attributes:
        extract_layer: number of frozen layers below the selector.
        heads: R.
        k: number of paragraphs to read, or "all".
        paragraph: longest paragraph in tokens; longer ones are cut.
        block_context: what a paragraph sees. "joint": all paragraphs before it. "independent": the
            start token and itself, and each has the positions from 1 on.
    """

    extract_layer: WholeAbove0 = 14
    heads: WidthAbove0 = 4
    k: SelectionBudget = 2
    paragraph: WholeAbove0 = 512
    block_context: Literal["joint", "independent"] = "joint"

    @property
    def blocks(self) -> SedemConfig:
        """A SeDeM configuration for training: paragraphs as blocks, with one slot per token."""
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
class RAGMemory(ContextMemory):
    """Documents with the keys of their paragraphs.

    Attributes:
        keys: keys of each paragraph `[J, R, H]`, in bfloat16.
    """

    paragraphs: list[Paragraph]
    keys: list[Tensor]


class RAG(FullContextTuned):
    """A trained selector over raw paragraphs, and a trained reader of the selected ones."""

    name = "rag"
    has_selection_budget = True
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
        """The selector, initialized as SeDeM's."""
        width = shape.hidden_size
        return nn.ModuleDict(
            {"selector": Selector(width, width, config.heads, width // config.heads)}
        )

    @property
    def selector(self) -> Selector:
        """The trained selector, R_phi."""
        selector = self.parts()["selector"]
        assert isinstance(selector, Selector)
        return selector

    # Reading

    @torch.no_grad()
    def read(self, documents: Sequence[Document]) -> RAGMemory:
        """Split documents into paragraphs and compute their keys; this needs no question.

        `stored_bytes` counts the text in UTF-8 and the keys; without the keys, every question would
        encode all paragraphs.
        """
        read = super().read(documents)
        paragraphs = split(documents, self.backbone, self.config.paragraph)
        keys: list[Tensor] = []
        for at in range(0, len(paragraphs), ENCODED_TOGETHER):
            rows = [paragraph.ids for paragraph in paragraphs[at : at + ENCODED_TOGETHER]]
            keys_NJRH = self.selector.keys(self._states(rows)).bfloat16()
            keys += [own[: len(ids)] for own, ids in zip(keys_NJRH, rows, strict=True)]
        notes = split_notes(
            documents, paragraphs, self.config.paragraph, len(read.token_ends), self.name
        )
        stored = read.stored_bytes + sum(2 * key.numel() for key in keys)
        return RAGMemory(
            read.documents,
            read.token_ends,
            CompressedContext(read.compressed.content, stored, notes),
            paragraphs,
            keys,
        )

    def _states(self, rows: Sequence[Tensor]) -> Tensor:
        ids_NJ = pad_sequence(list(rows), batch_first=True).to(self.backbone.device)
        return encode(self.backbone, ids_NJ, (self.config.extract_layer,))[0].float()

    # Selecting

    @torch.no_grad()
    def scores(self, memory: RAGMemory, question: str) -> Tensor:
        """Late-interaction score of every paragraph `[N]`."""
        ids_Q = torch.tensor(self.backbone.token_ids(question.strip()))
        queries_BQRH = self.selector.queries(self._states([ids_Q]))
        mask_BQ = torch.ones(queries_BQRH.shape[:2], dtype=torch.bool, device=queries_BQRH.device)
        keys_BNJRH = pad_sequence(memory.keys, batch_first=True)[None]
        lengths_N1 = torch.tensor([[len(key)] for key in memory.keys], device=mask_BQ.device)
        real_BNJ = (torch.arange(keys_BNJRH.shape[2], device=mask_BQ.device) < lengths_N1)[None]
        return block_scores(queries_BQRH, mask_BQ, keys_BNJRH, real_BNJ)[0]

    @property
    def separator(self) -> list[int]:
        """Tokens between two selected paragraphs; there are none between independent ones."""
        joint = self.config.block_context == "joint"
        return self.backbone.token_ids(SEPARATOR) if joint else []

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Join paragraphs `[J]` into a context `[U, 2]`: each token and its paragraph's number.

        A separator belongs to the paragraph before it.
        """
        between = rows[0].new_tensor(self.separator)
        parts = [torch.cat([row, between]) for row in rows[:-1]] + [rows[-1]]
        return torch.cat([_numbered(part, number) for number, part in enumerate(parts)])

    def selected(self, memory: RAGMemory, chosen: Sequence[int]) -> ContextMemory:
        """A context of the chosen paragraphs; each is a document named by its index."""
        paragraphs = [memory.paragraphs[index] for index in chosen]
        ends: list[int] = []
        at = 0
        for paragraph in paragraphs:
            if ends:
                at += len(SEPARATOR)
                ends += [at] * len(self.separator)
            ends += (paragraph.ends + at).tolist()
            at += len(paragraph.text)
        return ContextMemory(
            [Document(str(i), p.text) for i, p in zip(chosen, paragraphs, strict=True)],
            ends,
            CompressedContext(self.join([p.ids for p in paragraphs]).to(self.backbone.device)),
        )

    # Answering

    def prefill(
        self, contents: Sequence[Tensor], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill start token, selected paragraphs and prompt."""
        read = [context[:count] for context, count in zip(contents, used, strict=True)]
        return prefill_soft_prompts(self.backbone, self._embedded(read), prompts, self._apart(read))

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer; `contexts` come from `join`, or are a paragraph's tokens."""
        filled = run_soft_prompts(
            self.backbone, self._embedded(contexts), ids, valid, apart=self._apart(contexts)
        )
        return self.answer_loss(filled.prefix, labels)

    def _embedded(self, contexts: Sequence[Tensor]) -> list[Tensor]:
        return [self.backbone.embed(_numbered(context)[:, 0]) for context in contexts]

    def _apart(self, contexts: Sequence[Tensor]) -> list[Tensor] | None:
        """The paragraph of each token, if paragraphs are independent."""
        joint = self.config.block_context == "joint"
        return None if joint else [_numbered(context)[:, 1] for context in contexts]

    def answer_all(
        self, memories: Sequence[ContextMemory], questions: Sequence[str]
    ) -> list[Answer]:
        """Answer a question about each memory from its k best paragraphs, in order."""
        start = time.perf_counter()
        for question in questions:
            free_positions(
                self.backbone,
                len(question_ids(self.backbone, question)),
                self.decoding.max_new_tokens,
            )
        indexed = [memory for memory in memories if isinstance(memory, RAGMemory)]
        scores = [self.scores(m, q).cpu() for m, q in zip(indexed, questions, strict=True)]
        ranked = [top_k(own, len(own)).tolist() for own in scores]
        best = [sorted(own[: resolve_budget(self.config.k, len(own))]) for own in ranked]
        contexts = [self.selected(m, chosen) for m, chosen in zip(indexed, best, strict=True)]
        select_ms = (time.perf_counter() - start) * 1e3
        read = super().answer_all(contexts, questions)
        # Citations are of the original documents, and times and sizes include selecting.
        answers, late = [], {"select_ms", "ttft_ms", "total_ms"}
        for answer, memory, order, own in zip(read, indexed, ranked, scores, strict=True):
            paragraphs = memory.paragraphs
            ends = {int(citation.document): citation.end for citation in answer.citations}
            cited = [
                paragraphs[index].cited(rank, float(own[index]), ends[index])
                for rank, index in enumerate((i for i in order if i in ends), start=1)
            ]
            located = replace(
                answer,
                citations=tuple(cited),
                blocks=len(paragraphs),
                timings={n: ms + select_ms * (n in late) for n, ms in answer.timings.items()},
                cut=(*memory.compressed.notes, *answer.cut),
                stored_bytes=memory.stored_bytes,
                context_tokens=len(memory.token_ends),
                ranking=tuple(paragraphs[index].span for index in order),
            )
            answers.append(located)
        return answers


def _numbered(ids: Tensor, number: int = 0) -> Tensor:
    """Tokens `[U]` with their paragraph's number `[U, 2]`; unchanged if they already have it."""
    return ids if ids.dim() == 2 else F.pad(ids[:, None], (0, 1), value=number)
