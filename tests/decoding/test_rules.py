"""The rules at the end of DESIGN section 5, for every decoder: scripted cases and random ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.decoding import DecodeConfig, algorithm
from refusion.decoding.config import PLANNERS
from refusion.errors import ConfigError
from tests.decoding.fake import END, MASK, PROMPT, Run, decode
from tests.decoding.scripts import Text, hashed, left_to_right

DECODERS = ["refusion", "paper", "autoregressive"]
PARALLEL = ["refusion", "paper"]
SECOND_END = 91
TEXT = list(range(1, 40))

every = pytest.mark.parametrize("decoder", DECODERS)
parallel = pytest.mark.parametrize("decoder", PARALLEL)


@every
@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 8, 11, 12, 23])
def test_text_ends_at_the_first_end_token_wherever_it_stands(decoder: str, at: int) -> None:
    text = [*TEXT[:at], END, *TEXT[at + 1 :]]
    run = decode(Text(text), decoder=decoder, max_tokens=24, slot_size=4, block_size=12)
    assert run.tokens == text[: at + 1] and run.answer.finish_reason == "stop"


def early_end(decoder: str, **settings: Any) -> Run:
    """Slot 2 is certain and ends the text at position 9; slots 0 and 1 are not; slot 4 is certain too."""
    text = [*TEXT[:9], END, *TEXT[10:]]
    plan = {at: (text[at], 0.6) for at in (*range(8), *range(12, 16), *range(20, 24))}
    base = {"decoder": decoder, "max_tokens": 24, "slot_size": 4, "block_size": 24}
    return decode(Text(text, plan=plan), **{**base, **settings})


@parallel
def test_an_end_in_a_later_slot_drops_what_is_behind_and_nothing_else(decoder: str) -> None:
    run = early_end(decoder)
    assert run.tokens == [*TEXT[:9], END] and run.answer.finish_reason == "stop"
    first = next(n for n, one in enumerate(run.passes) if (9, END) in one.fed)
    assert max(max(one.positions) for one in run.passes[first + 1 :]) <= 9, "a pending slot behind the end is fed"
    earlier = {p for one in run.passes[first + 1 :] for p in one.positions}
    assert earlier >= set(range(4, 8)), "a slot before the end is still filled"


@parallel
def test_slots_committed_behind_the_end_are_cut(decoder: str) -> None:
    """Slot 4 comes first; then a slot before it ends the text."""
    text = [*TEXT[:5], END, *TEXT[6:]]
    plan = {at: (text[at], 0.6) for at in range(24) if not 16 <= at < 20}
    run = decode(Text(text, plan=plan), decoder=decoder, max_tokens=24, slot_size=4, block_size=24, plan_size=24)
    committed = {p - len(PROMPT) for (p, _), _ in run.cells}
    assert run.tokens == [*TEXT[:5], END] and {16, 17, 18, 19} <= committed
    assert sum(len(e.positions) for e in run.events if e.kind == "committed") > len(run.tokens)


@every
def test_several_end_tokens(decoder: str) -> None:
    text = [*TEXT[:6], SECOND_END, 7, END, *TEXT[9:]]
    kwargs: dict[str, Any] = {"decoder": decoder, "max_tokens": 24, "slot_size": 4, "block_size": 8}
    assert decode(Text(text), ends=(END, SECOND_END), **kwargs).tokens == text[:7]
    assert decode(Text(text), ends=(END,), **kwargs).tokens == text[:9]
    endless = decode(Text(text), ends=(), **kwargs)
    assert endless.tokens == text[:24] and endless.answer.finish_reason == "length"


@every
def test_an_end_at_the_very_last_position_is_a_stop(decoder: str) -> None:
    run = decode(Text([*TEXT[:6], END]), decoder=decoder, max_tokens=7, slot_size=4, block_size=8)
    assert run.tokens == [*TEXT[:6], END] and run.answer.finish_reason == "stop"


def stop_at(words: list[list[int]]) -> Any:
    """A stop check over tokens: how many reach to the end of the first of these runs of tokens."""
    def check(tokens: list[int]) -> int | None:
        found = [at + len(w) for w in words for at in range(len(tokens)) if tokens[at : at + len(w)] == w]
        return min(found, default=None)
    return check


@every
@pytest.mark.parametrize(("word", "length"), [([1], 1), ([4, 5], 5), ([7, 8, 9], 9), ([23, 24], 24), ([3], 3)])
def test_a_stop_string_over_slots_and_blocks(decoder: str, word: list[int], length: int) -> None:
    run = decode(
        Text(TEXT), decoder=decoder, max_tokens=24, slot_size=4, block_size=8, stop_check=stop_at([word])
    )
    assert run.tokens == TEXT[:length] and run.answer.finish_reason == "stop"


@parallel
def test_a_stop_string_counts_only_where_all_before_it_is_written(decoder: str) -> None:
    """Slot 2 holds it and is committed first; slots 0 and 1 are written all the same."""
    plan = {at: (TEXT[at], 0.6) for at in range(24) if not 8 <= at < 12}
    run = decode(
        Text(TEXT, plan=plan), decoder=decoder, max_tokens=24, slot_size=4, block_size=24,
        stop_check=stop_at([[10, 11]]),
    )
    assert run.tokens == TEXT[:11] and run.answer.finish_reason == "stop"


@every
def test_an_end_before_the_stop_string_wins(decoder: str) -> None:
    text = [1, 2, END, 4, 5, 6, 7, 8]
    run = decode(Text(text), decoder=decoder, max_tokens=8, slot_size=2, block_size=8, stop_check=stop_at([[5, 6]]))
    assert run.tokens == [1, 2, END] and run.answer.finish_reason == "stop"


@every
def test_one_token_answers(decoder: str) -> None:
    run = decode(Text(TEXT), decoder=decoder, max_tokens=1, slot_size=4, block_size=8)
    assert run.tokens == [1] and run.answer.finish_reason == "length"
    assert run.forwards == {"refusion": 0, "autoregressive": 0, "paper": 1}[decoder]


@parallel
def test_an_empty_prompt(decoder: str) -> None:
    run = decode(Text(TEXT, lead=0), prompt=(), decoder=decoder, max_tokens=10, slot_size=4, block_size=8)
    assert run.tokens == TEXT[:10]
    assert "prompt" not in run.kinds, "every pass counts where there is no prompt"


def test_what_a_prompt_must_not_be() -> None:
    for decoder in DECODERS:
        with pytest.raises(ConfigError, match=f"the prompt holds the mask token \\(id {MASK}\\)"):
            algorithm(DecodeConfig(decoder=decoder), [1, MASK, 2], end_ids=[END], mask_id=MASK)
    with pytest.raises(ConfigError, match="at least one prompt token"):
        algorithm(DecodeConfig(decoder="autoregressive"), [], end_ids=[END], mask_id=None)
    for decoder in PARALLEL:
        with pytest.raises(ConfigError, match=f"'{decoder}' needs a model with a mask token"):
            algorithm(DecodeConfig(decoder=decoder), [1], end_ids=[END], mask_id=None)


def test_left_to_right_is_one_token_a_pass() -> None:
    run = decode(Text(TEXT), decoder="autoregressive", max_tokens=20)
    assert run.kinds == ["prompt", *["next"] * 19] and run.forwards == 19


@every
def test_every_sampled_token_has_a_draw_and_the_seed_fixes_it(decoder: str) -> None:
    """The fake engine refuses a draw at temperature 0, and samples without one above it."""
    kwargs: dict[str, Any] = {"decoder": decoder, "max_tokens": 16, "slot_size": 4, "block_size": 8}
    model = hashed(3, end=0.0, loose=0.3, sharp=0.5)
    runs = [decode(model, temperature=1.5, top_p=0.95, seed=seed, **kwargs) for seed in (1, 1, 2, 3)]
    assert runs[0].tokens == runs[1].tokens and runs[0].passes == runs[1].passes
    assert len({tuple(run.tokens) for run in runs}) == 3
    drawn = [ask.uniform for one in runs[0].passes for ask in one.asks if ask.uniform is not None]
    assert len(drawn) > 10 and len(set(drawn)) == len(drawn)


@every
def test_a_tiny_nucleus_is_greedy(decoder: str) -> None:
    kwargs: dict[str, Any] = {"decoder": decoder, "max_tokens": 12, "slot_size": 3, "block_size": 6}
    model = hashed(4, end=0.01)
    assert decode(model, temperature=1.0, top_p=1e-9, **kwargs).tokens == decode(model, **kwargs).tokens


CONFIGS = st.builds(
    lambda slot, more, **rest: DecodeConfig(slot_size=slot, block_size=slot + more, **rest),
    slot=st.integers(1, 9), more=st.integers(0, 20), max_tokens=st.integers(1, 24),
    decoder=st.sampled_from(["refusion", "refusion", "paper", "autoregressive"]),
    slot_threshold=st.sampled_from([0.0, 0.4, 0.7, 0.9, 1.0]), token_threshold=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]), top_p=st.sampled_from([0.5, 1.0]), seed=st.integers(0, 3),
    acceptance=st.sampled_from(["threshold", "greedy", "speculative"]),
    planner=st.sampled_from(["confidence", *PLANNERS]),
    draft_threshold=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    stale_factor=st.sampled_from([0.0, 0.5, 0.9, 1.0]), plan_size=st.sampled_from([1, 2, 5, 8, 32]),
    branch_size=st.sampled_from([0, 0, 1, 3, 6]), branch_threshold=st.sampled_from([0.0, 0.1, 0.6]),
)
MODELS = st.builds(
    hashed, st.integers(0, 10**6), loose=st.sampled_from([0.0, 0.4, 0.8, 0.95]),
    end=st.sampled_from([0.0, 0.01, 0.1, 1.0]), sharp=st.sampled_from([1.0, 3.0, 8.0]),
)


@settings(max_examples=300)
@given(config=CONFIGS, model=MODELS, prompt=st.sampled_from([PROMPT, PROMPT, ()]), stop=st.sampled_from([0, 0, 1, 2]))
def test_rules_hold_for_any_model(config: DecodeConfig, model: Any, prompt: tuple[int, ...], stop: int) -> None:
    """Most of what is asserted stands in fake.check: texts, cells, contexts, events, draws."""
    if config.decoder == "autoregressive" and not prompt:
        prompt = PROMPT
    check = {0: None, 1: stop_at([[1, 2], [3]]), 2: stop_at([[2, 2, 1]])}[stop]
    run = decode(model, config, prompt=prompt, stop_check=check)
    if stop == 0 and config.decoder == "refusion":
        # an empty prompt names no first token: its plan is a pass, and so is that token's
        limit = len(run.tokens) - 1 if prompt else len(run.tokens) + 1
        assert run.forwards <= limit, "more passes than left-to-right"
    if stop and (keep := check(run.tokens)) is not None:
        assert keep == len(run.tokens) and run.answer.finish_reason == "stop"


@settings(max_examples=100)
@given(config=CONFIGS, model=MODELS)
def test_greedy_acceptance_in_order_is_left_to_right_exactly(config: DecodeConfig, model: Any) -> None:
    """Where no slot is finished early, every token is the verifier's own pick, whatever the masks say."""
    changes = {"decoder": "refusion", "acceptance": "greedy", "temperature": 0.0}
    if config.planner != "left-to-right":
        changes["slot_threshold"] = 1.0
    run = decode(model, DecodeConfig(**{**config.__dict__, **changes}))
    assert run.tokens == left_to_right(model, config.max_tokens)


@every
@pytest.mark.parametrize(("slot", "block"), [(1, 1), (4, 8), (5, 7), (8, 8), (8, 32), (7, 64), (32, 32), (70, 100)])
def test_any_length(decoder: str, slot: int, block: int) -> None:
    for length in [*range(1, 12), 31, 32, 33, 63, 64, 65, 70]:
        text = list(range(1, length + 1))
        run = decode(
            Text([t % 40 for t in text]), decoder=decoder, max_tokens=length, slot_size=slot, block_size=block
        )
        assert run.tokens == [t % 40 for t in text], "exactly as long as asked"


@every
@pytest.mark.parametrize("length", [1, 6, 7, 9, 21])
def test_nothing_is_fed_behind_the_answer(decoder: str, length: int) -> None:
    """A prompt and an answer that fill the model's context ask for none of the positions behind it."""
    model = hashed(length, end=0.0, loose=0.4)
    run = decode(
        model, decoder=decoder, max_tokens=length, slot_size=4, block_size=8, plan_size=64, branch_size=64,
        branch_threshold=0.0, slot_threshold=0.3, draft_threshold=0.0,
    )
    # an answer's last token needs no cell of its own where tokens are fed one by one
    furthest = max(max(one.positions) for one in run.passes)
    assert furthest == (length - 2 if decoder == "autoregressive" else length - 1)


@pytest.mark.parametrize("sure", [0.97, 0.2])
def test_perfect_masks_give_the_text_in_the_fewest_passes(sure: float) -> None:
    """Two passes a block as published; one with fused passes.

    Where no draft is trusted, a token a pass but for slots' first ones, which the plan alone proposes: 8 are judged
    beside the last token of the slot before.
    """
    length = 36
    run = decode(Text(TEXT, sure=sure), max_tokens=length, slot_size=4, block_size=12, draft_threshold=0.3)
    assert run.tokens == TEXT[:length]
    assert run.forwards == (3 if sure > 0.9 else length - 1 - 8)
    published = decode(Text(TEXT, sure=sure), decoder="paper", max_tokens=length, slot_size=4, block_size=12)
    assert published.tokens == TEXT[:length]
    # the first plan is the prompt's own pass
    assert published.forwards == (6 if sure > 0.9 else 2 * 9 + 9 * 6) - 1
