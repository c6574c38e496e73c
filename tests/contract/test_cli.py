"""The command line: its output, streams and exit codes, and no partial results on failure."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from commands import prints_json, refused, sedem, succeeds
from conftest import LEASE, RECIPE
from tools.house import parameters

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.decoding import UNANSWERABLE
from sedem.backbone.loading import open_backbone
from sedem.bank.file import BankFile
from sedem.checkpoint.folder import EXTRA_ENTRIES
from sedem.cli.main import app
from sedem.errors import DataError, printable
from sedem.reading import building

RENT = "What is the rent?"
TINY = "tiny"


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: str) -> Path:
    return Path(tiny_checkpoint)


@pytest.fixture
def variant(here: Path, config: SedemConfig) -> Callable[..., Path]:
    """Save an untrained checkpoint with some settings changed."""

    def save(name: str, **changes: object) -> Path:
        backbone = open_backbone(config.encoder)
        torch.manual_seed(1)
        changed = SeDeM(config.with_changes(**changes), backbone, backbone)
        changed.save_pretrained(here / name)
        return here / name

    return save


@pytest.fixture
def here(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two text files; "tiny" counts as a shipped checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sedem.checkpoint.folder.embedded", {TINY: checkpoint}.get)
    Path("lease.txt").write_text(LEASE, encoding="utf-8")
    Path("recipe.md").write_text(RECIPE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def bank(here: Path) -> Path:
    """A bank of both files."""
    succeeds("build", "both.bank", "lease.txt", "recipe.md", "-m", TINY)
    return Path("both.bank")


def bytes_of(place: Path) -> dict[str, bytes]:
    """The files of a folder, or the file of a bank and what lies beside it.

    This process may have a bank open; then its log lies there, too, and is empty.
    """
    found = place.rglob("*") if place.is_dir() else place.parent.glob(f"{place.name}*")
    files = {str(path): path.read_bytes() for path in found if path.is_file()}
    is_open = {path for path in files if path.endswith("-shm")}
    is_open |= {path for path, content in files.items() if path.endswith("-wal") and not content}
    return {path: content for path, content in files.items() if path not in is_open}


# Help and processes


def commands() -> Iterator[tuple[list[str], Any]]:
    """Yield every command with the words that call it."""

    def walk(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
        yield words, command
        # A group also has the commands of other packages.
        for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
            yield from walk([*words, name], command.get_command(None, name))

    return walk([], typer.main.get_command(app))


def test_help_explains_every_command_with_all_its_arguments() -> None:
    for words, command in commands():
        text = " ".join(succeeds(*words, "--help").split())
        assert command.help.split(".")[0].split("\n")[0] in text
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = parameter.opts
            if parameter.param_type_name == "argument":
                names = [parameter.metavar or parameter.name]
            assert any(name in text for name in names), (words, parameter.name)
            assert parameter.help, f"{parameter.name} has no help"
            assert parameter.help.split(".")[0][:30] in text
        for name, child in getattr(command, "commands", {}).items():
            assert name in text and child.help.split(".")[0][:30] in text


VERBS = (
    "demo, build, ask, bank ls, bank show, bank verify, bank rm, bank compact, bank copy, "
    "train, push, seal, "
    "data inspect, init, calibrate, eval METHOD, eval report, bench, cost, serve"
)


def test_every_verb_stays_and_the_version_is_printed() -> None:
    assert succeeds("--version") == f"sedem {version('sedem')}\n"
    assert {" ".join(words) for words, _ in commands()} >= set(VERBS.split(", "))


def test_a_person_can_read_all_of_the_help() -> None:
    assert parameters() <= 150


HELP_OF_EVERYTHING = """
import sys
import sedem
from sedem.cli.main import app
for words in COMMANDS:
    try:
        app([*words, "--help"])
    except SystemExit as end:
        assert not end.code, words
heavy = {
    "torch", "transformers", "tokenizers", "peft", "numpy", "safetensors", "huggingface_hub",
    "datasets", "matplotlib", "yaml", "rich.table",
}
print("imported:", sorted(heavy & sys.modules.keys()))
"""


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_help_imports_nothing_heavy() -> None:
    words = [words for words, _ in commands()]
    done = python(HELP_OF_EVERYTHING.replace("COMMANDS", repr(words)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.parametrize(
    ("arguments", "code", "stdout", "stderr"),
    [
        ("bank rm a.bank x", 1, "", r"\Aerror: bank 'a\.bank' does not exist; .*\n\Z"),
        ("build", 2, "", "Missing argument 'BANK'"),
    ],
)
def test_a_process_has_its_exit_code_and_separate_streams(
    arguments: str, code: int, stdout: str, stderr: str, tmp_path: Path
) -> None:
    call = "from sedem.cli.main import app; app()"
    done = python(call, *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, stdout)
    assert re.search(stderr, done.stderr)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# Building


def test_a_build_reports_on_stdout_and_shows_progress_only_on_stderr(here: Path) -> None:
    def build(*files: str, reads: bool = True) -> str:
        result = sedem("build", "a.bank", *files, "-m", TINY)
        assert result.exit_code == 0
        assert ("reading" in result.stderr) == reads
        return str(result.stdout)

    assert build("lease.txt") == (
        "a.bank: 1 added, 0 replaced, 0 unchanged; the bank holds 1 document in 17 blocks\n"
    )
    before = bytes_of(Path("a.bank"))
    again = build("lease.txt", reads=False)
    assert again.startswith("a.bank: 0 added, 0 replaced, 1 unchanged; the bank holds 1 document ")
    assert bytes_of(Path("a.bank")) == before
    assert build("recipe.md", "lease.txt").startswith("a.bank: 1 added, 0 replaced, 1 unchanged;")
    rent = Document("lease.txt", "The rent is 950 euros.")
    Path("lease.txt").write_text(rent.text)
    assert build("lease.txt", "recipe.md").startswith("a.bank: 0 added, 1 replaced, 1 unchanged;")
    assert MemoryBank.open("a.bank").documents == [Document("recipe.md", RECIPE), rent]
    assert succeeds("bank", "verify", "a.bank") == "a.bank: all is well\n"


def test_a_bank_keeps_the_type_that_it_was_built_with_and_may_keep_keys(here: Path) -> None:
    succeeds("build", "a.bank", "lease.txt", "-m", TINY)
    build = ("build", "b.bank", "lease.txt")
    succeeds(*build, "-m", TINY, "--dtype", "int8")
    succeeds("build", "b.bank", "recipe.md", "--keys", "fp8")
    plain, packed = (prints_json("bank", "show", name, "--json") for name in ("a.bank", "b.bank"))
    assert (plain["dtype"], packed["dtype"]) == ("bfloat16", "int8")
    assert plain["key_bytes"] == 0 < packed["key_bytes"]
    assert packed["bytes_per_token"] < 0.6 * plain["bytes_per_token"]
    assert succeeds("bank", "verify", "b.bank") == "b.bank: all is well\n"
    assert prints_json("ask", "b.bank", RENT, "--json")["stored_bytes"] == packed["memory_bytes"]
    succeeds(*build, "--dtype", "int8")
    refused(*build, "--dtype", "fp8", words="stores its slots as int8, not as fp8")
    refused(*build, "--keys", "int4", words="use bfloat16, int8, fp8")


def test_a_build_that_is_interrupted_in_a_document_names_it_and_resumes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "COMMIT", 100)
    monkeypatch.setattr(building, "PART", 64)
    append, parts = BankFile.append_part, []

    def killed(*given: Any, **options: Any) -> None:
        if parts:
            raise KeyboardInterrupt
        parts.append(append(*given, **options))

    with monkeypatch.context() as broken:
        broken.setattr(BankFile, "append_part", killed)
        stopped = sedem("build", "a.bank", "lease.txt", "-m", TINY)
    assert stopped.exit_code == 130
    assert "interrupted; run it again to continue after the last commit" in stopped.output
    facts = prints_json("bank", "show", "a.bank", "--json")
    assert (facts["documents"], facts["unfinished"]) == (0, ["lease.txt"])
    shown = sedem("bank", "show", "a.bank").output
    assert "note: reading 'lease.txt' was interrupted; run its build again" in shown
    succeeds("build", "a.bank", "lease.txt")
    assert prints_json("bank", "show", "a.bank", "--json")["unfinished"] == []
    assert "unfinished" not in succeeds("bank", "show", "a.bank")


BAD_FILES = {
    "empty.txt": (b"", r"'empty\.txt' holds no text \(it is empty or only white space\)"),
    "white.md": (b" \n\t \n", r"'white\.md' holds no text"),
    "mark.txt": (b"\xef\xbb\xbf\n", r"'mark\.txt' holds no text"),
    "noise.txt": (b"\x89PNG\r\n\x1a\n\0\0\0\xff", r"'noise\.txt' holds binary data, not text"),
    "nul.txt": (b"text\0text", r"'nul\.txt' holds binary data, not text"),
    "half.txt": (b"\xff\xfe\xfd", r"'half\.txt' is not utf-16 text \(byte 2\); save it again as"),
    "paper.pdf": (b"%PDF-1.7", r"'paper\.pdf' cannot be read as PDF, it is damaged, too large or"),
    "a.xyz": (b"text", r"'a\.xyz' is of the type '\.xyz'; \.txt, \.text, .* can be read"),
}


def test_a_file_that_cannot_be_read_is_refused_and_nothing_is_written(here: Path) -> None:
    build = ("build", "a.bank", "-m", TINY)
    for name, (content, words) in BAD_FILES.items():
        Path(name).write_bytes(content)
        refused(*build, name, "lease.txt", "--strict", words=words)
    Path("texts").mkdir()
    refused(*build, "texts", words=r"'texts' holds no file that can be read \(")
    refused(*build, "*.docx", words=r"'\*\.docx' holds no file that can be read")
    for name in ("no.txt", "nosuch", "no/such/folder/"):
        refused(*build, name, "--strict", words=rf"no file or folder '{name.rstrip('/')}'")
    words = "or there is no such encoding; try utf-8"
    refused(*build, "lease.txt", "--strict", "--encoding", "klingon", words=words)
    assert not [path for path in here.iterdir() if "bank" in path.name]
    # With its own encoding, a file is read.
    Path("latin.txt").write_bytes(b"Caf\xe9 in G\xf6rlitz")
    words = r"not utf-8 text \(byte 3\); .* --encoding latin-1"
    refused(*build, "latin.txt", "--strict", "--encoding", "utf-8", words=words)
    succeeds(*build, "latin.txt", "--encoding", "latin-1")
    assert MemoryBank.open("a.bank").documents == [Document("latin.txt", "Café in Görlitz")]


def test_a_bad_file_is_left_out_or_ends_a_strict_build(here: Path) -> None:
    Path("empty.txt").write_text("")
    sources = ["lease.txt", "empty.txt", "recipe.md"]
    result = sedem("build", "a.bank", *sources, "--strict", "-m", TINY)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("error: document 'empty.txt' holds no text")
    assert [*MemoryBank.open("a.bank").documents.names] == ["lease.txt"]
    for keep_going in ((), ("--keep-going",)):
        result = sedem("build", "a.bank", "no.txt", *sources, *keep_going, "-m", TINY)
        assert result.exit_code == 0
        assert result.stdout.endswith("; left out 2 (not readable: no.txt, empty.txt)\n")
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert [line.split("'")[1] for line in errors] == ["no.txt", "empty.txt"]
    for name, words in (("empty.txt", "holds no text"), ("no/such", "no file or folder")):
        again = sedem("build", "b.bank", name, "-m", TINY)
        (line,) = [line for line in again.stderr.splitlines() if line.startswith("error: ")]
        assert again.exit_code == 1 and words in line and f"'{name}'" in line


SPELLINGS = ["docs", "./docs/", "docs/../docs", "{here}/docs", "linked", "docs/*.txt"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_file_is_one_document_wherever_and_however_it_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    for name, text in (("a.txt", LEASE), ("b.txt", RECIPE)):
        Path("docs", name).parent.mkdir(exist_ok=True)
        Path("docs", name).write_text(text)
    Path("linked").symlink_to("docs")
    succeeds("build", "a.bank", "docs", "-m", TINY)
    again = succeeds("build", "a.bank", spelling.format(here=here), "docs/a.txt", "-m", TINY)
    assert "0 added, 0 replaced, 2 unchanged; the bank holds 2 documents" in again
    Path("else").mkdir()
    monkeypatch.chdir("else")
    again = succeeds("build", "../a.bank", "../docs", "-m", TINY)
    assert "0 added, 0 replaced, 2 unchanged; the bank holds 2 documents" in again
    # Another file of the same name is another document.
    Path("docs").mkdir()
    Path("docs/a.txt").write_text("The dog sleeps.")
    assert "1 added, 0 replaced" in succeeds("build", "../a.bank", "docs", "-m", TINY)
    assert MemoryBank.open("../a.bank").names == [
        "docs/a.txt", "docs/b.txt", str(here / "else" / "docs" / "a.txt")
    ]  # fmt: skip


def test_deleted_and_renamed_files_are_named_and_leave_when_that_is_wanted(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = ("build", "a.bank", "docs", "-m", TINY)
    Path("docs").mkdir()
    for number in range(5):
        Path(f"docs/{number}.txt").write_text(f"Room {number} has the code 4{number}.")
    succeeds(*build)
    succeeds("build", "a.bank", "lease.txt", "-m", TINY)
    Path("lease.txt").unlink()
    Path("docs/0.txt").unlink()
    Path("docs/1.txt").rename("docs/one.txt")
    monkeypatch.delattr(building, "encode")  # a move needs no reading
    told = succeeds(*build)
    assert "1 added" in told and "holds 7 documents" in told
    gone = "2 (the file is gone: docs/0.txt, docs/1.txt)"
    assert told.endswith(f"; with --prune, it would remove {gone}\n")
    asked = ("ask", "a.bank", "What is the code of room 0?", "-k", 28, "-m", TINY)
    assert "note: the file of 'docs/0.txt' is gone" in succeeds(*asked)
    assert "the file of 'docs/0.txt' is gone" in prints_json(*asked, "--json")["cut"]
    told = succeeds(*build, "--prune")
    assert "holds 5 documents" in told and told.endswith(f"; removed {gone}\n")
    names = ["docs/2.txt", "docs/3.txt", "docs/4.txt", "lease.txt", "docs/one.txt"]
    assert MemoryBank.open("a.bank").names == names
    refused(*build, "--prune", "--ray", "local", words="leave --ray out")


@pytest.mark.parametrize("how", ["most", "an inner disk", "all"])
def test_files_of_a_disk_that_is_not_there_stay_in_a_bank(here: Path, how: str) -> None:
    build = ("build", "a.bank", "docs", "-m", TINY)
    Path("docs/disk").mkdir(parents=True)
    names = [f"docs/{number}.txt" for number in range(5)] + ["docs/disk/a.txt", "docs/disk/b.txt"]
    for name in names:
        Path(name).write_text(f"The text of {name}.")
    succeeds(*build)
    held = MemoryBank.open("a.bank").names
    away = {"most": names[:4], "an inner disk": names[5:], "all": names}[how]
    for name in away:
        Path(name).unlink()
    result = sedem(*build, "--prune")
    assert MemoryBank.open("a.bank").names == held
    if how == "all":
        assert result.exit_code == 1 and "'docs' holds no file" in result.stderr
    else:
        assert result.exit_code == 0 and "removed" not in result.stdout
        kept = f"what was read of {len(away)} files is kept until they are back; if you deleted"
        assert kept in result.stderr and "sedem bank rm 'a.bank' NAME" in result.stderr


def test_a_document_that_the_model_rejects_does_not_stop_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = building.add_documents

    def picky(*given: Any) -> None:
        if any(one.name == "recipe.md" for one in given[4]):
            raise DataError("'recipe.md' has no tokens")
        add(*given)

    monkeypatch.setattr(building, "add_documents", picky)
    build = ("build", "a.bank", "lease.txt", "recipe.md", "-m", TINY)
    assert sedem(*build, "--strict").exit_code == 1
    result = sedem(*build)
    assert result.exit_code == 0 and "error: 'recipe.md' has no tokens" in result.stderr
    assert "1 added" in result.stdout
    assert result.stdout.endswith("; left out 1 (not readable: recipe.md)\n")


def test_pages_are_cited(here: Path, checkpoint: Path) -> None:
    model = SeDeM.from_pretrained(checkpoint)
    document = Document("lease.pdf", LEASE, (0, 0, len(LEASE) // 2))
    building.build_bank(model, model.engine, Path("a.bank"), [document])
    ask = ("ask", "a.bank", RENT, "-k", "all", "--max-new-tokens", 2, "-m", checkpoint)
    assert re.search(r"^  \[\d+\] lease\.pdf, page 2:0-\d+ ", succeeds(*ask), re.MULTILINE)
    citations = prints_json(*ask, "--json")["citations"]
    assert {c["page"] for c in citations} == {2, 3}
    assert all((c["page"] == 3) == (c["start"] >= len(LEASE) // 2) for c in citations)


def test_a_bank_of_another_model_is_neither_extended_nor_asked(
    bank: Path, variant: Callable[..., Path]
) -> None:
    stranger, before = variant("stranger", extract_layers=(2,)), bytes_of(bank)
    Path("note.txt").write_text("A note.")
    words = "was built by model [0-9a-f]{12}, this model is [0-9a-f]{12}; .*'sedem build'"
    refused("build", bank, "note.txt", "-m", stranger, words=words)
    refused("ask", bank, RENT, "-m", stranger, words=words)
    assert bytes_of(bank) == before


def test_a_path_that_is_not_a_bank_is_refused(here: Path) -> None:
    Path("folder").mkdir()
    for verb in ("build folder lease.txt", "bank ls folder"):
        words = "'folder' is a folder, not a bank; give the file of a bank"
        refused(*verb.split(), words=words)
    for verb in ("ask none Why?", "bank show none", "bank verify none"):
        words = "bank 'none' does not exist; create it with 'sedem build none FILE"
        refused(*verb.split(), words=words)
    assert list(Path("folder").iterdir()) == []


def test_a_checkpoint_that_cannot_be_used_is_refused_and_nothing_is_written(
    here: Path, checkpoint: Path, tiny_folder: Callable[..., str]
) -> None:
    shutil.copytree(checkpoint, "broken")
    os.truncate("broken/sedem.safetensors", 1000)
    for name, words in (
        ("broken", r"sedem\.safetensors' is damaged \(it has 1,000 bytes"),
        (tiny_folder(), "is not a sedem configuration"),
        ("lease.txt", r"'lease\.txt' is a file; a checkpoint is a folder"),
        ("no-such", "checkpoint 'no-such' is neither a local folder nor available from the hub"),
    ):
        refused("build", "a.bank", "lease.txt", "-m", name, words=words)
    assert not [path for path in here.iterdir() if "bank" in path.name]


# Checkpoints


def test_an_untrained_checkpoint_reads_and_answers(
    here: Path, tiny_folder: Callable[..., str], chat_folder: str
) -> None:
    shown = succeeds("init", tiny_folder(), "raw model", "--segment-length", 32, "-k", 3)
    for line in (
        "memory +states after layer 2, injected there unchanged",
        "bank +64 bytes a token, in bfloat16",
        "answer +from 3 blocks of 32 tokens",
        "prompt +without a chat template",
    ):
        assert re.search(rf"^{line}$", shown, re.MULTILINE)
    build, ask = shown.splitlines()[-2:]
    build, ask = build.replace("FILE ...", "lease.txt"), ask.replace("QUESTION", f"'{RENT}'")
    assert "1 added" in succeeds(*shlex.split(build)[1:])
    answer = prints_json(*shlex.split(ask)[1:], "--json")
    assert (answer["k"], answer["model"]) == (3, "raw model")
    assert re.search(r"^prompt +in a chat template$", succeeds("init", chat_folder, "a"), re.M)
    assert "prompt      without" in succeeds("init", chat_folder, "b", "--no-chat-template")
    found = [json.loads(Path(name, "config.json").read_text())["chat_template"] for name in "ab"]
    assert found == [True, False]


def test_a_gguf_file_is_a_model_by_itself_or_begins_a_checkpoint(
    here: Path, tiny_gguf: Path
) -> None:
    file = tiny_gguf.name
    assert "1 added" in succeeds("build", "own.bank", "lease.txt", "-m", file)
    assert prints_json("ask", "own.bank", RENT, "-m", file, "--json")["model"] == "tiny.gguf"
    assert "tiny.gguf, 4 layers, nothing trained" in succeeds("init", file, "new")
    assert "1 added" in succeeds("build", "new.bank", "lease.txt", "-m", "new")
    encoder = json.loads(Path("new", "config.json").read_text())["encoder"]
    assert encoder == str(Path(file).resolve())
    Path(file).unlink()
    words = r"needs the backbone in '.*tiny\.gguf', which is not on this machine"
    refused("ask", "new.bank", RENT, "-m", "new", words=words)


def test_a_new_checkpoint_with_bad_settings_is_refused(
    here: Path, tiny_folder: Callable[..., str]
) -> None:
    for options, words in (
        (["--chat-template"], "chat_template is on, but the tokenizer of backbone '.*' has no"),
        (["--layer", "4"], "layer is 4, but backbone '.*' has 4 layers; give a layer from 1 to 3"),
        (["--segment-length", "512"], "segment_length 512 and a start token exceed the 512"),
        (["-k", "most"], "k is 'most'"),
    ):
        refused("init", tiny_folder(), "new", *options, words=words)
    Path("empty").mkdir()
    refused("init", tiny_folder(), "empty", words="'empty' exists already; give the name of a new")
    assert not list(here.glob("new*"))


def questions_with_evidence(count: int) -> Path:
    """Questions about a rent, each with one document that tells and one that does not."""
    path = Path("questions.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"The rent of flat {number} is {900 + number} euros a month."
            document = {"name": "a.txt", "text": text}
            entry = {
                "documents": [document, {"name": "b.txt", "text": RECIPE}],
                "question": f"What is the rent of flat {number}?",
                "answers": [f"{900 + number} euros"],
                "evidence": [{"document": "a.txt", "start": 0, "end": len(text)}],
            }
            file.write(f"{json.dumps(entry)}\n")
    return path


def test_a_calibrated_checkpoint_tells_its_confidence_and_can_decline(
    bank: Path, checkpoint: Path
) -> None:
    calibrate = ("calibrate", checkpoint, "-o", "sure", "--data")
    result = sedem(*calibrate, questions_with_evidence(3))
    assert result.exit_code == 1 and not Path("sure").exists()
    words = "3 of 3 questions have labelled evidence .* at least 16 are needed"
    assert re.search(words, result.stderr)
    found = prints_json(*calibrate, questions_with_evidence(20), "--json")
    assert (found["fitted"], found["held_out"], found["left_out"]) == (15, 5, 0)
    assert 0 <= found["auroc"] <= 1 and 0 <= found["calibration_error"] <= 1
    assert SedemConfig.load(Path("sure"), extra=EXTRA_ENTRIES).confidence
    ask = ("ask", bank, RENT, "-m", "sure", "--engine", "eager", "--max-new-tokens", 3)
    ask = (*ask, "--answer", "free")
    always = (*ask, "--min-confidence", 0)
    answer = prints_json(*always, "--json")
    assert 0 < answer["confidence"] < 1 and answer["finish_reason"] != "unanswerable"
    assert f"  source found ({answer['confidence']:.2f})" in succeeds(*always).splitlines()
    assert 0 < found["min_confidence"] < 1 and {*found["declined"]} == {"with evidence", "without"}
    declined = prints_json(*ask, "--min-confidence", 1, "--json")
    assert (declined["answer"], declined["finish_reason"]) == (UNANSWERABLE, "unanswerable")
    assert declined["citations"] == answer["citations"]
    assert succeeds(*ask, "--min-confidence", 1).splitlines()[0] == UNANSWERABLE
    for hops, words in (("2", "this model has no second hop"), ("often", "it can be 1, 2, auto")):
        refused = sedem(*ask, "--hops", hops)
        assert refused.exit_code == 1 and words in refused.stderr


# Asking


def test_an_answer_comes_with_its_sources_and_equals_the_python_interface(
    bank: Path, checkpoint: Path
) -> None:
    shown = succeeds("ask", bank, RENT, "-k", "2")
    sources = r"^  \[[12]\] (lease\.txt|recipe\.md):\d+-\d+ \(\d+\.\d\)  \S"
    assert len(re.findall(sources, shown, re.MULTILINE)) == 2
    assert "  note: the answer was cut off at its limit of 64 tokens" in shown.splitlines()
    answer = SeDeM.from_pretrained(checkpoint).answer(MemoryBank.open(bank), RENT, k=2)
    assert shown.startswith(printable(answer.text, keep="\n"))
    entry = prints_json("ask", bank, RENT, "-k", 2, "--json")
    assert {"select_ms", "ttft_ms", "total_ms"} <= set(entry["timings"])
    expected = json.loads(json.dumps(answer.to_dict()))
    assert {**entry, "timings": None} == {**expected, "timings": None}
    assert (entry["k"], entry["blocks"], entry["model"]) == (2, 29, "tiny")
    # A question needs no quotes.
    plain = prints_json("ask", bank, *RENT.split(), "-k", 2, "--json")
    assert {**plain, "timings": None} == {**expected, "timings": None}
    texts = {d.name: d.text for d in MemoryBank.open(bank).documents}
    assert [c["rank"] for c in entry["citations"]] == [1, 2]
    for citation in entry["citations"]:
        span = texts[citation["document"]][citation["start"] : citation["end"]]
        assert span == citation["text"]


def test_questions_come_from_stdin_one_a_line_and_a_bad_one_costs_itself_alone(bank: Path) -> None:
    alone = [prints_json("ask", bank, q, "--json")["answer"] for q in (RENT, "Pets?")]
    lines = succeeds("ask", bank, "--json", stdin=f"{RENT}\n\n  Pets?  \n").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == alone
    assert succeeds("ask", bank, "--json", stdin="") == ""
    failed = sedem("ask", bank, "--json", stdin=f"{'?' * 10_000}\nPets?\n")
    assert failed.exit_code == 1
    bad, good = map(json.loads, failed.stdout.splitlines())
    assert bad["error"].startswith("the question has 10,000 tokens") and good["answer"] == alone[1]
    assert failed.stderr.startswith("error: question 1: the question has 10,000 tokens, the model")


def test_the_limit_of_an_answer_is_passed_on(bank: Path) -> None:
    ask = ("ask", bank, RENT, "--json")
    short = prints_json(*ask, "--max-new-tokens", 3)
    assert short["cut"] == ["the answer was cut off at its limit of 3 tokens"]
    refused(*ask, "--max-new-tokens", 0, words="max_new_tokens is 0; it must be a whole number")


def test_documents_can_be_named(bank: Path) -> None:
    ask = ("ask", bank, RENT, "-k", "all", "--max-new-tokens", 8, "--json", "--document")
    lease = prints_json(*ask, "lease.txt")
    assert {c["document"] for c in lease["citations"]} == {"lease.txt"}
    both = prints_json(*ask, "lease.txt", "--document", "recipe.md")
    assert len(both["citations"]) == both["blocks"] == 29 > len(lease["citations"])
    refused(*ask, "rent.txt", words="has no document 'rent.txt'; it has 'lease.txt', 'recipe.md'")


def test_auto_says_how_many_blocks_it_used(here: Path, variant: Callable[..., Path]) -> None:
    variant("guided", guidance=True, auto_min=3, auto_max=3)
    succeeds("build", "guided.bank", "lease.txt", "recipe.md", "-m", "guided")
    ask = ("ask", "guided.bank", RENT, "-m", "guided", "--engine", "eager", "-k")
    assert prints_json(*ask, "auto", "--json")["k"] == 3
    assert "  from 3 of 29 blocks" in succeeds(*ask, "auto").splitlines()
    assert "  from" not in succeeds(*ask, 3)


def test_a_question_or_a_value_that_cannot_be_used_is_refused(bank: Path) -> None:
    for k in ("0", "-1", "many", "1.5", ""):
        words = f"k is '?{k}'?; it must be a whole number"
        refused("ask", bank, RENT, "-k", k, "--json", words=words)
    refused("ask", bank, " \t ", words="the question is empty; ask something")
    ask = ("ask", bank, RENT, "--engine", "eager", "--min-confidence")
    refused(*ask, 0.5, words="min_confidence is 0.5, but this model gives no confidence; fit it")
    refused(*ask, 2, words="min_confidence is 2.0; it must be a number from 0 to 1")


# Banks


def test_the_model_of_a_bank_is_named_by_an_absolute_path(
    here: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, "model")
    succeeds("build", "a.bank", "lease.txt", "-m", "model")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    model = here / "model"
    refused("ask", "../a.bank", RENT, words=f"by model '{model}'; .* give -m {model} if you trust")
    assert prints_json("ask", "../a.bank", RENT, "--json", "-m", model)["model"] == "model"


def test_a_bank_is_listed_shown_copied_and_reduced(bank: Path) -> None:
    listed = prints_json("bank", "ls", bank, "--json")
    assert listed == [
        {"document": "lease.txt", "characters": len(LEASE), "blocks": 17},
        {"document": "recipe.md", "characters": len(RECIPE), "blocks": 12},
    ]
    assert [line.split() for line in succeeds("bank", "ls", bank).splitlines()] == [
        ["characters", "blocks", "document"],
        [f"{len(LEASE):,}", "17", "lease.txt"],
        [f"{len(RECIPE):,}", "12", "recipe.md"],
    ]
    facts = prints_json("bank", "show", bank, "--json")
    assert (facts["documents"], facts["blocks"], facts["model"]) == (2, 29, TINY)
    assert facts["tokens"] == len(LEASE) + len(RECIPE.encode())
    assert facts["fingerprint"] == MemoryBank.open(bank).fingerprint
    shown = succeeds("bank", "show", bank)
    # What is unfinished is a note, and only where there is any.
    assert all(name.replace("_", " ") in shown for name in facts.keys() - {"unfinished"})

    first = succeeds("ask", bank, RENT, "-k", "1")
    copied = succeeds("bank", "copy", bank, "copy.bank")
    assert re.fullmatch(r"copy\.bank: [\d,]{5,} bytes from both\.bank\n", copied)
    refused("bank", "copy", bank, "copy.bank", words="'copy.bank' exists already")
    refused(
        "bank", "rm", "copy.bank", "lease.txt", "x", words="no document 'x'; it has 'lease.txt'"
    )
    assert prints_json("bank", "ls", "copy.bank", "--json") == listed, "all or none are removed"
    removed = succeeds("bank", "rm", bank, "recipe.md", "recipe.md")
    assert removed == "both.bank: removed 'recipe.md'\n"
    shown = succeeds("bank", "compact", bank).replace(",", "")
    before, after = map(int, re.findall(r" (\d+) bytes (?:before|now)", shown))
    assert 0 < after <= before
    refused("bank", "compact", bank, "--keep", "2", words="--keep is for banks in parts; 'both")
    assert succeeds("ask", bank, RENT, "-k", "1") == first
    assert "sent.bank: " in succeeds("bank", "copy", bank, "sent.bank", "--check")
    assert "back.bank: " in succeeds("bank", "copy", "sent.bank", "back.bank", "--check")
    assert prints_json("bank", "verify", "back.bank", "--json") == {"problems": [], "documents": []}
    assert prints_json("bank", "ls", "back.bank", "--json") == listed[:1]


def test_a_bank_is_split_and_joined(bank: Path) -> None:
    answer = succeeds("ask", bank, RENT, "-k", "2")
    assert "parts: " in succeeds("bank", "copy", bank, "parts", "--parts", "2")
    words = "--check is for a copy in one file"
    refused("bank", "copy", bank, "more", "--parts", "2", "--check", words=words)
    assert len(list(Path("parts").glob("*.bank"))) == 2
    assert succeeds("ask", "parts", RENT, "-k", "2") == answer
    assert "whole.bank: " in succeeds("bank", "copy", "parts", "whole.bank")
    assert succeeds("ask", "whole.bank", RENT, "-k", "2") == answer
    assert succeeds("bank", "verify", "parts") == "parts: all is well\n"


def damage_last_block(bank: Path) -> None:
    """Change a byte of the memory of the last block."""
    with BankFile(bank).reading() as connection:
        memory = connection.execute("SELECT memory FROM blocks ORDER BY id DESC").fetchone()[0]
    gc.collect()  # so that no connection is open, and all is in one file
    content = bytearray(bank.read_bytes())
    assert content.count(memory) == 1
    content[content.index(memory) + 5] ^= 1
    bank.write_bytes(content)


def test_damage_is_reported_and_a_repair_reads_again_what_it_can_and_drops_the_rest(
    here: Path,
) -> None:
    for name in ("lease.txt", "recipe.md"):
        succeeds("build", "a.bank", name, "-m", TINY)
    bank = MemoryBank.open("a.bank")
    memory = bank.memory(range(len(bank)))
    bank.store.close()
    # The blocks of so small a model share a page, and texts have another.
    both = ["lease.txt", "recipe.md"]
    for options, read_again, dropped in (([], both, []), (["--drop"], [], both)):
        damage_last_block(Path("a.bank"))
        refused("ask", "a.bank", RENT, "-k", "all", words="a page does not match its checksum; res")
        found = sedem("bank", "verify", "a.bank", "--json")
        assert (found.exit_code, json.loads(found.stdout)["documents"]) == (1, both)
        assert "'recipe.md'" in sedem("bank", "verify", "a.bank").stdout
        del found  # its error holds the bank open
        gc.collect()
        report = prints_json("bank", "verify", "a.bank", "--repair", "--json", *options)
        assert (report["read_again"], report["dropped"]) == (read_again, dropped)
        repaired = MemoryBank.open("a.bank")
        assert torch.equal(repaired.memory(range(len(repaired))), memory[: len(repaired)])
        assert len(repaired) == (0 if dropped else len(memory))
        repaired.store.close()
    assert len(list(Path().glob("a.bank.damaged*"))) == 2
    assert prints_json("bank", "ls", "a.bank", "--json") == []
    assert succeeds("bank", "verify", "a.bank", "--repair") == "a.bank: all is well\n"
    refused("bank", "verify", "a.bank", "--drop", words="--from and --drop belong to --repair")
