"""A decoder under a name of its own with settings of its own: a row of an ablation."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Variant:
    """Settings that differ from those shared by all rows of a bench.

    name: of the row. changes: fields of DecodeConfig; `decoder` may be one of them.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, decode: DecodeConfig) -> DecodeConfig:
        """The shared settings with the changes.

        Raises:
            ConfigError: a value is out of range, or two don't go together; the variant is named.
        """
        try:
            return dataclasses.replace(decode, **self.changes)
        except ConfigError as error:
            raise ConfigError(f"variant '{self.name}': {error}") from None


def parse_variant(text: str) -> Variant:
    """A variant from `name: key=value,key=value`.

    Raises:
        ConfigError: the form is another, a setting is unknown or given twice, or a value is of the wrong type.
    """
    name, colon, settings = text.partition(":")
    name = name.strip()
    if not colon or not name or not settings.strip():
        raise ConfigError(f"a variant should read 'name: key=value,key=value', got '{text}'")
    types = get_type_hints(DecodeConfig)
    changes: dict[str, Any] = {}
    for part in settings.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            raise ConfigError(f"variant '{name}': '{part.strip()}' should read key=value")
        key = key.replace("-", "_")
        if key not in types:
            near = difflib.get_close_matches(key, types, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(types)}"
            raise ConfigError(f"variant '{name}': there is no setting '{key}'; {hint}")
        if key in changes:
            raise ConfigError(f"variant '{name}': {key} is given twice")
        changes[key] = _value(name, key, value, types[key])
    return Variant(name, changes)


def _value(name: str, key: str, text: str, kind: Any) -> Any:
    """A setting's value from its text; `stop` takes one string, a setting that may be None also 'none'."""
    if kind == tuple[str, ...]:
        return (text,)
    allowed = getattr(kind, "__args__", (kind,))
    if type(None) in allowed and text.lower() == "none":
        return None
    for wanted, read, word in _READERS:
        if wanted in allowed:
            try:
                return read(text)
            except (ValueError, KeyError):
                raise ConfigError(f"variant '{name}': {key} should be {word}, got '{text}'") from None
    return text


def _flag(text: str) -> bool:
    return _WORDS[text.lower()]


_READERS: tuple[tuple[type, Callable[[str], Any], str], ...] = (
    (bool, _flag, "true or false"), (float, float, "a number"), (int, int, "a whole number"),
)
