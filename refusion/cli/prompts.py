"""Where prompts come from: the command line, a pipe, a text file, a JSONL file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from refusion.errors import ConfigError, DataError

Prompt = str | list[dict[str, str]]
_KEYS = ("messages", "prompt", "question")


def read_prompts(prompt: str | None, file: Path | None) -> list[Prompt]:
    """All prompts of a call, at least one.

    Raises:
        ConfigError: there is no prompt, or there are two sources of prompts.
        DataError: the file is missing, empty or has a row that can't be used.
    """
    if file is not None:
        if prompt is not None:
            raise ConfigError("give a PROMPT or --file, not both")
        return _from_file(file)
    if prompt is not None and prompt != "-":
        return [prompt]
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise ConfigError("give a PROMPT, name a --file or pipe a text in")
    # one newline at the end is the pipe's, not the prompt's
    return [_decoded(sys.stdin.buffer.read(), "the standard input").removesuffix("\n").removesuffix("\r")]


def _from_file(file: Path) -> list[Prompt]:
    try:
        text = _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise DataError(f"{file}: can't be read ({error.strerror or error}); check the path") from None
    # not splitlines: other line separators belong to the text
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{file}: holds no prompt; write one on each line")
    if file.suffix.lower() != ".jsonl":
        return [line for _, line in lines]
    return [_from_json(line, f"{file}:{number}") for number, line in lines]


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: isn't UTF-8 at byte {error.start}; save it as UTF-8") from None


def _from_json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: broken JSON ({error})") from None
    key = next((key for key in _KEYS if key in row), None) if isinstance(row, dict) else None
    if key is None:
        raise DataError(f"{where}: should be a JSON object with prompt, question or messages")
    value = row[key]
    if key == "messages":
        return _messages(value, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} should be a text")
    return value


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages should be a list with at least one message")
    messages: list[dict[str, str]] = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: every message should have a role and a content, both texts")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message is the assistant's; end with the turn that is to be answered")
    return messages
