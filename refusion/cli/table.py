"""The table that `refusion bench` prints: a row for each task and decoder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table


def _count(value: Any) -> str:
    return f"{value:,}"


def _speed(value: Any) -> str:
    return f"{value:.1f}"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("task", "task", str),
    ("decoder", "decoder", str),
    ("exact_match", "exact match", lambda value: f"{value:.1%}"),
    ("tokens", "tokens", _count),
    ("forwards", "forwards", _count),
    ("tpf", "TPF", lambda value: f"{value:.2f}"),
    ("tps", "TPS", _speed),
    ("tps_ratio", "x left-to-right", lambda value: f"{value:.2f}"),
    ("batch_tps", "TPS in batches", _speed),
    ("first_token_seconds", "first token", lambda value: f"{value:.2f} s"),
    ("at_length_limit", "cut off", _count),
)
"""Key of a row, its title, and how its value is written."""


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the rows on stdout, leaving out columns for which no row has a value."""
    # a pipe has no width: 80 columns would break words
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(build(rows))


def build(rows: list[dict[str, Any]]) -> Table:
    """The table of `run_bench`'s rows."""
    columns = [column for column in _COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, title, _ in columns:
        table.add_column(title, justify="left" if key in ("task", "decoder") else "right")
    for row in rows:
        table.add_row(*("-" if row.get(key) is None else form(row[key]) for key, _, form in columns))
    return table
