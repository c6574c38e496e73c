"""The folder of a server.

    folder/
      server.sqlite             files, banks, pending work
      files/file-...            uploaded bytes
      banks/<name>-<hex>.bank   the banks that clients made
      lock                      held by the server

Only this module makes paths from names given by clients, and only from checked bank names.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Set
from pathlib import Path

from filelock import FileLock, Timeout

from sedem.bank.file import delete
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import ConfigError

_BANK = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}-[0-9a-f]{8}\.bank")
_OF_BANK = re.compile(rf"\.?({_BANK.pattern})(\.partial|(\.kept)?(-wal|-shm|-journal)?)")
"""A bank, or what lies beside one; in earlier releases it was a folder, at first a hidden one."""


class ServerFolder:
    """The folder of one server, and the lock in it.

    Args:
        folder: the folder; created if it does not exist; only its owner has access.

    Raises:
        ConfigError: another server uses it, or it holds files or banks but no database.
    """

    def __init__(self, folder: Path) -> None:
        self.database, self.files, self._banks = (
            folder / name for name in ("server.sqlite", "files", "banks")
        )
        make_folders(folder)
        folder.chmod(0o700)
        # Any thread may release it.
        self._lock = FileLock(folder / "lock", timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(
                f"another server uses the folder '{folder}'; stop it, or give another folder"
            ) from None
        make_folders(self._banks)
        self._check_database(folder)

    def _check_database(self, folder: Path) -> None:
        """Refuse to start over next to files and banks that only the lost database could name."""
        if self.database.exists():
            return
        held = [
            path
            for place in (self.files, self._banks)
            if place.exists()
            for path in place.iterdir()
        ]
        if held:
            self.release()
            raise ConfigError(
                f"'{folder}' holds {len(held):,} files and banks, but not its database "
                f"'{self.database.name}'; restore that from a backup, or give another folder"
            )

    def release(self) -> None:
        """Let another server use the folder."""
        self._lock.release()

    def new_bank(self, name: str) -> str:
        """Return a name for a bank's file; a bank of the same name may have been deleted before.

        Args:
            name: a valid bank name.
        """
        return f"{name}-{secrets.token_hex(4)}.bank"

    @staticmethod
    def is_bank(name: str) -> bool:
        """Return whether a name is valid for the file of a bank."""
        return _BANK.fullmatch(name) is not None

    def bank(self, name: str) -> Path:
        """Return the path of a bank.

        Args:
            name: a name from `new_bank`.

        Raises:
            ConfigError: it is not such a name.
        """
        if not self.is_bank(name):
            raise ConfigError(
                f"'{name}' is not a bank's file; the server's database was changed by hand"
            )
        return self._banks / name

    def remove(self, bank: Path) -> None:
        """Remove a bank."""
        path = self.bank(bank.name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            delete(path)
        sync_folder(self._banks)

    def remove_others(self, banks: Set[str]) -> None:
        """Remove banks that are not among the given ones: a killed server left them."""
        for path in [*self._banks.iterdir()]:
            found = _OF_BANK.fullmatch(path.name)
            if found is None or found[1] in banks:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
