"""The settings of an evaluation: which questions are asked, and how a method answers them.

A docstring below a field is also the help text of its flag in `sedem eval`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from sedem.config import (
    AnswerBy,
    Condition,
    Hops,
    SelectBy,
    Settings,
    Whole,
    WholeAbove0,
    WholeFrom0,
)
from sedem.errors import ConfigError

Control = Literal["selected", "gold", "gold-documents", "wrong", "none"]
"""Which blocks SeDeM answers from.

- selected: those that the selector chooses.
- gold: those with evidence first.
- gold-documents: those that the selector chooses, but from documents with evidence only.
- wrong: those without evidence first.
- none: no block at all.

Trained baselines read every document (selected) or only those with evidence (gold). The latter is
the same input as SeDeM's "gold-documents" with every block.
"""

Dtype = Literal["float32", "bfloat16"]
"""Data types of a backbone."""


class MethodSettings(Settings):
    """How a method is opened and how it answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    checkpoint: str
    """Checkpoint: a folder or a hub id. Untrained methods read with its frozen backbone."""

    k: WholeAbove0 | Literal["all", "auto"] | None = None
    """Blocks to use, "all", or "auto" for SeDeM. None means the model's own number, and 2
    paragraphs for BM25."""

    control: Control = "selected"
    """Blocks to use: selected, gold, gold-documents, wrong or none."""

    condition: Condition | None = None
    """Form in which SeDeM's decoder reads the blocks: memory, text or both. None means its own."""

    selection: SelectBy | None = None
    """What SeDeM's blocks are selected by: states, words or both. None means its own."""

    hops: Hops | None = None
    """How often SeDeM selects: 1, 2 (again, by what the best block says) or auto. None means its
    own."""

    answer: AnswerBy | None = None
    """How SeDeM answers: free, span (quotes its blocks) or auto. None means its own."""

    max_new_tokens: WholeAbove0 | None = None
    """Limit of an answer in tokens. [default: the set's own]"""

    dtype: Dtype = "float32"
    """Data type of the backbone: float32 or bfloat16."""

    batch: WholeAbove0 = 32
    """Questions that SeDeM answers together; 1 to measure times."""

    shift: WholeFrom0 = 0
    """Tokens by which SeDeM moves the boundaries between segments towards the start of a document;
    fewer if its last segment has less room, so the number of segments stays the same."""

    device: str | None = None
    """Device of the backbones. None means a GPU if there is one."""

    engine: str = "auto"
    """What runs SeDeM. Other methods have one engine only."""

    memory: str = "bfloat16"
    """What SeDeM stores slots as: bfloat16, int8 or fp8."""

    def refuse(self, method: str, *names: str) -> None:
        """Refuse settings that a method ignores; a result would record that they had an effect.

        Raises:
            ConfigError: one of these settings does not have its default.
        """
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ConfigError(f"{name} is {value!r}, but {method} has no {name}; leave it out")


class QuestionSettings(Settings):
    """Which questions are asked."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    data: str | Path
    """File of questions, or name of a public set."""

    schema_name: str | None = Field(None, serialization_alias="schema")
    """Schema of the data. [default: detected]"""

    records: str | None = None
    """Records of the set, as start:stop."""

    split: str | None = None
    """Split of a set that has several."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the set's reader."""

    limit: WholeAbove0 | None = None
    """Number of questions in a seeded sample. [default: all]"""

    seed: Whole = 0
    """Seed of the sample and of distractors."""


class EvaluationConfig(QuestionSettings, MethodSettings):
    """One evaluation: a method, the questions, and how the method answers them."""

    method: str
    """Name of the method, one of `sedem eval --list`."""
