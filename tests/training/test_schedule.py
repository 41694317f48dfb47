"""Learning rates at places where their value is known by definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.training.schedule import factor

SCHEDULES = ("cosine", "trapezoid", "constant")


@pytest.mark.parametrize(("schedule", "progress", "wanted"), [
    ("cosine", 0.0, 1.0), ("cosine", 0.25, (2 + math.sqrt(2)) / 4), ("cosine", 0.5, 0.5), ("cosine", 1.0, 0.0),
    ("trapezoid", 0.0, 1.0), ("trapezoid", 0.75, 1.0), ("trapezoid", 0.8, 0.8), ("trapezoid", 0.95, 0.2),
    ("trapezoid", 1.0, 0.0), ("constant", 0.0, 1.0), ("constant", 1.0, 1.0),
])
def test_known_places(schedule: str, progress: float, wanted: float) -> None:
    assert factor(schedule, 1000, progress, 10, 0.25) == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_never_zero(schedule: str) -> None:
    assert [factor(schedule, step, 0.0, 4, 0.2) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert factor(schedule, 0, 0.0, 0, 0.2) == 1.0


@given(st.sampled_from(SCHEDULES), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_it_falls_and_stays_in_range(schedule: str, first: float, second: float, decay: float) -> None:
    early, late = (factor(schedule, 99, at, 10, decay) for at in sorted((first, second)))
    assert 0 <= late <= early + 1e-12 <= 1 + 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_past_the_budget_it_stays_at_its_end(schedule: str) -> None:
    assert factor(schedule, 99, 1.3, 10, 0.5) == factor(schedule, 99, 1.0, 10, 0.5)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="linear"):
        factor("linear", 0, 0.0, 0, 0.5)
