"""Conversations into token ids, once before a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from refusion.data.rows import Conversation
from refusion.errors import DataError


class ChatTokenizer(Protocol):
    """What encoding needs of a tokenizer (see refusion.checkpoint.Tokenizer)."""

    def encode(self, text: str) -> list[int]: ...
    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class Encoded:
    """prompt, answer: token ids; the answer ends with its end token unless it was cut (ended False)."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ended: bool = True

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass
class LengthReport:
    """How many rows fit, and how many were longer than max_length and dropped or cut."""

    kept: int = 0
    dropped: int = 0
    cut: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        mean = self.tokens / max(self.kept, 1)
        return f"{self.kept} rows of {mean:.0f} tokens on average; too long: {self.dropped} dropped, {self.cut} cut"


def encode_row(
    row: Conversation, tokenizer: ChatTokenizer, end_id: int, max_length: int, over_long: str, report: LengthReport
) -> Encoded | None:
    """Ids of one conversation, or None where it is too long and rows are dropped.

    A cut answer keeps its first tokens and loses its end token. A prompt that alone fills
    max_length is always dropped.
    """
    prompt = tokenizer.chat([{"role": m.role, "content": m.content} for m in row.prompt])
    answer = [*tokenizer.encode(row.answer), end_id]
    ended = True
    if len(prompt) + len(answer) > max_length:
        if over_long == "drop" or len(prompt) >= max_length:
            report.dropped += 1
            return None
        answer, ended = answer[: max_length - len(prompt)], False
        report.cut += 1
    report.kept += 1
    report.tokens += len(prompt) + len(answer)
    return Encoded(tuple(prompt), tuple(answer), ended)


def encode_rows(
    rows: Sequence[Conversation], tokenizer: ChatTokenizer, end_id: int, max_length: int, over_long: str
) -> tuple[list[Encoded], LengthReport]:
    """All rows that fit, in order.

    Raises:
        DataError: none is left.
    """
    report = LengthReport()
    found = [encode_row(row, tokenizer, end_id, max_length, over_long, report) for row in rows]
    kept = [row for row in found if row is not None]
    if rows and not kept:
        raise DataError(f"all {len(rows)} rows are longer than data.max_length, {max_length} tokens; raise it")
    return kept, report
