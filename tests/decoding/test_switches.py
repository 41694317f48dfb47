"""Improvements switched off, one by one and together: what a pass then holds, and that every answer still ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.decoding import DecodeConfig
from refusion.errors import ConfigError
from tests.decoding.fake import END, Run, decode
from tests.decoding.scripts import Text, hashed, left_to_right

TEXT = list(range(1, 25))
WRONG = 60
SWITCHES = ("fused_pass", "bonus_token", "prompt_plan")


def refusion(model: Any, **settings: Any) -> Run:
    base: dict[str, Any] = {"draft_threshold": 0.3, "plan_size": 32, "branch_size": 0}
    return decode(model, **{**base, "slot_size": 4, "block_size": 12, "max_tokens": 12, **settings})


def test_without_the_prompt_s_plan_the_first_masks_come_in_a_pass_of_their_own() -> None:
    run = refusion(Text(TEXT), prompt_plan=False)
    assert run.passes[0].masks == [] and run.passes[0].kind == "prompt"
    assert run.passes[1].fed == [(0, 1)] and run.passes[1].masks == list(range(1, 12)), "the free token is fed"
    assert run.tokens == TEXT[:12] and run.forwards == 2


def test_without_fused_passes_a_pass_verifies_or_plans() -> None:
    shape = {"block_size": 8, "plan_size": 8, "max_tokens": 24}
    run = refusion(Text(TEXT), fused_pass=False, bonus_token=False, **shape)
    assert run.kinds == ["prompt", "verify", "plan", "verify", "plan", "verify"] and run.tokens == TEXT
    assert [one.masks for one in run.passes] == [list(range(8)), [], list(range(8, 16)), [], list(range(16, 24)), []]
    assert refusion(Text(TEXT), **shape).kinds == ["prompt", "fused", "fused", "verify"]


def test_without_the_bonus_token_a_rejected_draft_leaves_nothing() -> None:
    model = Text(TEXT, plan={2: (WRONG, 0.97)}, verify={2: (3, 0.97)})
    run = refusion(model, bonus_token=False, max_tokens=4, fused_pass=False)
    assert [[at for at, _ in one.fed] for one in run.passes] == [[], [0, 1, 2, 3], [], [2, 3]]
    assert run.passes[1].committed == [0, 1] and run.passes[2].masks == [2, 3]
    assert run.tokens == [1, 2, WRONG, 4], "the next plan's first token is taken unjudged"
    kept = refusion(model, max_tokens=4, fused_pass=False)
    assert kept.tokens == TEXT[:4] and kept.forwards == 2


def test_a_branch_is_the_fresh_plan_behind_a_rejected_draft_without_a_bonus_too() -> None:
    plan: dict[int, Any] = {2: {WRONG: 0.5, 3: 0.4}}
    run = refusion(Text(TEXT, plan=plan), bonus_token=False, max_tokens=4, branch_size=2, branch_threshold=0.1)
    assert run.passes[1].masks == [2, 3] and run.passes[1].committed == [0, 1]
    assert [at for at, _ in run.passes[2].fed] == [2, 3] and run.forwards == 2


@pytest.mark.parametrize("acceptance", ["greedy", "speculative"])
def test_exact_acceptance_needs_the_bonus_token(acceptance: str) -> None:
    with pytest.raises(ConfigError, match=f"acceptance '{acceptance}' needs bonus_token"):
        DecodeConfig(acceptance=acceptance, bonus_token=False)


OFF = st.sets(st.sampled_from(SWITCHES)).map(lambda names: dict.fromkeys(names, False))
SHAPES = st.fixed_dictionaries({
    "slot_size": st.integers(1, 5), "max_tokens": st.integers(1, 24), "plan_size": st.integers(1, 20),
    "branch_size": st.integers(0, 4), "branch_threshold": st.sampled_from([0.0, 0.1, 0.5]),
    "slot_threshold": st.sampled_from([0.0, 0.3, 0.6, 1.0]), "token_threshold": st.sampled_from([0.0, 0.3, 1.0]),
    "draft_threshold": st.sampled_from([0.0, 0.2, 1.0]), "stale_factor": st.sampled_from([0.0, 0.5, 1.0]),
    "temperature": st.sampled_from([0.0, 0.8]),
})


@given(
    off=OFF, shape=SHAPES, blocks=st.integers(1, 4), seed=st.integers(0, 10**6), loose=st.sampled_from([0.0, 0.7, 1])
)
def test_every_answer_is_complete_and_the_floor_needs_the_bonus_token_only(
    off: dict[str, bool], shape: dict[str, Any], blocks: int, seed: int, loose: float
) -> None:
    run = decode(hashed(seed, loose=loose), **shape, block_size=shape["slot_size"] * blocks, **off)
    if off.get("bonus_token", True):
        assert run.forwards <= max(len(run.tokens) - 1, 0)
    else:  # a plan and a verification for each token, at worst, and a plan spoiled by a rejection before it
        assert run.forwards <= 3 * shape["max_tokens"]
    for one in run.passes:
        if "prompt_plan" in off and one.kind == "prompt":
            assert not one.masks


@given(shape=SHAPES, fused=st.booleans(), prompt=st.booleans(), seed=st.integers(0, 10**6))
def test_greedy_acceptance_gives_left_to_right_s_text_whatever_is_switched_off(
    shape: dict[str, Any], fused: bool, prompt: bool, seed: int
) -> None:
    settings = {**shape, "slot_threshold": 1.0, "temperature": 0.0, "acceptance": "greedy"}
    model = hashed(seed)
    run = decode(model, **settings, block_size=shape["slot_size"] * 3, fused_pass=fused, prompt_plan=prompt)
    assert run.tokens == left_to_right(model, shape["max_tokens"], ends=(END,))
