from __future__ import annotations

import hashlib
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


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": list(entries)}))
    return path


def entry(name: str, secret: str = SECRET, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), **more}


def test_a_file_of_keys(tmp_path: Path) -> None:
    ring = KeyRing.load(
        write(tmp_path / "keys", entry("ann", banks=["a"], write=True), entry("ben", "other"))
    )
    assert ring.find(SECRET) == Key("ann", digest_of(SECRET), ("a",), write=True)
    assert ring.find("other") == Key("ben", digest_of("other"), ("*",))
    assert ring.find("nobody's") is None
    assert ring.find("") is None
    assert ring.find("\ud800") is None


def test_every_digest_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([Key(name, digest_of(name)) for name in ("first", "second", "third")])
    compared: list[tuple[str, str]] = []
    compare = hmac.compare_digest

    def watched(one: str, other: str) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(keys.hmac, "compare_digest", watched)
    for secret in ("first", "third", "none"):
        compared.clear()
        ring.find(secret)
        assert compared == [(key.digest, digest_of(secret)) for key in ring.keys]


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
    assert Key("ann", "", banks).may_read(bank) is may


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "JSON"),
        ("[]", "keys"),
        ('{"keys": []}', "has no key"),
        ('{"keys": [{"name": "ann"}]}', "sha256"),
        ('{"keys": [{"name": "ann", "sha256": "secret"}]}', "sha256"),
        ('{"keys": [{"name": "a\\nb", "sha256": "%s"}]}' % ("0" * 64), "name"),
        ('{"keys": [{"name": "ann", "sha256": "%s", "admin": true}]}' % ("0" * 64), "admin"),
    ],
)
def test_a_file_that_is_none_is_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        KeyRing.load(path)


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 keys named 'ann'"):
        KeyRing.load(write(tmp_path / "keys", entry("ann"), entry("ann", "other")))


def test_a_new_key_is_added_and_its_secret_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add_key(path, "ann")
    second = add_key(path, "ben", banks=["team-*"], write=False)
    ring = KeyRing.load(path)
    assert ring.find(first) == Key("ann", digest_of(first), write=True, metrics=True)
    assert ring.find(second) == Key("ben", digest_of(second), ("team-*",))
    assert first not in path.read_text() and second not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="has a key named 'ann'"):
        add_key(path, "ann")
    with pytest.raises(ConfigError, match=re.escape("'a/b' cannot name a key")):
        add_key(path, "a/b")


def test_without_a_file_there_is_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.SECRET_VARIABLE, SECRET)
    ring, made = keys_of(None)
    assert made is None
    assert ring.find(SECRET) is not None
    monkeypatch.delenv(keys.SECRET_VARIABLE)
    ring, made = keys_of(None)
    assert made is not None and len(made) > 40
    found = ring.find(made)
    assert found is not None and found.write and found.metrics
    assert keys_of(None)[1] != made


@pytest.mark.parametrize(
    "secret", ["short", "with a space in it", "x" * 513, "ümläute-in-a-secret"]
)
def test_a_secret_that_no_header_carries_is_refused(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.SECRET_VARIABLE, secret)
    with pytest.raises(ConfigError, match=keys.SECRET_VARIABLE) as raised:
        keys_of(None)
    assert secret not in str(raised.value)
