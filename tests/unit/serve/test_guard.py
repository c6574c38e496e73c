from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import READER, SCOPED, SECRET, bearer
from starlette.routing import BaseRoute

from sedem.serve.errors import bank_not_found
from sedem.serve.pages import COOKIE

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW")
UNKNOWN = (
    "/",
    "/nothing",
    "//health",
    "/health/",
    "/HEALTH",
    "/health/../metrics",
    "/v1",
    "/login",
    "/logout",
)
SERVER = "http://testserver"


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


def test_a_wrong_key_is_refused(anonymous: TestClient) -> None:
    for headers in [
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
    ]:
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        response = anonymous.get("/ready", headers=encoded)  # type: ignore[arg-type]
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"


def test_a_key_is_no_parameter_of_other_routes(anonymous: TestClient) -> None:
    assert anonymous.get(f"/ready?key={SECRET}").status_code == 401
    assert anonymous.post(f"/?key={SECRET}").status_code == 401


def test_the_scheme_of_the_header_may_be_in_lower_case(anonymous: TestClient) -> None:
    assert anonymous.get("/ready", headers={"Authorization": f"bearer {SECRET}"}).is_success


def test_a_bank_out_of_scope_is_as_one_that_does_not_exist(client: TestClient) -> None:
    files = {"file": ("lease.txt", b"The rent is 900 euros.", "text/plain")}
    assert client.post("/v1/banks/theirs/documents", files=files).status_code == 202
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/documents", None),
        ("GET", "/documents/0", None),
        ("GET", "/progress", None),
        ("DELETE", "", None),
        ("POST", "/scores", {"question": "Rent?"}),
    ):
        hidden, missing = (
            client.request(method, f"/v1/banks/{bank}{path}", json=body, headers=bearer(SCOPED))
            for bank in ("theirs", "nobody")
        )
        assert hidden.status_code == missing.status_code == 404
        assert hidden.text.replace("theirs", "nobody") == missing.text
    assert client.get("/v1/banks/theirs").is_success


def test_a_scoped_key_sees_and_makes_only_its_banks(
    client: TestClient, anonymous: TestClient
) -> None:
    files = {"file": ("lease.txt", b"The rent is 900 euros.", "text/plain")}
    assert client.post("/v1/banks/theirs/documents", files=files).status_code == 202
    scoped = bearer(SCOPED)
    refused = anonymous.post("/v1/banks/other/documents", files=files, headers=scoped)
    assert refused.status_code == 404
    assert refused.json() == bank_not_found("other").body()
    made = anonymous.post("/v1/banks/mine-1/documents", files=files, headers=scoped)
    assert made.status_code == 202
    listed = anonymous.get("/v1/banks", headers=scoped).json()["data"]
    assert [bank["name"] for bank in listed] == ["mine-1"]


def test_a_read_only_key_changes_nothing(client: TestClient, anonymous: TestClient) -> None:
    for method, path in [
        ("POST", "/v1/banks/any/documents"),
        ("DELETE", "/v1/banks/any"),
        ("DELETE", "/v1/banks/any/documents/0"),
    ]:
        files = {"file": ("lease.txt", b"The rent is 900 euros.", "text/plain")}
        assert client.post("/v1/banks/any/documents", files=files).status_code == 202
        body: dict[str, Any] = {"files": files} if method == "POST" else {}
        response = anonymous.request(method, path, headers=bearer(READER), **body)
        assert response.status_code == 403, response.text
        assert response.json()["error"]["code"] == "read_only_key"
        assert [bank["name"] for bank in client.get("/v1/banks").json()["data"]] == ["any"]


# The cookie of the page


@pytest.fixture
def page(anonymous: TestClient) -> TestClient:
    """A browser that is signed in."""
    anonymous.cookies.set(COOKIE, SECRET)
    return anonymous


def delete(page: TestClient, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return page.delete("/v1/banks/nothing", headers=named).status_code


def test_the_cookie_is_a_key(page: TestClient) -> None:
    assert page.get("/ready").is_success
    assert "<title>" in page.get("/", headers={"Accept": "text/html"}).text


def test_with_the_cookie_a_change_must_come_from_the_page(page: TestClient) -> None:
    passes = 404  # there is no such bank
    assert delete(page, Origin=SERVER) == passes
    assert delete(page, Origin="https://testserver") == passes  # TLS ends at a proxy
    assert delete(page, Sec_Fetch_Site="same-origin") == passes
    assert delete(page) == 403
    for origin in ("null", "http://evil.example", "http://testserver.evil.example", "testserver",
                   "http://testserver:8001", "http://evil.example/testserver"):  # fmt: skip
        assert delete(page, Origin=origin) == 403
    for site in ("cross-site", "same-site", "none", ""):
        assert delete(page, Sec_Fetch_Site=site, Origin=SERVER) == 403


def test_with_the_header_the_origin_does_not_matter(client: TestClient) -> None:
    assert delete(client, Origin="http://evil.example") == 404
