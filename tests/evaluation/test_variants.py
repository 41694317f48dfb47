"""Variants: read from one argument, wrong ones said in a sentence."""

from __future__ import annotations

import pytest

from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError
from refusion.evaluation.variants import Variant, parse_variant


def test_values_get_the_types_of_the_settings() -> None:
    found = parse_variant("no bonus: decoder=paper, stale-factor=0,slot_size = 4,block_size=8,stop=END")
    assert found == Variant(
        "no bonus", {"decoder": "paper", "stale_factor": 0.0, "slot_size": 4, "block_size": 8, "stop": ("END",)}
    )
    config = found.apply(DecodeConfig(max_tokens=9))
    assert (config.decoder, config.max_tokens, config.stop, config.slot_size) == ("paper", 9, ("END",), 4)


@pytest.mark.parametrize(("text", "reason"), [
    ("stale_factor=0", "should read 'name: key=value"), (": slot_size=3", "should read 'name: key=value"),
    ("a:", "should read 'name: key=value"), ("a: slot_size", "'slot_size' should read key=value"),
    ("a: slot_sise=3", "no setting 'slot_sise'; did you mean 'slot_size'?"),
    ("a: nonsense_word=3", "no setting 'nonsense_word'; there are decoder"),
    ("a: slot_size=3,slot_size=4", "slot_size is given twice"),
    ("a: slot_size=few", "slot_size should be a whole number, got 'few'"),
    ("a: slot_size=1.5", "slot_size should be a whole number"), ("a: top_p=high", "top_p should be a number"),
])
def test_a_wrong_variant_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_variant(text)
    assert reason in str(error.value)


@pytest.mark.parametrize("text", ["few: slot_size=99", "few: decoder=best", "few: token_threshold=2"])
def test_an_impossible_value_names_the_variant(text: str) -> None:
    with pytest.raises(ConfigError, match="variant 'few': "):
        parse_variant(text).apply(DecodeConfig())
