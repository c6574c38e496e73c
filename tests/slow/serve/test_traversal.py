"""Hostile names in every route: nothing outside of the folder changes, and no route fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from load.wire import Shot, Wire
from servers import serving
from serving import SECRET, bearer
from unit.server.conftest import read_all, send

from sedem import SeDeM
from sedem_serve.server.library import _BANK
from sedem_serve.server.settings import ServerSettings

pytestmark = pytest.mark.slow

MARK = b"a secret of the operator"

ROUTES = (
    ("GET", "/v1/banks/{}"),
    ("GET", "/v1/banks/{}/documents"),
    ("GET", "/v1/banks/{}/documents/0"),
    ("GET", "/v1/banks/kept/documents/{}"),
    ("DELETE", "/v1/banks/kept/documents/{}"),
    ("DELETE", "/v1/banks/kept/documents/0?name={}"),
    ("GET", "/v1/banks/{}/progress"),
    ("DELETE", "/v1/banks/{}"),
    ("GET", "/v1/models/{}"),
    ("GET", "/page/{}"),
)
RAW = "/.~%;:@!$&'()*+,=\\|^`{}[]<>\""
"""What a client may send in a path as it is."""


# Names that try to leave a folder, end a string or confuse a parser: all of them are only text

UP = (
    "..", "../..", "../../../../../../..", "....//", "..;/", ".", "./.", "~", "~root", "$HOME",
)  # fmt: skip
TARGETS = (
    "etc/passwd", "server.sqlite", "files", "banks/x.bank", "lock", "outside.txt",
)  # fmt: skip
SLASHES = (
    "/", "//", "\\", "%2f", "%2F", "%5c", "%252f", "%c0%af", "\u2044", "\u2215", "\uff0f",
    "\u29f8",
)  # fmt: skip
ABSOLUTE = (
    "/etc/passwd", "//etc/passwd", "/proc/self/environ", "/dev/zero", "/dev/stdin",
    "C:\\Windows\\win.ini", "C:/Windows/win.ini", "c:", "\\\\server\\share\\file",
    "\\\\?\\C:\\file", "\\\\.\\COM1", "//server/share", "file:///etc/passwd",
    "http://127.0.0.1/x", "gopher://x", "jar:file:x!/y",
)  # fmt: skip
DEVICES = (
    "CON", "PRN", "AUX", "NUL", "COM1", "LPT1", "CLOCK$", "nul.txt", "con.pdf", "aux.docx",
)  # fmt: skip
DOTS = (
    "%2e%2e/", "%2e%2e%2f", "..%2f", "%252e%252e%252f", "%u002e%u002e/", "\uff0e\uff0e/",
    "\u2025/", "..\u200b/", "\u202e../", "..%00/", "..\x00/", "..%0d%0a/", "..\n/", "..\r\n/",
    "..\t/",
)  # fmt: skip
ODD = (
    "", " ", "  ..  ", "\x00", "a\x00.txt", "\x7f", "\x1b[2J", "\n", "\r\nSet-Cookie: a=b",
    "\u202egnp.txt", "\u200f\u200e", "\ufeff", "\ufffe", "\U000e0001", "\U0001f4a9", "e\u0301",
    "\u00e9", "\ud800", "\udfff\ud800", "a\udc80b", "x" * 64, "x" * 65, "x" * 255, "x" * 256,
    "x" * 5000, "../" * 1000, "-rf", "--help", "-", "_", "*", "?", "[a-z]", "{a,b}", "|id",
    ";id", "`id`", "$(id)", "&&id", "'; DROP TABLE files; --", '" OR 1=1', "%s%n%x", "%", "%%",
    "%zz", "{{7*7}}", "${7*7}", "<script>alert(1)</script>", "<!--", "]]>", "null", "None",
    "true", "NaN", "0", "-1", "1e999", "[]", "{}", "__proto__", "constructor", ".git/config",
    ".env", ".htaccess", "server.sqlite", "server.sqlite-wal", "lock", "files", "banks",
    "file-000000000000000000000000", "file-000000000000000000000000/../../server.sqlite",
    "x-00000000.bank", ".x-00000000.bank.partial", "x-00000000.bank-wal", "x-00000000.bank.kept",
)  # fmt: skip


def names() -> list[str]:
    """All names, each once."""
    up = [f"{step}/{target}" for step, target in product(UP, TARGETS)]
    up += [f"..\\..\\{target}" for target in TARGETS]
    slashes = [slash.join(("..", "..", "outside.txt")) for slash in SLASHES]
    dots = [dot * 3 + target for dot, target in product(DOTS, TARGETS)]
    ended = [f"{name}.txt" for name in (*ABSOLUTE, *ODD[:30])]
    return list(dict.fromkeys([*up, *slashes, *ABSOLUTE, *DEVICES, *dots, *ODD, *ended]))


NAMES = names()


def written(name: str, safe: str = "") -> str:
    """A name as a part of a URL."""
    return quote(name.encode("utf-8", "surrogatepass"), safe=safe)


def tree(folder: Path) -> dict[str, bytes | None]:
    """All files outside of the server's folder, with their content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "server" not in path.relative_to(folder).parts
    }


@pytest.fixture
def guarded(settings: ServerSettings, model: SeDeM, tmp_path: Path) -> Iterator[httpx.Client]:
    """A server with a bank, beside files that no request may touch."""
    for name in ("outside.txt", "etc/passwd", "secrets/server.sqlite"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(MARK)
    settings = settings.with_changes(max_documents=10_000)
    with (
        serving(settings, model) as served,
        httpx.Client(base_url=served.url, headers=bearer(SECRET), timeout=60) as client,
    ):
        assert send(client, "kept", {"kept.txt": "This stays where it is."}).status_code == 202
        before = tree(tmp_path)
        yield client
    assert tree(tmp_path) == before
    folder = tmp_path / "server"
    assert {path.name for path in folder.iterdir()} <= {*("uploads", "banks", "lock")}
    assert [*(folder / "uploads").iterdir()] == []
    beside = re.compile(r"-(wal|shm|journal)$|\.(sources|files)$")
    banks = {beside.sub("", path.name) for path in (folder / "banks").iterdir()}
    assert all(map(_BANK.fullmatch, banks))


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_names_in_urls(guarded: httpx.Client, method: str, route: str) -> None:
    assert len(NAMES) >= 300
    # Every second one with its slashes and dots as they are.
    targets = [
        route.format(written(name, safe=RAW if number % 2 else ""))
        for number, name in enumerate(NAMES)
    ]
    # As they are: a client library would tidy them.
    wire = Wire(str(guarded.base_url), SECRET)
    for target in targets:
        answer = wire.send(Shot("", method, target.encode("ascii")))
        assert 0 < answer.status < 500, (method, target)
        assert MARK not in answer.body
        if answer.status >= 400 and not route.startswith("/page"):
            assert answer.body.startswith(b'{"error":{"message":"'), target


def test_names_in_bodies(guarded: httpx.Client) -> None:
    for name in NAMES:
        for field in ("model", "bank"):
            body = {"model": "sedem", "messages": [{"role": "user", "content": name}], field: name}
            answer = guarded.post("/v1/chat/completions", content=json.dumps(body))
            assert 400 <= answer.status_code < 500, (field, name)
            assert MARK not in answer.content


def test_names_of_files(guarded: httpx.Client) -> None:
    """As the file's name in a form, in turn with a type that can be read or not."""
    for name, ending in zip(NAMES, cycle((b"", b".txt")), strict=False):
        raw = name.encode("utf-8", "surrogatepass").replace(b'"', b"%22")
        body = (
            b'--edge\r\nContent-Disposition: form-data; name="file"; filename="'
            + raw + ending + b'"\r\n\r\ntext\r\n--edge--\r\n'
        )  # fmt: skip
        answer = guarded.post(
            "/v1/banks/odd/documents",
            content=body,
            headers={"Content-Type": "multipart/form-data; boundary=edge"},
        )
        assert answer.status_code in (202, 400), name


def test_names_of_banks_in_uploads(guarded: httpx.Client) -> None:
    for name in NAMES:
        answer = guarded.post(
            f"/v1/banks/{written(name)}/documents", files={"file": ("a.txt", b"text")}
        )
        assert answer.status_code in (202, 400, 404, 405, 422), (name, answer.text)


def test_documents_are_named_as_their_files_and_read(guarded: httpx.Client) -> None:
    files = [
        ("file", ((name[:100] + ".txt"), b"Some text"))
        for name in NAMES[::7]
        if name.isprintable() and '"' not in name and "\\" not in name and name.strip()
    ]
    distinct = list({name: (field, (name, text)) for field, (name, text) in files}.values())
    assert guarded.post("/v1/banks/odd/documents", files=distinct).status_code == 202
    progress = read_all(guarded, "odd")
    assert (progress["status"], progress["failed"]) == ("ready", [])
    listed = guarded.get("/v1/banks/odd/documents").json()["data"]
    assert len(listed) == len(distinct)
