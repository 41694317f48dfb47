"""Settings of decoding: bad ones are refused in one sentence that names the setting."""

from __future__ import annotations

from typing import Any

import pytest

from refusion.decoding import DecodeConfig
from refusion.errors import ConfigError

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"decoder": "best"}, "unknown decoder 'best'; choose one of refusion, paper, autoregressive"),
    ({"acceptance": "all"}, "unknown acceptance 'all'; choose one of threshold, greedy, speculative"),
    ({"planner": "best"}, "unknown planner 'best'; choose one of confidence, margin, entropy, left-to-right, random"),
    ({"max_tokens": 0}, "max_tokens must be a whole number of 1 or more, got 0"),
    ({"max_tokens": 2.5}, "max_tokens must be a whole number of 1 or more, got 2.5"),
    ({"slot_size": -1}, "slot_size must be a whole number of 1 or more, got -1"),
    ({"plan_size": 0}, "plan_size must be a whole number of 1 or more, got 0"),
    ({"block_size": 4}, "block_size 4 is smaller than slot_size 8; a block holds whole slots"),
    ({"slot_threshold": 1.1}, "slot_threshold must lie between 0 and 1, got 1.1"),
    ({"token_threshold": -0.1}, "token_threshold must lie between 0 and 1, got -0.1"),
    ({"draft_threshold": NAN}, "draft_threshold must lie between 0 and 1, got nan"),
    ({"stale_factor": 2}, "stale_factor must lie between 0 and 1, got 2"),
    ({"temperature": -1.0}, "temperature must be a finite number of 0 or more, got -1.0"),
    ({"temperature": INFINITY}, "temperature must be a finite number of 0 or more, got inf"),
    ({"temperature": NAN}, "temperature must be a finite number of 0 or more, got nan"),
    ({"top_p": 0.0}, "top_p must lie above 0 and at most at 1, got 0.0"),
    ({"top_p": 1.5}, "top_p must lie above 0 and at most at 1, got 1.5"),
    ({"stop": "END"}, "stop must be a list of strings, not one string"),
    ({"stop": ("a", "")}, "a stop string must not be empty"),
])
def test_a_bad_setting_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(**settings)
    assert str(caught.value) == sentence


def test_unknown_names_and_changes_are_errors() -> None:
    with pytest.raises(TypeError):
        DecodeConfig(slots=4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        DecodeConfig().slot_size = 4  # type: ignore[misc]


def test_borders_are_allowed() -> None:
    for threshold in (0.0, 1.0):
        DecodeConfig(slot_threshold=threshold, token_threshold=threshold, stale_factor=threshold, top_p=1.0)
    assert DecodeConfig(slot_size=8, block_size=8, max_tokens=1, plan_size=1).max_tokens == 1
