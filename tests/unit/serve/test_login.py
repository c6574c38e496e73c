from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from serving import SECRET

from sedem.serve.pages import COOKIE, FORM_BYTES

PAGE = {"Accept": "text/html,application/xhtml+xml"}
FORM = {"Origin": "http://testserver"}


@pytest.fixture
def browser(anonymous: TestClient) -> TestClient:
    anonymous.follow_redirects = False
    return anonymous


def test_a_browser_without_a_key_sees_a_form(browser: TestClient) -> None:
    response = browser.get("/", headers=PAGE)
    assert response.status_code == 401
    assert 'action="/login"' in response.text
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    # With "no-referrer" the browser would send the form with the origin "null".
    assert response.headers["Referrer-Policy"] == "same-origin"
    assert browser.get("/").json()["error"]["code"] == "invalid_api_key"


def test_the_form_takes_a_key_and_goes_to_the_page(browser: TestClient) -> None:
    response = browser.post("/login", data={"key": f" {SECRET} "}, headers=FORM)
    assert response.status_code == 303
    assert response.headers["Location"] == "/"
    cookie = response.headers["Set-Cookie"]
    assert cookie.startswith(f"{COOKIE}={SECRET};")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert browser.get("/", headers=PAGE).is_success


def test_a_wrong_key_shows_the_form_again(browser: TestClient) -> None:
    for data in [{"key": "wrong"}, {"key": ""}, {}, {"other": SECRET}]:
        response = browser.post("/login", data=data, headers=FORM)
        assert response.status_code == 401
        assert 'action="/login"' in response.text
        assert "Set-Cookie" not in response.headers
        assert "wrong" not in response.text


def test_any_body_is_answered(browser: TestClient) -> None:
    for body in [b"\xff\xfe", b"key=%ff%00", b"k" * (FORM_BYTES + 1), b"&" * 900]:
        headers = {**FORM, "Content-Type": "application/x-www-form-urlencoded"}
        assert browser.post("/login", content=body, headers=headers).status_code == 401


def test_another_site_cannot_sign_a_browser_in(browser: TestClient) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {}):
        response = browser.post("/login", data={"key": SECRET}, headers=headers)
        assert response.status_code == 403
        assert "Set-Cookie" not in response.headers


def test_the_address_with_the_key_becomes_a_cookie(browser: TestClient) -> None:
    response = browser.get(f"/?key={SECRET}", headers=PAGE)
    assert (response.status_code, response.headers["Location"]) == (303, "/")
    assert response.headers["Cache-Control"] == "no-store"
    assert browser.get("/", headers=PAGE).is_success


def test_a_wrong_key_in_the_address_shows_the_form(browser: TestClient) -> None:
    response = browser.get("/?key=%3Cscript%3E", headers=PAGE)
    assert response.status_code == 401
    assert "Set-Cookie" not in response.headers
    assert "<script>" not in response.text


def test_behind_tls_the_cookie_is_sent_over_tls_only(browser: TestClient) -> None:
    response = browser.get(f"https://testserver/?key={SECRET}")
    assert "Secure" in response.headers["Set-Cookie"].split("; ")


def test_signing_out_forgets_the_key(browser: TestClient) -> None:
    browser.post("/login", data={"key": SECRET}, headers=FORM)
    assert browser.post("/logout", headers={"Origin": "http://evil.example"}).status_code == 403
    assert browser.get("/", headers=PAGE).is_success
    response = browser.post("/logout", headers=FORM)
    assert (response.status_code, response.headers["Location"]) == (303, "/")
    assert browser.get("/", headers=PAGE).status_code == 401
