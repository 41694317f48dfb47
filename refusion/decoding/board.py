"""The answer being written: which positions are decided, and where the text ends.

Positions count from the answer's first one. Every algorithm keeps its tokens here, so the
rules of ending are in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

StopCheck = Callable[[list[int]], int | None]
"""From the tokens so far (contiguous from 0) to how many of them to keep, or None to go on."""


class Board:
    """Tokens by position, the length still aimed at, and the end.

    An end token shrinks the target at once: positions behind it are dropped, those before it
    stay wanted. The text ends at the first end token by position.
    """

    def __init__(self, length: int, end_ids: Collection[int], stop_check: StopCheck | None = None) -> None:
        self.length = length
        self._end_ids = frozenset(end_ids)
        self._stop_check = stop_check
        self._tokens: dict[int, int] = {}
        self._text: list[int] = []
        self._stopped = False

    def __contains__(self, position: int) -> bool:
        return position in self._tokens

    @property
    def contiguous(self) -> int:
        """Positions decided without a gap from the first on."""
        return len(self._text)

    @property
    def complete(self) -> bool:
        """Whether every position up to the target is decided."""
        return len(self._text) >= self.length

    def is_end(self, token: int) -> bool:
        return token in self._end_ids

    def decide(self, position: int, token: int) -> bool:
        """Fixes a token; False where the position lies behind the end or is decided already."""
        if position >= self.length or position in self._tokens:
            return False
        self._tokens[position] = token
        if token in self._end_ids:
            self._shrink(position + 1)
        before = len(self._text)
        while (following := self._tokens.get(len(self._text))) is not None:
            self._text.append(following)
        if len(self._text) > before and self._stop_check is not None:
            keep = self._stop_check(self.tokens())
            if keep is not None:
                self._shrink(keep)
                self._stopped = True
        return position < self.length

    def _shrink(self, length: int) -> None:
        self.length = min(self.length, length)
        for position in [p for p in self._tokens if p >= self.length]:
            del self._tokens[position]
        del self._text[self.length :]

    def pending(self, part: range) -> list[int]:
        """Undecided positions of a slot, within the target."""
        return [p for p in part if p < self.length and p not in self._tokens]

    def tokens(self) -> list[int]:
        """The tokens decided without a gap from the first position on, end token included."""
        return list(self._text)

    @property
    def finish_reason(self) -> str:
        """"stop" at an end token or stop string, "length" where the target was never shortened."""
        tail = self._tokens.get(self.length - 1)
        return "stop" if self._stopped or (tail is not None and tail in self._end_ids) else "length"
