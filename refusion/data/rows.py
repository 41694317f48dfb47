"""Files of rows -> conversations: JSON and JSON lines, plain or gzip, in the shapes that are in use."""

from __future__ import annotations

import gzip
import json
import re
import string
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refusion.errors import DataError

ROLES = ("system", "user", "assistant")
PAIRS = (("query", "response"), ("prompt", "completion"), ("question", "answer"))
REPORTED = 5
"""How many reasons for skipped rows a report keeps."""

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_SHAPES = "'messages', " + ", ".join(f"'{ask}' with '{reply}'" for ask, reply in PAIRS)


@dataclass(frozen=True)
class Message:
    """One turn; role is one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A prompt and the answer to it.

    messages: the last one is the assistant's answer, those before it are the prompt (at least one).
    origin: `file:line` or `generator:index`, for error messages.
    """

    messages: tuple[Message, ...]
    origin: str

    def __post_init__(self) -> None:
        if len(self.messages) < 2 or self.messages[-1].role != "assistant":
            raise ValueError(f"{self.origin}: a conversation is a prompt and, last, the assistant's answer")

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The turns that the answer answers."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The text to be learnt."""
        return self.messages[-1].content

    def with_system(self, system: str | None) -> Conversation:
        """The same with a system message in front, unless it has one or `system` is empty."""
        if not system or self.messages[0].role == "system":
            return self
        return Conversation((Message("system", system), *self.messages), self.origin)


@dataclass(frozen=True)
class RowFormat:
    """How a file's rows become conversations.

    strip_calculator: removes GSM8K's calculator marks such as `<<48/2=24>>` from the answer.
    prompt_template, answer_template: text with `{field}` in place of the row's fields; None: the field of the shape.
    """

    strip_calculator: bool = False
    prompt_template: str | None = None
    answer_template: str | None = None


@dataclass
class BadRows:
    """What to do with a row that can't be used: `stop` raises, `skip` counts it and keeps the first few reasons."""

    policy: str = "stop"
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: DataError) -> None:
        """Takes note of one bad row.

        Raises:
            DataError: the policy is `stop`.
        """
        if self.policy == "stop":
            raise error
        self.count += 1
        if len(self.reasons) < REPORTED:
            self.reasons.append(str(error))


def read_conversations(path: Path, form: RowFormat | None = None, bad: BadRows | None = None) -> list[Conversation]:
    """All usable rows of a `.jsonl` or `.json` file, either of them possibly `.gz`.

    A `.json` file holds a list of rows, or an object with exactly one list in it.

    Raises:
        DataError: the file can't be read, holds no usable row, or has a bad row under the policy `stop`.
    """
    form, bad = form or RowFormat(), bad or BadRows()
    found: list[Conversation] = []
    for line, row in read_rows(path, bad):
        try:
            found.append(to_conversation(row, form, f"{path}:{line}"))
        except DataError as error:
            bad.add(error)
    if not found:
        skipped = f" ({bad.count} skipped, the first because {bad.reasons[0]})" if bad.reasons else ""
        raise DataError(f"{path} holds no usable row{skipped}")
    return found


def read_rows(path: Path, bad: BadRows | None = None) -> Iterator[tuple[int, object]]:
    """Line number and decoded row of each row of a file, in whatever shape; see read_conversations.

    Raises:
        DataError: as read_conversations, but for the rows' shape.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    if not suffixes or suffixes[-1] not in (".json", ".jsonl", ".ndjson"):
        raise DataError(f"{path} should end in .jsonl or .json, or in one of them and .gz")
    data = _read_bytes(path)
    return _json_rows(path, data) if suffixes[-1] == ".json" else _json_lines(path, data, bad or BadRows())


def to_conversation(row: object, form: RowFormat, origin: str) -> Conversation:
    """One decoded row as a conversation.

    Raises:
        DataError: a field is missing, of the wrong type or empty.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{origin}: a row should be an object, not {_kind(row)}")
    messages = _turns(row, origin) if "messages" in row and not form.prompt_template else _pair(row, form, origin)
    system = row.get("system")
    if system is not None and _text(row, "system", origin).strip():
        if messages[0].role == "system":
            raise DataError(f"{origin}: has 'system' and a system turn in 'messages'; keep one of them")
        messages.insert(0, Message("system", str(system)))
    answer = _CALCULATOR.sub("", messages[-1].content) if form.strip_calculator else messages[-1].content
    messages[-1] = Message("assistant", answer.strip())
    for message in messages:
        _check_content(message, origin)
    return Conversation(tuple(messages), origin)


def _check_content(message: Message, origin: str) -> None:
    if not message.content.strip():
        raise DataError(f"{origin}: the {'answer' if message.role == 'assistant' else message.role + ' turn'} is empty")
    try:
        message.content.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(message.content[error.start])
        raise DataError(f"{origin}: the {message.role} turn holds {half}, half of a character") from None


def _pair(row: Mapping[str, Any], form: RowFormat, origin: str) -> list[Message]:
    ask, reply = next((pair for pair in PAIRS if pair[0] in row or pair[1] in row), (None, None))
    sides = []
    for key, template in ((ask, form.prompt_template), (reply, form.answer_template)):
        if template is not None:
            sides.append(_fill(template, row, origin))
        elif key is None:
            raise DataError(f"{origin}: has the fields {_names(row)}; a row needs {_SHAPES}")
        else:
            sides.append(_text(row, key, origin))
    return [Message("user", sides[0]), Message("assistant", sides[1])]


def _turns(row: Mapping[str, Any], origin: str) -> list[Message]:
    turns = row["messages"]
    if not isinstance(turns, list):
        raise DataError(f"{origin}: 'messages' should be a list, not {_kind(turns)}")
    messages = []
    for number, turn in enumerate(turns, 1):
        here = f"{origin}: turn {number}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{here}: should be an object, not {_kind(turn)}")
        role = _text(turn, "role", here)
        if role not in ROLES:
            raise DataError(f"{here}: the role '{role}' should be one of {', '.join(ROLES)}")
        if role == "system" and number > 1:
            raise DataError(f"{here}: a system turn should come first")
        messages.append(Message(role, _text(turn, "content", here)))
    if not messages or messages[-1].role != "assistant":
        last = f"is the {messages[-1].role}'s" if messages else "is missing"
        raise DataError(f"{origin}: the last turn should be the assistant's answer, but it {last}")
    if not any(message.role == "user" for message in messages[:-1]):
        raise DataError(f"{origin}: no user turn comes before the assistant's answer")
    return messages


def _text(row: Mapping[str, Any], key: str, origin: str) -> str:
    if key not in row:
        raise DataError(f"{origin}: the field '{key}' is missing, it has {_names(row)}")
    if not isinstance(row[key], str):
        raise DataError(f"{origin}: '{key}' should be text, not {_kind(row[key])}")
    return row[key]


def template_fields(template: str) -> list[str]:
    """The fields that a template names; `{{` and `}}` stand for braces.

    Raises:
        ValueError: braces don't match, or one holds more than a plain name.
    """
    names = []
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"'{{{name}}}' should hold the plain name of a field")
        names.append(name)
    return names


def _fill(template: str, row: Mapping[str, Any], origin: str) -> str:
    values = {}
    for name in template_fields(template):
        value = row.get(name)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            values[name] = value
        elif name in row:
            raise DataError(f"{origin}: '{name}' should be text, not {_kind(value)}")
        else:
            raise DataError(f"{origin}: the template's field '{name}' is missing, it has {_names(row)}")
    return template.format(**values)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in list(row)[:8]) or "no field"


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (list, "a list"))
    return next((word for kind, word in kinds if isinstance(value, kind)), "an object")


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except FileNotFoundError:
        raise DataError(f"{path} is missing; check the path") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from None


def _json_lines(path: Path, data: bytes, bad: BadRows) -> Iterator[tuple[int, object]]:
    """Line number and decoded row of every line that isn't blank; broken ones go to `bad`."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad.add(DataError(f"{path}:{number}: byte {error.start + 1} is not valid UTF-8"))
        except (ValueError, RecursionError) as error:
            bad.add(DataError(f"{path}:{number}: broken JSON: {error}"))


def _json_rows(path: Path, data: bytes) -> Iterator[tuple[int, object]]:
    """Line number and decoded row of each entry of a JSON file's list."""
    try:
        text = data.decode("utf-8-sig")
        whole = json.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: the file is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from None
    except RecursionError:
        raise DataError(f"{path}:1: broken JSON: nested too deep") from None
    if not isinstance(whole, list):
        lists = [key for key, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
        if len(lists) != 1:
            raise DataError(f"{path}:1: should hold a list of rows, or an object with one list, not {len(lists)}")
    at, line, counted = _list_start(text), 1, 0
    decoder = json.JSONDecoder()
    while text[at] != "]":
        row, end = decoder.raw_decode(text, at)
        line, counted = line + text.count("\n", counted, at), at
        yield line, row
        at = _skip(text, end, " \t\r\n,")


def _list_start(text: str) -> int:
    """Where the first entry of a valid JSON text's list, or of its object's only list, begins."""
    decoder, at = json.JSONDecoder(), _skip(text, 0)
    if text[at] == "[":
        return _skip(text, at + 1)
    at = _skip(text, at + 1)
    while True:
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at, " \t\r\n:")
        if text[at] == "[":
            return _skip(text, at + 1)
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at, " \t\r\n,")


def _skip(text: str, at: int, what: str = " \t\r\n") -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at
