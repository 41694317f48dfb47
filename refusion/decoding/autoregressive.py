"""Left-to-right decoding, one token a pass: the baseline and the only way for a plain causal model."""

from __future__ import annotations

from collections.abc import Sequence

from refusion.decoding.board import Board
from refusion.decoding.contract import Algorithm, Answer, Event, Row
from refusion.decoding.draw import Draws


def autoregressive(row: Row, prompt: Sequence[int], board: Board, draws: Draws) -> Algorithm:
    """Feeds the prompt, then each chosen token, until an end or the answer's length."""
    offset = len(prompt)
    tokens, positions, kind = list(prompt), list(range(offset)), "prompt"
    while not board.complete:
        reading = yield draws.step(kind, tokens, positions, [draws.ask(len(tokens) - 1)])
        assert reading is not None
        row.commit(range(len(tokens)))
        at, token = board.contiguous, reading.sample[0]
        board.decide(at, token)
        yield Event("committed", (at,), (token,), (reading.sample_probability[0],))
        tokens, positions, kind = [token], [offset + at], "next"
    return Answer(board.tokens(), board.finish_reason)
