"""The published decoder: exact pass sequences, and equality with a literal second implementation."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.decoding import DecodeConfig
from refusion.decoding.config import PLANNERS
from tests.decoding.fake import END, MASK, PROMPT, decode
from tests.decoding.literal import Published
from tests.decoding.scripts import Text, hashed

TEXT = list(range(1, 25))
WRONG = 60


def paper(model: Any, **settings: Any) -> Any:
    return decode(model, **{"decoder": "paper", "slot_size": 4, "block_size": 8, "max_tokens": 16, **settings})


def test_certain_slots_take_two_passes_a_block() -> None:
    run = paper(Text(TEXT))
    assert run.kinds == ["prompt", "verify", "plan", "verify"]
    assert run.tokens == TEXT[:16] and run.forwards == 3
    assert run.passes[0].masks == list(range(8)) and run.passes[2].masks == list(range(8, 16))
    assert run.passes[1].committed == list(range(8))


def test_one_uncertain_slot_a_round_two_passes_a_slot() -> None:
    run = paper(Text(TEXT, sure=0.8))
    assert run.kinds == ["prompt", "verify", *["plan", "verify"] * 3]
    assert [p.positions[0] for p in run.passes if p.kind == "verify"] == [0, 4, 8, 12]


def test_the_fallback_is_the_most_certain_slot() -> None:
    plan = {0: (1, 0.4), 4: (5, 0.8)}
    run = paper(Text(TEXT, plan=plan), max_tokens=8)
    assert [p.positions for p in run.passes if p.kind == "verify"] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert run.tokens == TEXT[:8]
    assert [position for (position, _), _ in run.cells] == [0, 1, 2, 7, 8, 9, 10, 3, 4, 5, 6]


def test_a_rejected_later_slot_is_planned_again() -> None:
    """The first slot is whole; the second one's valid prefix is thrown away, as published."""
    run = paper(Text(TEXT, verify={6: {7: 0.3, 1: 0.7}}), max_tokens=8, slot_threshold=0.5)
    assert run.kinds[:4] == ["prompt", "verify", "plan", "verify"]
    assert run.passes[1].committed == [0, 1, 2, 3] and run.passes[2].masks == [4, 5, 6, 7]


def test_completion_goes_on_behind_a_forced_token() -> None:
    """Two of four valid; the third is forced though the verifier never likes it, the fourth then holds."""
    run = paper(Text(TEXT, verify={2: {3: 0.1, 1: 0.9}}), max_tokens=4)
    assert run.kinds == ["prompt", "verify", "completion", "completion"]
    assert run.passes[2].tokens == [1, 2, MASK, MASK] and run.passes[3].tokens == [1, 2, 3, 4]
    assert run.tokens == TEXT[:4] and run.passes[3].committed == [0, 1, 2, 3]


def test_completion_takes_two_passes_a_token_at_worst() -> None:
    run = paper(Text(TEXT, verify={at: {at + 1: 0.1, 50: 0.9} for at in range(4)}), max_tokens=4)
    assert run.kinds == ["prompt", "verify", *["completion"] * 6]
    assert run.tokens == TEXT[:4]


def test_slots_behind_a_rejected_draft_are_judged_again_alone() -> None:
    """The second slot holds by itself, but was first judged behind a rejected token."""

    def predict(token: int, position: int, context: Any) -> Any:
        rejected = any(t == WRONG for _, t in context) and position >= len(PROMPT) + 4
        if rejected and token != MASK:
            return {50: 1.0}
        return Text(TEXT, plan={2: (WRONG, 0.9)})(token, position, context)

    seen_alone = paper(predict, max_tokens=8)
    kinds = ["prompt", "verify", "completion", "completion", "completion"]
    assert seen_alone.kinds[:6] == kinds
    alone = seen_alone.passes[2]
    assert alone.tokens == [1, 2, WRONG, 4, 5, 6, 7, 8] and alone.groups == [0] * 4 + [1] * 4
    redraft, judged = seen_alone.passes[3:5]
    assert redraft.tokens == [1, 2, MASK, MASK] and redraft.groups == [0] * 4, "the second slot is done"
    assert judged.committed == list(range(8))


def test_completed_slots_see_only_the_prefix_and_themselves() -> None:
    run = paper(Text(TEXT, verify={2: {3: 0.1, 1: 0.9}, 6: {7: 0.1, 1: 0.9}}), max_tokens=8)
    assert run.kinds == ["prompt", "verify", "completion", "completion", "completion"]
    contexts = {position: [p for p, _ in context] for (position, _), context in run.cells}
    assert contexts[8] == [0, 1, 2, 7, 8]


def test_a_rejected_end_lets_the_slot_grow_back() -> None:
    """The plan ends the slot at its second token; the verifier won't have it, and the new draft goes on."""

    def predict(token: int, position: int, context: Any) -> Any:
        early = token == MASK and sum(t == MASK for _, t in context) == position - len(PROMPT) + 1
        plan = {1: (END, 0.9)} if early else {}
        return Text(TEXT, plan=plan)(token, position, context)

    run = paper(predict, max_tokens=4)
    assert run.passes[1].tokens == [1, END]
    assert run.passes[2].tokens == [1, MASK, MASK, MASK]
    assert run.kinds == ["prompt", "verify", "completion", "completion"]
    assert run.tokens == TEXT[:4]


def test_an_end_found_in_completion_drops_the_slots_behind_it_at_once() -> None:
    text = [1, 2, END, *TEXT[3:]]
    slow = {at: {at + 1: 0.1, 50: 0.9} for at in (5, 6, 7)}
    run = paper(Text(text, plan={1: (WRONG, 0.9)}, verify=slow), max_tokens=8)
    assert run.kinds == ["prompt", "verify", "completion", "completion", "completion"]
    assert run.tokens == [1, WRONG, END], "a forced token stays"


def test_a_slot_behind_an_end_is_not_completed() -> None:
    """Slot 0 is rejected; slot 1, judged alone, ends the text; slot 2 is open, and dropped."""
    text = [*TEXT[:5], END, *TEXT[6:]]
    low = {at: {at + 1: 0.1, 50: 0.9} for at in (2, 10)}
    run = paper(Text(text, verify=low), max_tokens=12, block_size=12)
    assert run.kinds == ["prompt", "verify", *["completion"] * 3] and run.tokens == text[:6]
    assert run.passes[3].positions == [0, 1, 2, 3] and run.passes[4].positions == [0, 1, 2, 3, 4, 5]


def test_an_uncertain_end_is_no_fallback_while_earlier_slots_are_open() -> None:
    plan = {0: (1, 0.3), 4: (END, 0.8)}
    run = paper(Text(TEXT, plan=plan), max_tokens=8)
    assert run.passes[1].positions == [0, 1, 2, 3]
    # with nothing open before it, it ends the text
    assert run.tokens == [1, 2, 3, 4, END]


def test_a_first_token_is_never_judged() -> None:
    run = paper(Text(TEXT, verify={0: (50, 0.99), 4: (50, 0.99)}), max_tokens=8)
    assert run.kinds == ["prompt", "verify"] and run.tokens == TEXT[:8]
    assert [a.cell for a in run.passes[1].asks] == [0, 1, 2, 4, 5, 6]


def test_what_is_valid_is_not_read_again() -> None:
    """Slot 1 is full after its first judgment alone; it is fed beside slot 0 till that one is, and never read."""
    slow = {at: {at + 1: 0.1, 50: 0.9} for at in (2, 3)}
    run = paper(Text(TEXT, verify=slow), max_tokens=8)
    assert run.kinds == ["prompt", "verify", *["completion"] * 5] and run.tokens == TEXT[:8]
    judged = [one for one in run.passes[2:] if not one.masks]
    assert all(one.positions == list(range(8)) for one in judged)
    assert [[a.cell for a in one.asks] for one in judged] == [[1, 2, 4, 5, 6], [2], []]


def test_thresholds_are_exclusive() -> None:
    exactly = Text(TEXT, plan={at: (at + 1, 0.9) for at in range(8)})
    assert paper(exactly, max_tokens=8).passes[1].positions == [0, 1, 2, 3], "0.9 isn't above 0.9"
    at_threshold = Text(TEXT, verify={2: {3: 0.4, 50: 0.6}})
    assert paper(at_threshold, max_tokens=4).count["completion"] == 2


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6), loose=st.sampled_from([0.3, 0.7, 0.9]), end=st.sampled_from([0.003, 0.05, 0.4]),
    length=st.integers(1, 20), slot=st.integers(1, 6), more=st.integers(0, 9),
    slot_threshold=st.sampled_from([0.0, 0.4, 0.7, 1.0]), token_threshold=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    prompt=st.sampled_from([PROMPT, ()]), planner=st.sampled_from(["confidence", *PLANNERS]),
)
def test_it_equals_the_literal_algorithm(
    seed: int, loose: float, end: float, length: int, slot: int, more: int, slot_threshold: float,
    token_threshold: float, prompt: tuple[int, ...], planner: str,
) -> None:
    config = DecodeConfig(
        decoder="paper", max_tokens=length, slot_size=slot, block_size=slot + more, slot_threshold=slot_threshold,
        token_threshold=token_threshold, planner=planner,
    )
    model = hashed(seed, loose=loose, end=end)
    run = decode(model, config, prompt=prompt)
    published = Published(model, prompt, config, [END])
    assert run.tokens == published.run()
    assert run.kinds == published.kinds
    assert [cell for cell, _ in run.cells][: len(published.storage)] == published.storage
