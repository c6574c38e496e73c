"""A server of OpenAI's protocol that tests start: it replies with what a test tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Pieces = Sequence[str | bytes | Mapping[str, Any]]
"""Pieces of a reply: text, the fields of a delta, or bytes that are sent as they are. A reply whose
last piece is bytes has no other end."""
ENDS = {"finish_reason", "stop_reason"}
"""Fields of a delta here that stand beside it; the second one is vLLM's."""


def called(*arguments: str, **fields: Any) -> dict[str, Any]:
    """A delta with a piece of a call of a tool; its function has a name if `name` is a field."""
    name = {"name": fields.pop("name")} if "name" in fields else {}
    function = {**name, **({"arguments": arguments[0]} if arguments else {})}
    return {"tool_calls": [{"index": 0, "type": "function", **fields, "function": function}]}


class Told(ThreadingHTTPServer):
    """Replies to each request with what `reply` returns for its body.

    Attributes:
        bodies: the requests that came.
        keys: their keys.
        models: names of its models; None means that it answers with a page.
    """

    daemon_threads = True
    reply: Callable[[dict[str, Any]], Pieces | tuple[int, str]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models: list[str] | None = ["tiny"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Told

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.server.models is None:
            self._send(200, "text/html", b"<html></html>")
            return
        data = [{"id": name, "object": "model"} for name in self.server.models]
        self._send(200, "application/json", json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        replied = self.server.reply(body)
        if isinstance(replied, tuple):
            status, message = replied
            error = json.dumps({"error": {"message": message}}).encode()
            self._send(status, "application/json", error)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        # The first delta has only a role, and the last chunk only the usage.
        pieces: list[str | bytes | Mapping[str, Any]] = [{"role": "assistant", "content": ""}]
        pieces += replied
        if not isinstance(pieces[-1], bytes):
            if not any("finish_reason" in one for one in pieces if isinstance(one, Mapping)):
                calls = any("tool_calls" in one for one in pieces if isinstance(one, Mapping))
                pieces.append({"finish_reason": "tool_calls" if calls else "stop"})
            pieces += [chunk(choices=[], usage={"total_tokens": 9}), b"data: [DONE]\n\n"]
        for piece in pieces:
            if not isinstance(piece, bytes):
                fields = {"content": piece} if isinstance(piece, str) else piece
                delta = {name: value for name, value in fields.items() if name not in ENDS}
                ended = {name: fields.get(name) for name in ENDS}
                piece = chunk(choices=[{"index": 0, "delta": delta, **ended}])
            self.wfile.write(piece)


def chunk(**fields: Any) -> bytes:
    """An event of a stream."""
    told = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "tiny", **fields}
    return f"data: {json.dumps(told)}\n\n".encode()


@contextmanager
def reader_server(reply: Callable[[dict[str, Any]], Pieces | tuple[int, str]]) -> Iterator[Told]:
    """Serve a reader until the end of the block."""
    with Told() as server:
        server.reply = reply
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
