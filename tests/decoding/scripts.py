"""Scripted models: a known text with chosen faults, or a random function of all that is visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.decoding.fake import END, MASK, PROMPT, Context, Predict

FILLER, SPARE = 89, 80
Says = tuple[int, float] | Mapping[int, float]


class Text:
    """Knows a text by position: a mask gives its own token, any other cell the next one.

    plan: what a mask says at an answer position instead; verify: what the cell BEFORE an answer position
    says. Either a (token, probability), where that token is the likeliest, or a whole distribution.
    sure: the probability of the text's own tokens.
    """

    def __init__(
        self,
        text: Sequence[int],
        *,
        plan: Mapping[int, Says] | None = None,
        verify: Mapping[int, Says] | None = None,
        sure: float = 0.97,
        lead: int = len(PROMPT),
    ) -> None:
        self.text, self.plan, self.verify = list(text), dict(plan or {}), dict(verify or {})
        self.sure, self.lead = sure, lead

    def __call__(self, token: int, position: int, context: Context) -> Mapping[int, float]:
        at = position - self.lead + (token != MASK)
        true = self.text[at] if 0 <= at < len(self.text) else FILLER
        said = (self.plan if token == MASK else self.verify).get(at, (true, self.sure))
        if isinstance(said, Mapping):
            return said
        best, p = said
        return {best: p, **{SPARE + n: (1 - p) / 9 for n in range(9)}}


def mixed(number: int) -> float:
    """A uniform number of a hash (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return ((number ^ (number >> 31)) + 1) / 2**64


def hashed(seed: int, *, vocabulary: int = 6, sharp: float = 3.0, end: float = 0.03, loose: float = 0.7) -> Predict:
    """A random distribution for every position and all cells visible there; the end token at a rate of about `end`.

    loose: the share of predictions that ignore the context, so that plans and verifications often agree.
    """
    tokens = [*range(1, vocabulary + 1), END]

    def predict(token: int, position: int, context: Context) -> dict[int, float]:
        at = position + (token != MASK)
        full = hash((seed, token, at, context))
        source = hash((seed, at)) if mixed(full) < loose else full
        weights = [mixed(source + 1 + n) ** -sharp for n in range(len(tokens))]
        weights[-1] *= end
        total = sum(weights)
        return {t: w / total for t, w in zip(tokens, weights, strict=True)}

    return predict


def left_to_right(
    predict: Predict, length: int, prompt: Sequence[int] = PROMPT, ends: Sequence[int] = (END,)
) -> list[int]:
    """Greedy decoding, by definition."""
    cells = list(enumerate(prompt))
    text: list[int] = []
    while len(text) < length and not (text and text[-1] in ends):
        position, token = cells[-1]
        p = predict(token, position, tuple(cells))
        text.append(max(p, key=lambda t: (p[t], -t)))
        cells.append((len(cells), text[-1]))
    return text
