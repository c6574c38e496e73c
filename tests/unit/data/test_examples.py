from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sedem import Document
from sedem.data.examples import Evidence, Example, distinct_names
from sedem.errors import DataError

DOCUMENTS = (Document("a", "The rent is 900 euros."), Document("b", "It is due in May."))


def example(**changes: Any) -> Example:
    fields: dict[str, Any] = {
        "id": "q1",
        "documents": DOCUMENTS,
        "question": "What is the rent?",
        "answers": ("900 euros",),
        "evidence": (Evidence(0, 12, 21),),
        **changes,
    }
    return Example(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": ()}, "'q1' has no documents"),
        ({"question": " \n"}, "'q1' has an empty question"),
        ({"answers": ()}, "'q1' has no answer, or an empty one"),
        ({"answers": ("yes", " ")}, "'q1' has no answer, or an empty one"),
        ({"documents": (DOCUMENTS[0], DOCUMENTS[0])}, "'q1' has two documents of one name"),
        ({"id": "q\udce9"}, r"the id of an example is not Unicode text \('\\udce9' at char"),
        ({"question": "\ud83e?"}, "the question of example 'q1' is not Unicode text"),
        ({"answers": ("yes", "\ud83e")}, "an answer of example 'q1' is not Unicode text"),
        ({"evidence": (Evidence(2, 0, 1),)}, "evidence 0:1 in document 2, which has no such"),
        ({"evidence": (Evidence(0, 12, 23),)}, "evidence 12:23 in document 0, which has no such"),
        ({"evidence": (Evidence(0, -1, 4),)}, "evidence -1:4 in document 0"),
        ({"evidence": (Evidence(0, 4, 4),)}, "evidence 4:4 in document 0"),
    ],
)
def test_an_impossible_example_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        example(**changes)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "a (2)", "a (2) (2)", "", "untitled", "b"]), max_size=8))
def test_names_become_distinct(names: list[str]) -> None:
    distinct = distinct_names(names)
    assert len(distinct) == len(names)
    assert len(set(distinct)) == len(names)
    assert distinct_names(["Paris", "Paris ", "", " "]) == [
        "Paris", "Paris (2)", "untitled", "untitled (2)"
    ]  # fmt: skip
    # The first of each name keeps it, unless a count made before took it.
    assert all(new.startswith(old.strip()) for old, new in zip(names, distinct, strict=True))
