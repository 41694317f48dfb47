"""The tables that `refusion bench` prints: one for each task, a row for each decoder, variant and peer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
WIDTH = 100
"""Columns of a pipe, which has no width of its own."""


def _name(row: Row) -> str:
    return str(row.get("name") or row["decoder"])


def _spread(key: str, form: Callable[[float], str]) -> Callable[[Row], str]:
    """A median with its quartiles behind it, where they are known."""
    def write(row: Row) -> str:
        ends = row.get(f"{key}_quartiles")
        return form(row[key]) + (f" ({form(ends[0])}-{form(ends[1])})" if ends else "")

    return write


def _speed(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("decoder", "decoder", _name),
    ("exact_match", "exact", lambda row: f"{row['exact_match']:.1%}"),
    ("tokens", "tokens", lambda row: f"{row['tokens']:,}"),
    ("forwards", "passes", lambda row: f"{row['forwards']:,}"),
    ("tpf", "TPF", lambda row: f"{row['tpf']:.2f}"),
    ("tps", "TPS", _spread("tps", _speed)),
    ("first_token_seconds", "first ms", lambda row: f"{row['first_token_seconds'] * 1000:.0f}"),
    ("peak_memory_mb", "MB", lambda row: f"{row['peak_memory_mb']:,.0f}"),
    ("tps_ratio", "ratio", _spread("tps_ratio", lambda value: f"{value:.2f}")),
)
"""Key that a row needs for it, title, and how a row's value is written."""


def show(rows: list[Row]) -> None:
    """Prints the rows of every task on stdout: title, table and notes."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for number, (task, group) in enumerate(groupby(rows, key=lambda row: row.get("task"))):
        part = list(group)
        if number:
            console.print()
        if task:
            asked = max(row.get("problems", 0) for row in part)
            console.print(Text(f"{task}:" + (f" {asked} questions" if asked else ""), style="bold"))
        console.print(build(part))
        for note in notes(part):
            console.print(Text(note))


def build(rows: list[Row]) -> Table:
    """The table of one task's rows; columns for which no row has a value are left out."""
    columns = [column for column in _COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for key, title, _ in columns:
        first = key == "decoder"
        table.add_column(
            title, justify="left" if first else "right", no_wrap=not first, overflow="fold" if first else "ellipsis"
        )
    for row in rows:
        table.add_row(*(Text("-" if row.get(key) is None else form(row)) for key, _, form in columns))
    return table


def notes(rows: list[Row]) -> Iterator[str]:
    """What a reader of the figures should know, a line each."""
    most = max(row.get("problems", 0) for row in rows)
    if any(row.get("tps_quartiles") for row in rows):
        timed = max(row.get("timed", 0) for row in rows)
        yield f"TPS, first token, MB and ratio: {timed} answers written alone, in turns; medians (quartiles)"
    for few, names in _names_by(rows, lambda row: row["problems"] if row.get("problems", most) < most else None):
        yield f"{names}: exact match, tokens and passes over {few} of the {most} questions"
    cut = [f"{_name(row)} {row['at_length_limit']}" for row in rows if row.get("at_length_limit")]
    if cut:
        yield f"answers cut off by --max-tokens: {', '.join(cut)}"
    for row in rows:
        if row.get("note") or row.get("weights") != rows[0].get("weights"):
            yield f"{_name(row)} ran " + "; ".join(filter(None, (row.get("weights"), row.get("note"))))


def _names_by(rows: list[Row], key: Callable[[Row], Any]) -> Iterator[tuple[Any, str]]:
    """Each value that isn't None, with the names of the rows that have it."""
    found: dict[Any, list[str]] = {}
    for row in rows:
        value = key(row)
        if value is not None:
            found.setdefault(value, []).append(_name(row))
    for value, names in found.items():
        yield value, ", ".join(names)
