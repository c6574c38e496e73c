"""API keys: who may call, which banks each key may see, and whether it may change them.

A file of keys holds SHA-256 digests, never secrets:

    {"keys": [{"name": "ann", "sha256": "9f86d0...", "banks": ["reports", "team-*"]}]}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from sedem.config import Flag, Settings
from sedem.durable_files import atomic_write
from sedem.errors import ConfigError
from sedem.untrusted import read_json
from sedem_serve.server.logs import log

SECRET = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""A valid secret: characters that headers and cookies can carry unescaped."""
SECRET_VARIABLE = "SEDEM_API_KEY"
KEY_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
ALL_BANKS = ("*",)


class Key(Settings):
    """A key that the server knows.

    Attributes:
        name: who holds it; it appears in logs.
        sha256: digest of the secret, in hex.
        banks: names of banks; one that ends in "*" matches all names with that prefix.
        write: whether it may upload, build and delete.
        metrics: whether it may read /metrics, which counts the requests of all keys.
    """

    name: Annotated[str, StringConstraints(pattern=rf"^{KEY_NAME}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    banks: tuple[str, ...] = ALL_BANKS
    write: Flag = False
    metrics: Flag = False

    def may_read(self, bank: str) -> bool:
        """Return whether a bank exists for this key."""
        return any(
            bank.startswith(name[:-1]) if name.endswith("*") else bank == name
            for name in self.banks
        )


class KeyFile(Settings):
    """A file of keys."""

    keys: tuple[Key, ...]


class KeyRing:
    """The keys of a server."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Read a file of keys.

        Raises:
            ConfigError: it cannot be read, is not a file of keys, holds none, or names one twice.
        """
        keys = KeyFile.from_entries(read_json(path, ConfigError), str(path)).keys
        if not keys:
            raise ConfigError(f"'{path}' has no key; add one with `sedem serve --new-key NAME`")
        names = [key.name for key in keys]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"'{path}' has 2 keys named '{min(repeated)}'; remove one")
        return cls(keys)

    def find(self, secret: str) -> Key | None:
        """Return the key of a secret.

        Every digest is compared in full, so the time reveals nothing about any of them.
        """
        given, found = digest_of(secret), None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, given):
                found = key
        return found


def keys_of(path: Path | None) -> tuple[KeyRing, str | None]:
    """Return the keys of a server, and the secret if one was generated.

    Args:
        path: file of keys; None means one key that may do everything: the one in SEDEM_API_KEY, or
            one generated for this run.
    """
    if path is not None:
        return KeyRing.load(path), None
    given = os.environ.get(SECRET_VARIABLE)
    secret = given or new_secret()
    if SECRET.fullmatch(secret) is None:
        raise ConfigError(
            f"the key in {SECRET_VARIABLE} cannot be used; it needs 16 to 512 characters of "
            "A-Z, a-z, 0-9 and ._~+/=-"
        )
    key = Key(name="default", sha256=digest_of(secret), write=True, metrics=True)
    return KeyRing([key]), None if given else secret


def reload_keys(path: Path, use: Callable[[KeyRing], object]) -> None:
    """Read a file of keys again and use it; if that cannot be done, the old keys stay."""
    try:
        use(KeyRing.load(path))
    except ConfigError as error:
        log("keys kept", logging.ERROR, reason=error)
    else:
        log("keys reloaded")


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def new_secret() -> str:
    """Return a new random secret."""
    return f"sedem-{secrets.token_urlsafe(32)}"


def add_key(path: Path, name: str, *, banks: Sequence[str] = ALL_BANKS, write: bool = True) -> str:
    """Add a key to a file of keys, which is created if it does not exist.

    Args:
        name: whose key it is.
        banks: names of the banks that it may query; see `Key.banks`.
        write: whether it may upload, build, delete and read /metrics.

    Returns:
        The secret. The file has only its digest, so the secret cannot be recovered.

    Raises:
        ConfigError: the file cannot be read, or the name is taken or invalid.
    """
    if re.fullmatch(KEY_NAME, name) is None:
        raise ConfigError(
            f"'{name}' cannot name a key; it must be 1 to 64 letters, digits or '._@-', and "
            "begin with a letter or digit"
        )
    keys = KeyRing.load(path).keys if path.exists() else ()
    if name in {key.name for key in keys}:
        raise ConfigError(f"'{path}' has a key named '{name}'; remove it or choose another name")
    secret = new_secret()
    digest = digest_of(secret)
    key = Key(name=name, sha256=digest, banks=tuple(banks), write=write, metrics=write)
    entries = [one.model_dump(mode="json") for one in (*keys, key)]
    with atomic_write(path) as beside:
        beside.write_text(json.dumps({"keys": entries}, indent=2) + "\n", encoding="utf-8")
        beside.chmod(0o600)
    return secret
