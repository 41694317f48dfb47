"""The bench's own arithmetic, on a scripted `generate`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refusion.data.gym import Problem
from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError
from refusion.evaluation import bench
from refusion.evaluation.bench import BenchSettings, Sample, run_bench
from refusion.generation import Generation

COST = {"refusion": (5, 1.0), "paper": (20, 4.0), "autoregressive": (9, 2.0)}


def fake_model() -> Any:
    return SimpleNamespace(
        transformer=SimpleNamespace(dtype=torch.float32, device=torch.device("cpu")),
        checkpoint=SimpleNamespace(source="fake"),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Ten tokens an answer; the paper's decoder is wrong on every second problem and once empty."""
    seen: list[tuple[str, int]] = []

    def generate(model: Any, prompts: Any, config: DecodeConfig, batch_size: int = 1) -> list[Generation]:
        wanted = [prompts] if isinstance(prompts, str) else prompts
        seen.append((config.decoder, len(wanted)))
        forwards, seconds = COST[config.decoder]
        found = []
        for prompt in wanted:
            number = int(prompt.split()[-1])
            right = config.decoder != "paper" or number % 2 == 0
            text = "" if config.decoder == "paper" and number == 1 else f"#### {number if right else -1}"
            reason = "stop" if right else "length"
            found.append(Generation(text, list(range(10)), 3, forwards, seconds, 0.5, reason))
        return found

    def problems(name: str, count: int, seed: int, exclude: set[str]) -> list[Problem]:
        return [Problem(f"what is {n}", str(n), f"{name}:{n}") for n in range(count)]

    monkeypatch.setattr(bench, "generate", generate)
    monkeypatch.setattr(bench, "problems", problems)
    return seen


def test_rows_hold_sums_not_means_of_means(calls: list[tuple[str, int]]) -> None:
    samples: list[Sample] = []
    settings = BenchSettings(limit=10, batch_size=4, timed=3)
    result = run_bench(fake_model(), settings, samples=samples)
    rows = {row["decoder"]: row for row in result["rows"]}
    assert list(rows) == ["refusion", "paper", "autoregressive"]
    assert rows["refusion"]["exact_match"] == 1.0
    assert rows["paper"]["exact_match"] == 0.5
    assert rows["paper"]["at_length_limit"] == 5
    assert rows["paper"]["empty"] == 1
    assert rows["refusion"]["tokens"] == 100
    assert rows["refusion"]["forwards"] == 50
    assert rows["refusion"]["tpf"] == 2.0
    assert rows["refusion"]["tps"] == 10.0
    assert rows["refusion"]["tps_ratio"] == 2.0
    assert rows["autoregressive"]["tps_ratio"] == 1.0
    assert rows["paper"]["tps_quartiles"] == [2.5, 2.5]
    assert len(samples) == 30
    assert result["settings"]["limit"] == 10 and result["settings"]["model"] == "fake"


def test_decoders_take_turns_and_nothing_cold_is_timed(calls: list[tuple[str, int]]) -> None:
    run_bench(fake_model(), BenchSettings(limit=8, batch_size=4, timed=2))
    assert calls[:3] == [("refusion", 1), ("paper", 1), ("autoregressive", 1)]
    assert [c[0] for c in calls[3:9]] == [
        "refusion", "paper", "autoregressive", "paper", "autoregressive", "refusion",
    ]
    assert [c for c in calls[9:]] == [
        ("refusion", 1), ("paper", 1), ("autoregressive", 1), ("paper", 1), ("autoregressive", 1), ("refusion", 1),
    ]


def test_without_timed_problems_there_is_no_speed(calls: list[tuple[str, int]]) -> None:
    row = run_bench(fake_model(), BenchSettings(limit=2, timed=0))["rows"][0]
    assert "tps" not in row and row["problems"] == 2


def test_a_peer_answers_the_timed_problems_only(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def answer(self, prompt: str, max_tokens: int) -> Generation:
            return Generation(f"#### {prompt.split()[-1]}", list(range(12)), 3, 11, 4.0, 0.5, "stop")

    monkeypatch.setattr(bench, "open_peer", lambda name, model: Slow())
    result = run_bench(fake_model(), BenchSettings(limit=6, timed=2, peers=("transformers",)))
    row = result["rows"][-1]
    assert row["decoder"] == "transformers" and row["problems"] == 2 and row["exact_match"] == 1.0
    assert row["tpf"] == pytest.approx(12 / 11)
    assert row["tps"] == 3.0 and row["tps_ratio"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"limit": 0}, "limit"), ({"decoders": ()}, "decoder"), ({"decoders": ("paper", "paper")}, "twice"),
     ({"decoders": ("nonsense",)}, "nonsense"), ({"batch_size": 0}, "batch_size"), ({"timed": -1}, "timed"),
     ({"peers": ("llama",)}, "llama"), ({"peers": ("transformers",), "timed": 0}, "timed")],
)
def test_impossible_settings_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        BenchSettings(**change)
