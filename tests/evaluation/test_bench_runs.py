"""A whole bench on a tiny random model: real decoders, real transformers, a stand-in for llama.cpp's package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import refusion
from refusion.decoding.config import DECODERS, DecodeConfig
from refusion.evaluation.bench import BenchSettings, Sample, run_bench
from refusion.evaluation.variants import Variant
from tests.evaluation.fake_llama import Llama, package

pytest.importorskip("transformers")


def test_every_row_answers_the_same_questions_on_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_refusion_model: refusion.Model
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", package())
    config = DecodeConfig(decoder="autoregressive", max_tokens=10)
    right = refusion.generate(tiny_refusion_model, "1 + 2", config)[0]
    path = tmp_path / "q.jsonl"
    rows = [{"question": "1 + 2", "answer": f"#### {right.text}"}, {"question": "the quick"}, {"prompt": "brown fox"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = BenchSettings(
        decoders=DECODERS, decode=DecodeConfig(max_tokens=10, slot_size=4, block_size=8), batch_size=2, timed=2,
        peers=("transformers", "llama.cpp"), variants=(Variant("no branches", {"branch_size": 0}),), prompts=path,
    )
    phases: list[str] = []
    samples: list[Sample] = []
    found = run_bench(
        tiny_refusion_model, settings, progress=lambda phase, done, total: phases.append(phase), samples=samples
    )
    named = {row["name"]: row for row in found["rows"]}
    assert list(named) == [*DECODERS, "no branches", "transformers", "llama.cpp"]
    assert list(dict.fromkeys(phases)) == ["warm-up", "speed", "scores"]
    assert all(row["tokens"] > 0 and row["tps"] > 0 and row["tps_ratio"] > 0 for row in named.values())
    assert all(row["first_token_seconds"] > 0 and row["timed"] == 2 for row in named.values())
    assert {row["problems"] for row in named.values()} == {3, 2}
    assert all(row["scored"] == 1 for row in named.values())
    theirs = ("transformers", "llama.cpp")
    assert {(named[name]["tokens"], named[name]["forwards"]) for name in theirs} == {
        (sum(s.generation.tokens for s in samples if s.decoder == "autoregressive" and s.question.prompt in
             ("1 + 2", "the quick")), named["llama.cpp"]["forwards"])
    }
    longest = max(len(tiny_refusion_model.prompt_ids(text)) for text in ("1 + 2", "the quick", "brown fox"))
    [engine] = Llama.made
    assert engine.options["n_ctx"] == longest + 10 and engine.closed
    assert len(samples) == 3 * 4
    assert json.loads(json.dumps(found))["settings"]["variants"] == [
        {"name": "no branches", "changes": {"branch_size": 0}}
    ]
