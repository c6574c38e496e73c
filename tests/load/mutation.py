"""Requests that are almost right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from load.target import BANK
from load.wire import Shot

ASK = {
    "model": f"sedem-nano@{BANK}",
    "messages": [{"role": "user", "content": "What is the weight of shipment HK-2093?"}],
    "max_tokens": 2,
}
TEXT = "The pier is made of oak. It was built in 1871 by Anna Holm. " * 9
BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/chat/completions", ASK),
    ("/v1/chat/completions", {**ASK, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**ASK, "documents": [0], "k": "auto", "min_confidence": 0.5}),
    (
        "/v1/chat/completions",
        {**ASK, "model": "sedem-nano", "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": f"{TEXT}\n\nWho built the pier?"},
        ]},
    ),
    ("/v1/completions", {**ASK, "prompt": "What is there?", "n": 2, "logprobs": 1}),
    ("/v1/responses", {"model": f"sedem-nano@{BANK}", "input": "What is there?"}),
    (f"/v1/banks/{BANK}/scores", {"question": "What is there?"}),
)  # fmt: skip
"""Usual requests."""
PATHS = (
    "/health", "/ready", "/metrics", "/openapi.json", "/", "/login", "/page/{}", "/v1/models",
    "/v1/models/{}", "/v1/banks", "/v1/banks/{}", "/v1/banks/{}/documents",
    f"/v1/banks/{BANK}/documents/{{}}", "/v1/banks/{}/progress", "/v1/banks/{}/scores",
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/{}",
)  # fmt: skip
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
ODD_TEXTS = (
    "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "\u202e\u2066", "\ufeff", "\r\n\r\n",
    "😀" * 40, "é", "e\u0301", "x" * 300, "x" * 9_000, "../../etc/passwd", "..%2f..%2fetc",
    "/etc/passwd", "C:\\windows", "//host/share", "%00", "%", "{}", "null", "NaN", "-1", "1e999",
    "'; DROP TABLE files", "*", "demo/", "demo\0", "DEMO", ".", "..", "~",
    "sedem-nano@", "@demo", "a" * 64, "a" * 65,
)  # fmt: skip
ODD_NUMBERS = (
    0, -1, 1, 2, 63, 64, 65, 2**31, 2**31 - 1, -(2**31), 2**63, 2**63 - 1, -(2**63), 2**64, 10**400,
    0.0, -0.0, 0.5, 1e308, 5e-324, 1e-9, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
PART_NAMES = ("file", "files", "purpose", "", "\0", "name" * 200)
FILE_NAMES = (
    "a.txt", "a.md", "a.html", "a.pdf", "a.docx", "a", ".txt", "a.exe", "../a.txt", "a\0.txt",
    "/etc/passwd", "x" * 300 + ".txt", "é.txt", "\u202etxt.a", "a.txt/", "", "a\r\nb.txt", 'a".txt',
)  # fmt: skip
MANY_SPOTS = 60
"""A body with so many places is not made longer."""
CONTENTS = (
    b"", b"a", b"\0" * 50, b"\xff\xfe", b"%PDF-1.4\n", b"PK\x03\x04", TEXT.encode(), b"<html>" * 90,
    b"\n" * 3000, b"a" * 3000, "\u202e😀e\u0301 ".encode() * 60, b"\xed\xa0\x80" * 9, b" ",
)  # fmt: skip


def mutated(chance: random.Random, described: Sequence[Shot]) -> Shot:
    """Return a request with something odd about it.

    Args:
        chance: decides what.
        described: requests that may be mutated, too.
    """
    makers: Sequence[Callable[[random.Random], Shot]] = (
        _body, _body, _body, _body, _raw_body, _path, _path, _headers, _upload, _upload, _frame,
    )  # fmt: skip
    if described and chance.random() < 0.25:
        return _changed(chance, chance.choice(described))
    return chance.choice(makers)(chance)


# JSON


def _body(chance: random.Random) -> Shot:
    """A body whose values, types or fields are odd."""
    path, body = chance.choice(BODIES)
    body = json.loads(json.dumps(body))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        _mutate(chance, body)
    return _json("JSON", path, json.dumps(body, ensure_ascii=chance.random() < 0.5))


def _json(kind: str, path: str, text: str | bytes) -> Shot:
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return Shot(kind, "POST", path.encode(), ((b"Content-Type", b"application/json"),), content)


def _mutate(chance: random.Random, value: Any) -> None:
    """Change something inside a list or an object."""
    spots = list(_spots(value))
    holder, key = chance.choice(spots)
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(ODD_TEXTS)] = _odd(chance)
        case 2 if isinstance(holder, list) and len(spots) < MANY_SPOTS:
            holder.extend([holder[key]] * chance.choice((1, 30, 1200)))
        case 3:
            holder[key] = [holder[key]]
        case _:
            holder[key] = _odd(chance)
    if not list(_spots(value)):
        value["model"] = _odd(chance)


def _spots(value: Any) -> Any:
    """Every place inside a value: what holds it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in list(items):
        yield value, key
        if isinstance(inside, dict | list):
            yield from _spots(inside)


def _odd(chance: random.Random) -> Any:
    match chance.randrange(7):
        case 0:
            return chance.choice(ODD_NUMBERS)
        case 1:
            return chance.choice((None, True, False, [], {}, [[]], {"": None}))
        case 2:
            return [_odd(chance) for _ in range(chance.choice((1, 2, 9)))]
        case 3:
            return {chance.choice(ODD_TEXTS): _odd(chance)}
        case 4:
            depth = chance.choice((5, 50, 200))  # json fails from 1,000 on, which four may reach
            return json.loads("[" * depth + "]" * depth)
        case _:
            return chance.choice(ODD_TEXTS)


def _raw_body(chance: random.Random) -> Shot:
    """A body that is no JSON, or JSON of an unusual form."""
    path, body = chance.choice(BODIES)
    text = json.dumps(body).encode()
    odd: Sequence[bytes] = (
        b"", b"null", b"[]", b"{", b"{}" * 2, b'"\\ud800"', b"\xef\xbb\xbf" + text, text[:-1],
        text.decode().encode("utf-16"), b"[" * 50_000, b'{"a":' * 20_000, b"1" * 60_000,
        b'{"model": 1e99999}', b'{"model": NaN}', text[:-1] + b', "model": "x", "model": null}',
        text.replace(b" ", b"\xff"), text.replace(b'"', b"'"), text + b"\0", b" " * 60_000 + text,
        text[:-1] + b', "\\u0000": 1}', b'{"\\ud83d": "\\ude00"}', b"a" * 70_000,
        text.replace(b'"', b'\\"', 1), b"[" * 900 + b"]" * 900, b"1" * 5000,
    )  # fmt: skip
    content = chance.choice(odd)
    shot = _json("raw body", path, content)
    if chance.random() < 0.3:
        kind = chance.choice((
            b"text/plain", b"", b"application/json; charset=utf-16", b"application/xml",
            b"multipart/form-data", b"application/x-www-form-urlencoded", b"application/json" * 99,
        ))  # fmt: skip
        return replace(shot, headers=((b"Content-Type", kind),))
    return shot


# Paths, headers and the frame of a request


def _path(chance: random.Random) -> Shot:
    """A path with odd parameters, or an odd query."""
    path = chance.choice(PATHS)
    if "{}" in path:
        odd = str(chance.choice((*ODD_TEXTS, *ODD_NUMBERS, BANK, "0", "file-" + "0" * 24)))
        raw = odd.encode("utf-8", "surrogatepass")
        # Either as clients send it, or with the bytes that a request line can carry.
        kept = bytes(byte for byte in raw if byte > 32 and byte != 127)
        filled = quote(raw, safe="").encode() if chance.random() < 0.6 else kept
        target = path.encode().replace(b"{}", filled[:8000])
    else:
        target = path.encode()
    if chance.random() < 0.4:
        names = ("limit", "after", "order", "start", "end", "stream", "name", "purpose", "key", "x")
        pairs = [
            f"{chance.choice(names)}={quote(str(_odd(chance)).encode('utf-8', 'surrogatepass'))}"
            for _ in range(chance.choice((1, 2, 30)))
        ]
        target += b"?" + "&".join(pairs)[:8000].encode()
    elif chance.random() < 0.2:
        target += chance.choice((b"/", b"//", b"/.", b"/..", b";a=b", b"%2f", b"%", b"?", b"?&=&"))
    method = chance.choice(METHODS) if chance.random() < 0.3 else "GET"
    return Shot("path", method, target)


def _headers(chance: random.Random) -> Shot:
    """A usual request with odd headers."""
    path, body = chance.choice(BODIES)
    shot = _json("headers", path, json.dumps(body))
    names = (
        b"Authorization", b"Cookie", b"Accept", b"Origin", b"Sec-Fetch-Site", b"X-Request-Id",
        b"Host", b"Content-Encoding", b"Accept-Encoding", b"Expect", b"Range", b"If-None-Match",
        b"X-Forwarded-For", b"Forwarded", b"Upgrade", b"Connection", b"traceparent",
        b"Content-Type",
    )  # fmt: skip
    values = (
        b"", b"Bearer", b"Bearer \xff", b"Bearer " + b"a" * 600, b"Basic YTpi", b"sedem_key=;;=",
        b"sedem_key=" + b"a" * 3000, b"*/*", b"text/event-stream", b"text/html", b"null",
        b"\xf0\x9f\x98\x80", b"http://[", b"http://evil.example", b"a, b, c", b"gzip", b"websocket",
        b"h2c", b"100-continue", b"bytes=0-1", b"'\"<script>", b"[::1", b"a:99999", b"..",
    )  # fmt: skip
    odd = tuple(
        (chance.choice(names), chance.choice(values)) for _ in range(chance.choice((1, 2, 5)))
    )
    if chance.random() < 0.1:
        odd += tuple((b"X-%d" % number, b"a") for number in range(chance.choice((50, 300))))
    given = {name.lower() for name, _ in odd}
    usual = tuple(pair for pair in shot.headers if pair[0].lower() not in given)
    return replace(shot, headers=usual + odd)


def _frame(chance: random.Random) -> Shot:
    """A request whose length or chunks are wrong, or that is cut off."""
    path, body = chance.choice(BODIES)
    content = json.dumps(body).encode()
    shot = replace(_json("frame", path, content), broken=True)
    json_type = (b"Content-Type", b"application/json")
    length, chunked = b"Content-Length", (b"Transfer-Encoding", b"chunked")
    odd_length = chance.choice((b"-1", b"a", b"1e3", b"9" * 30, b"+5", b"0x5", b"5, 6"))
    odd_target = chance.choice(
        (b"*", b"", b"http://[::1", b"/a b", b"/\0", b"/\xff", b"x" * 70_000)
    )
    odd_method = chance.choice(("", "G\0T", "GET " * 9, "\u00e9", "A" * 3000))
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    changes: Sequence[dict[str, Any]] = (
        {"headers": (json_type, (length, b"%d" % (len(content) + 9)))},
        {"headers": (json_type, (length, odd_length))},
        {"headers": (json_type, chunked), "body": b"zz\r\n" + content},
        {"headers": (json_type, chunked), "body": whole},
        {"headers": (json_type, chunked, (length, b"5")), "body": b"5\r\nabc"},
        {"headers": (json_type, (b"A\0b", b"c"))},
        {"target": odd_target},
        {"method": odd_method},
    )
    return replace(shot, **chance.choice(changes))


# Uploads


def _upload(chance: random.Random) -> Shot:
    """A form with odd parts, or one that is cut off."""
    edge = chance.choice((b"edge", b"edge", b"edge", b"edge", b"x" * 70, b"x" * 200, b'"', b"a b"))
    parts = [_part(chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 40)))]
    content = b"".join(b"--%b\r\n%b" % (edge, part) for part in parts) + b"--%b--\r\n" % edge
    cut = content[: chance.randrange(len(content))]
    other = (cut, content.replace(b"\r\n", b"\n"), b"before\r\n" + content + b"after")
    content = chance.choice((*other, *[content] * 5))
    named = chance.choice((edge, edge, edge, edge, b"other", b""))
    kind = b"multipart/form-data; boundary=" + named
    banks = ("mine", "mine", "new", BANK, "x" * 64, "x" * 65, "UP", "..", "a%00")
    path = f"/v1/banks/{chance.choice(banks)}/documents".encode()
    return Shot("upload", "POST", path, ((b"Content-Type", kind),), content)


def _part(chance: random.Random) -> bytes:
    usual = chance.random() < 0.5
    name = "file" if usual else chance.choice(PART_NAMES)
    file = f"{chance.randrange(20)}.txt" if usual else chance.choice(FILE_NAMES)
    lines = [f'Content-Disposition: form-data; name="{name}"']
    if chance.random() < 0.85:
        lines[0] += f'; filename="{file}"'
    if not usual and chance.random() < 0.2:
        odd = ("Content-Disposition: attachment", "A" * 9000, ": b", "Content-Disposition;", "")
        lines[0] = chance.choice(odd)
    if chance.random() < 0.3:
        lines.append("Content-Type: " + chance.choice(("text/plain", "a/b; c=" + "d" * 999, "é")))
    head = "\r\n".join(lines).encode("utf-8", "surrogatepass")
    return head + b"\r\n\r\n" + chance.choice(CONTENTS) + b"\r\n"


# Anything


def _changed(chance: random.Random, shot: Shot) -> Shot:
    """A described request with some bytes of its body or target changed."""
    shot = replace(shot, kind="described, changed")
    if shot.body and chance.random() < 0.7:
        return replace(shot, body=_bytes_changed(chance, shot.body))
    target = bytes(byte for byte in _bytes_changed(chance, shot.target) if 32 < byte < 127)
    return replace(shot, target=b"/" + target.lstrip(b"/"))


def _bytes_changed(chance: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 9))):
        place = chance.randrange(len(changed) + 1)
        length, new = chance.choice((
            (chance.choice((1, 5)), b""),
            (0, bytes([chance.randrange(256)])),
            (1, chance.choice((b"\0", b"\xff", b'"', b"{", b"[", b"\\"))),
            (0, changed[place : place + chance.choice((3, 300))]),
        ))  # fmt: skip
        changed[place : place + length] = new
    return bytes(changed)
