"""Steps of the engine with many rows, where a setting fixes how much is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from _passes import random_tokens
from _timing import WARM_UP, Budget, Clock, Row, spread

from refusion.decoding import DecodeConfig, algorithm, cells_needed
from refusion.decoding.contract import Event
from refusion.engine import Engine
from refusion.model.transformer import Transformer

BATCHES = (1, 8, 32)
PROMPT = 128
ACCEPT_ALL: dict[str, Any] = {
    "slot_threshold": 0.0, "token_threshold": 0.0, "draft_threshold": 0.0, "branch_size": 0,
}
DECODERS = {
    "autoregressive": DecodeConfig(decoder="autoregressive"),
    "refusion, greedy": DecodeConfig(acceptance="greedy"),
    "refusion, all accepted": DecodeConfig(**ACCEPT_ALL),
    "refusion, all accepted, plan 32": DecodeConfig(**ACCEPT_ALL, plan_size=32),
}
"""Random weights accept next to nothing where acceptance is greedy: the lower bound beside the upper ones."""


class Written:
    """Counts the tokens that rows commit."""

    def __init__(self) -> None:
        self.by_row: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        return sum(self.by_row.values())

    def watch(self, row: int, start: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same algorithm, its committed tokens counted."""
        self.by_row[row] = 0

        def relay(algorithm: Any) -> Any:
            reading = None
            while True:
                try:
                    item = algorithm.send(reading)
                except StopIteration as end:
                    return end.value
                if isinstance(item, Event) and item.kind == "committed":
                    self.by_row[row] += len(item.positions)
                reading = yield item

        return lambda place: relay(start(place))


def engine_samples(
    transformer: Transformer, decode: DecodeConfig, batch: int, steps: int, budget: Budget
) -> list[tuple[float, int]]:
    """(milliseconds, tokens written by all rows) of each step behind the prompts and a warm-up."""
    config = transformer.config
    most = 1 if decode.decoder == "autoregressive" else decode.plan_size + 2
    # the first rows go on while the prompts of the last are fed
    decode = replace(decode, max_tokens=(WARM_UP + steps + 3 + batch * PROMPT // 256) * most)
    engine, written = Engine(transformer, rows=batch), Written()
    for row in range(batch):
        prompt = random_tokens(config, PROMPT, seed=row)
        # no end token: a row goes on as long as it is timed
        start = algorithm(decode, prompt, end_ids=(), mask_id=config.mask_token_id)
        engine.admit(written.watch(row, start), cells=cells_needed(decode, PROMPT))
    while not all(written.by_row.values()):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    clock = Clock(transformer.device, wall=True)
    found = []
    while len(found) < steps and engine.live_rows == batch and budget.left > 0:
        before = written.tokens
        milliseconds = clock(engine.step)
        found.append((milliseconds, written.tokens - before))
    return found


def engine_row(samples: Sequence[tuple[float, int]], batch: int, wanted: int) -> Row:
    """Median step, tokens per second of all rows together and tokens per row and pass; prompts don't count."""
    if not samples:
        return {}
    times = [milliseconds for milliseconds, _ in samples]
    tokens = sum(count for _, count in samples)
    row = spread(times) | {
        "tokens_per_second": 1000 * tokens / sum(times),
        "tokens_per_pass": tokens / len(samples) / batch,
    }
    return row if len(samples) >= wanted else row | {"note": f"{len(samples)} of {wanted} steps"}
