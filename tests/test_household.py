"""The household papers, which nobody trains on, hold the answers to their questions."""

from __future__ import annotations

from experiments.system.scales import HOUSEHOLD
from experiments.tools import household_examples
from sedem_lab.data.question_sets import open_examples


def test_the_questions_about_the_papers_are_those_that_are_measured() -> None:
    made = household_examples()
    assert len(made) == 22 and {len(example.documents) for example in made} == {8}
    assert [*open_examples(HOUSEHOLD, "own").examples] == made
