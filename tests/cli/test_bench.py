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
from refusion.evaluation import peers
from refusion.evaluation.bench import BenchInterrupted, BenchSettings
from refusion.evaluation.variants import Variant

REQUIRED = {"decoder", "exact_match", "tokens", "forwards", "tpf", "tps"}


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "decoder": name, "exact_match": 0.25, "tokens": 1234, "forwards": 617, "tpf": 2.0,
            "tps": 31.25, **changes}


class FakeBench:
    """Stands for run_bench: remembers the settings and gives a row for each decoder."""

    def __init__(self) -> None:
        self.settings: list[BenchSettings] = []
        self.exclude: list[str] = []
        self.breaks = ""

    def __call__(self, model: Any, settings: BenchSettings, *, exclude: Any, progress: Any, samples: Any) -> Any:
        self.settings.append(settings)
        self.exclude = list(exclude)
        for phase, done in (("warm-up", 0), ("scores", 1), ("scores", 2), ("speed", 1)):
            progress(phase, done, 2)
        samples.append(SimpleNamespace(to_dict=lambda: {"decoder": "paper", "prompt": "Zwölf?", "correct": True}))
        if settings.task == self.breaks:
            raise BenchInterrupted({"rows": [row("refusion", problems=3)], "settings": {}})
        return {"rows": [row(name) for name in settings.configs], "settings": {"task": settings.task, "limit": 3}}

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
    assert runs.only == BenchSettings("gsm_symbolic", None, DECODERS, DecodeConfig(), batch_size=8, timed=20, seed=0)
    assert runs.exclude == []
    title, head, *rows = result.stdout.splitlines()
    assert title == "gsm_symbolic:"
    assert head.split() == ["decoder", "exact", "tokens", "passes", "TPF", "TPS"]
    assert [line.split()[0] for line in rows] == list(DECODERS)
    assert rows[0].split() == ["refusion", "25.0%", "1,234", "617", "2.00", "31.2"]


def test_options_reach_the_settings(api, call, runs):
    result = call(
        "bench", "--model", "some/folder", "--limit", 7, "--decoders", "paper, autoregressive", "--timed", 2,
        "--batch-size", 4, "--problem-seed", 3, "--max-tokens", 99, "--slot-threshold", 0.8, "--seed", 6,
        "--plan-size", 9, "--device", "cpu", "--dtype", "bfloat16", "--peers", "transformers",
        "--variant", "no branches: branch_size=0", "--variant", "p2: decoder=paper,token_threshold=0.6",
    )
    assert result.exit_code == 0, result.output
    decode = DecodeConfig(max_tokens=99, slot_threshold=0.8, seed=6, plan_size=9)
    variants = (Variant("no branches", {"branch_size": 0}), Variant("p2", {"decoder": "paper", "token_threshold": 0.6}))
    assert runs.only == BenchSettings(
        "gsm_symbolic", 7, ("paper", "autoregressive"), decode, 4, 2, 3, ("transformers",), variants
    )
    [loaded] = api.loads
    assert loaded.items() >= {"source": "some/folder", "device": "cpu", "dtype": "bfloat16"}.items()
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["paper", "autoregressive", "no", "p2"]


def test_files_of_rows_and_answers(call, runs, tmp_path):
    rows_file, answers = tmp_path / "new" / "rows.json", tmp_path / "answers.jsonl"
    assert call("bench", "--limit", 3, "--json", rows_file, "--samples", answers).exit_code == 0
    found = json.loads(rows_file.read_text())
    assert [row["decoder"] for row in found["rows"]] == list(DECODERS)
    assert all(row.keys() >= REQUIRED for row in found["rows"])
    assert found["settings"] == {"limit": 3, "tasks": ["gsm_symbolic"]}
    assert json.loads(answers.read_text(encoding="utf-8"))["prompt"] == "Zwölf?"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["answers.jsonl", "new", "rows.json"]


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


def test_prompts_of_a_file_take_the_place_of_tasks(call, runs, failing, tmp_path):
    file, rows_file = tmp_path / "my prompts.jsonl", tmp_path / "rows.json"
    file.write_text('{"question": "What is 2 + 2?", "answer": "4"}\n')
    result = call("bench", "--prompts", file, "--json", rows_file)
    assert result.exit_code == 0, result.output
    assert runs.only.prompts == file and result.stdout.startswith("my prompts.jsonl:\n")
    assert json.loads(rows_file.read_text())["rows"][0]["task"] == "my prompts.jsonl"
    assert failing(call("bench", "--prompts", file, "--tasks", "chain_sum"), 2) == "give --tasks or --prompts, not both"


def test_a_bad_file_of_prompts_is_said_before_the_model_is_loaded(api, call, runs, failing, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "a"}\n{"question": \n')
    assert failing(call("bench", "--prompts", file), 1).startswith(f"{file}:2: broken JSON")
    assert not api.loads


def test_a_missing_peer_is_said_before_the_model_is_loaded(api, call, runs, failing, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    said = failing(call("bench", "--peers", "llama.cpp"), 2)
    assert "pip install llama-cpp-python" in said and not api.loads


def test_an_interrupt_prints_what_is_complete_and_writes_nothing(call, runs, tmp_path):
    rows_file, answers = tmp_path / "rows.json", tmp_path / "answers.jsonl"
    rows_file.write_text("old")
    runs.breaks = "chain_sum"
    files = ("--json", rows_file, "--samples", answers)
    result = call("bench", "--tasks", "gsm_symbolic,chain_sum,spell_backward", "--decoders", "refusion", *files)
    assert result.exit_code == 130
    assert [line.split()[0] for line in result.stdout.splitlines() if line] == [
        "gsm_symbolic:", "decoder", "refusion", "chain_sum:", "decoder", "refusion",
    ]
    assert result.stderr.splitlines()[-1].startswith("interrupted: the figures are of what was complete")
    assert rows_file.read_text() == "old" and not answers.exists()
    assert len(runs.settings) == 2
    runs.breaks, alone = "gsm_symbolic", call("bench", "--json", rows_file)
    assert alone.exit_code == 0 and json.loads(rows_file.read_text())["rows"]


def test_a_file_that_can_not_be_finished_leaves_the_old_one(call, runs, tmp_path, monkeypatch):
    rows_file = tmp_path / "rows.json"
    rows_file.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("refusion.cli.bench.os.replace", full)
    result = call("bench", "--json", rows_file)
    assert result.exit_code == 1 and "No space left on device" in result.stderr
    assert rows_file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_progress_on_a_pipe_is_lines_on_stderr(call, runs):
    said = call("bench").stderr.splitlines()
    assert [line.split(",")[1].split(":")[0].strip() for line in said] == ["warm-up", "scores", "scores", "speed"]


def test_a_model_without_a_mask_token_runs_left_to_right(api, call, runs, failing):
    api.mask_token_id = None
    result = call("bench")
    assert result.exit_code == 0 and runs.only.decoders == ("autoregressive",)
    assert "no mask token" in result.stderr
    assert "no mask token" in failing(call("bench", "--decoders", "paper"), 2)
    own = ("--decoders", "autoregressive", "--variant", "few: plan_size=2")
    assert "no mask token" in failing(call("bench", *own), 2)
    assert len(runs.settings) == 1


@pytest.mark.parametrize(("args", "reason"), [
    (("--decoders", "best"), "unknown decoder 'best'"), (("--decoders", "paper,paper"), "names one twice"),
    (("--decoders", ""), "--decoders should be names"), (("--tasks", "a,"), "--tasks should be names"),
    (("--limit", 0), "limit"), (("--timed", -1), "timed"), (("--peers", "vllm"), "vllm"),
    (("--variant", "x"), "should read 'name: key=value"), (("--variant", "x: size=3"), "no setting 'size'"),
    (("--variant", "paper: slot_size=3"), "two rows of the name 'paper'"),
    (("--slot-size", 99), "block_size"), (("--exclude-recipe", "none.yaml"), "is missing"),
])
def test_bad_settings_are_said_before_the_model_is_loaded(api, call, runs, failing, args, reason):
    assert reason in failing(call("bench", *args), 2)
    assert not api.loads


def test_errors_are_one_line(call, runs, failing, monkeypatch, tmp_path):
    result = call("bench", "--json", tmp_path)
    assert result.exit_code == 1 and "can't be written" in result.stderr
    assert "exact" in result.stdout  # what was measured isn't lost

    def fails(*_: Any, **__: Any) -> Any:
        raise DataError("gsm_symbolic gave 3 problems")

    monkeypatch.setattr(module, "run_bench", fails)
    assert failing(call("bench"), 1) == "gsm_symbolic gave 3 problems"
    assert Path(module.__file__).is_file()
