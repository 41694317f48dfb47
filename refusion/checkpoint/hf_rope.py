"""Rotary settings in Hugging Face configs, both the old form and that of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig, RopeScaling

_LARGEST = 2**40
Fail = Callable[[str], CheckpointError]


def read_rope(raw: dict[str, Any], fail: Fail, max_positions: int) -> tuple[float, RopeScaling | None]:
    """theta and the scaling; `rope_scaling` goes before `rope_parameters` as in transformers.

    Raises:
        CheckpointError: an unknown scaling, partial rotary embeddings or an impossible value.
    """
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise fail(f"rope_scaling must be an object, not {settings!r}; restore the original config")
    if set(settings) == {"full_attention"} and isinstance(settings["full_attention"], dict):
        settings = settings["full_attention"]

    def number(key: str, default: float | None = None, source: dict[str, Any] = settings) -> float:
        value = source.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
            what = "is missing" if value is None else f"must be a number above 0 of usual size, not {value!r}"
            raise fail(f"the rotary setting {key} {what}; restore the original config")
        return value

    theta = number("rope_theta", number("rope_theta", 10000.0, raw))
    if theta <= 1:
        raise fail(f"rope_theta must be above 1, not {theta}; restore the original config")
    partial = number("partial_rotary_factor", number("partial_rotary_factor", 1.0, raw))
    if partial != 1.0:
        raise fail(f"partial rotary embeddings (partial_rotary_factor {partial}) aren't supported")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return theta, None
    original = raw.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = int(number("length", max_positions, {"length": original}))
    if kind == "linear":
        return theta, RopeScaling("linear", factor=number("factor"))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise fail(f"low_freq_factor ({low}) must be below high_freq_factor ({high}); restore the original config")
        return theta, RopeScaling("llama3", factor=number("factor"), low_freq_factor=low, high_freq_factor=high,
                                  original_max_positions=original)
    if kind == "yarn":
        factor = number("factor", max_positions / original)
        return theta, RopeScaling(
            "yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=_attention_factor(settings, factor, number),
            truncate=bool(settings.get("truncate", True)),
        )
    raise fail(f"RoPE scaling {kind!r} isn't supported (linear, llama3 and yarn are)")


def _attention_factor(settings: dict[str, Any], factor: float, number: Callable[[str], float]) -> float | None:
    """The factor a yarn config asks for, or None for the usual one (arXiv 2309.00071, section 3.4)."""
    if settings.get("attention_factor") is not None:
        return number("attention_factor")
    if not (settings.get("mscale") and settings.get("mscale_all_dim")) or factor <= 1:
        return None
    scale, scale_all = number("mscale"), number("mscale_all_dim")
    return (0.1 * scale * math.log(factor) + 1.0) / (0.1 * scale_all * math.log(factor) + 1.0)


def write_rope(c: ModelConfig) -> dict[str, Any]:
    """The keys of the old form, which transformers 4 and 5, vLLM and llama.cpp all read."""
    s = c.rope_scaling
    if s is None:
        return {"rope_theta": c.rope_theta, "rope_scaling": None}
    settings: dict[str, Any] = {"rope_type": s.kind, "factor": float(s.factor)}
    if s.kind == "llama3":
        settings["low_freq_factor"] = s.low_freq_factor
        settings["high_freq_factor"] = s.high_freq_factor
    if s.kind == "yarn":
        settings.update(beta_fast=s.beta_fast, beta_slow=s.beta_slow)
        if s.attention_factor is not None:
            settings["attention_factor"] = s.attention_factor
        if not s.truncate:
            settings["truncate"] = False
    if s.kind in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = s.original_max_positions or c.max_positions
    return {"rope_theta": c.rope_theta, "rope_scaling": settings}
