"""What a bench asks: generated problems, or the prompts of a file with the answers that can be scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion.data.arithmetic import final_text, number, same_number
from refusion.data.gym import Problem, is_correct
from refusion.data.rows import PAIRS, RowFormat, read_rows, to_conversation
from refusion.data.split import conversation_key, question_key
from refusion.errors import DataError
from refusion.generation import Prompt

ROW_FILES = (".json", ".jsonl", ".ndjson", ".gz")
"""Ends of files that hold rows; any other file holds a prompt on each line."""
PLAIN_WORDS = 4
"""A plain answer of more words is a text, which no exact match can judge."""
_ABSENT = "-"
_REPLIES = tuple(reply for _, reply in PAIRS)


@dataclass(frozen=True)
class Question:
    """A prompt and, where an exact match can judge it, the answer.

    prompt: the user's text, or a conversation. answer: the expected final answer; None: not scored.
    source: `generator:index` or `file:line`. marked: the answer is to stand behind `####`; else it may also be
    the whole text.
    """

    prompt: Prompt
    answer: str | None
    source: str
    marked: bool = True

    def is_right(self, text: str) -> bool | None:
        """Whether a generated text ends in the answer, compared as refusion.data.gym.is_correct does; None: no answer.

        An answer that isn't marked may also be the whole text.
        """
        if self.answer is None:
            return None
        if self.marked or "####" in text:
            return is_correct(Problem("", self.answer, self.source), text)
        expected, given = number(self.answer), number(text)
        if expected is not None:
            return given is not None and same_number(given, expected)
        return text.split() == self.answer.split()


def from_problem(problem: Problem) -> Question:
    """A generated problem as a question."""
    return Question(problem.prompt, problem.answer, problem.source)


def read_questions(path: Path, limit: int | None = None, exclude: Collection[str] = ()) -> list[Question]:
    """The first `limit` questions of a file that aren't in `exclude` (texts; case and white space don't matter).

    A file of rows (`.jsonl`, `.json`, also `.gz`) has the shapes of refusion.data.rows, whose answer may be missing;
    any other file is text with a prompt on each line. `#### 42` at the end of an answer, and an answer of a few
    words on one line, can be scored; other answers are left alone.

    Raises:
        DataError: the file can't be read, a row can't be used, or nothing is left; with file and line.
    """
    barred = {question_key(text) for text in exclude}
    every = _rows(path) if path.suffix.lower() in ROW_FILES else _lines(path)
    if not every:
        raise DataError(f"{path} holds no prompt; write one on each line, or rows with 'question' or 'messages'")
    kept = [question for key, question in every if key not in barred]
    if not kept:
        raise DataError(f"{path} holds only questions of the excluded training; give other prompts")
    return kept[:limit]


def _lines(path: Path) -> list[tuple[str, Question]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; check the path") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from None
    found = []
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{line}: byte {error.start + 1} is not valid UTF-8") from None
        if text.strip():
            found.append((question_key(text), Question(text, None, f"{path}:{line}")))
    return found


def _rows(path: Path) -> list[tuple[str, Question]]:
    return [_question(row, f"{path}:{line}") for line, row in read_rows(path)]


def _question(row: object, origin: str) -> tuple[str, Question]:
    """Key and question of one row."""
    whole, answered = _with_answer(row)
    conversation = to_conversation(whole, RowFormat(), origin)
    first, *others = conversation.prompt
    prompt: Prompt = first.content
    if others or first.role != "user":
        prompt = [{"role": message.role, "content": message.content} for message in conversation.prompt]
    answer, marked = _judged(conversation.answer) if answered else (None, True)
    return conversation_key(conversation), Question(prompt, answer, origin, marked)


def _with_answer(row: object) -> tuple[object, bool]:
    """The row with its answer as text, a stand-in where it has none, and whether it had one."""
    if not isinstance(row, Mapping):
        return row, True
    turns = row.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "user":
        return {**row, "messages": [*turns, {"role": "assistant", "content": _ABSENT}]}, False
    reply = next((reply for ask, reply in PAIRS if ask in row), None)
    if "messages" in row or reply is None:
        return row, True
    given: Any = next((row[name] for name in (reply, *_REPLIES) if row.get(name) not in (None, "")), None)
    if given is None:
        return {**row, reply: _ABSENT}, False
    plain = isinstance(given, (int, float)) and not isinstance(given, bool)
    return {**row, reply: str(given) if plain else given}, True


def _judged(answer: str) -> tuple[str | None, bool]:
    """The part of a file's answer that an exact match can judge, and whether it is to stand behind `####`."""
    final = final_text(answer)
    if final:
        return final, True
    if number(answer) is not None or ("\n" not in answer and len(answer.split()) <= PLAIN_WORDS):
        return answer, False
    return None, True
