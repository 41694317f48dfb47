"""The transformers peer answers as our own left-to-right decoder on the same weights."""

from __future__ import annotations

import pytest

import refusion
from refusion.errors import ConfigError
from refusion.evaluation.peers import open_peer

pytest.importorskip("transformers")


def test_transformers_writes_the_same_tokens(tiny_refusion_model: refusion.Model) -> None:
    peer = open_peer("transformers", tiny_refusion_model)
    for prompt in ("1 + 2", "the quick brown fox"):
        theirs = peer.answer(prompt, 12)
        config = refusion.DecodeConfig(decoder="autoregressive", max_tokens=12)
        ours = refusion.generate(tiny_refusion_model, prompt, config)[0]
        assert theirs.token_ids == ours.token_ids
        assert theirs.forwards == ours.forwards
        assert theirs.finish_reason == ours.finish_reason
        assert 0 < theirs.first_token_seconds <= theirs.seconds


def test_an_unknown_peer_is_refused(tiny_refusion_model: refusion.Model) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        open_peer("nobody", tiny_refusion_model)
