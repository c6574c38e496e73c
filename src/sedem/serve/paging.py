"""Pages of lists, as OpenAI's clients request them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Query

from sedem.serve.errors import bad_request

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=10_000)]


@dataclass(frozen=True)
class Paging:
    """Which part of a list is requested.

    Attributes:
        limit: maximum number of items.
        after: id of the item after which the part begins; None means the start.
        before: id of the item before which the part ends.
        order: "asc" for the oldest first.
    """

    limit: Limit = 20
    after: str | None = None
    before: str | None = None
    order: Order = "desc"


Paged = Annotated[Paging, Depends()]


def page(items: Sequence[dict[str, Any]], wanted: Paging) -> dict[str, Any]:
    """Return a part of a list.

    Args:
        items: everything, the oldest first; each has an "id".
        wanted: the part to return.

    Raises:
        ApiError: 400, no item has the id that the part begins or ends with.
    """
    ordered = list(items if wanted.order == "asc" else reversed(items))
    ids = [item["id"] for item in ordered]
    for name, cursor in (("after", wanted.after), ("before", wanted.before)):
        if cursor is not None and cursor not in ids:
            raise bad_request(f"'{name}' is not an id in this list; leave it out", name)
    start = 0 if wanted.after is None else ids.index(wanted.after) + 1
    end = len(ids) if wanted.before is None else ids.index(wanted.before)
    part = ordered[start:end][: wanted.limit]
    return {
        "object": "list",
        "data": part,
        "first_id": part[0]["id"] if part else None,
        "last_id": part[-1]["id"] if part else None,
        "has_more": start + len(part) < end,
    }
