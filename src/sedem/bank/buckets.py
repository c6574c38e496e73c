"""The objects of a bank in parts: objects below a place of an object store, or files of a folder.

`Bucket` is a thin layer over obstore, which supports S3, Google Cloud Storage and Azure.
Credentials, region and endpoint come from the environment, under the names that each service uses.
Every method raises a BankError, in one sentence, if the place cannot be used.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from filelock import FileLock

from sedem.bank.file import delete
from sedem.durable_files import atomic_write, make_folders
from sedem.errors import BankError, ConfigError, first_line
from sedem.untrusted import read_bytes

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""URL schemes of the stores that support conditional writes."""
LIMIT = 2**26
"""Maximum bytes of a manifest."""
RANGE, AT_ONCE = 2**23, 8
"""Bytes per request of a download, and requests that run at the same time."""
WRONG_TAG = {"e_tag": '"none"', "version": "1"}
"""A tag that no object has."""
Tag = Any
"""Tells one content of an object from another; None stands for no object."""
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_TIMEOUTS = {"connect_timeout": "5s", "timeout": "300s"}
_VARIABLES = {
    "s": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "g": "GOOGLE_APPLICATION_CREDENTIALS",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""What holds the credentials, by the first letter of the scheme."""
_SENTENCES = {
    r"NoSuchBucket|bucket does not exist|ContainerNotFound": "there is no bucket '{bucket}' for "
    "'{url}'; create it, or correct the name or the endpoint",
    r"169\.254\.169\.254|/latest/(api/token|meta-data)|metadata\.google\.internal|"
    r"MissingCredentials|Missing (AccessKeyId|SecretAccessKey)": "there are no credentials for "
    "'{url}'; set {variables}",
    r"status code: 40[13]|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|"
    r"AuthenticationFailed|PermissionDeniedError|UnauthenticatedError": "'{url}' rejects these "
    "credentials; check {variables}, and that they may list, read, write and delete there",
    r"(?i)error sending request|HTTP error|timed out|dns error|connection (refused|reset|closed)":
    "'{url}' cannot be reached; check the network, and AWS_ENDPOINT if you set it",
}  # fmt: skip
"""Sentences for errors of a store, by the pattern of the error."""


class Listed(NamedTuple):
    """An object in a listing; `modified` is by the clock of the store."""

    name: str
    size: int
    modified: datetime


class Bucket:
    """The objects below one place of an object store, such as "s3://bucket/folder".

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
        options = {**_TIMEOUTS, "allow_http": endpoint.startswith("http://")}
        # Its overloads differ by service, which only the URL shows.
        from_url: Any = store.from_url
        with self._errors():
            self._store: Any = from_url(self.url, client_options=options, retry_config=_RETRIES)

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[type[Bucket], tuple[str]]:
        # Another process has its own connections and credentials.
        return Bucket, (self.url,)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of an object; see `load`."""
        found = self.load(name, limit)
        return None if found is None else found[0]

    def load(self, name: str, limit: int = LIMIT) -> tuple[bytes, Tag] | None:
        """Return the content of at most `limit` bytes and the tag of an object; None if missing."""
        with suppress(FileNotFoundError), self._errors():
            found = self._store.get(name)
            meta = found.meta
            if meta["size"] > limit:
                raise BankError(
                    f"'{self.url}/{name}' has {meta['size']:,} bytes, at most {limit:,} are read; "
                    "restore it"
                )
            return bytes(found.bytes()), {key: meta[key] for key in WRONG_TAG if meta.get(key)}
        return None

    def replace(self, name: str, content: bytes, tag: Tag) -> bool:
        """Write an object if it still has a tag, and return whether it did; None creates it."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode = "create" if tag is None else tag
        with self._errors(), suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
            self._store.put(name, content, mode=mode, use_multipart=False)
            return True
        # A request that was repeated because its answer was lost finds its own content.
        found = self.load(name)
        return found is not None and found[0] == content

    def upload(self, name: str, file: Path) -> None:
        """Write an object from a file; an existing one is replaced."""
        with self._errors():
            self._store.put(name, file)

    def download(self, name: str, path: Path) -> str | None:
        """Write an object into a new file, and return its SHA-256; None if it is missing."""
        size = self.size(name)
        if size is None:
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
        """Bytes of an object; None if it is missing."""
        with suppress(FileNotFoundError), self._errors():
            return int(self._store.head(name)["size"])
        return None

    def entries(self, folder: str = "") -> Iterator[Listed]:
        """Yield the objects below a folder."""
        with self._errors():
            for some in self._store.list(folder):
                for found in some:
                    yield Listed(found["path"], found["size"], found["last_modified"])

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""
        with suppress(FileNotFoundError), self._errors():
            self._store.delete([*names])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the store as `BankError`, but FileNotFoundError for a missing object."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            parts, text = urlsplit(self.url), f"{type(error).__name__}: {error}"
            for pattern, sentence in _SENTENCES.items():
                if re.search(pattern, text):
                    values = {"bucket": parts.netloc, "variables": _VARIABLES[parts.scheme[0]]}
                    raise BankError(sentence.format(url=self.url, **values)) from None
            if isinstance(error, FileNotFoundError):
                raise
            reason = first_line(error)[:300]
            raise BankError(f"'{self.url}' cannot be used ({reason})") from None


class Folder:
    """The files of a folder, which need not exist; it has the methods of `Bucket` for parts."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def __str__(self) -> str:
        return str(self.path)

    def load(self, name: str) -> tuple[bytes, Tag] | None:
        """Return the content of a regular file, which is its tag too; see `Bucket.load`."""
        path = self.path / name
        with suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise BankError(f"'{path}' is not a regular file; restore it")
            content = read_bytes(path, BankError, LIMIT)
            return content, content
        return None

    def replace(self, name: str, content: bytes, tag: Tag) -> bool:
        """Write a file if it still has a tag; see `Bucket.replace`."""
        with writing(self.path):
            make_folders(self.path)
            # Held for milliseconds, and released if its process dies.
            with FileLock(self.path / f".{name}.lock"):
                now = self.load(name)
                if (now and now[1]) != tag:
                    return False
                with atomic_write(self.path / name) as partial:
                    partial.write_bytes(content)
        return True

    def upload(self, name: str, file: Path) -> None:
        """Copy a file into the folder, durably."""
        with writing(self.path):
            make_folders(self.path)
            with atomic_write(self.path / name) as partial:
                shutil.copyfile(file, partial)

    def entries(self) -> Iterator[Listed]:
        """Yield the regular files of the folder."""
        for path in self.path.iterdir():
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                modified = datetime.fromtimestamp(found.st_mtime, UTC)
                yield Listed(path.name, found.st_size, modified)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; a missing one is not an error."""
        with writing(self.path):
            for name in names:
                delete(self.path / name)


@contextmanager
def writing(place: Path, advice: str = "ask its owner for permission") -> Iterator[None]:
    """Raise errors of the file system, such as a full disk, as `BankError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise BankError(f"'{place}' cannot be written ({reason}); make room, or {advice}") from None
