"""The command line. Commands import what is heavy when they run, so that `--help` answers at once."""

from __future__ import annotations


def main() -> None:
    """Runs `refusion` with the arguments of the process, and exits."""
    from refusion.cli.app import app

    app(prog_name="refusion")
