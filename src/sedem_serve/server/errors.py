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


class ApiError(Exception):
    """An error that is reported to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.type = status, shortened(message), type
        self.code, self.param, self.headers = code, param and cut(param), headers or {}
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": _encodable(self.message),
                "type": self.type,
                "param": None if self.param is None else _encodable(self.param),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body(), self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, code=code, param=param)


def unauthorized(message: str) -> ApiError:
    """A request without a valid key."""
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, "authentication_error", code="invalid_api_key", headers=headers)


def too_many_keys(seconds: int) -> ApiError:
    """A request from an address that tries wrong keys."""
    message = f"too many wrong keys came from this address; try again in {seconds} s"
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, message, "rate_limit_error", code="too_many_wrong_keys", headers=headers)


def forbidden(message: str, code: str = "forbidden") -> ApiError:
    """A request that its key does not allow."""
    return ApiError(403, message, "permission_error", code=code)


def foreign_origin() -> ApiError:
    """A request that a browser sends for a page of another site."""
    return forbidden("this request comes from a page of another site", "foreign_origin")


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    """A thing that does not exist for this key."""
    return ApiError(404, message, code=code, param=param)


def bank_not_found(name: str) -> ApiError:
    """A bank that does not exist, or that is hidden from the key: the two look the same."""
    return not_found(f"there is no bank '{name[:100]}'", "bank", "bank_not_found")


def conflict(message: str, code: str = "conflict") -> ApiError:
    """A request that conflicts with the state of what it names."""
    return ApiError(409, message, code=code)


def too_large(message: str, param: str | None = None) -> ApiError:
    """A body or a file over the limit."""
    return ApiError(413, message, code="too_large", param=param)


def head_too_large() -> ApiError:
    """A request whose head is over a limit."""
    message = f"send at most {HEADERS} headers in {HEAD_BYTES >> 10} KiB"
    message = f"the head of this request is too large; {message}"
    return ApiError(431, message, code="too_large", headers={"Connection": "close"})


def too_slow() -> ApiError:
    """A request whose body does not arrive in time."""
    return ApiError(408, "the body of this request arrives too slowly; send it again", code="slow")


def unavailable(message: str, retry_after: int = RETRY_SECONDS) -> ApiError:
    """A server that cannot answer now."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(503, message, "server_error", code="unavailable", headers=headers)


def client_gone() -> ApiError:
    """A request whose client disconnected; nobody sees this error."""
    return ApiError(CLIENT_GONE, "the client went away", code="client_gone")


def to_api_error(error: Exception) -> ApiError:
    """Return what a client is told about an error; an unexpected one is not described."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=headers)
        case UnavailableError():
            return unavailable(str(error))
        case ClientDisconnect():
            return client_gone()
        case DataError() | ConfigError():
            return bad_request(str(error))
        case UnknownDocumentError():
            return not_found(str(error), "documents", "document_not_found")
        case BankMismatchError():
            return conflict(
                "another model built this bank; ask it with that model, or build it again",
                "bank_mismatch",
            )
        case BankError():
            return unavailable("cannot read the bank; run `sedem bank verify` to find out why")
        case _:
            return ApiError(500, INTERNAL, "server_error", code="internal_error")


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(ApiError):
    """507: the disk has no room."""

    def __init__(self) -> None:
        message = (
            "the disk of the server is full, so nothing was stored; delete files or banks, or ask "
            "its operator for room"
        )
        super().__init__(507, message, "server_error", code="insufficient_storage")


@contextmanager
def full_disk() -> Iterator[None]:
    """Convert all errors that a full disk causes to one error.

    Raises:
        FullDiskError: the disk is full.
    """
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


def _encodable(text: str) -> str:
    """Escape what UTF-8 cannot represent; a message may quote what a client has sent."""
    return text.encode("utf-8", "backslashreplace").decode()
