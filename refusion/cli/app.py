"""The root command, and how errors reach the user."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from refusion import __version__
from refusion.cli import bench, convert, extract, generate, info, merge, train
from refusion.errors import ConfigError, RefusionError

INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns errors that a user can cause into one line on stderr and an exit code.

    2: the command line or a setting is wrong. 1: anything else that a user can mend. 130: interrupted.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the context names."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo(str(error) or "interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except RefusionError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {_line(str(error))}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
        except Exception as error:
            # usage errors are known by their form: their class moves between releases of typer and click
            if getattr(error, "exit_code", None) != 2 or not hasattr(error, "format_message"):
                raise
            where = getattr(getattr(error, "ctx", None), "command_path", None) or "refusion"
            reason = _line(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
            typer.echo(f"error: {reason} (see {where} --help)", err=True)
            raise typer.Exit(2) from None


def _line(text: str) -> str:
    return " ".join(text.split())


app = typer.Typer(
    cls=Commands, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"refusion {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """A diffusion language model with parallel autoregressive decoding (arXiv 2512.13586)."""


app.command("generate")(generate.generate)
app.command("train")(train.train)
app.command("info")(info.info)
app.command("convert")(convert.convert)
app.command("merge")(merge.merge)
app.command("extract")(extract.extract)
app.command("bench")(bench.bench)
