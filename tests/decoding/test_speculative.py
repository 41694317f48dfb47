"""Speculative acceptance keeps the verifier's distribution, whatever the drafts are worth."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.decoding.fake import MASK, PROMPT, Context, decode

LENGTH, TOKENS = 3, (1, 2, 3)


def verifier(before: tuple[int, ...]) -> dict[int, float]:
    """A next-token distribution that depends on every token before it."""
    weights = [1.0 + (7 * sum(before) + 3 * len(before) + 5 * token) % 11 for token in TOKENS]
    return {token: w / sum(weights) for token, w in zip(TOKENS, weights, strict=True)}


def predict(token: int, position: int, context: Context) -> Mapping[int, float]:
    """Masks always guess 2, more surely than the verifier ever is."""
    if token == MASK:
        return {2: 0.8, 1: 0.1, 3: 0.1}
    return verifier(tuple(t for p, t in context if p >= len(PROMPT)))


def sharpened(p: dict[int, float], temperature: float) -> dict[int, float]:
    powers = {token: value ** (1 / temperature) for token, value in p.items()}
    return {token: value / sum(powers.values()) for token, value in powers.items()}


WHOLE: dict[str, Any] = {"slot_size": LENGTH, "slot_threshold": 1.0}
IN_ORDER: dict[str, Any] = {"slot_size": 1, "slot_threshold": 0.5, "planner": "left-to-right"}


@pytest.mark.parametrize(("temperature", "branch_size", "settings"), [
    (1.0, 0, WHOLE), (0.6, 0, WHOLE), (1.0, 2, WHOLE), (1.0, 0, IN_ORDER),
])
def test_texts_follow_the_chain_rule(temperature: float, branch_size: int, settings: dict[str, Any]) -> None:
    runs = 3000
    seen: Counter[tuple[int, ...]] = Counter()
    passes = 0
    for seed in range(runs):
        run = decode(
            predict, acceptance="speculative", temperature=temperature, seed=seed, max_tokens=LENGTH,
            block_size=LENGTH, branch_size=branch_size, **settings,
        )
        seen[tuple(run.tokens)] += 1
        passes += run.forwards
    chi = 0.0
    for text in itertools.product(TOKENS, repeat=LENGTH):
        expected = float(runs)
        for at, token in enumerate(text):
            expected *= sharpened(verifier(text[:at]), temperature)[token]
        chi += (seen[text] - expected) ** 2 / expected
    # 26 degrees of freedom: 54.1 is exceeded once in a thousand
    assert chi < 54.1, chi
    assert passes < runs * (LENGTH - 1), "no draft was ever kept"


def test_at_temperature_zero_it_is_greedy() -> None:
    for acceptance in ("speculative", "greedy"):
        run = decode(predict, acceptance=acceptance, max_tokens=6, slot_size=3, block_size=6, slot_threshold=1.0)
        text: list[int] = []
        for _ in range(6):
            p = verifier(tuple(text))
            text.append(max(p, key=lambda token: (p[token], -token)))
        assert run.tokens == text
