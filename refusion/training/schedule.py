"""Learning rates over a run, as a factor on the peak."""

from __future__ import annotations

import math


def factor(schedule: str, step: int, progress: float, warmup_steps: int, decay_fraction: float) -> float:
    """Factor in [0, 1] for step `step` (from 0) when `progress` of the token budget is used, in [0, 1].

    cosine falls to 0 at the end; trapezoid stays at 1 and falls linearly to 0 over the last
    `decay_fraction` of the budget; constant stays. All rise linearly over `warmup_steps`.
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    progress = min(max(progress, 0.0), 1.0)
    if schedule == "cosine":
        return warm * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "trapezoid":
        return warm * min(1.0, (1.0 - progress) / decay_fraction)
    if schedule == "constant":
        return warm
    raise ValueError(f"unknown schedule '{schedule}'")
