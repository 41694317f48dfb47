"""Int8 weights, compiled passes and a limit on memory: they work end to end and change nothing they shouldn't."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.checkpoint import save
from refusion.decoding import DecodeConfig, algorithm, cells_needed
from refusion.engine import Engine
from refusion.errors import CapacityError, CheckpointError, ConfigError
from refusion.generation import Model, generate, load
from refusion.model.int8 import Int8Linear
from tests.engine.tiny import END, MASK, tiny
from tests.test_generation import PROMPTS, config, make

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_int8_model_loads_answers_and_is_never_written(tmp_path: Path) -> None:
    folder = save(make().checkpoint, tmp_path / "model")
    model = load(folder, device="cpu", dtype="int8", mask_token_id=MASK)
    assert any(isinstance(module, Int8Linear) for module in model.transformer.modules())
    together = generate(model, PROMPTS, config())
    assert [one.text for one in together] == [generate(model, prompt, config())[0].text for prompt in PROMPTS]
    assert all(one.tokens for one in together)
    with pytest.raises(CheckpointError, match="int8 can't be written; load it in a floating type"):
        save(model.checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_int8_on_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8 is for CPUs only"):
        load("default", device="meta", dtype="int8")


def test_a_compiled_model_answers_alike(tmp_path: Path) -> None:
    folder = save(make().checkpoint, tmp_path / "model")
    plain, fused = (load(folder, device="cpu", dtype="float32", mask_token_id=MASK, compile=c) for c in (False, True))
    for decoder in ("refusion", "autoregressive"):
        wanted, found = (generate(model, PROMPTS[:3], config(decoder)) for model in (plain, fused))
        assert [(one.token_ids, one.forwards) for one in found] == [(one.token_ids, one.forwards) for one in wanted]


def test_a_limit_on_memory_makes_answers_wait_and_refuses_what_never_fits() -> None:
    model: Model = make()
    wanted = generate(model, PROMPTS, config())
    room = max(cells_needed(config(), one.prompt_tokens) for one in wanted)
    assert [one.token_ids for one in generate(model, PROMPTS, config(), max_cells=room)] == [
        one.token_ids for one in wanted
    ]
    with pytest.raises(CapacityError, match="longer than the 20 that the cache may hold"):
        generate(model, PROMPTS, config(), max_cells=20)


@given(
    seed=st.integers(0, 50), decoder=st.sampled_from(["refusion", "paper", "autoregressive"]),
    slot_size=st.integers(1, 6), blocks=st.integers(1, 3), plan_size=st.integers(1, 20),
    branch_size=st.integers(0, 5), branch_threshold=st.floats(0, 1), slot_threshold=st.floats(0, 1),
    draft_threshold=st.floats(0, 1),
)
def test_an_answer_never_takes_more_cells_than_it_was_said_to_need(
    seed: int, decoder: str, slot_size: int, blocks: int, plan_size: int, branch_size: int,
    branch_threshold: float, slot_threshold: float, draft_threshold: float,
) -> None:
    settings = DecodeConfig(
        decoder=decoder, max_tokens=20, slot_size=slot_size, block_size=slot_size * blocks, plan_size=plan_size,
        branch_size=branch_size, branch_threshold=branch_threshold, slot_threshold=slot_threshold,
        draft_threshold=draft_threshold, token_threshold=0.1, seed=seed,
    )
    engine, prompt = Engine(tiny(seed, sharp=2.0), rows=1), [seed, 3, 5]
    cells = cells_needed(settings, len(prompt))
    engine.submit(algorithm(settings, prompt, end_ids=[END], mask_id=MASK), cells=cells)
    while not engine.idle:
        engine.step()
        assert engine.cache.capacity(0) in (0, cells)
