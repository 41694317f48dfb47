"""Where the text ends, against a brute-force reading of the rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from refusion.decoding import Board

END = 9


@given(length=st.integers(1, 8), order=st.permutations(range(9)), ends=st.sets(st.integers(0, 8), max_size=3))
def test_any_order_of_decisions(length: int, order: list[int], ends: set[int]) -> None:
    board = Board(length, [END])
    decided: set[int] = set()
    for position in order:
        target = min([length, *(p + 1 for p in decided & ends)])
        token = END if position in ends else position
        assert board.decide(position, token) == (position < target and position not in decided)
        decided |= {position} if position < target else set()
        target = min([length, *(p + 1 for p in decided & ends)])
        inside = {p for p in decided if p < target}
        contiguous = next(p for p in range(10) if p not in inside)
        assert (board.length, board.contiguous) == (target, contiguous)
        assert board.complete == (contiguous == target)
        assert board.tokens() == [END if p in ends else p for p in range(contiguous)]
        assert board.pending(range(9)) == [p for p in range(target) if p not in inside]
        assert all((p in board) == (p in inside) for p in range(9))
    assert board.complete
    assert board.finish_reason == ("stop" if any(p < length for p in ends) else "length")


def test_a_position_is_decided_once() -> None:
    board = Board(4, [END])
    assert board.decide(1, 5) and not board.decide(1, 6)
    board.decide(0, 7)
    assert board.tokens() == [7, 5]


def test_the_stop_check_sees_contiguous_tokens_only_when_they_grow() -> None:
    seen: list[list[int]] = []

    def check(tokens: list[int]) -> int | None:
        seen.append(list(tokens))
        return 3 if tokens[-2:] == [13, 14] or len(tokens) >= 4 else None

    board = Board(8, [END], check)
    for position in (2, 3, 1):
        board.decide(position, 10 + position)
    assert seen == []
    assert board.decide(0, 10)
    assert seen == [[10, 11, 12, 13]]
    assert board.complete and board.tokens() == [10, 11, 12] and board.finish_reason == "stop"
    assert not board.decide(5, 15)
