"""Every route but one needs a key, which sees its own banks and changes only what it may."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import READER, SCOPED, SECRET, bearer
from starlette.routing import BaseRoute
from unit.server.conftest import send

from sedem.errors import ConfigError
from sedem_serve.server import guard, keys
from sedem_serve.server.errors import bank_not_found
from sedem_serve.server.guard import ADDRESSES, WRONG_KEYS, WrongKeys
from sedem_serve.server.keys import Key, KeyRing, digest_of, keys_of
from sedem_serve.server.pages import COOKIE, FORM_BYTES

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW")
UNKNOWN = ("/", "/nothing", "//health", "/health/", "/HEALTH", "/health/../metrics", "/v1",
           "/login", "/logout")  # fmt: skip
SERVER, EVIL = "http://testserver", "http://evil.example"
FORM, PAGE = {"Origin": SERVER}, {"Accept": "text/html,application/xhtml+xml"}
LEASE = {"lease.txt": "The rent is 900 euros."}


def paths_of(routes: list[BaseRoute]) -> Iterator[str]:
    for route in routes:
        # Newer releases of FastAPI keep the routers that were included.
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        path = getattr(route, "path", None)
        if isinstance(path, str):
            yield re.sub(r"\{[^}]*\}", "x", path)
        if inner:
            yield from paths_of(inner)


def test_every_route_needs_a_key_but_health(app: FastAPI, anonymous: TestClient) -> None:
    documented = [re.sub(r"\{[^}]*\}", "x", path) for path in app.openapi()["paths"]]
    paths = {*paths_of(app.routes), *documented, *UNKNOWN}
    assert {"/v1/chat/completions", "/v1/banks", "/metrics", "/openapi.json", "/page/x"} <= paths
    served = set()
    for path in sorted(paths):
        for method in METHODS:
            response = anonymous.request(method, path)
            if response.status_code != 401:
                served.add((method, path, response.status_code))
            elif method != "HEAD" and "html" not in response.headers["content-type"]:
                assert response.json()["error"]["code"] == "invalid_api_key"
    # From another site or with no origin, signing in and out is refused as well.
    refused = {("POST", "/login", 403), ("POST", "/logout", 403)}
    assert served == {("GET", "/health", 200)} | refused


def test_a_wrong_key_is_refused_and_counted(client: TestClient, anonymous: TestClient) -> None:
    wrong = [
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer sedem-secret-of-nobody"},
        {"Authorization": f"Basic {SECRET}"},
        {"Authorization": SECRET},
        {"Authorization": f"Bearer {SECRET}x"},
        {"Authorization": f"Bearer {SECRET[:-1]}"},
        {"Authorization": "Bearer \xff\xfe"},
        {"Cookie": f"{COOKIE}=wrong"},
        {"X-Api-Key": SECRET},
        # A wrong key is not saved by a right cookie.
        {"Authorization": "Bearer wrong", "Cookie": f"{COOKIE}={SECRET}"},
    ]
    for headers in wrong:
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        response = anonymous.get("/ready", headers=encoded)  # type: ignore[arg-type]
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    counted = f'sedem_refused_total{{reason="key"}} {len(wrong)}.0'
    assert counted in client.get("/metrics").text
    # A key is no parameter of other routes.
    assert anonymous.get(f"/ready?key={SECRET}").status_code == 401
    assert anonymous.post(f"/?key={SECRET}").status_code == 401
    assert anonymous.get("/ready", headers={"Authorization": f"bearer {SECRET}"}).is_success


def test_a_bank_out_of_scope_is_as_one_that_does_not_exist(client: TestClient) -> None:
    scoped = bearer(SCOPED)
    assert send(client, "theirs", LEASE).status_code == 202
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/documents", None),
        ("GET", "/documents/0", None),
        ("GET", "/progress", None),
        ("DELETE", "", None),
        ("POST", "/scores", {"question": "Rent?"}),
    ):
        hidden, missing = (
            client.request(method, f"/v1/banks/{bank}{path}", json=body, headers=scoped)
            for bank in ("theirs", "nobody")
        )
        assert hidden.status_code == missing.status_code == 404
        assert hidden.text.replace("theirs", "nobody") == missing.text
    assert client.get("/v1/banks/theirs").is_success
    refused = send(client, "other", LEASE, headers=scoped)
    assert (refused.status_code, refused.json()) == (404, bank_not_found("other").body())
    assert send(client, "mine-1", LEASE, headers=scoped).status_code == 202
    listed = client.get("/v1/banks", headers=scoped).json()["data"]
    assert [bank["name"] for bank in listed] == ["mine-1"]


def test_a_key_that_may_only_ask_changes_and_counts_nothing(client: TestClient) -> None:
    assert send(client, "any", LEASE).status_code == 202
    for method, path, code in [
        ("POST", "/v1/banks/any/documents", "read_only_key"),
        ("DELETE", "/v1/banks/any", "read_only_key"),
        ("DELETE", "/v1/banks/any/documents/0", "read_only_key"),
        ("GET", "/metrics", "no_metrics"),
    ]:
        body: dict[str, Any] = {"files": {"file": ("a.txt", b"text")}} if method == "POST" else {}
        response = client.request(method, path, headers=bearer(READER), **body)
        assert response.status_code == 403, response.text
        assert response.json()["error"]["code"] == code
    assert [bank["name"] for bank in client.get("/v1/banks").json()["data"]] == ["any"]
    assert client.get("/v1/banks", headers=bearer(READER)).json()["writable"] is False


# The cookie of the page


def delete(page: TestClient, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return page.delete("/v1/banks/nothing", headers=named).status_code


def test_with_the_cookie_a_change_must_come_from_the_page(
    client: TestClient, anonymous: TestClient
) -> None:
    page, passes = anonymous, 404  # there is no such bank
    page.cookies.set(COOKIE, SECRET)
    assert page.get("/ready").is_success
    assert delete(page, Origin=SERVER) == passes
    assert delete(page, Origin="https://testserver") == passes  # TLS ends at a proxy
    assert delete(page, Sec_Fetch_Site="same-origin") == passes
    assert delete(page) == 403
    for origin in ("null", EVIL, f"{SERVER}.evil.example", "testserver", f"{SERVER}:8001",
                   f"{EVIL}/testserver"):  # fmt: skip
        assert delete(page, Origin=origin) == 403
    for site in ("cross-site", "same-site", "none", ""):
        assert delete(page, Sec_Fetch_Site=site, Origin=SERVER) == 403
    # With the header the origin does not matter.
    assert delete(client, Origin=EVIL) == passes


def test_a_browser_signs_in_with_a_form_and_out(anonymous: TestClient) -> None:
    shown = anonymous.get("/", headers=PAGE)
    assert shown.status_code == 401 and 'action="/login"' in shown.text
    assert "default-src 'none'" in shown.headers["Content-Security-Policy"]
    # With "no-referrer" the browser would send the form with the origin "null".
    assert shown.headers["Referrer-Policy"] == "same-origin"
    response = anonymous.post("/login", data={"key": f" {SECRET} "}, headers=FORM)
    assert (response.status_code, response.headers["Location"]) == (303, "/")
    cookie = response.headers["Set-Cookie"]
    assert cookie.startswith(f"{COOKIE}={SECRET};")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert "<title>" in anonymous.get("/", headers=PAGE).text
    assert anonymous.post("/logout", headers={"Origin": EVIL}).status_code == 403
    assert anonymous.get("/", headers=PAGE).is_success
    response = anonymous.post("/logout", headers=FORM)
    assert (response.status_code, response.headers["Location"]) == (303, "/")
    assert anonymous.get("/", headers=PAGE).status_code == 401


def test_a_wrong_form_or_one_of_another_site_gives_no_cookie(anonymous: TestClient) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    for content in (b"key=wrong", b"key=", b"", f"other={SECRET}".encode(), b"\xff\xfe",
                    b"key=%ff%00", b"k" * (FORM_BYTES + 1), b"&" * 900):  # fmt: skip
        response = anonymous.post("/login", content=content, headers={**FORM, **kind})
        assert response.status_code == 401 and 'action="/login"' in response.text
        assert "Set-Cookie" not in response.headers and "wrong" not in response.text
    for headers in ({"Origin": EVIL}, {"Sec-Fetch-Site": "cross-site"}, {}):
        response = anonymous.post("/login", data={"key": SECRET}, headers=headers)
        assert response.status_code == 403 and "Set-Cookie" not in response.headers


def test_the_address_with_the_key_becomes_a_cookie(anonymous: TestClient) -> None:
    wrong = anonymous.get("/?key=%3Cscript%3E", headers=PAGE)
    assert wrong.status_code == 401
    assert "Set-Cookie" not in wrong.headers and "<script>" not in wrong.text
    response = anonymous.get(f"/?key={SECRET}", headers=PAGE)
    assert (response.status_code, response.headers["Location"]) == (303, "/")
    assert response.headers["Cache-Control"] == "no-store"
    assert anonymous.get("/", headers=PAGE).is_success
    # Behind TLS the cookie is sent over TLS only.
    response = anonymous.get(f"https://testserver/?key={SECRET}")
    assert "Secure" in response.headers["Set-Cookie"].split("; ")


OWN = "a-secret-that-is-long"
DIGEST = "0" * 64


def key(name: str, secret: str = OWN, **more: Any) -> Key:
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


def test_scopes() -> None:
    for banks, bank in ((("*",), "any"), (("a", "b"), "b"), (("team-*",), "team-a")):
        assert key("ann", banks=banks).may_read(bank)
    for banks, bank in ((("a",), "ab"), (("team-*",), "team"), ((), "a")):
        assert not key("ann", banks=banks).may_read(bank)


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


def test_without_a_file_there_is_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.SECRET_VARIABLE, OWN)
    ring, made = keys_of(None)
    assert made is None and ring.find(OWN) is not None
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


def test_wrong_keys_of_an_address_slow_down() -> None:
    now = [0.0]
    wrong = WrongKeys(lambda: now[0])
    for _ in range(int(WRONG_KEYS)):
        assert wrong.left("a") >= 1
        wrong.take("a")
    assert wrong.left("a") < 1 <= wrong.left("b")
    now[0] += 1.0
    assert wrong.left("a") == 1.0
    now[0] += 3600.0
    assert wrong.left("a") == WRONG_KEYS
    for number in range(ADDRESSES + 5):
        wrong.take(str(number))
    assert len(wrong._buckets) == ADDRESSES


def test_an_address_with_many_wrong_keys_waits(
    anonymous: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "WRONG_KEYS_RATE", 1e-3)  # a slow machine gets no new tokens
    codes = [
        anonymous.get("/v1/banks", headers=bearer(f"wrong-key-of-somebody-{n}")).status_code
        for n in range(int(WRONG_KEYS) + 5)
    ]
    assert codes[: int(WRONG_KEYS)] == [401] * int(WRONG_KEYS) and codes[-1] == 429
    told = anonymous.get("/v1/banks", headers=bearer(SECRET))
    assert told.status_code == 429 and 0 < int(told.headers["Retry-After"]) <= 1000
    assert "too many wrong keys came from this address; try again in " in told.text
    assert anonymous.get("/v1/banks").status_code == 401, "a request without a key needs no wait"
    assert anonymous.get("/health").status_code == 200
