"""Long prompts in pieces, so that no pass is longer than it need be."""

from __future__ import annotations

from collections.abc import Sequence

from refusion.decoding.contract import Step


def divisible(step: Step) -> int:
    """Tokens of a step that may be fed in passes of their own, ahead of the rest, with the same result.

    They are a plain causal run from the first token on that every later token sees, and nothing
    is read at them.
    """
    if step.bidirectional or step.groups is not None:
        return 0
    run = len(step.tokens)
    for cell, parent in enumerate(step.parents or ()):
        if parent != cell - 1:
            run = min(run, parent + 1)
    return min([run, *(ask.cell for ask in step.ask)])


def pieces(waiting: Sequence[tuple[Step, int]], chunk: int) -> list[int]:
    """How many tokens of each step to feed in the next pass; 0 where it has to wait.

    waiting: steps in order of coming, each with how many of its tokens have been fed.
    chunk: tokens of prompts in a pass, at most, but for one prompt's last piece, which also holds
        what can't be divided. Other steps go whole. A prompt is cut at multiples of chunk only, so
        its pieces don't depend on the other rows.
    """
    sizes: list[int] = []
    left = chunk
    for step, fed in waiting:
        rest = len(step.tokens) - fed
        size = chunk if rest > chunk and fed + chunk <= divisible(step) else rest
        if step.kind == "prompt":
            if size > left and left < chunk:
                size = 0
            left -= size
        sizes.append(size)
    return sizes
