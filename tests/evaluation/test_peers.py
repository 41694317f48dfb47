"""The transformers peer answers as our own left-to-right decoder on the same weights."""

from __future__ import annotations

import pytest

import refusion
from refusion.errors import ConfigError
from refusion.evaluation import peers
from refusion.evaluation.peers import check_peer, open_peer

pytest.importorskip("transformers")


def test_transformers_writes_the_same_tokens(tiny_refusion_model: refusion.Model) -> None:
    peer = open_peer("transformers", tiny_refusion_model, 60)
    assert peer.weights == "the model's weights in float32"
    cases = [("1 + 2", ()), ("the quick brown fox", ())]
    first = refusion.generate(
        tiny_refusion_model, "1 + 2", refusion.DecodeConfig(decoder="autoregressive", max_tokens=12)
    )[0]
    cases.append(("1 + 2", (tiny_refusion_model.tokenizer.decode(first.token_ids[2:3]),)))
    for prompt, stop in cases:
        config = refusion.DecodeConfig(decoder="autoregressive", max_tokens=12, stop=stop)
        theirs = peer.answer(tiny_refusion_model.prompt_ids(prompt), config)
        ours = refusion.generate(tiny_refusion_model, prompt, config)[0]
        assert (theirs.token_ids, theirs.text) == (ours.token_ids, ours.text)
        assert theirs.forwards == ours.forwards
        assert theirs.finish_reason == ours.finish_reason
        assert theirs.prompt_tokens == ours.prompt_tokens
        assert 0 < theirs.first_token_seconds <= theirs.seconds


def test_an_unknown_peer_is_refused(tiny_refusion_model: refusion.Model) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        open_peer("nobody", tiny_refusion_model, 60)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the peer transformers isn't installed; run `pip install transformers`"):
        check_peer("transformers")
