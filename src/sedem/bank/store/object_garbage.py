"""Garbage of a bank in an object store: objects that no readable commit names.

A removal or a compaction leaves objects of earlier commits; a killed writer leaves objects of a
commit that it never made. Only their age distinguishes them from objects that are being uploaded.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from sedem.bank.store import object_commits
from sedem.bank.store.object_bucket import Bucket
from sedem.bank.store.object_commits import CATALOG_PARTS, COMMITS, SHARDS, Commit

KEEP = timedelta(days=1)
"""How long a replaced commit stays readable, and how long making a commit may take."""


def collect(bucket: Bucket, newest: Commit, keep: timedelta = KEEP) -> int:
    """Remove commits that were replaced long ago, and old objects that no other commit names.

    The clocks of this machine and the store should differ by no more than a fraction of `keep`.

    Args:
        bucket: where the bank is.
        newest: its newest commit, which stays.
        keep: longer than any reader uses a commit and any writer takes to make one.

    Returns:
        Number of objects that were removed.

    Raises:
        BankError: the store cannot be used.
    """
    before = datetime.now(UTC) - keep
    listed = sorted(bucket.entries(COMMITS), key=lambda entry: entry.name)
    named = set(newest.objects)
    gone = []
    for entry, following in pairwise(listed):
        # A commit was replaced when the one after it was made.
        if entry.name < newest.name and following.modified <= before:
            gone.append(entry.name)
        elif (commit := object_commits.read(bucket, entry.name)) is not None:
            named |= commit.objects
    for entry in listed[-1:]:
        if entry.name > newest.name and (commit := object_commits.read(bucket, entry.name)):
            named |= commit.objects
    objects = [
        entry.name
        for folder in (SHARDS, CATALOG_PARTS)
        for entry in bucket.entries(folder)
        if entry.name not in named and entry.modified <= before
    ]
    # Commits first: a commit whose objects are gone must not be found.
    bucket.delete(gone)
    bucket.delete(objects)
    return len(gone) + len(objects)
