"""Garbage of a bank in an object store: what no commit names that anybody may still read.

A removal or a compaction leaves the objects of earlier commits, a killed writer those of a commit
that it never made. Nothing of it can be told from what a writer is just uploading, except by age.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from sedem.bank.store import object_commits
from sedem.bank.store.object_bucket import Bucket
from sedem.bank.store.object_commits import CATALOG_PARTS, COMMITS, SHARDS, Commit

KEEP = timedelta(days=1)
"""How long a replaced commit can be read, and how long a commit may take to be made."""


def collect(bucket: Bucket, newest: Commit, keep: timedelta = KEEP) -> int:
    """Remove commits that were replaced long ago, and old objects that no other commit names.

    The clocks of this machine and of the store should not differ by more than a part of `keep`.

    Args:
        bucket: where the bank is.
        newest: its newest commit, which stays.
        keep: longer than any reader uses a commit, and than any writer needs for one.

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
    # Commits first: one whose objects are gone must not be found.
    bucket.delete(gone)
    bucket.delete(objects)
    return len(gone) + len(objects)
