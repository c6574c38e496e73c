"""A server of OpenAI's protocol that tests start: it replies with what a test tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Pieces = Sequence[str | Mapping[str, Any]]
"""Pieces of a reply: text, or the fields of a delta."""


class Told(ThreadingHTTPServer):
    """Replies to each request with what `reply` returns for its body.

    Attributes:
        bodies: the requests that came.
        keys: their keys.
    """

    daemon_threads = True
    reply: Callable[[dict[str, Any]], Pieces | tuple[int, str]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["tiny"]

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
        for piece in replied:
            delta = {"content": piece} if isinstance(piece, str) else {**piece}
            ended = delta.pop("finish_reason", None)
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": ended}]
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


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
