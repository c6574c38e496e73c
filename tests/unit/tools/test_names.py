"""What documents an agent means by names, paths, addresses and scopes."""

from __future__ import annotations

import os
import unicodedata

import pytest

from sedem_serve.tools.names import Names

ROOT = os.path.abspath("papers")
DOCUMENTS = [
    "lease.txt",
    "Büro/Mietvertrag.md",
    "kitchen/recipe.txt",
    "a b#1%.txt",
    "old/recipe.txt",
]
NAMES = Names(("papers", name, [ROOT]) for name in DOCUMENTS)
NFD = unicodedata.normalize("NFD", "Büro/Mietvertrag.md")


@pytest.mark.parametrize(
    ("written", "index"),
    [
        ("lease.txt", 0), ("papers/lease.txt", 0), ("./lease.txt", 0), ("/lease.txt", 0),
        ("papers\\lease.txt", 0), (".\\LEASE.TXT", 0), ("x/../lease.txt", 0), (" Lease.txt ", 0),
        (f"{ROOT}/lease.txt", 0), (f"file://{ROOT}/lease.txt", 0), ("file:lease.txt", 0),
        (f"file://localhost{ROOT}/lease.txt#L1", 0), ("lease.txt#L10-L20", 0),
        ("./papers/lease.txt", 0), ("sedem:///papers/lease.txt#page=2", 0),
        ("Büro/Mietvertrag.md", 1), (NFD, 1), (NFD.upper(), 1), (f"{ROOT}/{NFD}", 1),
        ("sedem:///papers/B%C3%BCro/Mietvertrag.md", 1), ("mietvertrag.md", 1),
        (f"file://{ROOT}/B%C3%BCro/Mietvertrag.md", 1), ("büro\\mietvertrag.md#L3", 1),
        ("a b#1%.txt", 3), ("a b#1%.txt#L1", 3), ("file:///a%20b%231%25.txt", 3),
        ("kitchen/recipe.txt:3-9", 2),
    ],
)  # fmt: skip
def test_a_document_is_found_by_what_it_may_be_called(written: str, index: int) -> None:
    found, span = NAMES.named(written)
    assert found == [index] and span == ((3, 9) if written.endswith(":3-9") else None)
    assert NAMES.within(written) == {index}


@pytest.mark.parametrize("written", ["none.txt", "/else/lease.txt", "ease.txt", "\0", "\ud800", ""])
def test_another_name_is_no_document(written: str) -> None:
    assert NAMES.named(written) == ([], None)


def test_the_end_of_a_path_may_be_the_name_of_several() -> None:
    assert NAMES.named("recipe.txt")[0] == [2, 4] and NAMES.named("old/recipe.txt")[0] == [4]
    same = Names([("a", "x.txt", []), ("a", "X.txt", []), ("a", "y/x.txt", [])])
    assert [same.named(one)[0] for one in ("x.txt", "X.txt", "./x.TXT", "y/X.txt")] == [
        [0], [1], [0, 1], [2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("scope", "indexes"),
    [
        ("kitchen", [2]), ("./kitchen/", [2]), ("KITCHEN\\", [2]), (f"{ROOT}/kitchen", [2]),
        (f"file://{ROOT}/kitchen/", [2]), ("papers/kitchen", [2]), ("*.MD", [1]),
        ("B\u0075\u0308ro/", [1]),
        ("*/recipe.txt", [2, 4]), ("recipe.txt", [2, 4]), ("attic/", []),
        *((every, [0, 1, 2, 3, 4]) for every in (
            "", ".", "./", "/", "*", "**", "all", "ALL", "papers", "papers/", ROOT, f"file://{ROOT}")),
    ],
)  # fmt: skip
def test_a_scope_is_a_folder_a_pattern_or_everything(scope: str, indexes: list[int]) -> None:
    assert sorted(NAMES.within(scope)) == indexes


def test_a_folder_that_is_called_all_is_a_folder() -> None:
    assert Names([("a", "all/x.txt", []), ("a", "y.txt", [])]).within("all") == {0}
