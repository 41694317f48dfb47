"""Branches: the pass that rejects a draft token has already planned for that case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.decoding.fake import MASK, PROMPT, Context, Run, decode
from tests.decoding.scripts import Text

TEXT = list(range(1, 25))
WRONG = 60
AT = len(PROMPT)


class Misled(Text):
    """Draws position 1 wrong from the prompt alone, and no mask that sees a wrong token is right."""

    def __call__(self, token: int, position: int, context: Context) -> Mapping[int, float]:
        if token == MASK and any(seen == WRONG for _, seen in context):
            return {WRONG: 0.6, 61: 0.4}
        if token == MASK and position == AT + 1 and len([c for c in context if c[1] != MASK]) == AT:
            return {WRONG: 0.6, 61: 0.4}
        return super().__call__(token, position, context)


def refusion(model: Any, **settings: Any) -> Run:
    return decode(model, **{"slot_size": 12, "block_size": 12, "max_tokens": 12, "draft_threshold": 0.5, **settings})


def test_a_branch_hangs_on_the_cell_before_a_doubtful_draft_and_starts_at_its_position() -> None:
    run = refusion(Misled(TEXT), branch_size=4)
    second = run.passes[1]
    # 0 is decided; 1 (0.6) is doubtful; behind it drafts of 0.97 until the end
    assert second.fed[:2] == [(0, 1), (1, WRONG)]
    assert second.masks == [1, 2, 3, 4] and second.committed == [0]


def test_its_plan_replaces_the_stale_one() -> None:
    with_branch, without = refusion(Misled(TEXT), branch_size=4), refusion(Misled(TEXT), branch_size=0)
    assert with_branch.tokens == without.tokens == TEXT[:12]
    # what was misled: nothing of the old plan is fed again, what the branch planned is
    assert with_branch.passes[2].fed == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert with_branch.forwards <= without.forwards


def test_masks_of_a_branch_see_neither_the_doubtful_draft_nor_other_branches() -> None:
    contexts: list[Context] = []

    def predict(token: int, position: int, context: Context) -> Mapping[int, float]:
        if token == MASK:
            contexts.append(context)
        return Misled(TEXT)(token, position, context)

    refusion(predict, branch_size=3)
    behind = [c for c in contexts if c[-1] == (AT + 3, MASK) and (AT, 1) in c and (AT + 1, MASK) in c]
    assert behind and all(c == (*enumerate(PROMPT), (AT, 1), *((AT + n, MASK) for n in (1, 2, 3))) for c in behind)


def test_sure_drafts_get_no_branch() -> None:
    run = refusion(Text(TEXT), branch_size=4, branch_threshold=0.1)
    assert run.kinds == ["prompt", "verify"] and run.tokens == TEXT[:12]


def test_an_accepted_doubtful_draft_leaves_the_main_plan_in_force() -> None:
    model = Text(TEXT, plan={1: (2, 0.6), **{at: (at + 1, 0.4) for at in range(4, 12)}})
    run = refusion(model, branch_size=2)
    assert run.passes[1].fed == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert run.passes[1].masks == [*range(4, 12), 1, 2] and run.passes[1].committed == [0, 1, 2, 3]
    assert run.tokens == TEXT[:12]
