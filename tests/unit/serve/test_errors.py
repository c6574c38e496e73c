from __future__ import annotations

import pytest

from sedem import errors as sedem_errors
from sedem.errors import (
    BankError,
    BankMismatchError,
    ConfigError,
    DataError,
    QueueFullError,
    SedemError,
    UnavailableError,
    UnknownDocumentError,
)
from sedem.serve.errors import INTERNAL, ApiError, bank_not_found, to_api_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DataError("x"), 400, None),
        (ConfigError("x"), 400, None),
        (UnknownDocumentError("x"), 404, "document_not_found"),
        (BankMismatchError("x"), 409, "bank_mismatch"),
        (BankError("x"), 503, "unavailable"),
        (QueueFullError("x"), 429, "queue_full"),
        (UnavailableError("x"), 503, "unavailable"),
        (SedemError("x"), 500, "internal_error"),
        (RuntimeError("x"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_a_status(error: Exception, status: int, code: str | None) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert ("Retry-After" in answer.headers) is (status in (429, 503))
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}


def test_nothing_of_an_unexpected_error_is_told() -> None:
    for kind in vars(sedem_errors).values():
        if isinstance(kind, type) and issubclass(kind, SedemError):
            assert 400 <= to_api_error(kind("x")).status < 600
    assert to_api_error(RuntimeError("/srv/secret/path")).message == INTERNAL
    # A path of the server stands in errors of banks.
    assert "/srv" not in to_api_error(BankError("'/srv/bank' is damaged")).message
    assert "/srv" not in to_api_error(BankMismatchError("'/srv/bank' was built by x")).message
    # What a client has sent can be quoted, whatever it is.
    assert len(bank_not_found("x" * 500).message) < 200
    body = ApiError(400, "there is no '\ud800'", param="\udfff").body()["error"]
    assert (body["message"], body["param"]) == (r"there is no '\ud800'", r"\udfff")
