"""A server of an object store in this process, and banks in it."""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

BUCKET = "sedem-tests"


@dataclass
class ObjectServer:
    """A server that speaks S3, on this machine.

    Attributes:
        address: of the server.
        client: of boto3, to look at objects and to damage them.
        before_put: called with the name of each object before it is written.
    """

    address: str
    client: Any
    before_put: list[Callable[[str], object]] = field(default_factory=list)

    def place(self) -> str:
        """A new place for a bank."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def objects(self, place: str) -> dict[str, bytes]:
        """Every object of a bank by its name."""
        prefix = place.removeprefix(f"s3://{BUCKET}/") + "/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {key.removeprefix(prefix): self._body(key) for key in keys}

    def put(self, place: str, name: str, content: bytes) -> None:
        """Write an object behind the back of a bank."""
        key = f"{place.removeprefix(f's3://{BUCKET}/')}/{name}"
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, place: str, name: str) -> None:
        """Delete an object behind the back of a bank."""
        key = f"{place.removeprefix(f's3://{BUCKET}/')}/{name}"
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def _body(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Run a server; its address and credentials are in the environment meanwhile."""
    import boto3
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    for name, value in {
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in (
        "AWS_ENDPOINT_URL",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "HTTP_PROXY",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        monkeypatch.setenv("AWS_ENDPOINT", address)
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
        client.create_bucket(Bucket=BUCKET)
        found = ObjectServer(address, client)
        # moto looks whether an object exists and then writes it: not at once, as a store must.
        writing = threading.Lock()
        put = S3Response.put_object

        @functools.wraps(put)
        def put_at_once(self: Any) -> Any:
            for call in [*found.before_put]:
                call(self.parse_key_name())
            with writing:
                return put(self)

        monkeypatch.setattr(S3Response, "put_object", put_at_once)
        yield found
    finally:
        server.stop()
