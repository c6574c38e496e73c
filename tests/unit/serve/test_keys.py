from __future__ import annotations

import hmac
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from sedem.errors import ConfigError
from sedem.serve import keys
from sedem.serve.keys import Key, KeyRing, add_key, digest_of, keys_of

SECRET = "a-secret-that-is-long"
DIGEST = "0" * 64


def key(name: str, secret: str = SECRET, **more: Any) -> Key:
    return Key(name=name, sha256=digest_of(secret), **more)


def test_every_digest_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([key(name, name) for name in ("first", "second", "third")])
    compared: list[tuple[str, str]] = []
    compare = hmac.compare_digest

    def watched(one: str, other: str) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(keys.hmac, "compare_digest", watched)
    for secret in ("first", "third", "none", "", "\ud800"):
        compared.clear()
        found = ring.find(secret)
        assert (found and found.name) == (secret if secret in ("first", "third") else None)
        assert compared == [(key.sha256, digest_of(secret)) for key in ring.keys]


@pytest.mark.parametrize(
    ("banks", "bank", "may"),
    [
        (("*",), "any", True),
        (("a", "b"), "b", True),
        (("a",), "ab", False),
        (("team-*",), "team-a", True),
        (("team-*",), "team", False),
        ((), "a", False),
    ],
)
def test_scopes(banks: tuple[str, ...], bank: str, may: bool) -> None:
    assert key("ann", banks=banks).may_read(bank) is may


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "JSON"),
        ("[]", "keys"),
        ('{"keys": []}', "has no key"),
        ('{"keys": [{"name": "ann"}]}', "sha256"),
        ('{"keys": [{"name": "ann", "sha256": "secret"}]}', "sha256"),
        (json.dumps({"keys": [{"name": "a\nb", "sha256": DIGEST}]}), "name"),
        (json.dumps({"keys": [{"name": "ann", "sha256": DIGEST, "admin": True}]}), "admin"),
        (json.dumps({"keys": [{"name": "ann", "sha256": DIGEST}] * 2}), "2 keys named 'ann'"),
    ],
)
def test_a_file_that_is_none_is_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        KeyRing.load(path)


def test_a_new_key_is_added_and_its_secret_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add_key(path, "ann")
    second = add_key(path, "ben", banks=["team-*"], write=False)
    ring = KeyRing.load(path)
    assert ring.find(first) == key("ann", first, write=True, metrics=True)
    assert ring.find(second) == key("ben", second, banks=("team-*",))
    assert first not in path.read_text() and second not in path.read_text()
    assert json.loads(path.read_text())["keys"][1] == {
        "name": "ben", "sha256": digest_of(second), "banks": ["team-*"], "write": False,
        "metrics": False,
    }  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="has a key named 'ann'"):
        add_key(path, "ann")
    with pytest.raises(ConfigError, match=re.escape("'a/b' cannot name a key")):
        add_key(path, "a/b")


def test_without_a_file_there_is_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.SECRET_VARIABLE, SECRET)
    ring, made = keys_of(None)
    assert made is None and ring.find(SECRET) is not None
    for secret in ("short", "with a space in it", "x" * 513, "ümläute-in-a-secret"):
        monkeypatch.setenv(keys.SECRET_VARIABLE, secret)
        with pytest.raises(ConfigError, match=keys.SECRET_VARIABLE) as raised:
            keys_of(None)
        assert secret not in str(raised.value)
    monkeypatch.delenv(keys.SECRET_VARIABLE)
    ring, made = keys_of(None)
    assert made is not None and len(made) > 40
    found = ring.find(made)
    assert found is not None and found.write and found.metrics
    assert keys_of(None)[1] != made
