"""SeDeM: long-context question answering over hidden-state memories.

A frozen language model reads documents once into compact memory blocks. A question selects K of
them. Only those are decompressed into hidden states and injected at a middle layer of the decoder,
which answers.

The dimension key, used in docstrings and as suffixes of tensors:

    B batch                         N memory blocks
    S segments                      J slots per block (N_B)
    T tokens per segment            K selected blocks
    C tokens per slot               U restored states of one question
    M slots per segment (N_M)       Q question tokens
    E encoder width                 P positions of one call
    D decoder width                 R selector heads, H head width
    X extraction layers             V vocabulary
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sedem.answering.decoding import Decoding as Decoding
    from sedem.bank.memory_bank import MemoryBank as MemoryBank
    from sedem.config import SedemConfig as SedemConfig
    from sedem.endpoint import Reader as Reader
    from sedem.errors import SedemError as SedemError
    from sedem.guidance import Auto as Auto
    from sedem.model import SeDeM as SeDeM
    from sedem.selecting.plan import Request as Request
    from sedem.types import Answer as Answer
    from sedem.types import Citation as Citation
    from sedem.types import Document as Document
    from sedem.types import DocumentReader as DocumentReader

_HOMES = {
    "Answer": "types",
    "Auto": "guidance",
    "Citation": "types",
    "Decoding": "answering.decoding",
    "Document": "types",
    "MemoryBank": "bank.memory_bank",
    "DocumentReader": "types",
    "Reader": "endpoint",
    "Request": "selecting.plan",
    "SeDeM": "model",
    "SedemConfig": "config",
    "SedemError": "errors",
}

__all__ = [
    "Answer",
    "Auto",
    "Citation",
    "Decoding",
    "Document",
    "DocumentReader",
    "MemoryBank",
    "Reader",
    "Request",
    "SeDeM",
    "SedemConfig",
    "SedemError",
]


def __getattr__(name: str) -> Any:
    # Imported when used: torch takes seconds, and `import sedem` and `sedem --help` must not.
    if name in _HOMES:
        return getattr(importlib.import_module(f"sedem.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sedem' has no attribute '{name}'")
