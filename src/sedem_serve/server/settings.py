"""Settings of the server: what it serves, where it listens and its limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator

from sedem import config
from sedem.config import DEFAULT_MODEL, Flag, NumberFrom0, WholeAbove0, WholeFrom0
from sedem_serve.tools import USUAL

BANK_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""A valid bank name; it is also part of the name of its file."""


class ServerSettings(config.Settings):
    """What a server serves and its limits. The flags of `sedem serve` have the descriptions.

    Attributes:
        banks: places of further banks by name; clients may only query them.
        key_file: JSON file of API keys; None means one key, from SEDEM_API_KEY or generated.
        device: cpu, cuda or cuda:N; None means a GPU if there is one.
        rows: maximum concurrent answers; None means as many as suit the engine.
        waiting: maximum questions waiting for a row; further ones get 429.
        reader: address of a model that writes the answers; None means this server's model.
        reader_model: its name there; None takes the only one.
        max_body_bytes: largest body of a request that is not an upload.
        max_documents: maximum documents of a bank or of a request.
        max_online_characters: longest text that comes with a question.
        online_banks: temporary banks that are kept for texts that come with a question.
        drain_seconds: when the process ends after the first signal, whatever is running.
    """

    model: str = Field(DEFAULT_MODEL, description="Folder or hub id.")
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. 0.0.0.0 is every address of this machine; put a proxy "
        "with TLS in front.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    folder: Path = Field(description="Folder of uploads and of the banks built from them.")
    banks: Mapping[str, Path | str] = {}
    key_file: Path | None = None
    engine: str = "auto"
    device: str | None = None
    rows: WholeAbove0 | None = None
    waiting: WholeAbove0 = 64
    memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory of the process, such as 4GB or 512MB: the model, caches of answers, "
        "kept states and requests. [default: half of the machine's]",
    )
    cors: tuple[str, ...] = Field(
        (),
        description="Origin whose pages may call the API, such as https://app.example; "
        "repeatable. [default: none]",
    )
    log_text: Flag = Field(False, description="Log questions, answers and messages of errors too.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of the log on stderr: text or json."
    )
    reader: str | None = None
    reader_model: str | None = None
    telemetry: Flag = Field(
        False,
        description="Send OpenTelemetry spans where the variables OTEL_* say; needs the extra "
        "telemetry.",
    )
    max_body_bytes: WholeAbove0 = 8 * 2**20
    max_file_bytes: WholeAbove0 = 64 * 2**20
    max_documents: WholeAbove0 = 1000
    max_question_characters: WholeAbove0 = USUAL.question
    max_k: WholeAbove0 = USUAL.k
    max_tokens: WholeAbove0 = USUAL.tokens
    max_online_characters: WholeAbove0 = 2_000_000
    online_banks: WholeFrom0 = 64
    drain_seconds: NumberFrom0 = 30.0

    @field_validator("banks")
    @classmethod
    def _names(cls, banks: Mapping[str, Path | str]) -> Mapping[str, Path | str]:
        for name in banks:
            if not is_bank_name(name):
                raise ValueError(f"'{name}' cannot name a bank; {BANK_NAME_RULE}")
        return banks

    @field_validator("cors")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not re.fullmatch(r"https?://[^/\s*]+", origin):
                raise ValueError(
                    f"'{origin}' is not an origin; give one such as https://app.example"
                )
        return origins


_FIELDS = [*ServerSettings.model_fields]
LIMITS = ("rows", "waiting", *_FIELDS[_FIELDS.index("max_body_bytes") :])
"""Settings that --limit may change."""

BANK_NAME_RULE = (
    "it must be 1 to 64 lower-case letters, digits, '-' or '_', and begin with a letter or digit"
)


def is_bank_name(name: str) -> bool:
    """Return whether a name is valid for a bank."""
    return BANK_NAME.fullmatch(name) is not None
