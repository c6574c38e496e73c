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
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from conftest import LEASE, POSITIONS, RECIPE
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from sedem import Document, MemoryBank, SeDeM, SedemConfig, cli
from sedem.answering.decoding import UNANSWERABLE
from sedem.backbone.loading import open_backbone
from sedem.bank.file import BankFile
from sedem.checkpoint.folder import EXTRA_ENTRIES
from sedem.cli.main import app
from sedem.cli.output import printable
from sedem.evaluation.config import CONTROLS
from sedem.evaluation.readers import SedemMethod
from sedem.reading import building

RENT = "What is the rent?"
TINY = "tiny"
ANSWER_KEYS = {"answer", "citations", "k", "blocks", "timings", "model", "finish_reason", "cut"} | {
    "conditioning", "stored_bytes", "context_tokens", "confidence",
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as with HF_HUB_OFFLINE=1, which the hub's client reads only at import."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def sedem(*arguments: object, stdin: str | None = None) -> Result:
    """Run the command line in this process; re-raise an error that it does not handle."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(*arguments: object, stdin: str | None = None) -> str:
    """Run a command that must succeed, and return its stdout."""
    result = sedem(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def prints_json(*arguments: object, stdin: str | None = None) -> Any:
    """Run a command that prints one JSON value and nothing else, and return the value."""
    return json.loads(succeeds(*arguments, stdin=stdin))


def refused(*arguments: object, words: str, stdin: str | None = None) -> None:
    """Check that a command exits with 1, one line on stderr and nothing on stdout."""
    result = sedem(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert re.search(rf"^error: .*{words}", lines[0]), lines[0]


def make_checkpoint(folder: Path, backbone: str, *, lora: bool = False, **changes: object) -> Path:
    """Save a tiny checkpoint with untrained parts."""
    config = SedemConfig(
        encoder=backbone,
        extract_layers=(3,),
        inject_layer=2,
        segment_length=16,
        compression=4,
        lora_rank=4,
        lora_alpha=8,
    ).with_changes(**changes)
    opened = open_backbone(backbone)
    if lora:
        opened.add_lora(config.lora_rank, config.lora_alpha)
    torch.manual_seed(1)
    SeDeM(config, opened, opened).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", tiny_folder())


@pytest.fixture(scope="module")
def stranger(tiny_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose memory the other one cannot read."""
    folder = tmp_path_factory.mktemp("checkpoints") / "stranger"
    return make_checkpoint(folder, tiny_folder(), extract_layers=(2,))


@pytest.fixture(scope="module")
def trained(tiny_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with adapters."""
    folder = tmp_path_factory.mktemp("checkpoints") / "trained"
    return make_checkpoint(folder, tiny_folder(), lora=True)


@pytest.fixture
def here(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two text files; "tiny" counts as a shipped checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sedem.checkpoint.folder.embedded", {TINY: checkpoint}.get)
    Path("lease.txt").write_text(LEASE, encoding="utf-8")
    Path("recipe.md").write_text(RECIPE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def bank(here: Path, checkpoint: Path) -> Path:
    """A bank of both files."""
    succeeds("build", "both.bank", "lease.txt", "recipe.md", "-m", TINY)
    return Path("both.bank")


def bytes_of(place: Path) -> dict[str, bytes]:
    """The files of a folder, or the file of a bank and what lies beside it."""
    found = place.rglob("*") if place.is_dir() else place.parent.glob(f"{place.name}*")
    return {str(path): path.read_bytes() for path in found if path.is_file()}


# Help


def commands() -> Iterator[tuple[list[str], Any]]:
    """Yield every command with the words that call it."""

    def walk(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
        yield words, command
        for name, child in getattr(command, "commands", {}).items():
            yield from walk([*words, name], child)

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
    "demo, build, ask, bank ls, bank show, bank verify, bank rm, bank compact, bank backup, "
    "bank export, bank import, bank split, bank join, bank warm, train stage1, train stage2, push, "
    "seal, data inspect, init, probe, adapt, calibrate, eval METHOD, eval report, bench, cost, "
    "serve"
)


def test_every_verb_stays() -> None:
    assert {" ".join(words) for words, _ in commands()} >= set(VERBS.split(", "))


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
    "datasets", "matplotlib", "yaml",
}
print("imported:", sorted(heavy & sys.modules.keys()))
"""


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


CALL = "from sedem.cli.main import app; app()"


def test_help_imports_nothing_heavy() -> None:
    words = [words for words, _ in commands()]
    done = python(HELP_OF_EVERYTHING.replace("COMMANDS", repr(words)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"


MODULES = sorted(path.stem for path in Path(cli.__file__).parent.glob("*.py"))


def test_every_module_of_the_command_line_imports_only_light_modules() -> None:
    imports = "; ".join(f"import sedem.cli.{name}" for name in MODULES if name != "__init__")
    done = python(f"import sys; {imports}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {f"sedem.cli.{name}" for name in MODULES if name != "__init__"} <= loaded
    heavy = {"torch", "transformers", "numpy", "peft", "datasets", "yaml", "rich.table"}
    assert not loaded & heavy


def test_adapt_refuses_what_it_cannot_use(here: Path, checkpoint: Path) -> None:
    adapt = ("adapt", TINY, "lease.txt", "--out", "new")
    refused(*adapt, "--steps", "3", words="steps is '3'; give the steps of stage 1 and stage 2")
    refused(*adapt, "--device", "tpu", words="device is 'tpu'; it can be cpu or cuda")
    refused(*adapt, "-C", "8", words=f"compression is 8, but checkpoint '{TINY}' has 4")
    Path("empty").mkdir()
    refused("adapt", TINY, "empty", "--out", "new", words="'empty' holds no file that can be read")
    refused("adapt", TINY, ".", "--out", "empty", words="'empty' exists already")
    assert not list(here.glob("new*"))


# Real processes


@pytest.mark.parametrize(
    ("arguments", "code", "stdout", "stderr"),
    [
        (["--help"], 0, "Usage", ""),
        (["bank", "rm", "a.bank", "x"], 1, "", r"\Aerror: bank 'a\.bank' does not exist; .*\n\Z"),
        (["build"], 2, "", "Missing argument 'BANK'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_process_has_its_exit_code_and_separate_streams(
    arguments: list[str], code: int, stdout: str, stderr: str, tmp_path: Path
) -> None:
    done = python(CALL, *arguments, cwd=tmp_path)
    assert done.returncode == code
    assert re.search(stdout, done.stdout) if stdout else done.stdout == ""
    assert re.search(stderr, done.stderr) if stderr else done.stderr == ""
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# Building


def test_a_build_reports_on_stdout_and_shows_progress_only_on_stderr(
    here: Path, checkpoint: Path
) -> None:
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
    Path("lease.txt").write_text("The rent is 950 euros.")
    assert build("lease.txt", "recipe.md").startswith("a.bank: 0 added, 1 replaced, 1 unchanged;")
    assert [d.text for d in MemoryBank.open("a.bank").documents] == [
        RECIPE,
        "The rent is 950 euros.",
    ]
    assert succeeds("bank", "verify", "a.bank") == "a.bank: all is well\n"


def test_a_bank_keeps_the_type_that_it_was_built_with_and_may_keep_keys(
    here: Path, checkpoint: Path
) -> None:
    succeeds("build", "a.bank", "lease.txt", "-m", TINY)
    succeeds("build", "b.bank", "lease.txt", "-m", TINY, "--dtype", "int8")
    succeeds("build", "b.bank", "recipe.md", "--keys", "fp8")
    plain, packed = (prints_json("bank", "show", name, "--json") for name in ("a.bank", "b.bank"))
    assert (plain["dtype"], packed["dtype"]) == ("bfloat16", "int8")
    assert plain["key_bytes"] == 0 < packed["key_bytes"]
    assert packed["bytes_per_token"] < 0.6 * plain["bytes_per_token"]
    assert succeeds("bank", "verify", "b.bank") == "b.bank: all is well\n"
    assert prints_json("ask", "b.bank", RENT, "--json")["stored_bytes"] == packed["memory_bytes"]
    succeeds("build", "b.bank", "lease.txt", "--dtype", "int8")
    refused(
        "build",
        "b.bank",
        "lease.txt",
        "--dtype",
        "fp8",
        words="stores its slots as int8, not as fp8",
    )
    refused("build", "b.bank", "lease.txt", "--keys", "int4", words="use bfloat16, int8, fp8")


def test_a_warmed_bank_answers_the_same_and_says_what_it_takes(
    here: Path, tiny_folder: Callable[..., str]
) -> None:
    make_checkpoint(here / "apart", tiny_folder(), block_context="independent", guidance=True)
    succeeds("build", "a.bank", "lease.txt", "-m", "apart")
    ask = ("ask", "a.bank", RENT, "--json", "-m", "apart", "-k", "all")
    before = prints_json(*ask)
    assert prints_json("bank", "show", "a.bank", "--json")["kept_bytes"] == 0
    printed = succeeds("bank", "warm", "a.bank", "-m", "apart")
    facts = prints_json("bank", "show", "a.bank", "--json")
    assert printed == (
        f"a.bank: keys and values of 17 blocks take {facts['kept_bytes']:,} bytes, its memory "
        f"{facts['memory_bytes']:,}\n"
    )
    assert prints_json(*ask)["answer"] == before["answer"]
    assert succeeds("bank", "verify", "a.bank") == "a.bank: all is well\n"
    succeeds("bank", "warm", "a.bank", "-m", "apart", "--dtype", "int8")
    assert prints_json("bank", "show", "a.bank", "--json")["kept_bytes"] < facts["kept_bytes"]
    warm = ("bank", "warm", "a.bank", "-m", "apart")
    refused(*warm, "--dtype", "int4", words="use bfloat16, int8, fp8")
    refused(*warm, "--engine", "eager", words="engine 'eager' keeps no keys and values")
    refused("bank", "warm", "none", words="bank 'none' does not exist")


def test_only_a_model_with_independent_blocks_warms(bank: Path) -> None:
    refused("bank", "warm", bank, words="block_context of this model is 'joint'.*'independent'")


def test_an_interrupted_build_resumes(
    here: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, documents = building.read, ["lease.txt", "recipe.md", "note.txt"]
    Path("note.txt").write_text("The cellar key hangs behind the door.")

    def killed(model: Any, engine: Any, batch: list[Document], **options: Any) -> MemoryBank:
        if batch[0].name == "recipe.md":
            raise KeyboardInterrupt
        return read(model, engine, batch, **options)

    # Every document is a commit of its own, and none is longer than a commit.
    monkeypatch.setattr(building, "COMMIT", max(len(Path(name).read_text()) for name in documents))
    with monkeypatch.context() as broken:
        broken.setattr(building, "read", killed)
        stopped = sedem("build", "a.bank", *documents, "-m", TINY)
    assert stopped.exit_code == 130
    assert "interrupted; run it again to continue after the last commit" in stopped.output
    assert [d.name for d in MemoryBank.open("a.bank").documents] == documents[:1]
    assert succeeds("build", "a.bank", *documents).startswith(
        "a.bank: 2 added, 0 replaced, 1 unchanged; the bank holds 3 documents"
    )


def test_a_document_that_is_not_read_to_its_end_is_named(
    here: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
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
        assert sedem("build", "a.bank", "lease.txt", "-m", TINY).exit_code == 130
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
    "latin.txt": (b"Caf\xe9 in G\xf6rlitz", r"not utf-8 text \(byte 3\); .* --encoding latin-1"),
    "paper.pdf": (b"%PDF-1.7", r"'paper\.pdf' cannot be read as PDF, it is damaged or of another"),
    "README": (b"text", r"'README' is without an ending; \.txt, \.md, .* can be read"),
}


def test_a_file_that_cannot_be_read_is_refused_and_nothing_is_written(
    here: Path, checkpoint: Path
) -> None:
    for name, (content, words) in BAD_FILES.items():
        Path(name).write_bytes(content)
        refused("build", "a.bank", name, "lease.txt", "-m", TINY, words=words)
    assert not [path for path in here.iterdir() if "bank" in path.name]


def test_what_was_read_before_a_bad_file_is_in_the_bank(here: Path, checkpoint: Path) -> None:
    Path("empty.txt").write_text("")
    result = sedem("build", "a.bank", "lease.txt", "empty.txt", "recipe.md", "-m", TINY)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("error: document 'empty.txt' holds no text")
    assert [*MemoryBank.open("a.bank").documents.names] == ["lease.txt"]


def test_bad_files_are_listed_and_passed_over_on_request(here: Path, checkpoint: Path) -> None:
    Path("empty.txt").write_text("")
    sources = ["no.txt", "lease.txt", "empty.txt", "recipe.md"]
    result = sedem("build", "a.bank", *sources, "--keep-going", "-m", TINY)
    assert result.exit_code == 1
    assert result.stdout.startswith("a.bank: 2 added, 0 replaced, 0 unchanged;")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split("'")[1] for line in errors] == ["no.txt", "empty.txt"]
    again = sedem("build", "b.bank", "empty.txt", "--keep-going", "-m", TINY)
    assert again.exit_code == 1
    assert "there is nothing to read" in again.stderr.splitlines()[-1]


def test_folders_and_patterns_are_read_and_no_file_twice(here: Path, checkpoint: Path) -> None:
    Path("texts/deep").mkdir(parents=True)
    Path("texts/deep/note.html").write_text("<p>The cellar key hangs <b>here</b>.")
    Path("texts/picture.png").write_bytes(b"\x89PNG")
    shutil.copy("lease.txt", "texts")
    sources = ["texts", "texts/**/*.html", "*.md", "./recipe.md"]
    succeeds("build", "a.bank", *sources, "-m", TINY)
    documents = MemoryBank.open("a.bank").documents
    assert documents == [
        Document("texts/deep/note.html", "The cellar key hangs here."),
        Document("texts/lease.txt", LEASE),
        Document("recipe.md", RECIPE),
    ]


def test_pages_are_cited(here: Path, checkpoint: Path) -> None:
    model = SeDeM.from_pretrained(checkpoint)
    document = Document("lease.pdf", LEASE, (0, 0, len(LEASE) // 2))
    building.build_bank(model, model.engine, Path("a.bank"), [document])
    printed = succeeds("ask", "a.bank", RENT, "-k", "all", "-m", checkpoint)
    assert re.search(r"^  \[\d+\] lease\.pdf, page 2:0-\d+ ", printed, re.MULTILINE)
    entry = prints_json("ask", "a.bank", RENT, "-k", "all", "--json", "-m", checkpoint)
    assert {c["page"] for c in entry["citations"]} == {2, 3}
    for citation in entry["citations"]:
        assert (citation["page"] == 3) == (citation["start"] >= len(LEASE) // 2)


def test_folders_without_files_and_missing_files_are_refused(here: Path, checkpoint: Path) -> None:
    Path("texts").mkdir()
    model = ("-m", checkpoint)
    refused("build", "a.bank", "texts", *model, words=r"'texts' holds no file that can be read \(")
    refused("build", "a.bank", "*.pdf", *model, words=r"'\*\.pdf' holds no file that can be read")
    refused("build", "a.bank", "no.txt", *model, words=r"there is no file 'no\.txt'")
    refused(
        "build",
        "a.bank",
        "lease.txt",
        "--encoding",
        "klingon",
        *model,
        words="or there is no such encoding; try utf-8",
    )
    assert not Path("a.bank").exists()


def test_a_named_encoding_is_used(here: Path, checkpoint: Path) -> None:
    Path("cafe.txt").write_bytes("Café in Görlitz".encode("utf-16"))
    succeeds("build", "a.bank", "cafe.txt", "--encoding", "utf-16", "-m", TINY)
    assert MemoryBank.open("a.bank").documents == [Document("cafe.txt", "Café in Görlitz")]


def test_a_bank_of_another_model_is_neither_extended_nor_asked(
    bank: Path, checkpoint: Path, stranger: Path
) -> None:
    before = bytes_of(bank)
    Path("note.txt").write_text("A note.")
    words = "was built by model [0-9a-f]{12}, this model is [0-9a-f]{12}; .*'sedem build'"
    refused("build", bank, "note.txt", "-m", stranger, words=words)
    refused("ask", bank, RENT, "-m", stranger, words=words)
    assert bytes_of(bank) == before


def test_a_path_that_is_not_a_bank_is_refused(here: Path, checkpoint: Path) -> None:
    Path("folder").mkdir()
    for verb in (
        ["ask", "folder", RENT],
        ["build", "folder", "lease.txt"],
        ["bank", "ls", "folder"],
    ):
        refused(*verb, words="'folder' is a folder, not a bank; give the file of a bank")
    for verb in (["ask", "none", RENT], ["bank", "show", "none"], ["bank", "verify", "none"]):
        refused(*verb, words="bank 'none' does not exist; create it with 'sedem build none FILE")
    assert list(Path("folder").iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "foreign", "file", "unknown"])
def test_a_checkpoint_that_cannot_be_used_is_refused_and_nothing_is_written(
    damage: str, here: Path, checkpoint: Path, tiny_folder: Callable[..., str]
) -> None:
    broken, words = Path("broken"), r"sedem\.safetensors' is damaged \(it has 1,000 bytes"
    broken.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    if damage == "truncated":
        os.truncate(broken / "sedem.safetensors", 1000)
    elif damage == "foreign":
        broken = Path(tiny_folder())
        words = "is not a sedem configuration"
    elif damage == "file":
        broken = Path("lease.txt")
        words = r"'lease\.txt' is a file; a checkpoint is a folder"
    else:
        broken = Path("no-such-model")
        words = "checkpoint 'no-such-model' is neither a local folder nor available from the hub"
    refused("build", "a.bank", "lease.txt", "-m", broken, words=words)
    assert not [path for path in here.iterdir() if "bank" in path.name]


# An untrained model


def test_an_untrained_checkpoint_reads_and_answers(
    here: Path, tiny_folder: Callable[..., str]
) -> None:
    shown = succeeds("init", tiny_folder(), "raw model", "--segment-length", 32, "-k", 3)
    assert re.search(r"^memory +states after layer 2, injected there unchanged$", shown, re.M)
    assert re.search(r"^bank +64 bytes a token, in bfloat16$", shown, re.M)
    assert re.search(r"^answer +from 3 blocks of 32 tokens$", shown, re.M)
    assert re.search(r"^prompt +without a chat template$", shown, re.M)
    build, ask = shown.splitlines()[-2:]
    build, ask = build.replace("FILE ...", "lease.txt"), ask.replace("QUESTION", f"'{RENT}'")
    assert "1 added" in succeeds(*shlex.split(build)[1:])
    answer = prints_json(*shlex.split(ask)[1:], "--json")
    assert (answer["k"], answer["model"]) == (3, "raw model")


def test_an_untrained_checkpoint_asks_in_a_chat_unless_told_not_to(
    here: Path, chat_folder: str
) -> None:
    assert re.search(r"^prompt +in a chat template$", succeeds("init", chat_folder, "a"), re.M)
    assert "prompt      without" in succeeds("init", chat_folder, "b", "--no-chat-template")
    found = [json.loads(Path(name, "config.json").read_text())["chat_template"] for name in "ab"]
    assert found == [True, False]


def test_an_untrained_checkpoint_with_bad_settings_is_refused(
    here: Path, tiny_folder: Callable[..., str]
) -> None:
    for options, words in (
        (["--chat-template"], "chat_template is on, but the tokenizer of backbone '.*' has no"),
        (["--layer", "4"], "layer is 4, but backbone '.*' has 4 layers; give a layer from 1 to 3"),
        (["--segment-length", "512"], "segment_length 512 and a start token exceed the 512"),
        (["-k", "most"], "k is 'most'"),
    ):
        refused("init", tiny_folder(), "raw", *options, words=words)
        assert not Path("raw").exists()
    Path("raw").mkdir()
    refused("init", tiny_folder(), "raw", words="'raw' exists already; give the name of a new fold")


# Asking


def test_an_answer_comes_with_its_sources(bank: Path) -> None:
    lines = succeeds("ask", bank, RENT, "-k", "2").splitlines()
    sources = r"^  \[[12]\] (lease\.txt|recipe\.md):\d+-\d+ \(\d+\.\d\)  \S"
    assert len(re.findall(sources, "\n".join(lines), re.MULTILINE)) == 2
    assert "  note: the answer was cut off at its limit of 64 tokens" in lines


def test_json_has_exactly_the_promised_keys_and_exact_citations(
    bank: Path, checkpoint: Path
) -> None:
    entry = prints_json("ask", bank, RENT, "-k", 3, "--json")
    assert set(entry) == ANSWER_KEYS
    assert (entry["k"], entry["blocks"], entry["model"]) == (3, 29, "tiny")
    assert {"select_ms", "ttft_ms", "total_ms"} <= set(entry["timings"])
    texts = {d.name: d.text for d in MemoryBank.open(bank).documents}
    assert [c["rank"] for c in entry["citations"]] == [1, 2, 3]
    for citation in entry["citations"]:
        assert set(citation) == {
            "rank",
            "document",
            "start",
            "end",
            "score",
            "text",
            "page",
            "note",
        }
        span = texts[citation["document"]][citation["start"] : citation["end"]]
        assert span == citation["text"]


def test_a_bank_without_texts_shows_sources_from_their_files(here: Path) -> None:
    succeeds("build", "bare.bank", "lease.txt", "-m", TINY, "--no-text")
    assert b"tenant" in Path("lease.txt").read_bytes()
    assert not any(b"tenant" in content for content in bytes_of(Path("bare.bank")).values())
    assert re.search(r"texts +not in the bank", succeeds("bank", "show", "bare.bank"))
    assert len(prints_json("bank", "ls", "bare.bank", "--json")) == 1
    for citation in prints_json("ask", "bare.bank", RENT, "-k", 2, "--json")["citations"]:
        assert citation["text"] == LEASE[citation["start"] : citation["end"]]
        assert citation["note"] is None
    Path("lease.txt").write_text("A new lease.", encoding="utf-8")
    said = "bank 'bare.bank' holds no texts, and 'lease.txt' has changed since; put the original"
    lines = succeeds("ask", "bare.bank", RENT, "-k", 2).splitlines()
    assert [line for line in lines if "note: " in line and said in line] == [
        f"  note: {said} file back in its place to see it"
    ]
    refused("ask", "bare.bank", RENT, "--condition", "text", words="holds no texts, and 'lease")


def test_asking_equals_the_python_interface(bank: Path, checkpoint: Path) -> None:
    answer = SeDeM.from_pretrained(checkpoint).answer(MemoryBank.open(bank), RENT)
    expected = {**answer.to_dict(), "timings": None}
    assert {**prints_json("ask", bank, RENT, "--json"), "timings": None} == json.loads(
        json.dumps(expected)
    )
    assert succeeds("ask", bank, RENT).startswith(printable(answer.text, keep="\n"))


def test_questions_come_from_stdin_one_a_line(bank: Path) -> None:
    alone = [prints_json("ask", bank, q, "--json")["answer"] for q in (RENT, "Pets?")]
    lines = succeeds("ask", bank, "--json", stdin=f"{RENT}\n\n  Pets?  \n").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == alone
    assert succeeds("ask", bank, "--json", stdin="") == ""


def test_limits_and_sampling_are_passed_on(bank: Path) -> None:
    def ask(*options: object) -> dict[str, Any]:
        return dict(prints_json("ask", bank, RENT, "--json", *options))

    short = ask("--max-new-tokens", 3)
    assert short["cut"] == ["the answer was cut off at its limit of 3 tokens"]
    hot = ("--temperature", 5, "--max-new-tokens", 16)
    assert ask(*hot, "--seed", 1)["answer"] == ask(*hot, "--seed", 1)["answer"]
    assert ask(*hot, "--seed", 1)["answer"] != ask(*hot, "--seed", 2)["answer"]
    refused(
        "ask",
        bank,
        RENT,
        "--max-new-tokens",
        0,
        words="max_new_tokens is 0; it must be a whole number",
    )
    refused("ask", bank, RENT, "--temperature", -1, words="temperature is -1")


def test_documents_can_be_named(bank: Path) -> None:
    ask = ("ask", bank, RENT, "-k", "all", "--json", "--document")
    lease = prints_json(*ask, "lease.txt")
    assert {c["document"] for c in lease["citations"]} == {"lease.txt"}
    limited = (*ask, "lease.txt", "--document", "recipe.md", "--max-new-tokens", 8)
    both = prints_json(*limited)
    assert len(both["citations"]) == both["blocks"] == 29 > len(lease["citations"])
    words = "has no document 'rent.txt'; it has lease.txt, recipe.md"
    refused("ask", bank, RENT, "--document", "rent.txt", words=words)


def test_auto_says_how_many_blocks_it_used(
    here: Path, tiny_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(here / "guided", tiny_folder(), guidance=True, auto_min=3, auto_max=3)
    succeeds("build", "guided.bank", "lease.txt", "recipe.md", "-m", "guided")
    ask = ("ask", "guided.bank", RENT, "-m", "guided", "--engine", "eager", "-k")
    assert prints_json(*ask, "auto", "--json")["k"] == 3
    assert "  from 3 of 29 blocks" in succeeds(*ask, "auto").splitlines()
    assert "  from" not in succeeds(*ask, 3)


def questions_with_evidence(path: Path, count: int = 20) -> Path:
    """Questions about a rent, each with one document that tells and one that does not."""
    lines = []
    for number in range(count):
        text = f"The rent of flat {number} is {900 + number} euros a month."
        document = {"name": "a.txt", "text": text}
        lines.append(
            {
                "documents": [document, {"name": "b.txt", "text": RECIPE}],
                "question": f"What is the rent of flat {number}?",
                "answers": [f"{900 + number} euros"],
                "evidence": [{"document": "a.txt", "start": 0, "end": len(text)}],
            }
        )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_calibrated_checkpoint_tells_its_confidence_and_can_decline(
    bank: Path, checkpoint: Path, here: Path
) -> None:
    data = questions_with_evidence(here / "questions.jsonl")
    found = prints_json(
        "calibrate", checkpoint, "--data", data, "-o", "sure", "--engine", "eager", "--json"
    )
    assert (found["fitted"], found["held_out"], found["left_out"]) == (15, 5, 0)
    assert 0 <= found["auroc"] <= 1 and 0 <= found["calibration_error"] <= 1
    assert SedemConfig.load(Path("sure"), extra=EXTRA_ENTRIES).confidence
    ask = ("ask", bank, RENT, "-m", "sure", "--engine", "eager", "--max-new-tokens", 3)
    answer = prints_json(*ask, "--json")
    assert 0 < answer["confidence"] < 1 and answer["finish_reason"] != "unanswerable"
    assert f"  confidence {answer['confidence']:.2f}" in succeeds(*ask).splitlines()
    declined = prints_json(*ask, "--min-confidence", 1, "--json")
    assert declined["answer"] == UNANSWERABLE
    assert declined["finish_reason"] == "unanswerable"
    assert declined["citations"] == answer["citations"]
    assert succeeds(*ask, "--min-confidence", 1).splitlines()[0] == UNANSWERABLE


def test_too_few_questions_to_calibrate_are_refused(checkpoint: Path, here: Path) -> None:
    data = questions_with_evidence(here / "questions.jsonl", 3)
    words = "3 of 3 questions have labelled evidence .* at least 16 are needed"
    result = sedem("calibrate", checkpoint, "--data", data, "-o", "sure", "--engine", "eager")
    assert result.exit_code == 1 and re.search(words, result.stderr)
    assert not Path("sure").exists()


def test_a_question_or_a_value_that_cannot_be_used_is_refused(bank: Path) -> None:
    for k in ("0", "-1", "many", "1.5", ""):
        words = f"k is '?{k}'?; it must be a whole number"
        refused("ask", bank, RENT, "-k", k, "--json", words=words)
    refused("ask", bank, " \t ", words="the question is empty; ask something")
    words = "the question has 10,000 tokens, the model reads at most 511; ask"
    refused("ask", bank, "?" * 10_000, words=words)
    ask = ("ask", bank, RENT, "--engine", "eager", "--min-confidence")
    refused(*ask, 0.5, words="min_confidence is 0.5, but this model gives no confidence; fit it")
    refused(*ask, 2, words="min_confidence is 2.0; it must be a number from 0 to 1")
    words = "both.bank' holds the texts of its documents; build another bank"
    refused("build", bank, "lease.txt", "-m", TINY, "--no-text", words=words)


def test_a_k_beyond_the_bank_is_the_whole_bank(bank: Path) -> None:
    short = ("--json", "--max-new-tokens", 8)
    whole = prints_json("ask", bank, RENT, "-k", "all", *short)
    beyond = prints_json("ask", bank, RENT, "-k", 10**9, *short)
    assert whole["k"] == beyond["k"] == whole["blocks"] == 29
    assert whole["answer"] == beyond["answer"]


def test_a_k_whose_states_do_not_fit_is_refused_with_numbers(here: Path, checkpoint: Path) -> None:
    Path("long.txt").write_text(LEASE * 3)
    succeeds("build", "long.bank", "long.txt", "-m", TINY)
    words = rf"{3 * len(LEASE):,} selected states, .* positions, the decoder has {POSITIONS}; use k"
    for k in (10**9, "all"):
        refused("ask", "long.bank", RENT, "-k", k, words=rf"{words} of at most \d+")


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
    succeeds("build", "../a.bank", "../recipe.md", "-m", model)


def test_a_bank_is_listed_shown_and_reduced(bank: Path) -> None:
    assert prints_json("bank", "ls", bank, "--json") == [
        {"document": "lease.txt", "characters": len(LEASE), "blocks": 17},
        {"document": "recipe.md", "characters": len(RECIPE), "blocks": 12},
    ]
    assert [line.split() for line in succeeds("bank", "ls", bank).splitlines()] == [
        ["characters", "blocks", "document"],
        [f"{len(LEASE):,}", "17", "lease.txt"],
        [f"{len(RECIPE):,}", "12", "recipe.md"],
    ]
    facts = prints_json("bank", "show", bank, "--json")
    assert facts["documents"] == 2
    assert facts["blocks"] == 29
    assert facts["tokens"] == len(LEASE) + len(RECIPE.encode())
    assert facts["fingerprint"] == MemoryBank.open(bank).fingerprint
    assert facts["model"] == TINY
    shown = succeeds("bank", "show", bank)
    # What is unfinished is a note, and only where there is any.
    assert all(name.replace("_", " ") in shown for name in facts.keys() - {"unfinished"})
    assert succeeds("bank", "rm", bank, "lease.txt") == "both.bank: removed 'lease.txt'\n"
    assert [d["document"] for d in prints_json("bank", "ls", bank, "--json")] == ["recipe.md"]
    refused("bank", "rm", bank, "lease.txt", words=r"no document 'lease\.txt'; it has recipe\.md")


def test_a_bank_is_removed_from_compacted_copied_exported_and_imported_with_json(
    bank: Path,
) -> None:
    first = succeeds("ask", bank, RENT, "-k", "1")
    backup = prints_json("bank", "backup", bank, "copy.bank", "--json")
    assert backup == {"from": str(bank), "to": "copy.bank", "bytes": backup["bytes"]}
    removed = prints_json("bank", "rm", bank, "recipe.md", "recipe.md", "--json")
    assert removed == {"removed": ["recipe.md"]}
    report = prints_json("bank", "compact", bank, "--json")
    assert 0 < report["bytes_after"] <= report["bytes_before"]
    assert "bytes now" in succeeds("bank", "compact", bank)
    refused("bank", "compact", bank, "--keep", "2", words="--keep is for banks in parts; 'both")
    assert succeeds("ask", bank, RENT, "-k", "1") == first
    assert "sent.bank: " in succeeds("bank", "export", bank, "sent.bank")
    assert prints_json("bank", "import", "sent.bank", "back.bank", "--json")["to"] == "back.bank"
    assert prints_json("bank", "verify", "back.bank", "--json") == {"problems": [], "documents": []}
    assert prints_json("bank", "ls", "back.bank", "--json") == prints_json(
        "bank", "ls", bank, "--json"
    )
    both = {d["document"] for d in prints_json("bank", "ls", "copy.bank", "--json")}
    assert both == {"lease.txt", "recipe.md"}
    refused("bank", "backup", bank, "copy.bank", words="'copy.bank' exists already")
    refused("bank", "rm", "copy.bank", "lease.txt", "x", words="no document 'x'; it has lease.txt")
    assert len(prints_json("bank", "ls", "copy.bank", "--json")) == 2, "all or none are removed"


def damage_last_block(bank: Path) -> None:
    """Change a byte of the memory of the last block."""
    with BankFile(bank).reading() as connection:
        memory = connection.execute("SELECT memory FROM blocks ORDER BY id DESC").fetchone()[0]
    gc.collect()  # so that no connection is open, and all is in one file
    content = bytearray(bank.read_bytes())
    assert content.count(memory) == 1
    content[content.index(memory) + 5] ^= 1
    bank.write_bytes(content)


def test_a_bank_is_split_and_joined(bank: Path) -> None:
    answer = succeeds("ask", bank, RENT, "-k", "2")
    report = prints_json("bank", "split", bank, "parts", "--parts", "2", "--json")
    assert report == {"from": str(bank), "to": "parts", "bytes": report["bytes"]}
    assert len(list(Path("parts").glob("*.bank"))) == 2
    assert succeeds("ask", "parts", RENT, "-k", "2") == answer
    assert "whole.bank: " in succeeds("bank", "join", "parts", "whole.bank")
    assert succeeds("ask", "whole.bank", RENT, "-k", "2") == answer
    assert succeeds("bank", "verify", "parts") == "parts: all is well\n"
    refused("bank", "warm", "parts", words="needs a bank in one file; copy it with 'sedem bank jo")


def test_a_repair_reads_again_what_it_can_and_drops_the_rest(here: Path) -> None:
    for name in ("lease.txt", "recipe.md"):
        succeeds("build", "a.bank", name, "-m", TINY)
    bank = MemoryBank.open("a.bank")
    memory = bank.memory(range(len(bank)))
    bank.store.close()
    # The blocks of so small a model share a page, and texts have another.
    both = ["lease.txt", "recipe.md"]
    for options, read_again, dropped in (([], both, []), (["--drop"], [], both)):
        damage_last_block(Path("a.bank"))
        found = sedem("bank", "verify", "a.bank", "--json")
        assert (found.exit_code, json.loads(found.stdout)["documents"]) == (1, both)
        del found  # its error holds the bank open
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


def test_verify_reports_damage_with_exit_code_1(bank: Path) -> None:
    assert succeeds("bank", "verify", bank) == "both.bank: all is well\n"
    damage_last_block(bank)
    result = sedem("bank", "verify", bank)
    assert result.exit_code == 1
    assert "both.bank: " in result.stdout and "'recipe.md'" in result.stdout
    refused("ask", bank, RENT, "-k", "all", words="a page does not match its checksum; restore")


# Evaluating


def custom_questions(path: Path, count: int = 5) -> Path:
    """Write custom questions; those with odd numbers have evidence."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"Flat {number}. The rent of flat {number} is {900 + number} euros a month."
            entry: dict[str, Any] = {
                "id": f"q{number}",
                "documents": [
                    {"name": "lease.txt", "text": text},
                    {"name": "recipe.md", "text": RECIPE},
                ],
                # Line separators of Unicode are ordinary characters in a line of JSON.
                "question": f"What is the rent of flat {number}?\u2028\u0085",
                "answers": [f"{900 + number} euros"],
            }
            if number % 2:
                entry["evidence"] = [{"document": "lease.txt", "start": 8, "end": len(text)}]
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    return path


SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{title} number {p} lies at {p * 100} metres.",
                    "qas": [
                        {
                            "id": f"{title}-{p}",
                            "question": f"How high is {title} number {p}?",
                            "answers": [
                                {
                                    "text": f"{p * 100} metres",
                                    "answer_start": len(f"{title} number {p} lies at "),
                                }
                            ],
                        }
                    ],
                }
                for p in (1, 2)
            ],
        }
        for title in ("Hill", "Lake")
    ],
}


def test_methods_are_listed() -> None:
    listed = [line.split()[0] for line in succeeds("eval", "--list").splitlines()]
    assert {"sedem", "full-context", "bm25", "longllmlingua"} <= set(listed)


def test_every_control_is_in_the_help() -> None:
    text = " ".join(succeeds("eval", "sedem", "--help").split())
    assert f"{', '.join(CONTROLS[:-1])} or {CONTROLS[-1]}" in text


def check_metric(metric: dict[str, Any], count: int) -> None:
    assert set(metric) == {"mean", "interval", "n"}
    low, high = metric["interval"]
    assert 0 <= low <= metric["mean"] <= high <= 100
    assert metric["n"] == count


@pytest.mark.parametrize("method", ["sedem", "full-context", "bm25"])
def test_a_method_is_evaluated_on_custom_questions(
    method: str, here: Path, checkpoint: Path
) -> None:
    data = custom_questions(here / "custom.jsonl")
    options = ("--data", data, "-m", checkpoint, "--max-new-tokens", 4)
    metrics = prints_json("eval", method, *options, "--json")
    for name in ("em", "f1", "rouge_l"):
        check_metric(metrics[name], 5)
    selection = {name for name in metrics if "@" in name or name == "mrr"}
    if method == "full-context":
        assert not selection and metrics["counts"]["ranked_every_block"] == 0
    else:
        # Only two of the five have evidence.
        check_metric(metrics["recall@1"], 2)
        assert {"recall@1", "precision@1", "mrr"} <= selection
    assert metrics["counts"]["examples"] == 5
    assert metrics["counts"]["ended_by_limit"] <= 5
    assert metrics["settings"]["method"] == method
    assert metrics["settings"]["schema"] == "own"
    assert {"machine", "versions", "commit"} <= set(metrics)
    shown = succeeds("eval", method, *options)
    assert re.search(r"^em +\d+\.\d\d +\[\d+\.\d\d, \d+\.\d\d\] +5$", shown, re.MULTILINE)


def test_a_method_is_evaluated_on_squad(here: Path, checkpoint: Path) -> None:
    Path("squad.json").write_text(json.dumps(SQUAD))
    metrics = prints_json(
        "eval", "sedem", "--data", "squad.json", "-m", checkpoint, "--max-new-tokens", 4, "--json"
    )
    assert metrics["settings"]["schema"] == "squad"
    assert metrics["counts"]["examples"] == 4
    check_metric(metrics["f1"], 4)
    check_metric(metrics["recall@2"], 4)
    assert metrics["recall@1"]["mean"] <= metrics["recall@2"]["mean"]
    sampled = prints_json(
        "eval", "sedem", "--data", "squad.json", "-m", checkpoint, "--limit", 2, "--records", "1:",
        "--max-new-tokens", 4, "--json",
    )  # fmt: skip
    assert sampled["counts"]["examples"] == 2


def test_gold_blocks_are_found_and_wrong_ones_are_not(here: Path, checkpoint: Path) -> None:
    Path("squad.json").write_text(json.dumps(SQUAD))

    def recall(control: str) -> float:
        metrics = prints_json(
            "eval", "sedem", "--data", "squad.json", "-m", checkpoint, "--control", control,
            "-k", 1, "--max-new-tokens", 2, "--json",
        )  # fmt: skip
        return float(metrics["recall@1"]["mean"])

    assert (recall("gold"), recall("wrong")) == (100.0, 0.0)


def test_boundaries_between_segments_can_be_moved(here: Path, checkpoint: Path) -> None:
    data = custom_questions(here / "custom.jsonl")
    first = {}
    for shift in (0, 4):
        succeeds(
            "eval", "sedem", "--data", data, "-m", checkpoint, "-k", "all", "--shift", shift,
            "--max-new-tokens", 2, "--limit", 1, "--out", f"run{shift}",
        )  # fmt: skip
        spans = [(b["start"], b["end"]) for b in read_records(Path(f"run{shift}"))[0]["selected"]]
        first[shift] = sorted(spans)[0]
    assert first == {0: (0, 16), 4: (0, 4)}


def test_predictions_and_metrics_are_saved(here: Path, checkpoint: Path) -> None:
    data = custom_questions(here / "custom.jsonl")
    result = sedem(
        "eval", "sedem", "--data", data, "-m", checkpoint, "--max-new-tokens", 4, "--out", "run",
        "--json",
    )  # fmt: skip
    assert "answering" in result.stderr
    assert json.loads(result.stdout) == json.loads(Path("run/metrics.json").read_text())
    records = read_records(Path("run"))
    assert [record["id"] for record in records] == [f"q{number}" for number in range(5)]
    assert records[1]["references"] == ["901 euros"]
    assert [record["labelled"] for record in records] == [False, True, False, True, False]
    assert all(record["k"] == len(record["selected"]) == 2 for record in records)


def read_records(out: Path) -> list[dict[str, Any]]:
    content = (out / "predictions.jsonl").read_text(encoding="utf-8")
    assert content.endswith("\n")
    return [json.loads(line) for line in content.removesuffix("\n").split("\n")]


def test_an_interrupted_evaluation_resumes_after_its_last_whole_line(
    here: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "eval", "sedem", "--data", custom_questions(here / "custom.jsonl"), "-m", checkpoint,
        "--max-new-tokens", 4, "--out", "run", "--json",
    )  # fmt: skip
    whole = prints_json(*arguments)
    path = Path("run/predictions.jsonl")
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    answered: list[str] = []
    real = SedemMethod.answer

    def counting(self: SedemMethod, examples: Any) -> Any:
        answered.extend(example.id for example in examples)
        return real(self, examples)

    kept = 3
    path.write_bytes(b"".join(line + b"\n" for line in lines[:kept]) + lines[kept][:40])
    monkeypatch.setattr(SedemMethod, "answer", counting)
    again = prints_json(*arguments)
    assert answered == ["q3", "q4"]
    assert path.read_bytes().split(b"\n")[:kept] == lines[:kept]
    assert [record["id"] for record in read_records(Path("run"))] == [f"q{n}" for n in range(5)]
    assert {name: again[name] for name in ("em", "f1", "counts")} == {
        name: whole[name] for name in ("em", "f1", "counts")
    }
    assert prints_json(*arguments)["f1"] == whole["f1"]
    assert answered == ["q3", "q4"], "a finished run answers nothing twice"


def test_results_of_other_settings_or_files_are_not_mixed(here: Path, trained: Path) -> None:
    data = custom_questions(here / "custom.jsonl", 2)
    shutil.copytree(trained, "model")
    arguments = (
        "eval", "sedem", "--data", data, "-m", "model", "--max-new-tokens", 4, "--out", "run",
    )  # fmt: skip
    succeeds(*arguments)
    before = bytes_of(Path("run"))
    words = r"'run' holds results of other settings .*; give another --out"
    for other in (("--limit", 2), ("--seed", 1)):
        refused(*arguments, *other, words=words)
    path = Path("model/adapter/adapter_model.safetensors")
    save_file({n: w + 0.01 for n, w in load_file(path).items()}, path)
    succeeds("seal", "model")
    refused(*arguments, words=words)
    assert bytes_of(Path("run")) == before


def test_an_evaluation_with_bad_settings_is_refused(here: Path, checkpoint: Path) -> None:
    data = custom_questions(here / "custom.jsonl", 2)
    for options, words in (
        (["fly"], "there is no method 'fly'; there are sedem, full-context, bm25"),
        (["sedem", "--schema", "mine"], "there is no schema 'mine'; known are own, squad"),
        (["sedem", "--records", "first"], "records is 'first'; it must be 'start:stop'"),
        (["sedem", "--records", "9:"], "there are no examples to evaluate"),
        (["sedem", "--limit", "0"], "sedem eval: limit is 0; it must be above 0"),
        (["sedem", "--control", "best"], "control is 'best'; it can be selected, gold, gold-docum"),
        (["sedem", "--dtype", "int8"], "dtype is 'int8'; it can be float32 or bfloat16"),
        (["sedem", "-k", "auto"], "k is 'auto', but this model was trained without guidance"),
        (["bm25", "-k", "0"], "k is 0; it must be above 0, or it can be all or auto"),
        (["bm25", "--control", "gold"], "control is 'gold', but bm25 has no control; leave it out"),
        (["full-context", "-k", "2"], "k is 2, but full-context has no k; leave it out"),
        (["sedem", "-m", "no-such"], "checkpoint 'no-such' is neither a local folder nor"),
    ):
        arguments = options if "-m" in options else [*options, "-m", checkpoint]
        refused("eval", *arguments, "--data", data, words=words)


def test_data_that_cannot_be_read_is_refused(here: Path, checkpoint: Path) -> None:
    Path("odd.jsonl").write_text('{"text": "no question"}\n')
    Path("half.jsonl").write_text('{"documents": [], "answers": [], "question": ')
    Path("none.jsonl").write_text("")
    Path("empty").mkdir()
    for name, words in (
        ("no.jsonl", r"there is no file 'no\.jsonl'"),
        ("odd.jsonl", r"the fields of 'odd\.jsonl' fit no schema; name it"),
        ("half.jsonl", r"'half\.jsonl', line 1 is not JSON"),
        ("none.jsonl", r"none\.jsonl"),
        (".", r"'half\.jsonl', line 1 is not JSON"),
        ("empty", "folder 'empty' holds no .json, .jsonl, .parquet file"),
    ):
        refused("eval", "sedem", "--data", name, "-m", checkpoint, words=words)


def test_unanswered_questions_are_reported_at_the_end(here: Path, checkpoint: Path) -> None:
    data = custom_questions(here / "custom.jsonl", 3)
    data.write_text(data.read_text("utf-8").replace("flat 1?", "?" * 700), encoding="utf-8")
    shown = succeeds("eval", "sedem", "--data", data, "-m", checkpoint, "--max-new-tokens", 4)
    assert shown.splitlines()[-1].startswith(
        "1 of 3 could not be answered and count as wrong; the first, q1: the question has "
    )


def test_options_of_a_set_reach_its_loader(here: Path, checkpoint: Path) -> None:
    Path("squad.json").write_text(json.dumps(SQUAD))
    arguments = (
        "eval", "sedem", "--data", "squad.json", "-m", checkpoint, "--max-new-tokens", 2,
    )  # fmt: skip
    one = prints_json(*arguments, "--option", "distractors=0", "--json")
    four = prints_json(*arguments, "--option", "distractors=3", "--batch", 2, "--json")
    assert one["counts"]["blocks_mean"] < four["counts"]["blocks_mean"]
    assert one["settings"]["options"] == {"distractors": 0}
    assert (one["settings"]["batch"], four["settings"]["batch"]) == (32, 2)
    refused(*arguments, "--option", "distractors", words="option 'distractors' is not of the form")
    refused(*arguments, "--option", "colour=red", words="unknown key 'colour'; known are")
    refused(*arguments, "--batch", 0, words="batch is 0; it must be above 0")
    refused(*arguments, "--split", "dev", words="is a file: leave it out")


def test_runs_are_reported(here: Path, checkpoint: Path) -> None:
    data = custom_questions(here / "custom.jsonl")
    for method in ("sedem", "bm25"):
        succeeds(
            "eval", method, "--data", data, "-m", checkpoint, "--max-new-tokens", 4,
            "--out", f"{method}-run",
        )  # fmt: skip
    folders = ("sedem-run", "bm25-run", "lease.txt")
    result = prints_json("eval", "report", *folders, "--plot", "runs.svg", "--json")
    assert [run["method"] for run in result["runs"]] == ["sedem", "bm25"]
    assert result["differences"][0]["metrics"]["f1"]["n"] == 5
    assert result["problems"] == ["'lease.txt' holds no results of 'sedem eval --out'"]
    assert "<svg" in Path("runs.svg").read_text(encoding="utf-8")
    shown = sedem("eval", "report", *folders)
    assert shown.exit_code == 0
    assert "sedem K=" not in shown.stdout
    assert re.search(r"^1  sedem-run +\d", shown.stdout, re.MULTILINE)
    assert shown.stderr == "note: 'lease.txt' holds no results of 'sedem eval --out'\n"
    refused("eval", "report", "lease.txt", words="'lease.txt' holds no results")


@pytest.mark.parametrize("words", [[], ["sedem"], ["report"]])
def test_eval_without_a_method_or_folders_is_a_usage_error(words: list[str]) -> None:
    result = sedem("eval", *words)
    assert (result.exit_code, result.stdout) == (2, "")


# Costs


def test_costs_of_a_preset_are_counted() -> None:
    result = prints_json("cost", "llama-3.2-1b", "--json")
    assert set(result) == {"backbone", "parameters", "flops"}
    parameters = result["parameters"]
    parts = ("compressor", "decompressor", "selector", "lora")
    assert parameters["total"] == sum(parameters[part] for part in parts)
    assert parameters["backbone"] == 1_235_814_400
    assert parameters["percent"] == pytest.approx(
        100 * parameters["total"] / parameters["backbone"], abs=0.01
    )
    flops = result["flops"]
    stages = ("read", "select", "restore", "prefill", "decode")
    assert flops["total"] == pytest.approx(sum(flops[stage] for stage in stages), abs=5)
    assert set(flops["assumptions"]) >= {"context_tokens", "k", "extract_layer", "inject_layer"}


def test_costs_are_shown_by_part_with_their_assumptions() -> None:
    shown = succeeds("cost", "llama-3.2-3b")
    assert re.search(r"^selector +18\.89  M parameters$", shown, re.MULTILINE)
    assert re.search(r"^read +\d+\.\d  GFLOPs$", shown, re.MULTILINE)
    assert re.search(r"^for context tokens 2048, .*k 2,", shown, re.MULTILINE)


def test_costs_of_a_training_run_are_shown_before_it_starts() -> None:
    shown = succeeds("cost", "--recipe", "paper/llama-3.2-1b/stage1", "--gpus", "8")
    assert "122,075" in shown and "memory of a GPU" in shown and "tflops 400, gpus 8" in shown
    entry = "optimization.epochs=1"
    result = prints_json("cost", "--recipe", "paper/llama-3.2-3b/stage1", "--set", entry, "--json")
    assert result["steps"] * 5 == 122_075


def test_costs_of_a_baseline_are_shown_with_their_assumptions() -> None:
    shown = succeeds("cost", "llama-3.2-1b", "--method", "icae")
    assert re.search(r"^without lora +0\.54  M parameters$", shown, re.MULTILINE)
    assert re.search(r"^encode +\d+\.\d  GFLOPs$", shown, re.MULTILINE)
    assert "memory 128, compression 4" in shown
    result = prints_json("cost", "llama-3.2-3b", "--method", "hmt", "--json")
    assert set(result) == {"backbone", "method", "parameters", "flops"}
    assert result["flops"]["total"] == result["flops"]["encode"] + result["flops"]["decode"]


def test_costs_of_a_baseline_on_any_backbone_are_counted(tiny_folder: Callable[..., str]) -> None:
    assert "GFLOPs" in succeeds("cost", tiny_folder(), "--method", "500x")
    words = "FLOPs of 'bm25' are not counted; those of icae, hmt, 500x, beacon are"
    refused("cost", tiny_folder(), "--method", "bm25", "--json", words=words)


def test_costs_of_a_checkpoint_are_those_of_its_weights(checkpoint: Path) -> None:
    parameters = prints_json("cost", checkpoint, "--json")["parameters"]
    model = SeDeM.from_pretrained(checkpoint)
    for part in ("compressor", "selector", "decompressor"):
        assert parameters[part] == sum(p.numel() for p in model.parts()[part].parameters())
    assert parameters["lora"] == sum(p.numel() for p in model.decoder.lora_parameters())


def test_costs_of_a_backbone_folder_are_counted(tiny_folder: Callable[..., str]) -> None:
    shown = succeeds("cost", tiny_folder())
    assert "M parameters" in shown
    assert "GFLOPs" in shown


@pytest.mark.parametrize("name", ["llama-9", "a/b/c", "."])
def test_an_unknown_backbone_is_refused_with_the_known_ones(name: str, here: Path) -> None:
    refused("cost", name, "--json", words=rf"backbone '{re.escape(name)}' is not known; give llama")
