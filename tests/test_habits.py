"""Habits of the code base, checked: sizes of files and functions, a quick start, the order of imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from refusion.cli.app import app

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("refusion", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
FILE_LINES = 400
FUNCTION_LINES = 60
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "reasoning_gym", "huggingface_hub")
PARTS = ("cli", "server", "trace", "analysis", "evaluation", "training", "generation", "engine", "decoding",
         "checkpoint", "model", "data", "slots", "errors")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES, f"{name_of(path)} is too long: it usually holds two ideas"
    long = [
        f"{node.name} at line {node.lineno}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert not long, f"{name_of(path)}: {', '.join(long)}: over {FUNCTION_LINES} lines"


@pytest.mark.parametrize("path", [p for p in FILES if "refusion" in p.relative_to(ROOT).parts], ids=name_of)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("code", [
    "import refusion",
    "from refusion.cli.app import app; app(['--help'], standalone_mode=False)",
    "from refusion.cli.app import app; app(['generate', '--help'], standalone_mode=False)",
    "from refusion.cli.app import app; app(['bench', '--help'], standalone_mode=False)",
])
def test_help_loads_nothing_heavy(code: str) -> None:
    check = f"{code}\nimport sys\nprint('LOADED', [n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_every_command_is_a_short_file_of_its_own() -> None:
    for command in app.registered_commands:
        assert command.name and (ROOT / "refusion" / "cli" / f"{command.name}.py").is_file(), command.name


def test_the_order_of_imports_is_a_contract() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    listed = [part.strip(" ()") for layer in layers for part in layer.split("|")]
    assert tuple(listed) == PARTS
    # folders of data are no parts
    parts = [path for path in (ROOT / "refusion").iterdir() if path.is_file() or (path / "__init__.py").exists()]
    present = {path.stem for path in parts if not path.name.startswith("_")}
    assert present <= set(PARTS), "a new part needs its place in the layers"


def test_constraints_pin_every_direct_dependency() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    names = {need.split(">=")[0].split("[")[0].strip() for need in wanted} - {"refusion"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    assert names <= pinned, sorted(names - pinned)
    assert "torch==2.13.0" in lines
