from __future__ import annotations

import base64
import hashlib
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sedem_serve.server.pages import FOLDER, TYPES, files, login_page, router


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


def test_files_and_elements_that_are_named_exist(page: TestClient) -> None:
    index = (FOLDER / "index.html").read_text("utf-8")
    scripts = "".join(path.read_text("utf-8") for path in FOLDER.glob("*.js"))
    named = {*re.findall(r"/page/([\w.]+)", index), *re.findall(r"from \"\./([\w.]+)\"", scripts)}
    assert named == set(files()) - {"index.html", "login.html"}
    for name in named:
        response = page.get(f"/page/{name}")
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["Content-Type"] == TYPES[f".{name.rsplit('.')[-1]}"]
    wanted = set(re.findall(r"\bby\(\"([\w-]+)\"\)", scripts))
    assert len(wanted) > 20
    assert wanted <= set(re.findall(r"\bid=\"([\w-]+)\"", index))


def test_the_form_for_a_key_says_why_it_is_shown_again() -> None:
    response = login_page('<b>"no"</b>')
    text = bytes(response.body).decode()
    assert response.status_code == 401
    assert "&lt;b&gt;&quot;no&quot;&lt;/b&gt;" in text
    assert "<b>" not in text
    assert response.headers["Cache-Control"] == "no-store"
    assert "{message}" not in bytes(login_page().body).decode()
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in response.headers["Content-Security-Policy"]
