"""Which questions are held out: by a hash of their text, so that neither order nor source matters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from refusion.data.rows import Conversation


def question_key(text: str) -> str:
    """A question's text with white space and case made even: equal keys are the same question."""
    return " ".join(text.split()).casefold()


def conversation_key(row: Conversation) -> str:
    """The key of a conversation's prompt; system turns don't count."""
    return question_key("\n".join(message.content for message in row.prompt if message.role != "system"))


def rank(key: str) -> float:
    """A fixed number in [0, 1) for a key, spread evenly."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48


def held_out_keys(rows: Sequence[Conversation], amount: int | float) -> set[str]:
    """The questions to hold out: `amount` of them if it is an int, else that fraction, lowest rank first.

    Never all of them: at least one question is left for training.
    """
    keys = sorted({conversation_key(row) for row in rows}, key=lambda key: (rank(key), key))
    if isinstance(amount, int):
        return set(keys[: min(amount, len(keys) - 1)])
    return {key for key in keys[: max(0, len(keys) - 1)] if rank(key) < amount}


def split(
    sources: Sequence[Sequence[Conversation]], amount: int | float, weights: Sequence[float]
) -> tuple[list[list[Conversation]], list[list[Conversation]]]:
    """Rows of every source for training and those held out; no question is in both, whatever its source.

    amount: questions in all, shared between the sources by weight, if it is an int; else a fraction of each source.
    """
    shares = apportion(amount, weights) if isinstance(amount, int) else [amount] * len(sources)
    keys: set[str] = set()
    for rows, share in zip(sources, shares, strict=True):
        keys |= held_out_keys(rows, share)
    train = [[row for row in rows if conversation_key(row) not in keys] for rows in sources]
    held = [[row for row in rows if conversation_key(row) in keys] for rows in sources]
    return train, held


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` split into whole parts in proportion to the weights, exact in sum (largest remainders first)."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    parts = [math.floor(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda at: (parts[at] - exact[at], at))
    for at in order[: total - sum(parts)]:
        parts[at] += 1
    return parts
