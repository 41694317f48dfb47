"""Settings -> rows: loads every source, holds out its questions and mixes the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from refusion.data.config import DataConfig, SourceConfig
from refusion.data.gym import generate
from refusion.data.mixture import Mixture, Pick
from refusion.data.rows import BadRows, Conversation, RowFormat, read_conversations
from refusion.data.split import conversation_key, rank, split
from refusion.errors import DataError


@dataclass(frozen=True)
class SourceReport:
    """What loading a source gave: usable rows, rows skipped and why (the first few), seconds, the generator's note."""

    label: str
    rows: int
    skipped: int
    reasons: tuple[str, ...]
    seconds: float
    note: str = ""

    def __str__(self) -> str:
        lines = [self.note or f"{self.label}: {self.rows} rows in {self.seconds:.1f} s, {self.skipped} skipped"]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.skipped > len(self.reasons):
            lines.append(f"  and {self.skipped - len(self.reasons)} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Data:
    """Rows ready for training.

    train: rows by source, as the mixture's picks index them.
    held_out: rows for validation, sources mixed, so that the first few stand for all.
    """

    train: list[list[Conversation]]
    held_out: list[Conversation]
    mixture: Mixture
    reports: tuple[SourceReport, ...]

    def row(self, pick: Pick) -> Conversation:
        """The conversation that a pick of the mixture names."""
        return self.train[pick.source][pick.row]


def load_source(config: SourceConfig, on_bad_row: str = "stop") -> tuple[list[Conversation], SourceReport]:
    """All rows of one source.

    Raises:
        DataError, ConfigError: as `read_conversations` and `generate`.
    """
    started = time.perf_counter()
    if config.kind == "gym":
        rows, made = generate(str(config.name), int(config.size or 0), config.seed, config.options)
        return rows, SourceReport(config.label, len(rows), 0, (), made.seconds, str(made))
    form = RowFormat(config.strip_calculator, config.prompt_template, config.answer_template)
    bad = BadRows(on_bad_row)
    rows = read_conversations(Path(str(config.path)), form, bad)[: config.size]
    return rows, SourceReport(config.label, len(rows), bad.count, tuple(bad.reasons), time.perf_counter() - started)


def load_data(config: DataConfig, seed: int) -> Data:
    """Loads, splits and mixes all sources; the same settings and seed give the same rows in the same order.

    Raises:
        DataError: as `load_source`, or nothing of a source is left for training.
    """
    loaded = [load_source(source, config.on_bad_row) for source in config.sources]
    rows = [[row.with_system(config.system) for row in found] for found, _ in loaded]
    weights = [source.weight for source in config.sources]
    train, held = split(rows, config.held_out, weights)
    for source, left in zip(config.sources, train, strict=True):
        if not left:
            raise DataError(f"all questions of {source.label} are held out; lower data.held_out or drop the source")
    held_out = sorted((row for found in held for row in found), key=lambda row: rank(conversation_key(row)))
    return Data(train, held_out, Mixture(train, weights, seed), tuple(report for _, report in loaded))
