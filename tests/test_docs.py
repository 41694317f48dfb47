"""The commands and snippets in README and docs: parsed, their files and targets looked up, Python run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import refusion
from refusion.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, body)
        for page in PAGES
        for kind, body in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


def commands() -> list[tuple[str, str]]:
    """Every command line of the `sh` blocks, continued lines joined, comments and pipes cut."""
    found = []
    for page, body in blocks("sh"):
        for line in body.replace("\\\n", " ").splitlines():
            line = line.split(" #")[0].split(" | ")[-1].strip()
            if line and not line.startswith("#"):
                found.append((page, line))
    return found


@pytest.mark.parametrize(("page", "line"), [c for c in commands() if c[1].startswith("refusion ")])
def test_a_command_of_the_docs_parses(page: str, line: str) -> None:
    group: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version")
        return
    top = group.make_context("refusion", list(words), resilient_parsing=True)
    command = group.get_command(top, words[0])
    assert command is not None, f"{page} names the command {words[0]}, which doesn't exist"
    command.make_context(words[0], words[1:], parent=top)
    for word in words[1:]:
        if word.startswith("recipes/"):
            assert (ROOT / word).is_file(), f"{page} names {word}, which doesn't exist"


def test_make_targets_and_scripts_of_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page, line in commands():
        words = shlex.split(line)
        if words[0] == "make":
            for target in (w for w in words[1:] if "=" not in w):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page} names make {target}"
        elif words[0] in ("python", ".venv/bin/python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"{page} names {words[1]}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which doesn't exist"


@pytest.mark.parametrize(("page", "body"), blocks("python"))
def test_python_of_the_docs_runs(
    page: str, body: str, tiny_refusion_model: refusion.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusion, "load", lambda *args, **options: tiny_refusion_model, raising=False)
    torch.manual_seed(0)
    exec(compile(body, page, "exec"), {})


def test_recipes_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from refusion.training.recipe import load_recipe

    (tmp_path / "gsm8k_train.jsonl").write_text("{}\n")
    monkeypatch.setenv("REFUSION_DATA", str(tmp_path))
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    assert recipes
    for path in recipes:
        assert load_recipe(path).optim.total_tokens > 0
