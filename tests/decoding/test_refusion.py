"""The default decoder: every idea of DESIGN section 5 as an exact sequence of passes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decoding.fake import END, MASK, PROMPT, Context, Run, decode
from tests.decoding.scripts import Text, left_to_right

TEXT = list(range(1, 25))
WRONG = 60


def refusion(model: Any, **settings: Any) -> Run:
    base: dict[str, Any] = {"draft_threshold": 0.3, "plan_size": 32, "branch_size": 0}
    return decode(model, **{**base, "slot_size": 4, "block_size": 12, "max_tokens": 12, **settings})


def fed(run: Run) -> list[list[int]]:
    """Positions of the tokens that each pass verifies or caches."""
    return [[p for p, _ in one.fed] for one in run.passes]


def test_the_prompt_carries_the_first_masks_and_gives_the_first_token() -> None:
    run = refusion(Text(TEXT))
    first = run.passes[0]
    assert first.kind == "prompt" and first.positions == [-3, -2, -1, *range(12)]
    assert first.masks == list(range(12)) and first.committed == [0, 1, 2]
    assert run.kinds == ["prompt", "verify"] and run.tokens == TEXT[:12]


def test_where_every_draft_holds_the_same_pass_is_the_next_plan() -> None:
    run = refusion(Text(TEXT), block_size=8, max_tokens=24, plan_size=16)
    assert run.kinds == ["prompt", "fused", "fused", "verify"] and run.tokens == TEXT
    assert fed(run) == [[], list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert [p.masks for p in run.passes] == [list(range(16)), list(range(8, 16)), list(range(16, 24)), []]
    # the free token behind a block is fed with the drafts that the fused pass made
    assert run.passes[2].tokens[0] == 9 and len(run.passes[2].committed) == 8


def test_masks_see_the_drafts_before_them_and_stay_uncommitted() -> None:
    seen: dict[int, Context] = {}

    def predict(token: int, position: int, context: Context) -> Any:
        if token == MASK:
            seen.setdefault(position, context)
        return Text(TEXT)(token, position, context)

    run = refusion(predict, block_size=4, plan_size=4)
    assert fed(run)[1] == [0, 1, 2, 3] and run.passes[1].masks == [4, 5, 6, 7]
    assert seen[len(PROMPT) + 4] == (*enumerate(PROMPT), (3, 1), (4, 2), (5, 3), (6, 4), (7, MASK))


def test_useless_drafts_cost_no_more_passes_than_left_to_right() -> None:
    model = Text(TEXT, plan={at: (WRONG, 0.97) for at in range(24)})
    run = refusion(model, max_tokens=24, slot_threshold=1.0)
    assert run.tokens == left_to_right(model, 24) == TEXT and run.forwards == 23


def test_a_partial_prefix_stays_and_the_verifier_names_what_comes_behind() -> None:
    run = refusion(Text(TEXT, plan={2: (WRONG, 0.97)}), max_tokens=4)
    assert fed(run) == [[], [0, 1, 2, 3], [2, 3]]
    assert run.passes[1].committed == [0, 1] and run.passes[2].tokens == [3, 4]
    assert run.tokens == TEXT[:4] and run.forwards == 2


def test_a_correction_leaves_the_rest_as_stale_drafts_and_later_slots_as_masks() -> None:
    run = refusion(Text(TEXT, plan={1: (WRONG, 0.97)}))
    assert run.kinds == ["prompt", "verify", "fused", "verify"]
    assert run.passes[1].tokens == [1, WRONG, *TEXT[2:12]]
    # 0.97 * 0.5 is still above draft_threshold, but not above slot_threshold
    assert run.passes[2].fed == [(1, 2), (2, 3), (3, 4)] and run.passes[2].masks == list(range(4, 12))
    assert fed(run)[3] == list(range(4, 12)) and run.tokens == TEXT[:12]


@pytest.mark.parametrize(("settings", "second"), [
    ({"stale_factor": 0.0}, [1]), ({"draft_threshold": 0.49}, [1]), ({"stale_factor": 0.3}, [1]),
    ({"stale_factor": 1.0}, list(range(1, 12))), ({"slot_threshold": 0.4}, list(range(1, 12))),
])
def test_how_stale_drafts_are_believed(settings: dict[str, float], second: list[int]) -> None:
    run = refusion(Text(TEXT, plan={1: (WRONG, 0.97)}), **settings)
    assert fed(run)[2] == second and run.tokens == TEXT[:12]
    assert run.passes[2].masks == [p for p in range(2, 12) if p not in second]


def test_a_slot_partly_fed_behind_a_rejection_keeps_its_stale_draft() -> None:
    """Its rest was masked in that pass; the stale beginning and the new rest make one draft."""
    run = refusion(Text(TEXT, plan={1: (WRONG, 0.97), 7: (8, 0.2)}), stale_factor=1.0, max_tokens=8)
    assert run.passes[1].fed == [(0, 1), (1, WRONG), *((p, p + 1) for p in range(2, 7))]
    assert run.passes[1].masks == [7]
    assert fed(run)[2] == list(range(1, 7)) and run.tokens == TEXT[:8] and run.forwards == 2


def test_drafts_below_the_threshold_stay_masks() -> None:
    run = refusion(Text(TEXT, plan={at: (at + 1, 0.2) for at in (2, 3, 6, 10)}))
    assert fed(run)[1] == [0, 1, 4, 5, 8, 9] and run.passes[1].masks == [2, 3, 6, 7, 10, 11]
    # the free token inside each slot, and the new drafts behind it; position 3 is unlikely once more
    assert fed(run)[2] == [2, 6, 7, 10, 11] and run.passes[2].masks == [3]
    assert run.tokens == TEXT[:12] and run.forwards == 2


def test_a_certain_slot_is_finished_early_and_the_gap_gets_the_free_token() -> None:
    """Position 4 comes free behind the first slot; the plan made in the same pass goes on behind it."""
    run = refusion(Text(TEXT, plan={at: (at + 1, 0.6) for at in range(8)}))
    assert [p for p, _ in run.passes[1].fed] == [0, 1, 2, 3, 8, 9, 10, 11] and run.passes[1].masks == [4, 5, 6, 7]
    assert fed(run)[2] == [4, 5, 6, 7] and run.forwards == 2 and run.tokens == TEXT[:12]
    contexts = {p: [q for q, _ in context] for (p, _), context in run.cells}
    assert contexts[len(PROMPT) + 8] == [0, 1, 2, 3, 4, 5, 6, 11]


@pytest.mark.parametrize("stale_factor", [0.0, 0.5, 1.0])
def test_drafts_keep_their_positions_where_a_slot_gets_a_free_token(stale_factor: float) -> None:
    """No slot is certain, so slot 1 has an older draft when the verifier names its first token."""
    run = refusion(Text(TEXT), slot_threshold=1.0, stale_factor=stale_factor)
    assert fed(run)[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and run.tokens == TEXT[:12]
    for one in run.passes[1:]:
        assert all(token == position + 1 for position, token in one.fed), "a draft at another's position"


def test_a_first_token_right_behind_the_text_is_judged_too() -> None:
    """Both slots are fed; the verifier at the first one's end corrects the second one's beginning."""
    model = Text(TEXT, plan={4: (WRONG, 0.97)})
    run = refusion(model, max_tokens=8)
    assert run.passes[1].tokens == [1, 2, 3, 4, WRONG, 6, 7, 8]
    assert [a.given for a in run.passes[1].asks] == [2, 3, 4, WRONG, 6, 7, 8]
    assert fed(run)[2] == [4, 5, 6, 7] and run.tokens == TEXT[:8] == left_to_right(model, 8)


@pytest.mark.parametrize("at", [8, 12])
def test_a_first_token_apart_from_the_text_is_the_plan_s(at: int) -> None:
    """Slots 2 and 3 are finished before slot 1: each begins as planned, though 12 follows a fed token."""
    plan = {**{p: (p + 1, 0.6) for p in range(4, 8)}, at: (WRONG, 0.97)}
    run = refusion(Text(TEXT, plan=plan), max_tokens=16, block_size=16)
    assert fed(run)[1] == [*range(4), *range(8, 16)] and run.forwards == 2
    assert run.tokens == [*TEXT[:at], WRONG, *TEXT[at + 1 : 16]]


def test_the_leftmost_slot_is_fed_beside_the_last_token_of_the_one_before() -> None:
    run = refusion(Text(TEXT, plan={3: (WRONG, 0.97)}))
    # the correction fills slot 0; the stale drafts of slot 1, now leftmost, are judged by it
    assert fed(run)[1:] == [list(range(12)), [3, 4, 5, 6, 7], [8, 9, 10, 11]]
    assert run.tokens == TEXT[:12]


def test_a_block_begins_beside_the_last_token_of_the_one_before() -> None:
    run = refusion(Text(TEXT, plan={3: (WRONG, 0.97)}), block_size=4, stale_factor=1.0)
    assert fed(run)[1] == [0, 1, 2, 3] and run.passes[1].masks == list(range(4, 8))
    assert fed(run)[2] == [3, 4, 5, 6, 7] and run.passes[2].masks == list(range(8, 12))


def test_no_later_block_s_slot_is_verified_before_its_time() -> None:
    run = refusion(Text(TEXT, plan={1: (2, 0.2)}), block_size=4, max_tokens=8)
    assert fed(run)[1] == [0] and run.passes[1].masks == list(range(1, 8))
    assert fed(run)[2] == [1, 2, 3]


def test_a_stale_plan_alone_begins_no_slot() -> None:
    """Slot 1 is finished early; slot 2 was planned behind a rejected token and goes back to masks."""
    plan = {1: (2, 0.2), 2: (WRONG, 0.6), 6: (7, 0.6)}

    def predict(token: int, position: int, context: Context) -> Any:
        spoiled = any(t == WRONG for _, t in context)
        return Text(TEXT, plan={**plan, 6: (50, 0.6)} if spoiled else plan)(token, position, context)

    run = refusion(predict, slot_size=3, block_size=9, max_tokens=9)
    assert run.tokens == TEXT[:9], "50 was said behind a rejected token"
    assert fed(run)[1:] == [[0, 3, 4, 5], [1, 2], [2], [6, 7, 8]]
    assert [p.masks for p in run.passes[2:4]] == [[6, 7, 8]] * 2


def test_a_stale_draft_alone_begins_no_slot() -> None:
    """As above, but slot 2 got certain meanwhile, so that its draft itself was fed behind the rejected token."""
    def predict(token: int, position: int, context: Context) -> Any:
        known = [t for _, t in context if t != MASK]
        certain = (7, 0.6) if len(known) == len(PROMPT) else (50, 0.97) if 3 not in known else (7, 0.97)
        return Text(TEXT, plan={1: (2, 0.2), 2: (WRONG, 0.6), 6: certain})(token, position, context)

    run = refusion(predict, slot_size=3, block_size=9, max_tokens=9)
    assert run.passes[2].tokens == [2, WRONG, 50, 8, 9]
    assert fed(run)[3:] == [[2], [6, 7, 8]] and run.tokens == TEXT[:9]


def test_a_plan_for_the_leftmost_slot_is_spoiled_by_no_later_draft() -> None:
    """Slot 2 needs a new plan; slot 3's stale draft, wrong as it is, waits meanwhile and is masked anew."""
    early = {1: (2, 0.2), 2: (WRONG, 0.97), 6: (7, 0.6), 10: (WRONG, 0.97), 11: (WRONG, 0.97)}

    def predict(token: int, position: int, context: Context) -> Any:
        late = 3 in [t for _, t in context]
        return Text(TEXT, plan={} if late else early)(token, position, context)

    run = refusion(predict, slot_size=3, draft_threshold=0.22)
    assert fed(run)[1:3] == [[0, 3, 4, 5, 9, 10, 11], [1, 2, 10, 11]]
    assert fed(run)[3] == [2, 10] and run.passes[3].masks == [6, 7, 8, 11]
    assert fed(run)[4:] == [[6, 7, 8, 11]] and run.tokens == TEXT[:12]


def test_a_plan_behind_a_rejected_token_makes_no_slot_certain() -> None:
    def predict(token: int, position: int, context: Context) -> Any:
        first = all(t == MASK for _, t in context[len(PROMPT) :])
        unsure = {at: (at + 1, 0.6) for at in range(4, 12)} if first else {}
        return Text(TEXT, plan={**unsure, 1: (WRONG, 0.97)})(token, position, context)

    run = refusion(predict)
    assert fed(run)[1:] == [[0, 1, 2, 3], [1, 2, 3], list(range(4, 12))] and run.tokens == TEXT[:12]


def test_an_end_in_any_draft_shrinks_the_target_at_once() -> None:
    text = [*TEXT[:9], END, *TEXT[10:]]
    plan = {at: (text[at], 0.6) for at in (4, 5, 6, 7)}
    run = refusion(Text(text, plan=plan), block_size=24, max_tokens=24)
    assert fed(run)[1] == [0, 1, 2, 3, 8, 9, *range(12, 24)], "nothing behind an end inside a slot"
    assert len(run.passes[1].committed) == 6, "what was fed behind the end isn't kept"
    assert max(p for one in run.passes[2:] for p in one.positions) == 7
    assert run.tokens == text[:10] and run.answer.finish_reason == "stop"


def test_an_end_as_correction_cuts_committed_slots() -> None:
    text = [1, 2, END, *TEXT[3:]]
    plan = {**{at: (at + 1, 0.97) for at in range(24)}, 1: (2, 0.2)}
    run = refusion(Text(text, plan=plan), max_tokens=24, block_size=24)
    assert run.tokens == [1, 2, END]
    committed = {p - len(PROMPT) for (p, _), _ in run.cells}
    assert 4 in committed, "the cut tokens were decided before"


def test_an_end_as_free_token() -> None:
    run = refusion(Text([1, 2, 3, 4, END, *TEXT[5:]], plan={4: (WRONG, 0.2), 5: (WRONG, 0.2)}))
    assert run.tokens == [1, 2, 3, 4, END] and run.answer.finish_reason == "stop"


def test_an_end_whose_whole_context_holds_leaves_the_plan_fresh() -> None:
    """Masks of an earlier slot stand behind the end token, every fed draft holds: their drafts count in full."""
    text = [*TEXT[:9], END]
    run = refusion(Text(text, plan={at: (text[at], 0.6) for at in (4, 5, 6, 7)}), draft_threshold=0.5)
    assert run.forwards == 2 and fed(run)[2] == [4, 5, 6, 7]


def test_acceptance() -> None:
    """The draft's token has 0.45 from the verifier, another one 0.55."""
    model = Text(TEXT, plan={1: (WRONG, 0.97)}, verify={1: {WRONG: 0.45, 2: 0.55}})
    assert refusion(model, max_tokens=4).tokens == [1, WRONG, 3, 4]
    assert refusion(model, max_tokens=4, token_threshold=0.45).tokens == TEXT[:4], "exclusive"
    assert refusion(model, max_tokens=4, acceptance="greedy").tokens == TEXT[:4]
    likeliest = Text(TEXT, verify={1: {2: 0.2, **{n: 0.1 for n in range(40, 48)}}})
    for acceptance in ("threshold", "greedy"):
        assert refusion(likeliest, max_tokens=4, acceptance=acceptance, token_threshold=1.0).forwards == 1


def test_certainty_must_exceed_the_threshold() -> None:
    model = Text(TEXT, plan={at: (at + 1, 0.9) for at in range(4, 8)})
    assert fed(refusion(model, max_tokens=8))[1] == [0, 1, 2, 3]
    assert fed(refusion(model, max_tokens=8, slot_threshold=0.89))[1] == list(range(8))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_plan_is_bounded(size: int) -> None:
    run = refusion(Text(TEXT), max_tokens=24, block_size=8, plan_size=size)
    assert max(len(p.masks) for p in run.passes) == size
    assert run.tokens == TEXT


def test_events_tell_of_drafts_rejections_and_commits() -> None:
    run = refusion(Text(TEXT, plan={1: (WRONG, 0.97)}), max_tokens=4)
    told = [(e.kind, list(e.positions), list(e.tokens)) for e in run.events]
    assert told == [
        ("committed", [0], [1]), ("draft", [1, 2, 3], [WRONG, 3, 4]),
        ("rejected", [1, 2, 3], [WRONG, 3, 4]), ("committed", [1], [2]),
        ("committed", [2], [3]), ("committed", [3], [4]),
    ]
