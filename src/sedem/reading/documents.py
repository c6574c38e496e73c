"""A user's own files as documents, read one at a time, and what is known of them later.

That is kept beside their bank, in BANK.sources, which may be deleted: then every file is compared
with the bank.
"""

from __future__ import annotations

import glob
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from sedem.durable_files import atomic_write, create_private
from sedem.errors import DataError, cut, printable
from sedem.reading.document_formats import CODE, PARSERS, ending_of, is_text, parse_file
from sedem.types import Answer, Document
from sedem.untrusted import DOCUMENT_BYTES, check_file, exists, is_folder, open_file, read_json

if TYPE_CHECKING:
    from sedem.bank.file import Place  # its import takes long

ENDINGS = tuple(PARSERS)
LISTED = f"{', '.join(name for name in ENDINGS if name not in CODE)} and source code"
HEAD_BYTES = 2**12
"""Bytes that tell whether a file without an ending is text."""
UNKNOWN = "of an unknown type"
"""Why a file that nobody named is left out if no parser reads it."""
NAMED = 10
"""Files that are named of those left out for the same reason."""

_PROGRAMS = frozenset(("node_modules", "site-packages", "venv", "__pycache__"))
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")

LeftOut = dict[str, list[str]]
"""Names of files and folders that are not read, by the reason."""


class DocumentFiles(Iterable[Document]):
    """Files as documents, named by their paths and read one at a time.

    Files that cannot be read are left out, unless it is `strict`.

    Args:
        name_of: names the document of a file; two paths of one name are one document.

    Attributes:
        paths: each file, by the name of its document, without those left out.
        sizes: their bytes.
        failed: one sentence for each file that could not be read.
        left_out: what was not read, by the reason.
        notes: sentences on what was left out of documents, or guessed.

    Raises:
        DataError: a folder or a pattern has no file; or, if it is strict, a file is missing, of
            another type or too large. Strict reading raises the errors of `read_document`.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        encoding: str | None = None,
        *,
        strict: bool = False,
        include: Sequence[str] = (),
        name_of: Callable[[Path], str] = os.path.normpath,
    ) -> None:
        self.encoding, self.strict, self.include = encoding, strict, include
        self.paths: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}
        self.failed: list[str] = []
        self.left_out: LeftOut = {}
        self.notes: list[str] = []
        for path in files_in(sources, left_out=self.left_out, include=include):
            try:
                size = size_of(path, include)
            except DataError as error:
                self._fail(path, error)
            else:
                name = name_of(path)
                self.paths.setdefault(name, path)
                self.sizes.setdefault(name, size)

    def __iter__(self) -> Iterator[Document]:
        """Read the files."""
        for name, path in tuple(self.paths.items()):
            try:
                document = read_document(path, self.encoding, self.include)
            except DataError as error:
                self._fail(path, error)
                del self.paths[name], self.sizes[name]
            else:
                self.notes += document.notes
                yield replace(document, name=name)

    def fail(self, name: str, error: DataError) -> None:
        """List a document that cannot be read; raise the error if it is strict."""
        self._fail(self.paths[name], error)

    def _fail(self, path: Path, error: DataError) -> None:
        if self.strict:
            raise error
        self.failed.append(str(error))
        self.left_out.setdefault("not readable", []).append(str(path))


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Read files as documents, named by their paths; see `read_document`."""
    return [read_document(path) for path in paths]


Given = str | os.PathLike[str] | Document
"""A document, or the path of one, of a folder of them, or a pattern of paths."""


def documents_of(given: Given | Iterable[Given]) -> list[Document]:
    """Return documents as they are, and the files behind paths as `sedem build` reads them.

    Raises:
        DataError: a path is missing, a file cannot be read, or something is neither a path nor a
            document.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    found: list[Document] = []
    for one in cast("Iterable[Given]", given if several else [given]):
        if not isinstance(one, str | os.PathLike | Document):
            raise DataError(f"{one!r} is no document; give paths, or a Document(name, text)")
        found += [one] if isinstance(one, Document) else DocumentFiles([Path(one)], strict=True)
    return found


def files_in(
    sources: Sequence[Path],
    endings: Sequence[str] = ENDINGS,
    *,
    left_out: LeftOut | None = None,
    include: Sequence[str] = (),
) -> list[Path]:
    """Files as given, and all documents in folders and matching patterns.

    Args:
        sources: files, folders and patterns such as "reports/**/*.pdf".
        left_out: is given the names of what is in them and no document.
        include: patterns of names or paths of what is taken all the same.

    Raises:
        DataError: a folder or a pattern has no such file.
    """
    found: list[Path] = []
    aside: LeftOut = {} if left_out is None else left_out

    def take(path: Path, inner: str, why: str) -> bool:
        if why and not _matches(path.name, inner, include):
            aside.setdefault(why, []).append(str(path))
            return False
        return True

    for source in sources:
        if is_folder(source):
            chosen = [*_documents_below(source, endings, take, include)]
        elif glob.has_magic(str(source)) and not exists(source):
            # The folder that the pattern begins in.
            home = Path(*takewhile(lambda part: not glob.has_magic(part), source.parts)).resolve()
            chosen = []
            for path in map(Path, sorted(glob.iglob(str(source), recursive=True))):
                if is_folder(path):
                    continue
                # A folder on the way to a file may be no folder of documents.
                way = (one for one in path.parents if one.name and one.name not in source.parts)
                above = next(filter(None, (_folder_reason(one, one.resolve()) for one in way)), "")
                why = above or _link_reason(path, home) or _reason(path, endings)
                if take(path, str(path), why):
                    chosen.append(path)
        else:
            found.append(source)
            continue
        if not chosen:
            raise DataError(
                f"'{source}' holds no file that can be read ({LISTED}){told_left_out(aside)}"
            )
        found += chosen
    return list(dict.fromkeys(found))


def unknown_type(name: str) -> str:
    """Return the rest of a sentence about a file of an unknown type; empty if it is known."""
    ending = ending_of(name)
    if not ending or ending in PARSERS:
        return ""
    return f"is of the type '{ending}'; {LISTED} files can be read: save it as one of them"


def _matches(name: str, place: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, one) or fnmatch(place, one) for one in patterns)


def told_left_out(left_out: LeftOut, what: str = "left out") -> str:
    """Return what was left out and why, as the end of a sentence; empty if nothing was."""
    if not left_out:
        return ""
    parts = []
    for why, names in left_out.items():
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        parts.append(f"{why}: {', '.join(cut(printable(one)) for one in names[:NAMED])}{more}")
    return f"; {what} {sum(map(len, left_out.values())):,} ({'; '.join(parts)})"


def _documents_below(
    root: Path,
    endings: Sequence[str],
    take: Callable[[Path, str, str], bool],
    include: Sequence[str],
) -> Iterator[Path]:
    """The documents in a folder and the folders in it, in order."""
    home, found = root.resolve(), list[Path]()
    shut: dict[str, str] = {}

    def failed(error: OSError) -> None:
        take(Path(error.filename), "", "not readable")

    for folder, folders, names in os.walk(root, onerror=failed):
        inner = Path(folder).relative_to(root)
        why_all = shut.get(str(inner), "")
        for name in sorted(folders):
            place = str(inner / name)
            why = why_all or _folder_reason(Path(folder, name), home)
            if take(Path(folder, name), place, why):
                continue
            # A pattern may name what is in a folder that is left out.
            if any(pattern.startswith(f"{place}/") for pattern in include):
                shut[place] = why
            else:
                folders.remove(name)
        for name in names:
            path = Path(folder, name)
            why = why_all or _link_reason(path, home) or _reason(path, endings)
            if take(path, str(inner / name), why):
                found.append(path)
    yield from sorted(found)


def _folder_reason(path: Path, home: Path) -> str:
    """Why a folder is no folder of documents; empty if it is one."""
    if path.name.startswith("."):
        return "hidden"
    if path.name in _PROGRAMS or any(exists(path / name) for name in _ENVIRONMENT):
        return "of programs"
    return _link_reason(path, home)


def _link_reason(path: Path, home: Path) -> str:
    try:
        leads_out = path.is_symlink() and not path.resolve().is_relative_to(home)
    except (OSError, RuntimeError):  # links that lead to each other
        return "links to nothing"
    return "links that lead out" if leads_out else ""


def _reason(path: Path, endings: Sequence[str]) -> str:
    """Why a file that nobody named is no document; empty if it is one."""
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        return "names that are not UTF-8"
    if path.name.startswith("."):
        return "hidden"
    if path.name.startswith("~$"):
        return "lock files"
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and not found.st_size:
            return "empty"
    except OSError:
        return "links to nothing"
    if (ending := ending_of(path.name)) in endings:
        return ""
    with suppress(DataError, OSError):
        if not ending:
            with open_file(path, DataError) as file:
                if is_text(file.read(HEAD_BYTES)):
                    return ""
    return UNKNOWN


def read_document(
    path: Path,
    encoding: str | None = None,
    include: Sequence[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Document:
    """Read one file as a document.

    Raises:
        DataError: the file is missing, a folder, of another type, binary, damaged, encrypted,
            empty or in another encoding, or larger or slower than can be read.
        StoppedError: `stopped` returned true.
    """
    size_of(path, include)
    return Document(os.path.normpath(path), *parse_file(path, str(path), encoding, stopped))


def size_of(path: Path, include: Sequence[str] = ()) -> int:
    """Return the size of a file in bytes; refuse one of an unknown type before it is read.

    Args:
        include: patterns of names or paths whose type does not matter.

    Raises:
        DataError: it is missing, a folder, of another type, or larger than can be read.
    """
    if is_folder(path):
        raise DataError(f"'{path}' is a folder; give its files, such as {path}/*.txt")
    if not exists(path):
        raise DataError(f"there is no file or folder '{path}'")
    if (why := unknown_type(path.name)) and not _matches(path.name, str(path), include):
        raise DataError(f"'{path}' {why}")
    try:
        check_file(path, DataError, DOCUMENT_BYTES)
        return path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"there is no file or folder '{path}'") from None


# The files of a bank

NOTE = ".note"
"""Ending of the name of a note; no file of such a name is read, so the two are never confused."""
Stamp = tuple[int, int]
"""Size and time of the last change of a file."""


class Seen(NamedTuple):
    """A file as it was when it was read; SHA-256 of its bytes, if that is known."""

    size: int
    changed: int
    sha256: str
    path: str


class Failed(NamedTuple):
    """A file as it was when it could not be read, the reason, and when that was, in Unix time."""

    size: int
    changed: int
    why: str
    at: float


AGAIN_SECONDS = 3600
"""After so long, another process tries what could not be read again."""


class Record:
    """The files that the documents of a bank were read from, beside it.

    Attributes:
        files: each file as it was when it was read, by the name of its document.
        failed: those that could not be read, likewise.
        lost: documents whose files are out of reach, until they are back.
    """

    def __init__(self, place: Place) -> None:
        self.path = None if "://" in str(place) else Path(f"{Path(place)}.sources")
        self._saved = ""
        self.load()

    def forget(self) -> None:
        """Know nothing."""
        self.files, self.lost = dict[str, Seen](), set[str]()
        self.failed: dict[str, Failed] = {}
        self._names: dict[str, str] = {}

    def load(self) -> None:
        """Read what was saved; nothing is known if that cannot be read."""
        self.forget()
        try:
            stored = read_json(self.path or Path(), DataError, DOCUMENT_BYTES)
            self.files = {str(name): Seen(*seen) for name, seen in stored["files"].items()}
            self.lost = {str(name) for name in stored["lost"]}
            tried = {str(name): Failed(*one) for name, one in stored.get("failed", {}).items()}
            since = time.time() - AGAIN_SECONDS
            self.failed = {name: one for name, one in tried.items() if one.at > since}
        except (OSError, DataError, AttributeError, KeyError, TypeError, ValueError):
            pass
        self._names = {seen.path: name for name, seen in self.files.items()}

    def save(self) -> None:
        """Write it, if it has changed."""
        lost = sorted(self.lost)
        content = json.dumps({"files": self.files, "lost": lost, "failed": self.failed})
        if self.path is None or content == self._saved:
            return
        with atomic_write(self.path) as beside:
            create_private(beside)
            beside.write_text(content, encoding="utf-8")
        self._saved = content

    def name_of(self, path: Path) -> str:
        """Return the name of a file's document, wherever and however a command spells its path.

        It is the path as it was given first, unless another file has that name.
        """
        at = canonical(path)
        name = self._names.get(at) or os.path.normpath(path)
        other = self.files.get(name)
        if other is not None and other.path != at and exists(Path(other.path)):
            name = at
        self.files[name], self._names[at] = Seen(*(stamp_of(path) or (0, 0)), "", at), name
        return name

    def gone(
        self, names: Sequence[str], sources: Sequence[Path], found: Mapping[str, Path]
    ) -> list[str]:
        """Return the documents whose files were deleted from folders or patterns.

        Args:
            names: all documents of the bank.
            found: the files that are there, by the names of their documents.
        """
        places = [
            os.path.join(glob.escape(os.path.realpath(one)), "*")
            if is_folder(one)
            else canonical(one).replace("**/", "*")
            for one in sources
        ]
        held = {}
        for name in names:
            # A bank of an earlier release does not know its files.
            at = self.files[name].path if name in self.files else canonical(Path(name))
            known = name in self.files or (not name.endswith(NOTE) and not unknown_type(name))
            if known and any(fnmatch(at, place) for place in places):
                held[name] = Path(at)
        missing = {name: path for name, path in held.items() if not exists(path)}
        self.keep_lost(missing, len(held), {stamp_of(path) for path in found.values()})
        return [name for name in missing if name not in self.lost]

    def with_notes(self, answer: Answer) -> Answer:
        """Return an answer that says which of its sources have no file any more."""
        cited = dict.fromkeys(citation.document for citation in answer.citations)
        gone = (n for n in cited if n in self.files and not exists(Path(self.files[n].path)))
        return replace(answer, cut=(*answer.cut, *(f"the file of '{n}' is gone" for n in gone)))

    def keep_lost(
        self, missing: Mapping[str, Path], held: int, there: Collection[Stamp | None]
    ) -> None:
        """See which of the missing files were not deleted, it seems.

        They are all if most of the files that are `held` are missing; and those behind a link or in
        an inner folder that cannot be read or is empty. A file that was moved is not lost: one of
        its size and time is `there`. What is lost stays so until it is back.
        """
        gone = {
            name: path
            for name, path in missing.items()
            if not (name in self.files and self.files[name][:2] in there) and not exists(path)
        }
        if len(gone) > 1 and 2 * len(gone) > held:
            self.lost = set(gone)
            return
        folders = {name: _nearest(path) for name, path in gone.items()}
        count = Counter(folders.values())
        away = {one for one in count if one[1] is None or (one[1] == 0 and count[one] > 1)}
        self.lost = {name for name in gone if name in self.lost or folders[name] in away}

    def told(self, bank: str, why: str = "", of: str = "") -> str:
        """Say which files are out of reach, and why; empty if none is."""
        files = f"{len(self.lost):,} files{of}"
        return (
            f"{why or f'{files} are missing all at once'}; what was read of {files} is kept until "
            f"they are back; if you deleted them, run sedem bank rm '{bank}' NAME"
            if self.lost
            else why
        )


def canonical(path: Path) -> str:
    """Return the one path of a file; a link is a file of its own in its folder."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def _nearest(path: Path) -> tuple[Path, int | None]:
    """Return the nearest folder of a missing file that is there, and how much it holds.

    That is None if the file may be out of reach: behind a link, or in a folder without a list.
    """
    for folder in [] if path.is_symlink() else path.parents:
        try:
            return folder, len(os.listdir(folder))
        except FileNotFoundError:
            continue
        except OSError:
            break
    return path, None


def stamp_of(path: Path) -> Stamp | None:
    """Return the size and time of a file; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
