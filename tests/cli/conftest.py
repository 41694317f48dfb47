"""The command line with a generation API that answers without a model and remembers what it was asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from refusion import generation
from refusion.cli.app import app
from refusion.generation import Generation

Call = Callable[..., Result]


def make_generation(text: str, tokens: int = 6) -> Generation:
    """An answer of 6 tokens in 3 forward passes and half a second."""
    return Generation(
        text=text, token_ids=list(range(tokens)), prompt_tokens=4, forwards=3, seconds=0.5, first_token_seconds=0.1,
        finish_reason="stop",
    )


@dataclass
class FakeApi:
    """What the commands see as refusion.generation. mask_token_id, order and error are set by tests."""

    mask_token_id: int | None = 7
    order: Callable[[list[Any]], list[Any]] = list
    error: BaseException | None = None
    loads: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    signatures: dict[str, inspect.Signature] = field(default_factory=dict)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Remembers the arguments as the real function would take them."""
        self.loads.append(self.bound("load", *args, **kwargs))
        return SimpleNamespace(config=SimpleNamespace(mask_token_id=self.mask_token_id), tokenizer=None)

    def generate(self, *args: Any, **kwargs: Any) -> list[Generation]:
        """Answers every prompt with its place and text; rows finish in `order`."""
        given = self.bound("generate", *args, **kwargs)
        self.runs.append(given)
        if self.error is not None:
            raise self.error
        found = [make_generation(f"answer {at}: {prompt}") for at, prompt in enumerate(given["prompts"])]
        for at in self.order(list(range(len(found)))):
            given["on_finish"](at, found[at])
        return found

    def bound(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments by name; a TypeError where the real function wouldn't take them."""
        bound = self.signatures[name].bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def run(self) -> dict[str, Any]:
        """The only run's arguments."""
        assert len(self.runs) == 1
        return self.runs[0]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    signatures = {name: inspect.signature(getattr(generation, name)) for name in ("load", "generate")}
    fake = FakeApi(signatures=signatures)
    monkeypatch.setattr(generation, "load", fake.load)
    monkeypatch.setattr(generation, "generate", fake.generate)
    return fake


@pytest.fixture
def call() -> Call:
    """`refusion ARGS...`, its standard input a pipe."""
    runner = CliRunner()

    def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
        return runner.invoke(app, [str(arg) for arg in args], input=stdin, prog_name="refusion")

    return invoke


def error_line(result: Result, code: int) -> str:
    """The one line on stderr of a command that failed with `code`."""
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output and result.stdout == ""
    return result.stderr.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def failing() -> Callable[[Result, int], str]:
    return error_line
