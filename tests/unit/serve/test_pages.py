from __future__ import annotations

import base64
import hashlib
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sedem.serve.pages import FOLDER, TYPES, files, login_page, router


@pytest.fixture
def page() -> TestClient:
    app = FastAPI()
    app.include_router(router)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/page/main.js", "/page/base.css"])
def test_a_browser_is_told_to_run_nothing_else(page: TestClient, path: str) -> None:
    response = page.get(path)
    assert response.status_code == 200
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_each_file_has_its_type(page: TestClient) -> None:
    for name in set(files()) - {"login.html", "index.html"}:
        response = page.get(f"/page/{name}")
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["Content-Type"] == TYPES[f".{name.rsplit('.')[-1]}"]


def test_a_file_that_the_browser_has_is_not_sent_again(page: TestClient) -> None:
    first = page.get("/page/main.js")
    assert first.headers["Cache-Control"] == "no-cache"
    again = page.get("/page/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = page.get("/page/main.js", headers={"If-None-Match": '"other"'})
    assert other.content == first.content


@pytest.mark.parametrize(
    "name",
    ["login.html", "none.js", "..%2fpages.py", "%2e%2e%2fpages.py", "..%5cpages.py", "main.js%00"],
)
def test_other_names_are_not_found(page: TestClient, name: str) -> None:
    assert page.get(f"/page/{name}").status_code == 404


def test_nothing_comes_from_another_host_or_runs_inline() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text("utf-8")
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"\son\w+=|style=|javascript:", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_every_file_that_is_named_exists() -> None:
    index = (FOLDER / "index.html").read_text("utf-8")
    named = set(re.findall(r"/page/([\w.]+)", index))
    for path in FOLDER.glob("*.js"):
        named.update(re.findall(r"from \"\./([\w.]+)\"", path.read_text("utf-8")))
    assert named == set(files()) - {"index.html", "login.html"}


def test_every_element_that_scripts_look_for_is_on_the_page() -> None:
    ids = set(re.findall(r"\bid=\"([\w-]+)\"", (FOLDER / "index.html").read_text("utf-8")))
    wanted = set()
    for path in FOLDER.glob("*.js"):
        wanted.update(re.findall(r"\bby\(\"([\w-]+)\"\)", path.read_text("utf-8")))
    assert len(wanted) > 20
    assert wanted <= ids


def test_the_form_for_a_key_says_why_it_is_shown_again() -> None:
    response = login_page('<b>"no"</b>')
    text = bytes(response.body).decode()
    assert response.status_code == 401
    assert "&lt;b&gt;&quot;no&quot;&lt;/b&gt;" in text
    assert "<b>" not in text
    assert response.headers["Cache-Control"] == "no-store"
    assert "{message}" not in bytes(login_page().body).decode()


def test_the_styles_of_the_form_are_the_ones_that_its_policy_allows() -> None:
    response = login_page()
    [style] = re.findall(r"<style>(.*?)</style>", bytes(response.body).decode(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in response.headers["Content-Security-Policy"]
