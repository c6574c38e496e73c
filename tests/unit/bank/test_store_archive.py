"""Archives and backups hold one commit, and what arrives is checked before it is believed."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.bank.crashes import Machine, every_stop
from unit.bank.test_store import append, assert_holds, flip, make_bank, shard_file

from sedem.bank.store import backup as backups
from sedem.bank.store.archive import export_bank, import_bank
from sedem.bank.store.backup import backup
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError
from sedem.untrusted import open_file


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    return make_bank(tmp_path / "a.bank", 2)


@pytest.fixture
def archive(bank: Path, tmp_path: Path) -> Path:
    export_bank(bank, tmp_path / "a.tar")
    return tmp_path / "a.tar"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_bank_comes_back_from_its_archive_and_can_be_written(dtype: str, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 3, dtype)
    LocalStore(bank).remove("doc-1")
    size = export_bank(bank, tmp_path / "a.tar")
    assert size == (tmp_path / "a.tar").stat().st_size
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getnames() == [
            "catalog.sqlite",
            *(f"shards/00000{n}.safetensors" for n in (1, 2, 3)),
        ]
    import_bank(tmp_path / "a.tar", tmp_path / "b.bank")
    assert_holds(tmp_path / "b.bank", [0, 2])
    append(tmp_path / "b.bank", 5)
    assert_holds(tmp_path / "b.bank", [0, 2, 5])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bank", "a.tar", "b.bank"]


def test_equal_banks_have_equal_archives(bank: Path, archive: Path, tmp_path: Path) -> None:
    export_bank(bank, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()


Members = list[tuple[tarfile.TarInfo, bytes]]


def members_of(archive: Path) -> Members:
    with tarfile.open(archive) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> Members:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return [(info, content)]


def foreign_tables(members: Members) -> Members:
    """The same archive with a view in its catalog that never ends."""
    connection = sqlite3.connect(":memory:")
    connection.execute(
        "CREATE VIEW meta AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT 'schema_version' AS key, i AS value, 0 AS crc32 FROM n"
    )
    return [*member("catalog.sqlite", connection.serialize()), *members[1:]]


HOSTILE: dict[str, tuple[Callable[[Members], Members], str]] = {
    "a path outside": (lambda m: [*m, *member("../evil.txt", b"x")], r"'\.\./evil\.txt' is not"),
    "an absolute path": (
        lambda m: [*m, *member("/tmp/evil", b"x")],
        "is not a bank's catalog or shard",
    ),
    "a lower folder": (lambda m: [*m, *member("shards/x/000001.safetensors")], "is not a bank's"),
    "a lock": (lambda m: [*m, *member("LOCK")], "member 'LOCK' is not a bank's catalog or shard"),
    "a log": (
        lambda m: [*m, *member("catalog.sqlite-wal", b"x")],
        "is not a bank's catalog or shard",
    ),
    "a link": (
        lambda m: [*m, *member("shards/000003.safetensors", kind=tarfile.SYMTYPE, link="/etc")],
        "is not a bank's catalog or shard",
    ),
    "a hard link": (
        lambda m: [*m, *member("shards/000003.safetensors", kind=tarfile.LNKTYPE, link="/etc")],
        "is not a bank's catalog or shard",
    ),
    "a device": (
        lambda m: [*m, *member("shards/000003.safetensors", kind=tarfile.CHRTYPE)],
        "is not a bank's catalog or shard",
    ),
    "a long name": (lambda m: [*member("x" * 5000), *m], "LongLink' is not a bank's"),
    "a name twice": (lambda m: [*m, m[1]], r"it has 'shards/000001\.safetensors' twice"),
    "a shard more": (
        lambda m: [*m, *member("shards/000009.safetensors", b"x")],
        r"does not name 'shards/000009\.safetensors'",
    ),
    "a shard less": (lambda m: m[:-1], r"shard '000002\.safetensors' is missing"),
    "no catalog": (lambda m: m[1:], r"it has no catalog\.sqlite"),
    "nothing": (lambda m: [], r"it has no catalog\.sqlite"),
    "another shard": (
        lambda m: [*m[:-1], (m[-1][0], m[1][1])],
        r"shard '000002\.safetensors' is damaged",
    ),
    "no database": (lambda m: [*member("catalog.sqlite", b"x" * 99), *m[1:]], "cannot be used"),
    "an endless view": (foreign_tables, "has other tables than those of a bank"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_with_anything_else_is_refused_and_leaves_nothing(
    kind: str, archive: Path, tmp_path: Path
) -> None:
    change, words = HOSTILE[kind]
    members = change(members_of(archive))
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    here = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(BankError, match=rf"a\.tar' is not the archive of a bank: .*{words}"):
        import_bank(archive, tmp_path / "b.bank")
    assert sorted(path.name for path in tmp_path.iterdir()) == here


def test_an_archive_cut_anywhere_or_with_a_wrong_size_is_refused(
    archive: Path, tmp_path: Path
) -> None:
    whole = archive.read_bytes()
    used = len(whole.rstrip(b"\0"))
    for cut in (0, 1, 511, 512, 4096, used - 600, used):
        archive.write_bytes(whole[:cut])
        with pytest.raises(BankError, match=r"not the archive of a bank: .*(early|larger)"):
            import_bank(archive, tmp_path / "b.bank")
    archive.write_bytes(b"hello" * 500)
    with pytest.raises(BankError, match="is not an uncompressed tar file; export the bank again"):
        import_bank(archive, tmp_path / "b.bank")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bank", "a.tar"]


@pytest.mark.parametrize("offset", range(600, 42000, 4999))
def test_a_flipped_byte_in_an_archive_is_found_or_without_meaning(
    offset: int, archive: Path, tmp_path: Path
) -> None:
    flip(archive, offset)
    try:
        import_bank(archive, tmp_path / "b.bank")
    except BankError:
        assert not (tmp_path / "b.bank").exists()
    else:
        assert_holds(tmp_path / "b.bank", [0, 1])


def test_nothing_is_replaced(bank: Path, archive: Path, tmp_path: Path) -> None:
    for attempt in (
        lambda: import_bank(archive, bank),
        lambda: export_bank(bank, archive),
        lambda: backup(bank, archive),
    ):
        with pytest.raises(BankError, match="exists already; choose another name"):
            attempt()
    with pytest.raises(BankError, match=r"there is no archive '.*none\.tar'"):
        import_bank(tmp_path / "none.tar", tmp_path / "b.bank")
    with pytest.raises(BankError, match="is a folder; give a file"):
        import_bank(bank, tmp_path / "b.bank")


# Backup


def test_a_backup_is_a_bank_of_its_own(bank: Path, tmp_path: Path) -> None:
    size = backup(bank, tmp_path / "b.bank")
    assert size == sum(p.stat().st_size for p in (tmp_path / "b.bank").rglob("*") if p.is_file())
    flip(shard_file(bank, 1), -1)
    append(tmp_path / "b.bank", 2)
    assert_holds(tmp_path / "b.bank", [0, 1, 2])


@pytest.mark.parametrize("copy", [backup, export_bank])
def test_a_damaged_or_missing_shard_is_not_copied(
    copy: Callable[[Path, Path], int], bank: Path, tmp_path: Path
) -> None:
    flip(shard_file(bank, 1), -1)
    with pytest.raises(BankError, match=r"000001\.safetensors' is damaged.*verify --repair"):
        copy(bank, tmp_path / "copy")
    shard_file(bank, 1).unlink()
    with pytest.raises(BankError, match=r"000001\.safetensors' is missing.*verify --repair"):
        copy(bank, tmp_path / "copy")
    assert [p.name for p in tmp_path.iterdir()] == ["a.bank"]


@pytest.mark.parametrize("copy", [backup, export_bank])
def test_a_bank_that_is_written_and_compacted_meanwhile_is_copied_as_of_one_commit(
    copy: Callable[[Path, Path], int], bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = open_file

    def open_late(path: Path, *about: object) -> object:
        monkeypatch.setattr(backups, "open_file", real)
        append(bank, 2)
        LocalStore(bank).compact()
        return real(path, *about)  # type: ignore[arg-type]

    monkeypatch.setattr(backups, "open_file", open_late)
    copy(bank, tmp_path / "copy")
    if (tmp_path / "copy").is_file():
        import_bank(tmp_path / "copy", tmp_path / "b.bank")
    assert_holds(tmp_path / ("b.bank" if copy is export_bank else "copy"), [0, 1, 2])


# Stops


@pytest.mark.parametrize("what", ["backup", "export", "import"])
def test_a_stop_at_any_call_leaves_the_whole_copy_or_none(
    what: str, bank: Path, archive: Path, tmp_path: Path
) -> None:
    copies = iter(tmp_path / f"copy-{number}" for number in range(1000))
    made: list[Path] = []
    do = {
        "backup": lambda target: backup(bank, target),
        "export": lambda target: export_bank(bank, target),
        "import": lambda target: import_bank(archive, target),
    }[what]

    def run(machine: Machine) -> None:
        made.append(next(copies))
        with machine.running():
            do(made[-1])

    for _ in every_stop(run):
        target = made[-1]
        if not target.exists():
            do(target)  # what the stopped machine left is in nobody's way
        if what == "export":
            import_bank(target, target.with_suffix(".bank"))
            target = target.with_suffix(".bank")
        assert_holds(target, [0, 1])
    assert_holds(bank, [0, 1])
