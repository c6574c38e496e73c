"""Layers, sizes, documentation and forbidden calls of the package, and the layout of its tests."""

from __future__ import annotations

import ast
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.house import walk
from tools.planted_faults import FAULTS, plant

import sedem

SOURCE = Path(sedem.__file__).parents[1]
ROOT = SOURCE.parent
PACKAGES = ["sedem", "sedem_serve", "sedem_lab"]
FUNCTION_LINES = 110


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {
    name_of(path): ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in (SOURCE / package).rglob("*.py")
}
"""The syntax of every module of the three packages, by name."""


# Imports; import-linter checks the layers of pyproject.toml


def test_no_import_is_exempt_from_the_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    linter = settings["tool"]["importlinter"]
    assert not linter.get("exclude_type_checking_imports", False)
    packages, *rooms, circles, studies = linter["contracts"]
    assert packages["layers"] == ["experiments", "sedem_serve", "sedem_lab", "sedem"]
    assert [container for room in rooms for container in room["containers"]] == PACKAGES
    assert all(contract["exhaustive"] for contract in (*rooms, studies))
    assert circles["ancestors"] == linter["root_packages"] == [*PACKAGES, "experiments"]
    for contract in linter["contracts"]:
        assert not {"ignore_imports", "exhaustive_ignores"} & contract.keys()


def test_public_names_can_be_imported() -> None:
    assert sorted(sedem.__all__) == sedem.__all__
    for name in sedem.__all__:
        assert getattr(sedem, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'sedem' has no attribute 'Nothing'"):
        _ = sedem.Nothing


# Sizes


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's statements; signature and docstring do not count."""
    first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
    return (node.end_lineno or 0) - first.lineno + 1


def test_functions_are_short() -> None:
    long = {
        f"{name}.{node.name}": lines
        for name, tree in MODULES.items()
        for node in functions(tree)
        if (lines := body_lines(node)) > FUNCTION_LINES
    }
    assert not long, f"split these, {FUNCTION_LINES} lines are the cap: {long}"


# Words


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Public classes and functions of a module, and public methods of its public classes."""
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, f"{node.name}.")


def is_overload(node: Definition) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def undocumented(tree: ast.Module) -> list[str]:
    missing = [] if ast.get_docstring(tree) else ["the module itself"]
    return missing + [
        name
        for name, node in public(tree.body)
        if not is_overload(node) and not ast.get_docstring(node)
    ]


def unannotated(tree: ast.Module) -> list[str]:
    """Functions with an argument or a result without a type; `__init__` needs no result."""
    missing = []
    for node in functions(tree):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or (node.returns is None and node.name != "__init__"):
            missing.append(f"{node.name}({', '.join(bare)})")
    return missing


def test_public_things_are_documented_and_everything_is_annotated() -> None:
    for find in (undocumented, unannotated):
        assert not {name: found for name, tree in MODULES.items() if (found := find(tree))}


def test_a_missing_docstring_or_annotation_is_found() -> None:
    for source in (
        "def read(text: str) -> None:\n    pass",
        "class Bank:\n    '''A bank.'''\n    def read(self) -> None:\n        pass",
        "class Bank:\n    pass",
    ):
        assert undocumented(ast.parse(f"'''A module.'''\n{source}"))
    assert undocumented(ast.parse("x = 1")) == ["the module itself"]
    for source in ("def f(a) -> int: ...", "def f(a: int): ...", "def f(*a, **b) -> int: ..."):
        assert unannotated(ast.parse(source))


def test_no_module_has_an_empty_name() -> None:
    empty = {"util", "utils", "helper", "helpers", "manager", "core", "common", "misc", "base"}
    assert not {part for name in MODULES for part in name.split(".")} & empty


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


# Tests


UNIT_TESTS = Path(__file__).parent / "unit"
WITHOUT_MODULE = {
    "baselines.test_baseline_training": "trains every baseline with the training room",
    "bank.test_deleted": "searches the bytes of a bank and of all files beside it",
    "bench.test_bench": "runs the bench from command to document",
    "evaluation.test_flops": "compares every stage of `cost` with torch's counter",
    "method.test_soft_tokens": "runs the method without a decompressor, from reading to training",
    "reading.test_long_documents": "follows one document through a build in parts",
    "training.test_gradients": "compares the gradients of both stages with one appendix",
}
"""Test files of several modules, and why they are one file."""


def test_a_unit_test_file_has_the_name_of_a_module() -> None:
    tests = {
        ".".join(path.relative_to(UNIT_TESTS).with_suffix("").parts)
        for path in UNIT_TESTS.rglob("test_*.py")
    }
    # bank.file is tested by bank/test_file.py.
    rooms = [name.partition(".")[2].partition(".") for name in MODULES]
    named = {
        f"{room}.test_{rest.replace('.', '_')}" if rest else f"test_{room}"
        for room, _, rest in rooms
    }
    assert tests - named == WITHOUT_MODULE.keys(), (
        "name the file after its module, or give a reason"
    )


def test_a_planted_fault_has_one_place(tmp_path: Path) -> None:
    rooms = tmp_path / "src"
    for room, old, new in FAULTS:
        shutil.copytree(SOURCE / "sedem", rooms / "sedem")
        plant(tmp_path, room, old, new)
        shutil.rmtree(rooms)


# Forbidden imports and calls


OPENERS = {"from_pretrained", "from_config"}


def lacks_safe_options(call: ast.Call) -> Iterator[str]:
    """Options against foreign code and pickles that a call lacks."""
    owner, _, method = ast.unparse(call.func).rpartition(".")
    kind = owner.rpartition(".")[2]
    foreign = kind.startswith("Auto") or kind.startswith("Peft") or kind == "LoraConfig"
    if not foreign or method not in OPENERS:
        return
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    needed = {"trust_remote_code": "False"}
    if method == "from_pretrained" and "Model" in kind:
        needed["use_safetensors"] = "True"
    for option, value in needed.items():
        if given.get(option) != value:
            yield f"line {call.lineno}: {kind}.{method} lacks {option}={value}"


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Imports and calls that can run foreign code, or print."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [str(getattr(node, "module", ""))]
            for name in names:
                if name.split(".")[0] in {"pickle", "dill", "joblib", "marshal", "shelve"}:
                    yield f"line {node.lineno}: imports {name}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in {"print", "eval", "exec", "torch.load", "torch.save", "yaml.load"}:
            yield f"line {node.lineno}: calls {called}"
        yield from lacks_safe_options(node)
        for keyword in node.keywords:
            if keyword.arg in {"trust_remote_code", "allow_pickle"} and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                yield f"line {node.lineno}: passes {keyword.arg}"


def test_nothing_runs_foreign_code_or_prints() -> None:
    assert not {name: found for name, tree in MODULES.items() if (found := [*forbidden(tree)])}


def test_forbidden_code_is_found_and_safe_opening_allowed() -> None:
    for source in (
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "print('done')",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=safe)",
        "AutoModel.from_pretrained(name, use_safetensors=True)",
        "transformers.AutoModelForCausalLM.from_config(config)",
        "AutoConfig.from_pretrained(name, revision=revision)",
        "AutoTokenizer.from_pretrained(name)",
        "PeftModel.from_pretrained(model, name)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "np.load(path, allow_pickle=True)",
        "eval('1')",
    ):
        assert list(forbidden(ast.parse(source))), source
    for source in (
        "model.fingerprint()\nmodel.eval()\nrun.print_all()",
        "AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True)",
        "AutoModel.from_config(config, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=False)",
        "SeDeM.from_pretrained(name)",
    ):
        assert not list(forbidden(ast.parse(source))), source


def test_experiments_open_backbones_safely() -> None:
    for path in (ROOT / "experiments").rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        assert not [problem for call in calls for problem in lacks_safe_options(call)], path


def test_a_document_passes_through_few_files_into_a_bank(tmp_path: Path) -> None:
    """Opening the model is most of them."""
    document = SOURCE / "sedem" / "demo" / "harbour-register.txt"
    for name in ("a.bank", "b.bank"):  # what the first run imports is not counted
        built = walk("build", str(tmp_path / name), str(document))
    assert len(built.files) <= 34
