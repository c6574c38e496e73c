"""The server's log on stderr: one line per request, as text or as JSON.

A line names the key, never its secret, and the path without its query. Questions and answers are
logged only if the operator asks for them.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("sedem_serve.server")
FIELDS = "fields"
"""Attribute of a log record that holds the fields of its event."""


class _Lines(logging.Formatter):
    """Formats an event as one line.

    Args:
        messages: whether the messages of unexpected errors are shown; they may quote a question.
    """

    def __init__(self, *, as_json: bool, messages: bool) -> None:
        super().__init__()
        self.as_json, self.messages = as_json, messages

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback is part of it."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = "".join(traceback.format_tb(error.__traceback__))
            fields |= {"error": type(error).__name__, "traceback": frames}
            fields |= {"message": str(error)} if self.messages else {}
        if self.as_json:
            return json.dumps(fields, default=str)
        moment, level, event = (fields.pop(name) for name in ("time", "level", "event"))
        shown = event if _is_plain(event) else json.dumps(event)
        rest = (f"{name}={_quoted(value)}" for name, value in fields.items())
        return " ".join((moment, level, shown, *rest))


def configure(log_format: str, *, log_text: bool = False) -> None:
    """Send the events of the server and the warnings of uvicorn to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(as_json=log_format == "json", messages=log_text))
    for logger, level in ((LOGGER, logging.INFO), (logging.getLogger("uvicorn"), logging.WARNING)):
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def log(event: str, level: int = logging.INFO, *, error: bool = False, **fields: Any) -> None:
    """Log an event; fields that are None are left out.

    Args:
        event: a fixed word or two.
        error: whether to add the traceback of the exception that is being handled.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, exc_info=error, extra={FIELDS: known})


def _quoted(value: object) -> str:
    """Return a value as one word, quoted if it could break the line or look like a field."""
    text = str(value)
    plain = text and _is_plain(text) and not set(text) & set(' ="\\')
    return text if plain else json.dumps(text)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()
