"""generate(): prompts in, answers and honest figures out, on a tiny random model whose tokens are words."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion import generation
from refusion.checkpoint import Checkpoint, Tokenizer
from refusion.decoding import DecodeConfig
from refusion.decoding.contract import Ask, Reading, Step
from refusion.engine import Engine
from refusion.errors import CapacityError, ConfigError
from refusion.generation import Generation, Model, first_stop, generate
from tests.engine.tiny import END, MASK, ROWS, allowed, steps, tiny

VOCABULARY = ["<unk>", "<s>", "user", "system", *(f"w{n}" for n in range(4, 58))]
WORDS = [*VOCABULARY, "<end>", "<mask>"]
TEMPLATE = "{% for m in messages %}{{ m.role + ' ' + m.content + ' <end> ' }}{% endfor %}"
SETTINGS: dict[str, Any] = {
    "max_tokens": 16, "slot_size": 4, "block_size": 8, "slot_threshold": 0.35, "token_threshold": 0.15,
    "draft_threshold": 0.1,
}
PROMPTS = ["w4 w5", "w6", "w7 w8 w9 w10 w11", "w12 w13 w14", "w20", "w30 w31", "w40 w41 w42 w43 w44 w45", "w50 w51"]


pytestmark = pytest.mark.usefixtures("one_thread")


def make(
    template: str | None = TEMPLATE, bos: int | None = None, ends: tuple[int, ...] = (END,), **shape: Any
) -> Model:
    vocabulary = {word: at for at, word in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in ("<end>", "<mask>")])
    tokenizer = Tokenizer(
        backend, eos_ids=ends, bos_id=bos, mask_id=MASK, unk_id=0, chat_template=template, add_bos=bos is not None
    )
    return Model(Checkpoint(tiny(1, 3.0, **shape), tokenizer, "here"))


@pytest.fixture(scope="module")
def model() -> Model:
    return make()


def config(decoder: str = "refusion", **changes: Any) -> DecodeConfig:
    return DecodeConfig(**{**SETTINGS, "decoder": decoder, **changes})


def written(found: list[Generation]) -> list[tuple[list[int], int, str, str]]:
    return [(one.token_ids, one.forwards, one.text, one.finish_reason) for one in found]


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_batch_changes_nothing(model: Model, decoder: str, temperature: float) -> None:
    chosen = config(decoder, temperature=temperature, seed=3)
    alone = written(generate(model, PROMPTS, chosen, batch_size=1))
    assert written(generate(model, PROMPTS, chosen, batch_size=8)) == alone
    assert written(generate(model, PROMPTS, chosen, batch_size=3)) == alone
    if temperature == 0.0:
        assert written(generate(model, PROMPTS[::-1], chosen, batch_size=3)) == alone[::-1]


def test_equal_prompts_of_a_call_sample_apart(model: Model) -> None:
    """The first draws from the seed's own stream; what is written beside a prompt changes none of it."""
    chosen = config(temperature=1.0, seed=3)
    [single] = written(generate(model, "w4 w5", chosen))
    found = written(generate(model, ["w4 w5"] * 4, chosen))
    assert found[0] == single and len({tuple(ids) for ids, *_ in found}) == 4
    assert written(generate(model, ["w4 w5"] * 4, chosen, batch_size=1)) == found
    assert written(generate(model, ["w6", "w7 w8", "w4 w5"], chosen))[2] == found[2]


def test_one_prompt_or_many(model: Model) -> None:
    messages = [{"role": "user", "content": "w6"}]
    single = written(generate(model, "w6", config()))
    assert written(generate(model, ["w6"], config())) == single
    assert written(generate(model, messages, config())) == single, "a text is the user's turn"
    assert written(generate(model, [messages, "w4 w5", messages], config()))[::2] == single * 2
    assert generate(model, [], config()) == []


def test_answers_are_handed_over_as_they_end_and_returned_in_order(model: Model) -> None:
    told: list[tuple[int, Generation]] = []
    found = generate(model, PROMPTS, config(), batch_size=3, on_finish=lambda index, one: told.append((index, one)))
    assert sorted(index for index, _ in told) == list(range(len(PROMPTS)))
    assert all(found[index] is one for index, one in told)
    assert all(one.seconds > 0 and one.first_token_seconds <= one.seconds for one in found)
    # two rows: the short answer first, and the third prompt takes its row
    order: list[int] = []
    lengths = {one: len(g.token_ids) for one, g in enumerate(generate(model, PROMPTS, config("autoregressive")))}
    generate(model, PROMPTS, config("autoregressive"), batch_size=8, on_finish=lambda index, _: order.append(index))
    assert [lengths[index] for index in order] == sorted(lengths.values())


def test_prompts_and_the_chat_template(model: Model) -> None:
    def words(*args: Any, **kwargs: Any) -> list[str]:
        return [WORDS[index] for index in model.prompt_ids(*args, **kwargs)]

    assert words("w4 w5") == ["user", "w4", "w5", "<end>"]
    assert words("w4", system="w9") == ["system", "w9", "<end>", "user", "w4", "<end>"]
    assert words([{"role": "user", "content": "w4"}], system="w9") == words("w4", system="w9")
    assert words("w4 w5", chat=False) == ["w4", "w5"]
    with pytest.raises(ConfigError, match="a system message needs chat=True"):
        model.prompt_ids("w4", chat=False, system="w9")
    plain = make(template=None)
    assert plain.prompt_ids("w4") == model.prompt_ids("w4", chat=False)
    assert plain.prompt_ids("w4", system="w9") == model.prompt_ids("w9 w4", chat=False), "never silently dropped"


def test_an_empty_prompt() -> None:
    assert make(template=None).prompt_ids("") == [END]
    beginning = make(template=None, bos=1)
    assert beginning.prompt_ids("") == [1] and beginning.prompt_ids("w4") == [1, 4]
    assert len(generate(beginning, "", config())[0].token_ids) >= 1
    with pytest.raises(ConfigError, match="the prompt is empty and this model has no token that begins a text"):
        make(template=None, ends=()).prompt_ids("")


def test_a_mask_token_in_a_text_is_text(model: Model) -> None:
    assert MASK not in model.prompt_ids("w4 <mask> w5") and generate(model, "<mask>", config())
    with pytest.raises(ConfigError, match="the prompt holds the mask token"):
        model.start([4, MASK], config())


def test_bad_requests_are_refused_before_anything_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something ran")

    monkeypatch.setattr(generation, "Engine", never)
    for size in (0, -3):
        with pytest.raises(ConfigError, match=f"batch_size must be 1 or more, got {size}"):
            generate(model, PROMPTS, config(), batch_size=size)
    with pytest.raises(CapacityError) as caught:
        generate(model, ["w4", "w5 w6"], config(max_tokens=253))
    assert str(caught.value) == (
        "a prompt of 4 tokens leaves 252 of the model's 256 positions for the answer; "
        "ask for at most that many instead of 253"
    )
    with pytest.raises(CapacityError, match="leaves none of the model's 256 positions for an answer; shorten it"):
        generate(model, " ".join(["w4"] * 300), config())


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
def test_an_answer_may_fill_the_context(decoder: str) -> None:
    small = make(max_positions=24, ends=())
    room = 24 - len(small.prompt_ids("w4"))
    [found] = generate(small, "w4", config(decoder, max_tokens=room))
    assert found.tokens == room and found.finish_reason == "length"


def test_the_default_decoder_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = generation.algorithm

    def spy(chosen: DecodeConfig, *args: Any, **kwargs: Any) -> Any:
        seen.append(chosen.decoder)
        return original(chosen, *args, **kwargs)

    monkeypatch.setattr(generation, "algorithm", spy)
    parallel, plain = make(max_positions=300), make(mask_token_id=None, max_positions=300)
    generate(parallel, "w4")
    generate(plain, "w4")
    assert seen == ["refusion", "autoregressive"]
    assert parallel.is_refusion and not plain.is_refusion
    with pytest.raises(ConfigError, match="needs a model with a mask token"):
        generate(plain, "w4", config())


def test_figures_are_honest(model: Model) -> None:
    for one in generate(model, PROMPTS, config(), record=True):
        assert one.tokens == len(one.token_ids) and END not in one.token_ids[:-1]
        assert one.tpf == one.tokens / one.forwards and one.tps == one.tokens / one.seconds
        assert max(number for number, _, _ in one.events) == one.forwards + 1, "the prompt's pass isn't counted"
        assert one.text == model.tokenizer.decode(one.token_ids) and "<end>" not in one.text
        facts = one.to_dict()
        assert facts["tokens"] == one.tokens and facts["finish_reason"] in ("stop", "length")
        assert {"text", "forwards", "tpf", "seconds", "tps"} <= facts.keys()
    [short] = generate(model, "w4", config("autoregressive", max_tokens=1))
    assert short.tokens == 1 and short.forwards == 0 and short.tpf == 0.0 and short.events == []


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
def test_stop_strings(decoder: str) -> None:
    endless = make(ends=())
    [free] = generate(endless, "w4 w5", config(decoder))
    words = free.text.split()
    assert len(words) == 16
    for first, last in ((0, 0), (3, 3), (5, 6), (7, 8), (14, 15)):
        stop = " ".join(words[first : last + 1])
        at = free.text.find(stop)
        [found] = generate(endless, "w4 w5", config(decoder, stop=("never said", stop)))
        assert found.text == free.text[:at] and found.finish_reason == "stop"
        assert found.tokens == len(free.text[: at + len(stop)].split()), "counted up to the stop string's end"
        assert found.token_ids == free.token_ids[: found.tokens]
        assert found.forwards <= free.forwards


@given(st.lists(st.sampled_from(["a", "b", "ab", "c", ""]), max_size=10), st.lists(st.sampled_from(
    ["a", "bb", "abc", "ca", "cab", "bab"]), min_size=1, max_size=3))
def test_the_first_stop_string_is_found_at_its_end(pieces: list[str], stop: list[str]) -> None:
    def decode(ids: list[int]) -> str:
        return "".join(pieces[index] for index in ids)

    wanted = next((n for n in range(1, len(pieces) + 1) if any(s in "".join(pieces[:n]) for s in stop)), None)
    assert first_stop(list(range(len(pieces))), stop=stop, decode=decode) == wanted


def test_logits_are_those_of_a_cached_pass(model: Model) -> None:
    ids = [4, 9, 30, 8, 17]
    logits = model.logits(ids)
    assert logits.shape == (5, ROWS) and logits.dtype == torch.float32
    assert model.logits([]).shape == (0, ROWS)
    into: list[Reading] = []
    script = [(Step(ids[:2], [0, 1]), range(2)), (Step(ids[2:], [2, 3, 4], [Ask(n, given=7) for n in range(3)]), [])]
    engine = Engine(model.transformer, rows=1)
    engine.admit(steps(script, into))
    engine.run()
    p = allowed(logits)[2:]
    assert into[-1].best == p.argmax(-1).tolist()
    assert into[-1].given_probability == pytest.approx(p[:, 7].tolist(), abs=1e-6)


def test_left_to_right_equals_a_loop_over_logits(model: Model) -> None:
    ids = model.prompt_ids("w4 w5")
    text: list[int] = []
    while len(text) < 16 and END not in text:
        text.append(int(allowed(model.logits([*ids, *text]))[-1].argmax()))
    assert generate(model, "w4 w5", config("autoregressive"))[0].token_ids == text
    greedy = config(acceptance="greedy", slot_threshold=1.0)
    assert generate(model, "w4 w5", greedy)[0].token_ids == text
