"""Settings of the data: where rows come from, how they are mixed, what is held out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refusion.data.rows import template_fields
from refusion.errors import ConfigError


@dataclass(frozen=True)
class SourceConfig:
    """One source of rows.

    kind: `file` (then `path`) or `gym` (then `name` and `size`).
    path: a .json or .jsonl file, possibly .gz.
    name: a generator of reasoning-gym; for a file a label in reports.
    size: distinct problems to generate; for a file at most so many rows. 1 or more.
    seed: of the generator. options: the generator's own settings.
    weight: this source's share of the examples, relative to the other weights; above 0.
    strip_calculator, prompt_template, answer_template: as RowFormat, for files.
    """

    kind: str
    path: str | None = None
    name: str | None = None
    size: int | None = None
    seed: int = 0
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    strip_calculator: bool = False
    prompt_template: str | None = None
    answer_template: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("file", "gym"):
            raise ConfigError(f"kind is '{self.kind}', it should be file or gym")
        if self.kind == "file" and not self.path:
            raise ConfigError("path is missing: a source of the kind file needs one")
        if self.kind == "gym" and not (self.name and self.size):
            raise ConfigError("name or size is missing: a source of the kind gym needs both")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size is {self.size}, it should be 1 or more")
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(f"weight is {self.weight}, it should be above 0 and finite")
        foreign = self._foreign()
        if foreign:
            raise ConfigError(f"{foreign} doesn't belong to a source of the kind {self.kind}")
        for name in ("prompt_template", "answer_template"):
            try:
                template_fields(getattr(self, name) or "")
            except ValueError as error:
                raise ConfigError(f"{name} can't be read: {error}") from None

    def _foreign(self) -> str | None:
        if self.kind == "file":
            return "options" if self.options else None
        given = {
            "path": self.path,
            "strip_calculator": self.strip_calculator,
            "prompt_template": self.prompt_template,
            "answer_template": self.answer_template,
        }
        return next((key for key, value in given.items() if value), None)

    @property
    def label(self) -> str:
        """The source's name in reports."""
        return self.name or str(self.path)


@dataclass(frozen=True)
class DataConfig:
    """The rows of a training.

    sources: at least one.
    held_out: questions kept for validation: a number in all (0 or more), or a fraction of each source (between 0 and
        1, written with a point).
    on_bad_row: `stop` at a row that can't be used, or `skip` and count it.
    max_length: tokens of prompt and answer together, 8 or more. over_long: `drop` longer rows or `cut` their answer.
    system: a system message for rows without one.
    """

    sources: tuple[SourceConfig, ...]
    held_out: int | float = 200
    on_bad_row: str = "stop"
    max_length: int = 1024
    over_long: str = "drop"
    system: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources is empty, it needs at least one source")
        if isinstance(self.held_out, int) and self.held_out < 0:
            raise ConfigError(f"held_out is {self.held_out}, it should be 0 or more")
        if isinstance(self.held_out, float) and not 0 <= self.held_out < 1:
            raise ConfigError(f"held_out is {self.held_out}, a fraction should be at least 0 and below 1")
        if self.on_bad_row not in ("stop", "skip"):
            raise ConfigError(f"on_bad_row is '{self.on_bad_row}', it should be stop or skip")
        if self.max_length < 8:
            raise ConfigError(f"max_length is {self.max_length}, it should be 8 tokens or more")
        if self.over_long not in ("drop", "cut"):
            raise ConfigError(f"over_long is '{self.over_long}', it should be drop or cut")
