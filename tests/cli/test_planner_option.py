"""`--planner` reaches the settings of every command that decodes, and a wrong one is one line."""

from __future__ import annotations

from typing import Any

import pytest

from refusion.evaluation import bench as module


def test_generate_takes_a_planner(api, call, failing):
    assert call("generate", "--planner", "left-to-right", "hello").exit_code == 0
    assert api.run["config"].planner == "left-to-right"
    said = failing(call("generate", "--planner", "best", "hello"), 2)
    assert said == "unknown planner 'best'; choose one of confidence, margin, entropy, left-to-right, random"


def test_bench_takes_a_planner(api, call, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def run_bench(model: Any, settings: Any, **rest: Any) -> Any:
        seen.append(settings)
        return {"rows": [], "settings": {}}

    monkeypatch.setattr(module, "run_bench", run_bench)
    call("bench", "--planner", "margin", "--limit", 3)
    assert [settings.decode.planner for settings in seen] == ["margin"]
