"""The root command: help, version, unknown commands."""

from __future__ import annotations

import pytest

from refusion import __version__
from refusion.cli.app import app


def names() -> list[str]:
    return [command.name or "" for command in app.registered_commands]


def test_help_lists_every_command(call):
    result = call("--help")
    assert result.exit_code == 0
    assert set(names()) >= {"generate", "train", "info", "convert", "bench"}
    for name in names():
        assert f" {name} " in result.stdout


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(call, name, flag):
    result = call(name, flag)
    assert result.exit_code == 0 and "Usage: refusion" in result.stdout


def test_version(call):
    result = call("--version")
    assert result.exit_code == 0 and result.stdout == f"refusion {__version__}\n"


def test_an_unknown_command_is_one_line(call, failing):
    said = failing(call("generat"), 2)
    assert "generat" in said and "refusion --help" in said


def test_no_command_shows_the_help(call):
    assert "Commands" in call().output
