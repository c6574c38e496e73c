"""Free the space of removed documents while questions are answered.

A bank is copied without them into a new folder, and one database transaction moves the bank there.
Running answers keep the old folder until they have ended.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from pathlib import Path

from sedem.bank.memory_bank import MemoryBank
from sedem.bank.store.checksums import State
from sedem.bank.store.compacted_copy import compacted_copy, state_of
from sedem.durable_files import bytes_text, folder_bytes
from sedem.errors import BankError
from sedem.serve.bank_entry import BankEntry
from sedem.serve.library import Library

logger = logging.getLogger(__name__)


class Compactor:
    """Compacts the banks of a library, one at a time, in the thread that reads files into them.

    Args:
        library: the banks. Its setting `max_removed_share` says when one is compacted.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        # Banks that could not be compacted, and their number of removed blocks then.
        self._failed: weakref.WeakKeyDictionary[BankEntry, int] = weakref.WeakKeyDictionary()

    def turn(self) -> bool:
        """Compact a bank that needs it.

        Returns:
            Whether there was one.
        """
        limit = self.library.settings.max_removed_share
        for entry in self.library.entries():
            if entry.id is None or entry.bank is None or entry.error is not None:
                continue
            stored, removed = stored_blocks(entry.bank)
            # The parts of a document that is not complete yet count as removed.
            needed = removed > limit * stored and not self.library.reading.has_work(entry.id)
            if needed and self._failed.get(entry) != removed:
                self._compact(entry, removed)
                return True
        return False

    def _compact(self, entry: BankEntry, removed: int) -> None:
        library, old = self.library, entry.folder
        new = library.place.bank(library.place.new_bank(entry.name))
        with library.database.writing() as connection:
            # Until the bank is moved there, a killed server would leave the folder behind.
            library.trash.note(connection, new)
        try:
            state = compacted_copy(old, new)
            before, after = folder_bytes(old), folder_bytes(new)
            moved = self._move(entry, new, state)
        except (BankError, OSError) as error:
            logger.warning("bank '%s' could not be compacted: %s", entry.name, error)
            self._failed[entry] = removed
            moved = False
        if moved:
            logger.info(
                "bank '%s' was compacted from %s to %s",
                entry.name,
                bytes_text(before),
                bytes_text(after),
            )
        else:
            with suppress(OSError):  # the next start removes it
                library.trash.remove(new)

    def _move(self, entry: BankEntry, folder: Path, copied: State) -> bool:
        """Move a bank to another folder, unless it was deleted or written since."""
        library = self.library
        with library.changing, entry.changing:
            assert entry.id is not None
            if library.by_id(entry.id) is None or state_of(entry.folder) != copied:
                return False
            bank, former = MemoryBank.open(folder), entry.folder
            with library.database.writing() as connection:
                connection.execute(
                    "UPDATE banks SET folder = ? WHERE id = ?", (folder.name, entry.id)
                )
                library.trash.keep(connection, folder)
                library.trash.note(connection, former)
            library.trash.leave(former, entry.move(folder, bank))
        return True


def stored_blocks(bank: MemoryBank) -> tuple[int, int]:
    """Return the blocks in a bank's files, and how many of them belong to removed documents."""
    now = bank.contents
    stored = sum(map(len, now.pieces))
    return stored, stored - len(now.blocks)
