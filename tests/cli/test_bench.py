"""`refusion bench`: options to settings, rows to a table and files, decoders that the model can run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refusion.decoding.config import DECODERS, DecodeConfig
from refusion.errors import DataError
from refusion.evaluation import bench as module
from refusion.evaluation.bench import BenchSettings

REQUIRED = {"decoder", "exact_match", "tokens", "forwards", "tpf", "tps"}


class FakeBench:
    """Stands for run_bench: remembers the settings and gives a row for each decoder."""

    def __init__(self) -> None:
        self.settings: list[BenchSettings] = []
        self.exclude: list[str] = []

    def __call__(self, model: Any, settings: BenchSettings, *, exclude: Any, progress: Any, samples: Any) -> Any:
        self.settings.append(settings)
        self.exclude = list(exclude)
        for phase, done in (("warm-up", 0), ("scores", 1), ("scores", 2), ("speed", 1)):
            progress(phase, done, 2)
        samples.append(SimpleNamespace(to_dict=lambda: {"decoder": "paper", "prompt": "Zwölf?", "correct": True}))
        rows = [
            {"decoder": name, "exact_match": 0.25, "tokens": 1234, "forwards": 617, "tpf": 2.0, "tps": 31.25}
            for name in settings.decoders
        ]
        return {"rows": rows, "settings": {"task": settings.task, "limit": settings.limit}}

    @property
    def only(self) -> BenchSettings:
        assert len(self.settings) == 1
        return self.settings[0]


@pytest.fixture
def runs(api, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    monkeypatch.setattr(module, "run_bench", fake)
    return fake


def test_defaults_and_the_table(call, runs):
    result = call("bench")
    assert result.exit_code == 0, result.output
    assert runs.only == BenchSettings("gsm_symbolic", 50, DECODERS, DecodeConfig(), batch_size=8, timed=20, seed=0)
    assert runs.exclude == []
    head, *rows = result.stdout.splitlines()
    assert head.split("  ")[0] == "task" and "exact match" in head and "TPF" in head
    assert [row.split()[1] for row in rows] == list(DECODERS)
    assert rows[0].split() == ["gsm_symbolic", "refusion", "25.0%", "1,234", "617", "2.00", "31.2"]


def test_options_reach_the_settings(api, call, runs):
    result = call(
        "bench", "--model", "some/folder", "--limit", 7, "--decoders", "paper, autoregressive", "--timed", 2,
        "--batch-size", 4, "--problem-seed", 3, "--max-tokens", 99, "--slot-threshold", 0.8, "--seed", 6,
        "--plan-size", 9, "--device", "cpu", "--dtype", "bfloat16", "--peers", "",
    )
    assert result.exit_code == 0, result.output
    decode = DecodeConfig(max_tokens=99, slot_threshold=0.8, seed=6, plan_size=9)
    assert runs.only == BenchSettings("gsm_symbolic", 7, ("paper", "autoregressive"), decode, 4, 2, 3)
    assert api.loads == [{"source": "some/folder", "device": "cpu", "dtype": "bfloat16", "mask_token_id": None}]


def test_files_of_rows_and_answers(call, runs, tmp_path):
    rows_file, answers = tmp_path / "new" / "rows.json", tmp_path / "answers.jsonl"
    assert call("bench", "--limit", 3, "--json", rows_file, "--samples", answers).exit_code == 0
    found = json.loads(rows_file.read_text())
    assert [row["decoder"] for row in found["rows"]] == list(DECODERS)
    assert all(row.keys() >= REQUIRED for row in found["rows"])
    assert found["settings"] == {"limit": 3, "tasks": ["gsm_symbolic"]}
    assert json.loads(answers.read_text(encoding="utf-8"))["prompt"] == "Zwölf?"


def test_several_tasks_share_a_table(call, runs, tmp_path):
    file = tmp_path / "rows.json"
    assert call("bench", "--tasks", "gsm_symbolic,chain_sum", "--decoders", "paper", "--json", file).exit_code == 0
    found = json.loads(file.read_text())
    assert [row["task"] for row in found["rows"]] == ["gsm_symbolic", "chain_sum"]
    assert found["settings"]["tasks"] == ["gsm_symbolic", "chain_sum"]


def test_questions_of_a_training_are_left_out(call, runs, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"What is  {n}?", "answer": str(n)}) + "\n" for n in range(5))
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {held_out: 2, system: Think., sources: [{kind: file, path: rows.jsonl}]}\nrun: {out: x}\n")
    assert call("bench", "--exclude-recipe", recipe).exit_code == 0
    assert sorted(runs.exclude) == [f"what is {n}?" for n in range(5)]


def test_a_model_without_a_mask_token_runs_left_to_right(api, call, runs, failing):
    api.mask_token_id = None
    result = call("bench")
    assert result.exit_code == 0 and runs.only.decoders == ("autoregressive",)
    assert "no mask token" in result.stderr
    assert "no mask token" in failing(call("bench", "--decoders", "paper"), 2)
    assert len(runs.settings) == 1


@pytest.mark.parametrize(("args", "reason"), [
    (("--decoders", "best"), "unknown decoder 'best'"), (("--decoders", "paper,paper"), "names one twice"),
    (("--decoders", ""), "--decoders should be names"), (("--tasks", "a,"), "--tasks should be names"),
    (("--limit", 0), "limit"), (("--timed", -1), "timed"), (("--peers", "llama.cpp"), "llama.cpp"),
    (("--slot-size", 99), "block_size"), (("--exclude-recipe", "none.yaml"), "is missing"),
])
def test_bad_settings_are_said_before_the_model_is_loaded(api, call, runs, failing, args, reason):
    assert reason in failing(call("bench", *args), 2)
    assert not api.loads


def test_errors_are_one_line(call, runs, failing, monkeypatch, tmp_path):
    result = call("bench", "--json", tmp_path)
    assert result.exit_code == 1 and "can't be written" in result.stderr
    assert "exact match" in result.stdout  # what was measured isn't lost

    def fails(*_: Any, **__: Any) -> Any:
        raise DataError("gsm_symbolic gave 3 problems")

    monkeypatch.setattr(module, "run_bench", fails)
    assert failing(call("bench"), 1) == "gsm_symbolic gave 3 problems"
    assert Path(module.__file__).is_file()
