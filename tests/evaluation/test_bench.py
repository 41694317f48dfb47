"""The bench's own arithmetic, order and interruption, on a scripted `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refusion.data.gym import Problem
from refusion.decoding.config import DecodeConfig
from refusion.errors import CapacityError, ConfigError
from refusion.evaluation import bench
from refusion.evaluation.bench import BenchInterrupted, BenchSettings, Sample, run_bench
from refusion.evaluation.variants import Variant
from refusion.generation import Generation

COST = {"refusion": (5, 1.0), "paper": (20, 4.0), "autoregressive": (9, 2.0)}
WARM = 8


class FakeModel:
    """Prompt ids are a number's worth of zeros; a prompt of 90 or more is too long."""

    def __init__(self) -> None:
        self.transformer: Any = torch.nn.Linear(4, 4)
        self.transformer.dtype, self.transformer.device = torch.float32, torch.device("cpu")
        self.checkpoint = SimpleNamespace(source="fake", extra={})

    def prompt_ids(self, prompt: str) -> list[int]:
        return [0] * (int(prompt.split()[-1]) + 1)

    def start(self, ids: list[int], config: DecodeConfig) -> None:
        if len(ids) > 90:
            raise CapacityError("a prompt of many tokens leaves no room")


def fake_model() -> Any:
    return FakeModel()


Calls = list[tuple[str, int, int]]
"""Decoder, prompts and max_tokens of each call of `generate`."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Ten tokens an answer; the paper's decoder is wrong on every second problem and once empty."""
    seen: Calls = []

    def generate(model: Any, prompts: list[str], config: DecodeConfig, batch_size: int = 1) -> list[Generation]:
        seen.append((config.decoder, len(prompts), config.max_tokens))
        forwards, seconds = COST[config.decoder]
        found = []
        for prompt in prompts:
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


class FakePeer:
    """Twelve tokens in eleven passes and four seconds."""

    weights, note, uses_torch = "its own weights", "a note", True

    def __init__(self) -> None:
        self.closed = False

    def answer(self, prompt_ids: list[int], config: DecodeConfig) -> Generation:
        return Generation(f"#### {len(prompt_ids) - 1}", list(range(12)), 3, 11, 4.0, 0.5, "stop")

    def close(self) -> None:
        self.closed = True


class FakeMemory:
    """Half a gigabyte in use, and a peak of a gigabyte and a megabyte more for every answer so far."""

    works = True

    def __init__(self, device: torch.device) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def peak(self) -> int:
        return 2**30 + self.resets * 2**20

    def now(self) -> int:
        return 2**29

    def give_back(self) -> None:
        pass


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def test_rows_hold_sums_not_means_of_means(calls: Calls) -> None:
    samples: list[Sample] = []
    result = run_bench(fake_model(), BenchSettings(limit=10, batch_size=4, timed=3), samples=samples)
    rows = by_name(result)
    assert list(rows) == ["refusion", "paper", "autoregressive"]
    assert rows["refusion"]["exact_match"] == 1.0
    assert rows["paper"]["exact_match"] == 0.5 and rows["paper"]["scored"] == 10
    assert rows["paper"]["at_length_limit"] == 5
    assert rows["paper"]["empty"] == 1
    assert rows["refusion"]["tokens"] == 100
    assert rows["refusion"]["forwards"] == 50
    assert rows["refusion"]["tpf"] == 2.0
    assert rows["refusion"]["tps"] == 10.0 and rows["refusion"]["first_token_seconds"] == 0.5
    assert rows["refusion"]["tps_ratio"] == 2.0
    assert rows["autoregressive"]["tps_ratio"] == 1.0
    assert rows["paper"]["tps_quartiles"] == [2.5, 2.5]
    assert rows["paper"]["batch_tps"] > 0
    assert rows["paper"]["weights"] == "the model's weights in float32" and rows["paper"]["changes"] == {}
    assert len(samples) == 30 and samples[0].to_dict()["correct"] is True
    assert result["settings"]["limit"] == 10 and result["settings"]["model"] == "fake"
    json.dumps(result)


def test_all_take_turns_and_nothing_cold_is_timed(calls: Calls) -> None:
    run_bench(fake_model(), BenchSettings(limit=8, batch_size=4, timed=2))
    order = ["refusion", "paper", "autoregressive"]
    turned = ["paper", "autoregressive", "refusion"]
    assert [call[:2] for call in calls[:3]] == [(name, 1) for name in order]
    assert [call[:2] for call in calls[3:9]] == [(name, 1) for name in order + turned]
    assert calls[9:12] == [(name, 4, WARM) for name in order]
    assert calls[12:] == [(name, 4, 256) for name in order + turned]


def test_without_timed_problems_there_is_no_speed(calls: Calls) -> None:
    row = run_bench(fake_model(), BenchSettings(limit=2, timed=0))["rows"][0]
    assert row["tps"] is None and row["tps_ratio"] is None and row["problems"] == 2 and row["timed"] == 0


def test_a_peer_answers_the_timed_problems_only(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    peer = FakePeer()

    def open_peer(name: str, model: Any, positions: int) -> FakePeer:
        opened.append((name, positions))
        return peer

    monkeypatch.setattr(bench, "open_peer", open_peer)
    settings = BenchSettings(limit=6, timed=2, peers=("transformers",), decode=DecodeConfig(max_tokens=30))
    row = run_bench(fake_model(), settings)["rows"][-1]
    assert row["decoder"] == "transformers" and row["problems"] == 2 and row["exact_match"] == 1.0
    assert row["tpf"] == pytest.approx(12 / 11)
    assert row["tps"] == 3.0 and row["tps_ratio"] == pytest.approx(0.6) and row["batch_tps"] is None
    assert (row["weights"], row["note"]) == ("its own weights", "a note")
    assert opened == [("transformers", 6 + 30)] and peer.closed
    sampled = BenchSettings(limit=2, timed=1, peers=("transformers",), decode=DecodeConfig(temperature=0.5))
    assert run_bench(fake_model(), sampled)["rows"][-1]["note"] == "a note; greedy, where the decoders sample"


def test_memory_is_that_of_each_row_without_the_other_engines(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = iter([2**29, 2**29 + 300 * 2**20])
    monkeypatch.setattr(FakeMemory, "now", lambda self: next(grown))
    monkeypatch.setattr(bench, "PeakMemory", FakeMemory)
    monkeypatch.setattr(bench, "open_peer", lambda name, model, positions: FakePeer())
    settings = BenchSettings(limit=2, timed=1, decoders=("refusion", "paper"), peers=("transformers",))
    model = fake_model()
    rows = by_name(run_bench(model, settings))
    assert rows["refusion"]["peak_memory_mb"] == 1024 + 1 - 300
    assert rows["paper"]["peak_memory_mb"] == 1024 + 2 - 300
    assert rows["transformers"]["peak_memory_mb"] == 1024 + 3  # less 80 bytes of the model, rounded away
    assert rows["refusion"]["batch_peak_memory_mb"] == 1024 + 4
    assert rows["transformers"]["batch_peak_memory_mb"] is None


def test_memory_that_can_not_be_measured_is_null(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(FakeMemory):
        def peak(self) -> None:  # type: ignore[override]
            return None

    monkeypatch.setattr(bench, "PeakMemory", Blind)
    row = run_bench(fake_model(), BenchSettings(limit=2, timed=1))["rows"][0]
    assert row["peak_memory_mb"] is None and row["batch_peak_memory_mb"] is None


def test_variants_are_rows_in_turns_with_the_decoders(calls: Calls) -> None:
    short = Variant("short paper", {"decoder": "paper", "max_tokens": 7})
    settings = BenchSettings(limit=2, timed=1, decoders=("autoregressive",), variants=(short,))
    rows = by_name(run_bench(fake_model(), settings))
    assert rows["short paper"]["decoder"] == "paper"
    assert rows["short paper"]["changes"] == {"decoder": "paper", "max_tokens": 7}
    assert rows["short paper"]["tps_ratio"] == 0.5
    assert calls[2:4] == [("autoregressive", 1, 256), ("paper", 1, 7)]
    assert calls[5] == ("paper", 2, 7)  # warmed no longer than it may write


def test_prompts_of_a_file_are_scored_where_they_have_answers(calls: Calls, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (
        {"question": "is 3", "answer": "3"}, {"question": "is 5", "answer": "it is\n#### 5"}, {"question": "is 6"},
    )))
    result = run_bench(fake_model(), BenchSettings(prompts=path, timed=1))
    paper = by_name(result)["paper"]
    assert (paper["problems"], paper["scored"], paper["exact_match"]) == (3, 2, 0.0)
    assert result["settings"]["prompts"] == str(path) and result["settings"]["limit"] == 3
    path.write_text('{"question": "is 6"}\n')
    row = run_bench(fake_model(), BenchSettings(prompts=path, timed=1))["rows"][0]
    assert row["exact_match"] is None and row["scored"] == 0 and row["tokens"] == 10


def test_a_prompt_that_is_too_long_is_named_before_anything_runs(calls: Calls, tmp_path: Path) -> None:
    path = tmp_path / "q.txt"
    path.write_text("is 3\nis 90\n")
    with pytest.raises(CapacityError, match=r"q.txt:2: a prompt of many tokens"):
        run_bench(fake_model(), BenchSettings(prompts=path))
    assert calls == []


def interrupting(phase: str, count: int) -> Callable[[str, int, int], None]:
    """Ctrl-C as soon as a phase has done so much."""
    def tell(now: str, done: int, total: int) -> None:
        if now == phase and done == count:
            raise KeyboardInterrupt

    return tell


def test_an_interrupt_gives_what_every_row_has_done(calls: Calls) -> None:
    settings = BenchSettings(limit=8, batch_size=4, timed=3)
    with pytest.raises(BenchInterrupted, match="no file was written") as stop:
        run_bench(fake_model(), settings, progress=interrupting("speed", 5))
    rows = by_name(stop.value.found)
    assert [row["timed"] for row in rows.values()] == [1, 1, 1] and rows["paper"]["problems"] == 1
    assert stop.value.found["interrupted"] is True
    samples: list[Sample] = []
    with pytest.raises(BenchInterrupted) as stop:
        run_bench(fake_model(), settings, progress=interrupting("scores", 20), samples=samples)
    rows = by_name(stop.value.found)
    assert [row["problems"] for row in rows.values()] == [4, 4, 4]
    assert [row["timed"] for row in rows.values()] == [3, 3, 3]
    assert rows["refusion"]["tokens"] == 40 and samples == []


def test_an_interrupt_before_anything_is_complete_is_a_plain_one(calls: Calls) -> None:
    for phase, count in (("warm-up", 1), ("speed", 2)):
        with pytest.raises(KeyboardInterrupt) as stop:
            run_bench(fake_model(), BenchSettings(limit=8, timed=3), progress=interrupting(phase, count))
        assert not isinstance(stop.value, BenchInterrupted)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"limit": 0}, "limit"), ({"decoders": ()}, "decoder"), ({"decoders": ("paper", "paper")}, "twice"),
     ({"decoders": ("nonsense",)}, "nonsense"), ({"batch_size": 0}, "batch_size"), ({"timed": -1}, "timed"),
     ({"peers": ("llama",)}, "llama"), ({"peers": ("transformers",), "timed": 0}, "timed"),
     ({"variants": (Variant("paper"),)}, "two rows of the name 'paper'"),
     ({"variants": (Variant("a"), Variant("a"))}, "two rows of the name 'a'"),
     ({"variants": (Variant("a", {"block_size": 1}),)}, "variant 'a': block_size")],
)
def test_impossible_settings_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        BenchSettings(**change)


def test_variants_alone_are_enough() -> None:
    assert list(BenchSettings(decoders=(), variants=(Variant("a"),)).configs) == ["a"]
