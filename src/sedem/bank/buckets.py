"""The objects of a bank in parts: in an object store, or files of a folder.

`Bucket` is a thin layer over obstore, which supports S3, Google Cloud Storage and Azure.
Credentials, region and endpoint come from the environment, under the names that each service uses.
Every method raises a BankError, in one sentence, if the place cannot be used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from sedem.bank.database import check_no_link
from sedem.bank.file import delete
from sedem.durable_files import atomic_write, create_private, make_folders
from sedem.errors import BankError, ConfigError, first_line
from sedem.untrusted import read_bytes

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""URL schemes of the stores that support conditional writes."""
LIMIT = 2**27
"""Maximum bytes of a manifest."""
Tag = Any
"""Tells one content of an object from another; None stands for no object."""
Listed = tuple[str, int, datetime]
"""The name, size and time of the last change of an object."""
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_TIMEOUTS = {"connect_timeout": "5s", "read_timeout": "60s", "timeout": "1day"}


class Bucket:
    """The objects below one place of an object store, such as "s3://bucket/folder"."""

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

    def load(self, name: str) -> tuple[bytes, Tag] | None:
        """Return the content of at most `LIMIT` bytes and the tag of an object; None if missing."""
        with self._errors(), suppress(FileNotFoundError):
            found = self._store.get(name)
            if (size := found.meta["size"]) > LIMIT:
                raise BankError(
                    f"'{self.url}/{name}' has {size:,} bytes, at most {LIMIT:,} are read"
                )
            tag = {key: found.meta[key] for key in ("e_tag", "version") if found.meta.get(key)}
            return bytes(found.bytes()), tag
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

    def download(self, name: str, path: Path, size: int | None = None) -> str | None:
        """Write an object into a new file, and return its SHA-256.

        It is None if the object is missing, or has another size than the given one.
        """
        digest = hashlib.sha256()
        with self._errors(), suppress(FileNotFoundError):
            found = self._store.get(name)
            if size in (None, found.meta["size"]):
                with path.open("xb") as file:
                    for content in found.stream():
                        file.write(content)
                        digest.update(content)
                return digest.hexdigest()
        return None

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is missing."""
        with self._errors(), suppress(FileNotFoundError):
            return int(self._store.head(name)["size"])
        return None

    def entries(self) -> Iterator[Listed]:
        """Yield the objects; times are by the clock of the store."""
        with self._errors():
            for some in self._store.list():
                yield from ((one["path"], one["size"], one["last_modified"]) for one in some)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""
        with self._errors(), suppress(FileNotFoundError):
            self._store.delete([*names])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise BankError(
                f"'{self.url}' cannot be used ({first_line(error)[:300]}); check its name, the "
                "network, and the credentials in the environment, such as AWS_ACCESS_KEY_ID"
            ) from None


class Folder:
    """The files of a folder, which need not exist; it has the methods of `Bucket` for parts."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def __str__(self) -> str:
        return str(self.path)

    def load(self, name: str) -> tuple[bytes, Tag] | None:
        """Return the content of a file, which is its tag too; see `Bucket.load`."""
        check_no_link(self.path / name)
        with suppress(FileNotFoundError):
            content = read_bytes(self.path / name, BankError, LIMIT)
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
                    create_private(partial)
                    partial.write_bytes(content)
        return True

    def upload(self, name: str, file: Path) -> None:
        """Copy a file into the folder, durably."""
        with writing(self.path):
            make_folders(self.path)
            with atomic_write(self.path / name) as partial:
                create_private(partial)
                shutil.copyfile(file, partial)

    def entries(self) -> Iterator[Listed]:
        """Yield what is in the folder."""
        for path in self.path.iterdir():
            with suppress(FileNotFoundError):
                found = path.lstat()
                yield path.name, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; a missing one is not an error."""
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
