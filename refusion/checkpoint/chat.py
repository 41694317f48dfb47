"""Chat templates: a sandboxed Jinja environment that renders as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refusion.checkpoint.reasons import reason
from refusion.errors import CheckpointError, DataError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, which mark the assistant's text for training, print their body."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def render(
    template: str, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]
) -> str:
    """The text of a conversation.

    Raises:
        CheckpointError: the template isn't valid Jinja.
        DataError: the template refuses these messages, for example because of their roles.
    """
    try:
        compiled = _compiled(template)
    except jinja2.TemplateError as error:
        why = reason(error)
        raise CheckpointError(f"the chat template isn't valid ({why}); mend it in tokenizer_config.json") from error
    values = {"tools": None, "documents": None, **variables}
    try:
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        raise DataError(f"the model's chat template refuses these messages: {reason(error)}") from error


def _replace_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same nested value with every string in it changed; keys too, which templates print as JSON."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_replace_strings(key, change): _replace_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_strings(item, change) for item in value]
    return value


def pattern_of(specials: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost, longest special token, or None without specials."""
    ordered = sorted({text for text in specials if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def guard(value: Any, specials: re.Pattern[str]) -> tuple[Any, dict[str, str]]:
    """A nested value with every special-token string replaced by a sentinel, and what each stands for.

    The rest of a string stays as it is, so templates that look into contents still work.
    """
    seen: list[str] = []
    _replace_strings(value, lambda text: seen.append(text) or text)
    everything = "\0".join(seen)
    salt = 0
    while f"\ue000{salt}:" in everything:
        salt += 1
    originals: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        sentinel = f"\ue000{salt}:{len(originals)}\ue001"
        originals[sentinel] = match.group()
        return sentinel

    return _replace_strings(value, lambda text: specials.sub(replace, text)), originals
