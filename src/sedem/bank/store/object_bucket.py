"""Read, write and list the objects of one bank in an object store; each error is one sentence.

A thin layer over obstore, which supports S3, Google Cloud Storage and Azure. Credentials, region
and endpoint come from the environment, under the names that each service uses.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sedem.errors import BankError, ConfigError, first_line

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""URL schemes of the stores that support conditional writes."""
RANGE = 2**23
"""Bytes per request; a large object is read with several parallel requests."""
AT_ONCE = 8
"""Requests that run at the same time."""
_CONNECT = "5s"
_REQUEST = "300s"
_RETRIES = 4
_RETRY_SECONDS = 30
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound")
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|/latest/(api/token|meta-data)|metadata\.google\.internal|MissingCredentials"
)
_REFUSED = re.compile(
    r"status code: 40[13]|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|"
    r"AuthenticationFailed"
)
_UNREACHABLE = re.compile(
    r"error sending request|HTTP error|timed out|dns error|connection (refused|reset|closed)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Entry:
    """An object as the store lists it.

    Attributes:
        name: its name, relative to the bank's place.
        size: bytes.
        modified: when it was written, by the store's clock.
        tag: differs if the content differs.
    """

    name: str
    size: int
    modified: datetime.datetime
    tag: str


class Bucket:
    """The objects below one place.

    Args:
        url: a URL such as "s3://bucket/folder".

    Raises:
        ConfigError: obstore is not installed.
        BankError: the URL is not a place that can hold a bank.
    """

    def __init__(self, url: str) -> None:
        if find_spec("obstore") is None:
            raise ConfigError(f"a bank at '{url}' needs obstore; run pip install 'sedem[scale]'")
        from obstore import store

        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in SCHEMES or not parts.netloc or not parts.path.strip("/"):
            raise BankError(
                f"'{url}' is not a place in an object store; give one such as "
                "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
            )
        endpoint = os.environ.get("AWS_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options: dict[str, Any] = {"connect_timeout": _CONNECT, "timeout": _REQUEST}
        if endpoint.startswith("http://"):
            options["allow_http"] = True
        wait = datetime.timedelta(seconds=_RETRY_SECONDS)
        with self._errors():
            # Its overloads differ by service, which only the URL shows.
            from_url: Any = store.from_url
            self._store: Any = from_url(
                self.url,
                client_options=options,
                retry_config={"max_retries": _RETRIES, "retry_timeout": wait},
            )

    def __reduce__(self) -> tuple[type[Bucket], tuple[str]]:
        # Another process has its own connections and credentials.
        return Bucket, (self.url,)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of an object; None if there is none.

        Raises:
            BankError: it has more bytes than `limit`, or the store cannot be used.
        """
        with self._errors():
            try:
                found = self._store.get(name)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None
            if found.meta["size"] > limit:
                raise BankError(
                    f"'{self.url}/{name}' has {found.meta['size']:,} bytes, at most {limit:,} are "
                    "expected; restore it"
                )
            return bytes(found.bytes())

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; returns whether this call wrote it."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._errors():
            try:
                self._store.put(name, content, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                # A request that was retried because its response was lost finds its own object.
                return self._store.get(name).bytes() == content
        return True

    def write(self, name: str, content: bytes | Path) -> None:
        """Write an object, from memory or from a file; an existing one is replaced."""
        with self._errors():
            self._store.put(name, content)

    def download(self, name: str, path: Path) -> str | None:
        """Write the content of an object into a new file.

        Returns:
            Its SHA-256; None if there is no such object.

        Raises:
            BankError: the store cannot be used.
        """
        with self._errors():
            try:
                size = self._store.head(name)["size"]
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None

            def part(start: int) -> Any:
                with self._errors():
                    return self._store.get_range(name, start=start, end=min(size, start + RANGE))

            digest = hashlib.sha256()
            starts = iter(range(0, size, RANGE))
            with path.open("xb") as file, ThreadPoolExecutor(AT_ONCE) as pool:
                while window := list(islice(starts, AT_ONCE)):
                    for content in pool.map(part, window):
                        file.write(content)
                        digest.update(content)
            return digest.hexdigest()

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self._errors():
            try:
                return int(self._store.head(name)["size"])
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None

    def entries(self, folder: str, after: str | None = None) -> Iterator[Entry]:
        """Yield the objects of a folder, by name.

        Args:
            folder: a folder such as "commits".
            after: name in that folder; only objects after it are listed.
        """
        with self._errors():
            offset = f"{folder}/{after}" if after is not None else None
            for part in self._store.list(folder, offset=offset, chunk_size=1000):
                for found in part:
                    tag = str(found.get("e_tag") or "")
                    yield Entry(found["path"], found["size"], found["last_modified"], tag)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""
        names = list(names)
        with self._errors():
            for start in range(0, len(names), 1000):
                self._store.delete(names[start : start + 1000])

    def _check_bucket(self, error: Exception) -> None:
        if _NO_BUCKET.search(str(error)):
            raise self._no_bucket() from None

    def _no_bucket(self) -> BankError:
        return BankError(
            f"there is no bucket '{urlsplit(self.url).netloc}' for '{self.url}'; create it, or "
            "correct the name or the endpoint"
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the store as `BankError`."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._sentence(error) from None

    def _sentence(self, error: Exception) -> BankError:
        text, scheme = str(error), urlsplit(self.url).scheme
        kind = "az" if scheme.startswith("a") else scheme[:2]
        if _NO_BUCKET.search(text):
            return self._no_bucket()
        if _NO_CREDENTIALS.search(text):
            return BankError(f"there are no credentials for '{self.url}'; set {_VARIABLES[kind]}")
        if _REFUSED.search(text) or type(error).__name__ in (
            "PermissionDeniedError",
            "UnauthenticatedError",
        ):
            return BankError(
                f"'{self.url}' refuses these credentials; check {_VARIABLES[kind]}, and that they "
                "may list, read, write and delete there"
            )
        if _UNREACHABLE.search(text):
            return BankError(
                f"'{self.url}' cannot be reached; check the network"
                + (" and AWS_ENDPOINT" if kind == "s3" else "")
            )
        return BankError(f"'{self.url}' cannot be used ({first_line(error)[:300]})")
