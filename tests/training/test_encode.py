"""Conversations -> ids: what is kept, dropped and cut."""

from __future__ import annotations

import pytest

from refusion.data.rows import Conversation, Message
from refusion.errors import DataError
from refusion.training.encode import LengthReport, encode_row, encode_rows

END = 0


class Letters:
    """Ids are code points; a chat is `role:text` of every turn."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))


def row(question: str, answer: str) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)), "test:1")


PROMPT = len("user:ab;")


def test_an_answer_ends_with_the_end_token() -> None:
    report = LengthReport()
    found = encode_row(row("ab", "xyz"), Letters(), END, 100, "drop", report)
    assert found is not None and found.ended
    assert "".join(map(chr, found.prompt)) == "user:ab;"
    assert found.answer == (ord("x"), ord("y"), ord("z"), END)
    assert len(found) == PROMPT + 4
    assert (report.kept, report.dropped, report.cut, report.tokens) == (1, 0, 0, PROMPT + 4)


def test_every_turn_before_the_answer_is_prompt() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    talk = Conversation(tuple(Message(role, text) for role, text in turns), "test:1")
    found = encode_row(talk, Letters(), END, 100, "drop", LengthReport())
    assert found is not None and "".join(map(chr, found.prompt)) == "system:s;user:a;assistant:b;user:c;"
    assert found.answer == (ord("d"), END)


@pytest.mark.parametrize(("room", "kept"), [(4, 4), (3, 3), (1, 1), (0, 0), (1 - PROMPT, 0)])
def test_the_longest_that_fits(room: int, kept: int) -> None:
    max_length = PROMPT + room
    report = LengthReport()
    cut = encode_row(row("ab", "xyz"), Letters(), END, max_length, "cut", report)
    if kept == 0:
        assert cut is None and (report.kept, report.dropped, report.cut) == (0, 1, 0)
    else:
        assert cut is not None and cut.answer == (ord("x"), ord("y"), ord("z"), END)[:kept]
        assert cut.ended == (kept == 4) and len(cut) == report.tokens <= max_length
        assert (report.kept, report.dropped, report.cut) == (1, 0, int(kept < 4))
    dropped = encode_row(row("ab", "xyz"), Letters(), END, max_length, "drop", LengthReport())
    assert (dropped is not None) == (kept == 4)


def test_rows_keep_their_order_and_the_report_counts() -> None:
    rows = [row("ab", "x"), row("ab", "x" * 50), row("ab", "yy"), row("ab" * 50, "x")]
    kept, report = encode_rows(rows, Letters(), END, PROMPT + 5, "cut")
    assert [len(each.answer) for each in kept] == [2, 5, 3]
    assert str(report) == "3 rows of 11 tokens on average; too long: 1 dropped, 1 cut"


def test_nothing_left_is_an_error_but_nothing_given_is_not() -> None:
    with pytest.raises(DataError, match=r"all 2 rows are longer than data.max_length, 8 tokens; raise it"):
        encode_rows([row("ab", "xyz")] * 2, Letters(), END, 8, "drop")
    kept, report = encode_rows([], Letters(), END, 8, "drop")
    assert kept == [] and str(report).startswith("0 rows of 0 tokens")
