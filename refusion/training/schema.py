"""Plain data -> frozen dataclasses: unknown keys, missing ones and wrong types are errors that name the place."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from refusion.errors import ConfigError

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def build(cls: type[T], data: object, where: str = "") -> T:
    """An instance of the dataclass `cls`, dataclasses inside it included.

    Args:
        data: a mapping from field names to values, as YAML gives it.
        where: the dotted place of `data`, for messages; "" at the top.

    Raises:
        ConfigError: a key is unknown or missing, a value is of the wrong type or refused by `__post_init__`.
    """
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the recipe'} should be a section of keys and values, not {kind(data)}")
    known = {item.name: item for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(f"{join(where, key)} is unknown; {nearest(str(key), list(known))}")
        values[key] = convert(hints[key], value, join(where, key))
    for name, item in known.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"{join(where, name)} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(join(where, str(error))) from None


def convert(hint: Any, value: object, where: str) -> Any:
    """A value as the type `hint` (int, float, str, bool, a dataclass, a tuple, a mapping, or a union of these).

    Whole floats serve as ints, ints as floats, and text that spells a number or a truth value as one, since
    environment variables are text.

    Raises:
        ConfigError: the value isn't of that type.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(args, value, where)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} should be a section of keys and values, not {kind(value)}")
        return dict(value)
    return _convert_scalar(hint, value, where)


def _convert_union(args: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    options = [arg for arg in args if arg is not type(None)]
    if isinstance(value, (int, float)) and type(value) in options:
        return _convert_scalar(type(value), value, where)
    problem: ConfigError | None = None
    for option in options:
        try:
            return convert(option, value, where)
        except ConfigError as error:
            problem = error
    raise problem or ConfigError(f"{where} can't be {kind(value)}")


def _convert_tuple(args: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where} should be a list, not {kind(value)}")
    if args[-1] is Ellipsis:
        return tuple(convert(args[0], entry, f"{where}.{at}") for at, entry in enumerate(value))
    if len(value) != len(args):
        raise ConfigError(f"{where} should be a list of {len(args)}, not of {len(value)}")
    return tuple(convert(args[at], entry, f"{where}.{at}") for at, entry in enumerate(value))


def _convert_scalar(hint: type, value: object, where: str) -> Any:
    wrong = ConfigError(f"{where} should be {_WORDS.get(hint, 'something else')}, not {kind(value)}")
    if hint is str:
        if not isinstance(value, str):
            raise wrong
        return value
    if isinstance(value, str):
        value = _spelled(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong
    if not math.isfinite(value):
        raise ConfigError(f"{where} is {value}, it should be finite")
    if hint is int and value != int(value):
        raise wrong
    return int(value) if hint is int else float(value)


def _spelled(text: str) -> object:
    """The number or truth value that a text spells, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def join(where: str, key: object) -> str:
    """A dotted place."""
    return f"{where}.{key}" if where else str(key)


def nearest(key: str, known: list[str]) -> str:
    """A hint at the known key that looks most like `key`, or all of them."""
    near = difflib.get_close_matches(key, known, 1)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"


def kind(value: object) -> str:
    """A value in words: `the text 'abc'`, `the number 3`."""
    if value is None:
        return "nothing"
    if isinstance(value, (bool, str)):
        return f"the text '{value}'" if isinstance(value, str) else str(value).lower()
    if isinstance(value, (int, float)):
        return f"the number {value}"
    return "a list" if isinstance(value, Sequence) else "a section"
