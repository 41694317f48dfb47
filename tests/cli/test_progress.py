"""Progress where there is no terminal: few lines, with the time it took and the time left."""

from __future__ import annotations

import io

import pytest

from refusion.cli.progress import Lines, clock


def lines(*told: tuple[str, int, int, float]) -> list[str]:
    """What is printed for calls of (phase, done, total) at given seconds."""
    stream, now = io.StringIO(), [0.0]
    tell = Lines("sums", stream, lambda: now[0])
    for phase, done, total, seconds in told:
        now[0] = seconds
        tell(phase, done, total)
    return stream.getvalue().splitlines()


def test_a_phase_is_told_as_it_begins_and_by_tenths() -> None:
    said = lines(*(("speed", done, 200, 100.0 + done) for done in range(201)))
    assert len(said) == 11
    assert said[0] == "sums, speed: 0 of 200"
    assert said[1] == "sums, speed: 20 of 200, 0:20 so far, about 3:00 left"
    assert said[-1] == "sums, speed: 200 of 200, 3:20 so far"


def test_each_phase_has_a_clock_of_its_own() -> None:
    said = lines(("warm-up", 0, 2, 0.0), ("warm-up", 1, 2, 50.0), ("scores", 0, 4, 60.0), ("scores", 2, 4, 62.0))
    assert said == [
        "sums, warm-up: 0 of 2", "sums, warm-up: 1 of 2, 0:50 so far, about 0:50 left", "sums, scores: 0 of 4",
        "sums, scores: 2 of 4, 0:02 so far, about 0:02 left",
    ]


def test_a_total_of_nothing_is_no_error() -> None:
    assert lines(("scores", 0, 0, 0.0), ("scores", 0, 0, 1.0)) == ["sums, scores: 0 of 0"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_the_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
