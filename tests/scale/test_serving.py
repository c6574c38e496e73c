"""A host is lost while questions run; starting hosts and replicas takes minutes."""

from __future__ import annotations

import pytest
from scale.hosts import not_permitted
from scale.serving import killed_host

pytestmark = pytest.mark.slow


def test_a_host_is_lost_and_no_answer_is_wrong() -> None:
    if reason := not_permitted():
        pytest.skip(reason)
    counts = killed_host(24)
    assert counts.wrong == 0
    assert counts.same + counts.broken == counts.asked == 24
    assert counts.same >= counts.asked // 2
