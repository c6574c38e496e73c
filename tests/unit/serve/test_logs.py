from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from sedem.serve import logs

QUESTION = "Who is the landlord?"


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Leave the loggers as they were."""
    loggers = (logs.LOGGER, logging.getLogger("uvicorn"))
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.level, one.propagate = handlers, level, propagate


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logs.log("request", path="/v1", status=200, key=None)
    [line] = logged(capsys)
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {"level": "info", "event": "request", "path": "/v1", "status": 200}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/v1/banks", "/v1/banks"),
        ("a b", '"a b"'),
        ("a\nevent=fake", '"a\\nevent=fake"'),
        ("\x1b[2J", '"\\u001b[2J"'),
        ("\u202eevil", '"\\u202eevil"'),
        ('say "no"', '"say \\"no\\""'),
        ("", '""'),
        (7, "7"),
    ],
)
def test_no_value_forges_a_line(value: Any, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text")
    logs.log("request", path=value)
    [line] = logged(capsys)
    assert line.split(" ", 1)[1] == f"info request path={shown}"


@pytest.mark.parametrize("log_text", [True, False])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_shows_where_and_its_message_only_if_texts_may_be_logged(
    log_format: str, log_text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(log_format, log_text=log_text)
    try:
        raise KeyError(QUESTION)
    except KeyError:
        logs.log("failed", logging.ERROR, error=True, request_id="req-1")
    [line] = logged(capsys)
    assert "req-1" in line and "KeyError" in line and "test_logs.py" in line
    assert (QUESTION in line) is log_text


def test_warnings_of_uvicorn_are_shown_and_its_chatter_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("text")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").warning("one\n\x1b[2Jtwo")
    first, second = logged(capsys)
    assert first.endswith("warning Invalid HTTP request received.")
    assert second.endswith('warning "one\\n\\u001b[2Jtwo"')
