"""The bench's table: readable at 100 columns, with notes on what isn't comparable."""

from __future__ import annotations

from typing import Any

import pytest

from refusion.cli import table

FULL = {
    "task": "gsm_symbolic", "decoder": "refusion", "changes": {}, "weights": "the model's weights in bfloat16",
    "problems": 200, "exact_match": 0.665, "tokens": 35_123, "forwards": 14_321, "tpf": 2.4525, "tps": 128.04,
    "tps_quartiles": [123.3, 131.3], "first_token_seconds": 0.0914, "peak_memory_mb": 1345.6, "tps_ratio": 1.553,
    "tps_ratio_quartiles": [1.4, 1.661], "timed": 20, "at_length_limit": 3,
}


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {**FULL, "name": name, **changes}


def test_a_full_table_fits_into_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table.show([
        row("refusion"), row("autoregressive", tps=82.4, tps_quartiles=[79.0, 90.25], tps_ratio=1.0),
        row("transformers", decoder="transformers", problems=20, exact_match=None, tokens=3_512, at_length_limit=0),
        row("llama.cpp", decoder="llama.cpp", problems=20, weights="the model's own file x.gguf", note="on the CPU"),
    ])
    said = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 100 for line in said)
    title, head, first, second, third, fourth, *notes = [line.rstrip() for line in said]
    assert title == "gsm_symbolic: 200 questions"
    assert head.split() == ["decoder", "exact", "tokens", "passes", "TPF", "TPS", "first", "ms", "MB", "ratio"]
    assert first.split() == ["refusion", "66.5%", "35,123", "14,321", "2.45", "128", "(123-131)", "91", "1,346",
                             "1.55", "(1.40-1.66)"]
    assert "82.4 (79.0-90.2)" in second and third.split()[1] == "-" and fourth.startswith("llama.cpp")
    assert notes == [
        "TPS, first token, MB and ratio: 20 answers written alone, in turns; medians (quartiles)",
        "transformers, llama.cpp: exact match, tokens and passes over 20 of the 200 questions",
        "answers cut off by --max-tokens: refusion 3, autoregressive 3, llama.cpp 3",
        "llama.cpp ran the model's own file x.gguf; on the CPU",
    ]


def test_tasks_have_tables_of_their_own_and_columns_without_values_are_left_out(
    capsys: pytest.CaptureFixture[str]
) -> None:
    bare = {"decoder": "paper", "tokens": 10, "forwards": 5, "tpf": 2.0, "exact_match": None, "tps": None}
    table.show([{**bare, "task": "a[b]"}, {**bare, "task": "c"}])
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert said == ["a[b]:", "decoder tokens passes  TPF", "paper       10      5 2.00", "",
                    "c:", "decoder tokens passes  TPF", "paper       10      5 2.00"]


def test_a_long_name_is_folded_and_no_figure_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    table.show([row("a variant with [bold] and a very long name of its own"), row("autoregressive")])
    said = capsys.readouterr().out
    assert "(1.40-1.66)" in said and "…" not in said and "[bold]" in said.replace("\n", "")
    assert all(len(line.rstrip()) <= 100 for line in said.splitlines())
