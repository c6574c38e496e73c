"""Errors of the API, in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from sedem.errors import (
    BankError,
    BankMismatchError,
    ConfigError,
    DataError,
    QueueFullError,
    UnavailableError,
    UnknownDocumentError,
    cut,
    shortened,
)
from sedem.untrusted import HEAD_BYTES, HEADERS

RETRY_SECONDS = 1
"""When to retry a request that was refused because the server is busy."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected before the response."""
INTERNAL = "the server failed to answer; its log has the reason under the id of this request"


KINDS = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    408: ("invalid_request_error", "slow"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "too_large"),
    429: ("rate_limit_error", "queue_full"),
    431: ("invalid_request_error", "too_large"),
    CLIENT_GONE: ("invalid_request_error", "client_gone"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
    507: ("server_error", "insufficient_storage"),
}
"""The type of an error by its status, and its code unless another one is given."""


class ApiError(Exception):
    """An error that is reported to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status, self.message = status, shortened(message)
        self.type, usual = KINDS.get(status, KINDS[400])
        self.code, self.param, self.headers = code or usual, param and cut(param), headers or {}
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The JSON body; it may quote what a client has sent, so what UTF-8 lacks is escaped."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {
            "error": {
                name: text and text.encode("utf-8", "backslashreplace").decode()
                for name, text in told.items()
            }
        }

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body(), self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param, code)


def foreign_origin() -> ApiError:
    """A request that a browser sends for a page of another site."""
    message = "this request comes from a page of another site"
    return ApiError(403, message, code="foreign_origin")


def bank_not_found(name: str) -> ApiError:
    """A bank that does not exist, or that is hidden from the key: the two look the same."""
    return ApiError(404, f"there is no bank '{name[:100]}'", "bank", "bank_not_found")


def head_too_large() -> ApiError:
    """A request whose head is over a limit."""
    message = f"send at most {HEADERS} headers in {HEAD_BYTES >> 10} KiB"
    message = f"the head of this request is too large; {message}"
    return ApiError(431, message, headers={"Connection": "close"})


def client_gone() -> ApiError:
    """A request whose client disconnected; nobody sees this error."""
    return ApiError(CLIENT_GONE, "the client went away")


def unavailable(message: str, retry_after: int = RETRY_SECONDS) -> ApiError:
    """A server that cannot answer now."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


def to_api_error(error: Exception) -> ApiError:
    """Return what a client is told about an error; an unexpected one is not described."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return ApiError(429, str(error), headers=headers)
        case UnavailableError():
            return unavailable(str(error))
        case ClientDisconnect():
            return client_gone()
        case DataError() | ConfigError():
            return ApiError(400, str(error))
        case UnknownDocumentError():
            return ApiError(404, str(error), "documents", "document_not_found")
        case BankMismatchError():
            message = "another model built this bank; ask it with that model, or build it again"
            return ApiError(409, message, code="bank_mismatch")
        case BankError():
            return unavailable("cannot read the bank; run `sedem bank verify` to find out why")
        case _:
            return ApiError(500, INTERNAL)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(ApiError):
    """507: the disk has no room."""

    def __init__(self) -> None:
        super().__init__(
            507,
            "the disk of the server is full, so nothing was stored; delete files or banks, or ask "
            "its operator for room",
        )


@contextmanager
def full_disk() -> Iterator[None]:
    """Convert all errors that a full disk causes to one error."""
    try:
        yield
    except (OSError, BankError) as error:
        if not is_full(error):
            raise
        raise FullDiskError from None


def is_full(error: BaseException | None) -> bool:
    """Return whether an error says that the disk is full, or was caused by one that does."""
    if isinstance(error, BankError):
        return is_full(error.__context__)
    return isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno in FULL)
