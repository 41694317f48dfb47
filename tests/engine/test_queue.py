"""Queueing, the limit in cells, and prompts in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.decoding.contract import Ask, Reading, Step
from refusion.engine import Engine
from refusion.engine.chunks import divisible, pieces
from refusion.errors import CapacityError
from refusion.model.visibility import visible
from tests.engine.test_engine import PROMPTS, alone, network, outcome, settings, start
from tests.engine.tiny import MASK, allowed, plain_logits, steps

LONG = [(11 * n + 3) % 57 for n in range(90)]


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
def test_more_sequences_than_rows_and_memory_wait_and_lose_nothing(decoder: str) -> None:
    config = settings(decoder)
    engine = Engine(network(), rows=3, max_cells=100)
    tickets = [engine.submit(start(prompt, config), cells=45) for prompt in PROMPTS]
    assert engine.queued == 8 and engine.live_rows == 0
    found, most = {}, 0
    while not engine.idle:
        found.update({done.ticket: outcome(done) for done in engine.step()})
        most = max(most, engine.cache.cells)
        assert engine.live_rows <= 2, "a third row would hold 135 cells"
    assert [found[ticket] for ticket in tickets] == alone(config)
    assert 45 < most <= 100 and engine.cache.cells == 0


def test_the_queue_is_served_in_order_and_told_in_seconds() -> None:
    engine = Engine(network(), rows=1)
    tickets = [engine.submit(start(prompt, settings("autoregressive"))) for prompt in PROMPTS[:4]]
    done = engine.run()
    assert [one.ticket for one in done] == tickets
    waits = [one.queued_seconds for one in done]
    assert waits == sorted(waits) and waits[3] > done[0].seconds


def test_a_sequence_that_never_fits_is_refused_and_one_that_does_not_fit_now_too() -> None:
    engine = Engine(network(), rows=4, max_cells=50)
    with pytest.raises(CapacityError, match="51 cells is longer than the 50"):
        engine.submit(start(PROMPTS[0], settings("refusion")), cells=51)
    engine.admit(start(PROMPTS[0], settings("refusion")), cells=30)
    with pytest.raises(CapacityError, match="30 of 50 cells are taken and 21 are wanted"):
        engine.admit(start(PROMPTS[1], settings("refusion")), cells=21)
    engine.submit(start(PROMPTS[1], settings("refusion")), cells=21)
    with pytest.raises(CapacityError, match="wait for one to finish"):  # nobody overtakes the queue
        engine.admit(start(PROMPTS[2], settings("refusion")), cells=1)
    assert len(engine.run()) == 2


def test_a_queued_sequence_can_be_cancelled() -> None:
    engine = Engine(network(), rows=1)
    first, second, third = (engine.submit(start(p, settings("refusion"))) for p in PROMPTS[:3])
    engine.step()
    assert engine.cancel(second) and not engine.cancel(second) and engine.queued == 1
    assert [done.ticket for done in engine.run()] == [first, third]


@pytest.mark.parametrize(("name", "value"), [("max_cells", 0), ("chunk", 0)])
def test_impossible_limits_are_refused(name: str, value: int) -> None:
    with pytest.raises(CapacityError, match=f"{name} must be 1 or more"):
        Engine(network(), rows=1, **{name: value})


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
@pytest.mark.parametrize("chunk", [1, 7, 89, 90, 200])
def test_a_prompt_in_pieces_gives_what_a_whole_one_gives(decoder: str, chunk: int) -> None:
    config = settings(decoder)
    whole = Engine(network(), rows=1, chunk=1000)
    whole.admit(start(LONG, config))
    cut = Engine(network(), rows=2, chunk=chunk)
    cut.admit(start(LONG, config))
    other = cut.admit(start(PROMPTS[6], config))
    found = {done.ticket: outcome(done) for done in cut.run()}
    assert found[0] == outcome(whole.run()[0])
    assert found[other] == alone(config)[6]


def test_a_forest_behind_a_long_run_reads_as_without_pieces() -> None:
    tokens = [5, 8, 13, 21, 34, MASK, MASK, MASK]
    parents = [-1, 0, 1, 2, 3, 4, 5, 3]
    step = Step(tokens, [0, 1, 2, 3, 4, 5, 6, 4], [Ask(6), Ask(7)], kind="prompt", parents=parents)
    assert divisible(step) == 4, "cell 7 hangs on cell 3"
    readings: list[Reading] = []
    engine = Engine(network(), rows=1, chunk=2)
    engine.admit(steps([(step, range(5))], readings))
    engine.run()
    wanted = allowed(plain_logits(network(), tokens, step.positions, visible(8, None, False, parents)))
    for n, cell in enumerate((6, 7)):
        assert readings[0].best[n] == int(wanted[cell].argmax())
        assert readings[0].best_probability[n] == pytest.approx(float(wanted[cell].max()), rel=1e-4)


@given(data=st.data())
def test_pieces_cover_every_step_once_and_never_cut_what_cannot_be_cut(data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, 12))
    queue = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    asks = [data.draw(st.integers(0, size - 1)) for size in queue]
    todo: list[tuple[Step, int]] = [
        (Step([0] * size, range(size), [Ask(ask)], kind="prompt"), 0) for size, ask in zip(queue, asks, strict=True)
    ]
    passes: list[Sequence[int]] = []
    while todo:
        sizes = pieces(todo, chunk)
        passes.append(sizes)
        assert sizes[0] > 0, "the first in the queue always goes on"
        for (step, fed), size in zip(todo, sizes, strict=True):
            if fed + size < len(step.tokens) and size:
                assert size == chunk and fed + size <= step.ask[0].cell
        todo = [
            (step, fed + size) for (step, fed), size in zip(todo, sizes, strict=True) if fed + size < len(step.tokens)
        ]
    assert sum(map(sum, passes)) == sum(queue)
    assert all(sum(sizes) <= max(chunk, max(sizes)) for sizes in passes)


def test_steps_that_are_not_prompts_never_wait() -> None:
    prompt = Step([0] * 10, range(10), [Ask(9)], kind="prompt")
    verify = Step([0] * 30, range(30), [Ask(0)])
    assert pieces([(prompt, 0), (verify, 0), (prompt, 0), (prompt, 8)], 12) == [10, 30, 0, 2]
    assert divisible(Step([0] * 4, range(4), bidirectional=True)) == 0
    assert divisible(Step([0] * 4, range(4), groups=[0, 0, 1, 1])) == 0
