"""What a pass of the default decoder reads: nothing that no later step could use, and the draws stay in place.

That nothing needed is left out shows everywhere else: a decoder that looks at a cell it hasn't asked about fails.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.decoding.fake import END, MASK, PROMPT, Run, decode
from tests.decoding.scripts import Text, hashed

TEXT = list(range(1, 25))
WRONG = 60
LEAD = len(PROMPT)


def refusion(model: Any, **settings: Any) -> Run:
    base: dict[str, Any] = {"draft_threshold": 0.3, "plan_size": 32, "branch_size": 0}
    return decode(model, **{**base, "slot_size": 4, "block_size": 12, "max_tokens": 12, **settings})


def unread(run: Run, at: int) -> list[tuple[int, int]]:
    """(position, token) of a pass's answer cells that nothing was asked about."""
    one = run.passes[at]
    asked = {ask.cell for ask in one.asks}
    return [
        (position, token) for cell, (position, token) in enumerate(zip(one.positions, one.tokens, strict=True))
        if cell not in asked and position >= 0
    ]


def test_the_prompt_s_last_token_names_the_first_so_its_mask_need_not() -> None:
    run = refusion(Text(TEXT))
    assert [ask.cell for ask in run.passes[0].asks] == [LEAD - 1, *range(LEAD + 1, LEAD + 12)]
    assert unread(run, 0) == [(0, MASK)]


def test_without_a_prompt_the_first_mask_is_read() -> None:
    run = decode(Text(TEXT, lead=0), prompt=(), max_tokens=8, slot_size=4, block_size=8)
    assert unread(run, 0) == [] and run.tokens == TEXT[:8]


def test_nothing_is_read_behind_the_answer() -> None:
    run = refusion(Text(TEXT))
    assert unread(run, 1) == [(11, 12)]


def test_behind_a_slot_finished_early_nothing_goes_on() -> None:
    """Slots 0 and 2 are fed; what follows slot 2 is another slot, and not where the text goes on."""
    plan = {at: (at + 1, 0.6) for at in (*range(4, 8), *range(12, 16))}
    run = refusion(Text(TEXT, plan=plan), block_size=16, max_tokens=16)
    assert [p for p, _ in run.passes[1].fed] == [*range(4), *range(8, 12)]
    assert unread(run, 1) == [(11, 12)]


def test_a_first_token_that_can_t_be_judged_has_no_judge() -> None:
    """Slots 2 and 3 are fed before slot 1: 12 follows a fed token, but the text isn't there yet."""
    run = refusion(Text(TEXT, plan={p: (p + 1, 0.6) for p in range(4, 8)}), block_size=16, max_tokens=16)
    assert [p for p, _ in run.passes[1].fed] == [*range(4), *range(8, 16)]
    assert unread(run, 1) == [(11, 12), (15, 16)]
    # behind slot 0 the text goes on, and inside a slot a draft is judged
    assert {a.cell: a.given for a in run.passes[1].asks if a.cell < 4} == {0: 2, 1: 3, 2: 4, 3: None}


def test_a_gap_that_is_filled_joins_the_text_to_the_slot_behind_it() -> None:
    """Slot 1 is done early; slot 0's last token is the verifier's, so slot 2 follows the text behind slot 1."""
    plan = {3: (4, 0.2), **{at: (at + 1, 0.6) for at in range(8, 16)}}
    run = refusion(Text(TEXT, plan=plan), block_size=16, max_tokens=16)
    assert [p for p, _ in run.passes[1].fed] == [*range(3), *range(4, 8)]
    # the free token at 3 closes the gap, so the cell of 7 names 8; all of it is used
    assert unread(run, 1) == [] and run.passes[2].fed[:3] == [(3, 4), (8, 9), (9, 10)]


def test_nothing_is_read_behind_an_end_token() -> None:
    text = [*TEXT[:9], END, *TEXT[10:]]
    run = refusion(Text(text, plan={at: (text[at], 0.6) for at in (4, 5, 6, 7)}), block_size=24, max_tokens=24)
    assert [p for p, _ in run.passes[1].fed][:6] == [0, 1, 2, 3, 8, 9]
    assert (9, END) in unread(run, 1)


def test_a_mask_where_a_decided_token_alone_is_fed_need_not_speak() -> None:
    """The pass feeds position 0 and no draft: what follows it is named by that cell."""
    run = refusion(Text(TEXT, plan={1: (2, 0.2)}))
    second = run.passes[1]
    assert second.fed[0] == (0, 1) and (1, 2) not in second.fed
    assert (1, MASK) in unread(run, 1)


def test_a_branch_s_first_mask_stands_for_the_verifier_s_token() -> None:
    model = Text(TEXT, plan={1: (WRONG, 0.6), **{at: (at + 1, 0.4) for at in range(4, 12)}})
    run = refusion(model, slot_size=12, draft_threshold=0.5, branch_size=3)
    assert run.passes[1].fed[:2] == [(0, 1), (1, WRONG)] and run.passes[1].masks[-3:] == [1, 2, 3]
    assert unread(run, 1) == [(1, MASK)]
    assert run.passes[2].fed[:3] == [(1, 2), (2, 3), (3, 4)], "what the others said is fed next"


def test_a_branch_at_a_draft_that_can_t_be_rejected_is_not_read() -> None:
    plan = {**{p: (p + 1, 0.6) for p in range(4, 8)}, 12: (13, 0.91)}
    run = refusion(
        Text(TEXT, plan=plan), block_size=16, max_tokens=16, branch_size=2, branch_threshold=0.05, slot_threshold=0.9
    )
    branches = [cell for cell, token in enumerate(run.passes[1].tokens) if token == MASK][-2:]
    assert [run.passes[1].positions[cell] for cell in branches] == [12, 13]
    assert not {ask.cell for ask in run.passes[1].asks} & set(branches)


@pytest.mark.parametrize("acceptance", ["threshold", "speculative"])
def test_a_cell_left_out_uses_its_draw_up_all_the_same(acceptance: str) -> None:
    """Every cell behind the prompt has its number of the seed's stream, read or not; speculative masks have none."""
    run = decode(
        hashed(5, end=0.0), acceptance=acceptance, temperature=1.0, seed=7, max_tokens=16, slot_size=4, block_size=8,
        slot_threshold=0.3,
    )
    stream = random.Random("refusion/7")
    left_out = 0
    for one in run.passes:
        asks = {ask.cell: ask for ask in one.asks}
        for cell, token in enumerate(one.tokens):
            if one.positions[cell] < -1 or (token == MASK and acceptance == "speculative"):
                continue
            number = stream.random()
            left_out += cell not in asks
            assert cell not in asks or asks[cell].uniform == number
    assert left_out > 0 and len(run.passes) > 3
