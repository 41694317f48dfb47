"""The engine: batching changes nothing, readings equal those of a pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from refusion.decoding import DecodeConfig, algorithm
from refusion.decoding.contract import Algorithm, Answer, Ask, Event, Reading, Row, Step
from refusion.engine import Engine, Finished
from refusion.errors import CapacityError
from refusion.model.transformer import Transformer
from tests.engine.tiny import END, MASK, ROWS, TOKENS, allowed, plain_logits, steps, tiny

PROMPTS = [[(7 * n + 3 * i) % 57 for i in range(1 + n)] for n in range(8)]


@cache
def network() -> Transformer:
    """Sharp enough for drafts to be accepted and rejected."""
    return tiny(1, sharp=3.0)


def settings(decoder: str, **changes: Any) -> DecodeConfig:
    base: dict[str, Any] = {
        "decoder": decoder, "max_tokens": 18, "slot_size": 4, "block_size": 8, "slot_threshold": 0.35,
        "token_threshold": 0.15, "draft_threshold": 0.1, "plan_size": 12,
    }
    return DecodeConfig(**{**base, **changes})


def start(prompt: Sequence[int], config: DecodeConfig) -> Any:
    return algorithm(config, prompt, end_ids=[END], mask_id=MASK)


def outcome(done: Finished) -> tuple[list[int], int, str]:
    return done.answer.tokens, done.forwards, done.answer.finish_reason


def alone(config: DecodeConfig) -> list[tuple[list[int], int, str]]:
    found = []
    for prompt in PROMPTS:
        one = Engine(network(), rows=1)
        one.admit(start(prompt, config))
        found += [outcome(done) for done in one.run()]
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
def test_a_batch_gives_what_single_runs_give(decoder: str, temperature: float) -> None:
    config = settings(decoder, temperature=temperature, top_p=0.9 if temperature else 1.0, seed=5)
    single = alone(config)
    assert len({tuple(tokens) for tokens, _, _ in single}) > 4, "the prompts matter"
    together = Engine(network(), rows=8)
    tickets = [together.admit(start(prompt, config)) for prompt in PROMPTS[::-1]]
    found = {done.ticket: outcome(done) for done in together.run()}
    assert [found[ticket] for ticket in tickets][::-1] == single
    assert together.free_rows == 8 and together.live_rows == 0


@pytest.mark.parametrize("decoder", ["refusion", "paper"])
def test_rows_join_and_leave_midway(decoder: str) -> None:
    config = settings(decoder)
    engine = Engine(network(), rows=3)
    waiting = [4, 0, 7, 2, 6, 1, 5, 3]
    place: dict[int, int] = {}
    found: dict[int, Any] = {}
    while waiting or engine.live_rows:
        if waiting and engine.free_rows:  # one at a time, so that rows are at different passes
            number = waiting.pop(0)
            place[engine.admit(start(PROMPTS[number], config))] = number
        found.update({place[done.ticket]: outcome(done) for done in engine.step()})
    assert [found[n] for n in range(8)] == alone(config)


def test_a_row_that_outgrows_its_cells_grows_alone() -> None:
    config = settings("refusion")
    engine = Engine(network(), rows=2)
    engine.admit(start(PROMPTS[7], config), cells=2)
    engine.admit(start(PROMPTS[0], config), cells=100)
    seen = []
    found = []
    while engine.live_rows:
        found += [(done.ticket, outcome(done)) for done in engine.step()]
        seen.append((engine.cache.capacity(0), engine.cache.capacity(1)))
    assert [one for _, one in sorted(found)] == [alone(config)[7], alone(config)[0]]
    assert {second for _, second in seen} <= {0, 100} and max(first for first, _ in seen) > 10


def test_cells_are_reserved_on_admission_and_given_back() -> None:
    engine = Engine(network(), rows=1)
    engine.admit(start(PROMPTS[7], settings("refusion")), cells=77)
    assert engine.cache.cells == 77
    engine.run()
    assert engine.cache.cells == 0


def test_cancelling_a_row_leaves_the_others_alone() -> None:
    config = settings("refusion")
    closed = []

    def endless(row: Row) -> Algorithm:
        try:
            while True:
                yield Step([1], [0], [Ask(0)])
        finally:
            closed.append(True)

    engine = Engine(network(), rows=2)
    dropped = engine.admit(endless)
    kept = engine.admit(start(PROMPTS[3], config))
    engine.step()
    assert engine.cancel(dropped) and closed == [True]
    assert not engine.cancel(dropped) and not engine.cancel(99)
    assert engine.free_rows == 1
    later = engine.admit(start(PROMPTS[5], config))
    found = {done.ticket: outcome(done) for done in engine.run()}
    assert found == {kept: alone(config)[3], later: alone(config)[5]}
    assert not engine.cancel(kept)


def test_a_row_that_fails_takes_no_other_with_it() -> None:
    def broken(row: Row) -> Algorithm:
        yield Step([1], [0], [Ask(0)])
        raise ZeroDivisionError

    def never(row: Row) -> Algorithm:
        raise ZeroDivisionError

    engine = Engine(network(), rows=3)
    engine.admit(start(PROMPTS[3], settings("refusion")))
    engine.admit(broken)
    engine.admit(start(PROMPTS[5], settings("refusion")))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.admit(never)
    assert engine.live_rows == 2 and engine.free_rows == 1
    found = sorted(engine.run(), key=lambda done: done.ticket)
    assert [outcome(done) for done in found] == [alone(settings("refusion"))[n] for n in (3, 5)]


def test_a_full_engine_says_so() -> None:
    engine = Engine(network(), rows=1)
    engine.admit(start([1], settings("refusion")))
    with pytest.raises(CapacityError, match="all 1 rows are taken; wait for one to finish"):
        engine.admit(start([1], settings("refusion")))


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
def test_events_are_recorded_in_order_with_their_pass(decoder: str) -> None:
    engine = Engine(network(), rows=2)
    engine.admit(start(PROMPTS[2], settings(decoder)), record=True)
    engine.admit(start(PROMPTS[4], settings(decoder)))
    recorded, silent = sorted(engine.run(), key=lambda done: done.ticket)
    assert silent.events == []
    passes = [number for number, _, _ in recorded.events]
    times = [seconds for _, seconds, _ in recorded.events]
    assert passes == sorted(passes) and times == sorted(times)
    assert passes[0] == 1
    # forwards leave the prompt's pass out
    assert max(passes) == recorded.forwards + 1
    committed = [event for _, _, event in recorded.events if event.kind == "committed"]
    by_position = {p: t for event in committed for p, t in zip(event.positions, event.tokens, strict=True)}
    assert [by_position[p] for p in range(len(recorded.answer.tokens))] == recorded.answer.tokens
    assert 0 < recorded.first_token_seconds <= recorded.seconds


def test_an_algorithm_without_steps_or_asks() -> None:
    def nothing(row: Row) -> Algorithm:
        yield Event("finished")
        return Answer([5], "stop")

    def silent(row: Row) -> Algorithm:
        reading = yield Step([1, 2], [0, 1])
        assert reading == Reading([], [], [], [], [])
        return Answer([row.committed])

    engine = Engine(network(), rows=2)
    engine.admit(nothing, record=True)
    engine.admit(silent)
    first, second = sorted(engine.run(), key=lambda done: done.ticket)
    assert first.answer == Answer([5], "stop") and first.forwards == 0 and len(first.events) == 1
    assert second.answer == Answer([0]) and second.forwards == 1
    assert engine.step() == []


def readings(*scripts: Sequence[tuple[Step, Sequence[int]]]) -> list[list[Reading]]:
    """What each script reads when all run in one engine."""
    engine, found = Engine(network(), rows=len(scripts)), [[] for _ in scripts]  # type: ignore[var-annotated]
    for script, into in zip(scripts, found, strict=True):
        engine.admit(steps(script, into))
    engine.run()
    return found


def every(count: int) -> list[Ask]:
    """The best token at each cell, and the probability of token 5."""
    return [Ask(cell, given=5) for cell in range(count)]


def same(reading: Reading, logits: torch.Tensor) -> None:
    """A reading against logits [A, V] of a pass without a cache."""
    p = allowed(logits)
    assert list(reading.best) == p.argmax(-1).tolist() == list(reading.sample)
    assert torch.allclose(torch.tensor(reading.best_probability), p.max(-1).values, atol=1e-5)
    assert torch.allclose(torch.tensor(reading.given_probability), p[:, 5], atol=1e-5)
    assert list(reading.best_probability) == list(reading.sample_probability)


PROMPT = ([3, 14, 15], [0, 1, 2])


def test_groups_share_the_prefix_and_do_not_see_one_another() -> None:
    tokens, positions, groups = [20, 21, 30, 31, 22], [3, 4, 9, 10, 5], [0, 0, 1, 1, 0]
    step = Step(tokens, positions, every(5), groups)
    [[_, found]] = readings([(Step(*PROMPT), range(3)), (step, [])])
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    number = torch.tensor([9, 9, 9, *groups])
    seen = causal & ((number[:, None] == number) | (number == 9))
    same(found, plain_logits(network(), PROMPT[0] + tokens, PROMPT[1] + positions, seen)[3:])


def test_a_bidirectional_group_sees_itself_whole() -> None:
    step = Step([20, 21, 22], [3, 4, 5], every(3), bidirectional=True)
    both = Step([20, 21, 22, 30], [3, 4, 5, 6], every(4), [0, 0, 0, 1], bidirectional=True)
    [[_, one, two]] = readings([(Step(*PROMPT), range(3)), (step, []), (both, [])])
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen[:3] = torch.ones(3, 6, dtype=torch.bool).tril()
    logits = plain_logits(network(), [*PROMPT[0], 20, 21, 22], range(6), seen)[3:]
    same(one, logits)
    assert list(two.best[:3]) == list(one.best)
    assert two.best_probability[:3] == pytest.approx(one.best_probability, abs=1e-6)


def test_one_packed_step_equals_separate_ones() -> None:
    more = [(Step([9, 8], [3, 4], every(2)), range(2)), (Step([1], [5], every(1)), [])]
    scripts = [
        [(Step(*PROMPT, every(3)), range(3)), *more],
        [(Step([40], [0], every(1)), range(1)), (Step([MASK] * 5, [7, 8, 9, 1, 2], every(5)), [])],
        [(Step([2] * 7, range(7), every(7), bidirectional=True), [6, 0])],
    ]
    together = readings(*scripts)
    for script, found in zip(scripts, together, strict=True):
        [single] = readings(script)
        for one, other in zip(single, found, strict=True):
            assert one.best == other.best
            assert one.given_probability == pytest.approx(other.given_probability, abs=1e-6)


def test_committed_cells_are_what_later_steps_see() -> None:
    """Cells 0 and 2 of a group each are kept, in another order; positions stay the true ones."""
    step = Step([20, 21, 30, 31], [3, 4, 9, 10], [], [0, 0, 1, 1])
    query = Step([50], [5], every(1))
    [[*_, kept]] = readings([(Step(*PROMPT), range(3)), (step, [2, 0]), (query, [])])
    tokens, positions = [*PROMPT[0], 20, 30, 50], [0, 1, 2, 3, 9, 5]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[4, 3] = False
    same(kept, plain_logits(network(), tokens, positions, seen)[5:])


def test_storage_order_does_not_matter() -> None:
    """Two slots that saw only the prompt, committed in either order; then a query sees both."""
    slots = ([20, 21, 22, 30, 31, 32], [3, 4, 5, 9, 10, 11], [], [0, 0, 0, 1, 1, 1])
    query = Step([50, 51, MASK], [6, 7, 8], every(3))
    orders = (range(6), [3, 4, 5, 0, 1, 2], [5, 0, 3, 2, 1, 4])
    found = readings(*[[(Step(*PROMPT), range(3)), (Step(*slots), order), (query, [])] for order in orders])
    last = [reading[-1] for reading in found]
    for other in last[1:]:
        assert other.best == last[0].best
        assert other.best_probability == pytest.approx(last[0].best_probability, abs=1e-5)
        assert other.given_probability == pytest.approx(last[0].given_probability, abs=1e-5)


def test_banned_ids_never_win() -> None:
    """Mask and padding rows are made the likeliest; the others' probabilities sum to 1 without them."""
    transformer = tiny(2)
    assert transformer.head is not None
    transformer.head.weight.data[[MASK, *range(TOKENS, ROWS)]] *= 100
    logits = plain_logits(transformer, [1, 2, 3, 4], range(4), torch.ones(4, 4, dtype=torch.bool).tril())
    assert (logits.argmax(-1) >= MASK).any()
    asks = [Ask(3, given=token, uniform=(token + 0.5) / ROWS) for token in range(ROWS)]
    into: list[Reading] = []
    engine = Engine(transformer, rows=1)
    engine.admit(steps([(Step([1, 2, 3, 4], range(4), asks, temperature=3.0), [])], into))
    engine.run()
    [reading] = into
    assert sum(reading.given_probability) == pytest.approx(1.0, abs=1e-5)
    assert [reading.given_probability[t] for t in (MASK, *range(TOKENS, ROWS))] == [0.0] * 5
    assert max(*reading.best, *reading.sample) < MASK
    for token, p in zip(reading.sample, reading.sample_probability, strict=True):
        assert p == pytest.approx(reading.given_probability[token]), "at temperature 1"


def test_a_model_without_a_mask_token_bans_padding_only() -> None:
    into: list[Reading] = []
    engine = Engine(tiny(2, mask_token_id=None), rows=1)
    engine.admit(steps([(Step([1], [0], [Ask(0, given=token) for token in range(ROWS)]), [])], into))
    engine.run()
    assert into[0].given_probability[MASK] > 0 and into[0].given_probability[TOKENS] == 0
