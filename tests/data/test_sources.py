"""Sources: from settings to rows that are split, mixed and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refusion.data.config import DataConfig, SourceConfig
from refusion.data.sources import load_data, load_source
from refusion.data.split import conversation_key
from refusion.errors import ConfigError, DataError


def rows_file(folder: Path, name: str, count: int, start: int = 0, extra: str = "") -> str:
    path = folder / name
    rows = [
        json.dumps({"question": f"{n} + 1?", "answer": f"{n} + 1 = <<x>>{n + 1}"}) for n in range(start, start + count)
    ]
    path.write_text("\n".join(rows) + extra)
    return str(path)


def test_files_are_split_and_mixed(tmp_path: Path) -> None:
    first = SourceConfig("file", path=rows_file(tmp_path, "a.jsonl", 40), weight=3, strip_calculator=True)
    second = SourceConfig("file", path=rows_file(tmp_path, "b.jsonl", 40, start=30), name="second", size=20)
    data = load_data(DataConfig((first, second), held_out=8, system="Be brief."), seed=4)
    train = {conversation_key(row) for rows in data.train for row in rows}
    held = {conversation_key(row) for row in data.held_out}
    assert not train & held and len(train | held) == 50
    assert 7 <= len(held) <= 8
    assert {row.messages[0].content for row in data.held_out} == {"Be brief."}
    assert "<<" not in data.train[0][0].answer and "<<" in data.train[1][0].answer
    picks = data.mixture.epoch(0)
    assert data.mixture.shares[0] / len(data.mixture) == pytest.approx(0.75, abs=0.01)
    assert data.row(picks[0]) is data.train[picks[0].source][picks[0].row]
    again = load_data(DataConfig((first, second), held_out=8, system="Be brief."), seed=4)
    assert (
        again.train == data.train
        and again.held_out == data.held_out
        and again.mixture.epoch(3) == data.mixture.epoch(3)
    )
    assert [report.label for report in data.reports] == [first.path, "second"]
    assert [report.rows for report in data.reports] == [40, 20]


def test_generated_rows_are_loaded() -> None:
    pytest.importorskip("reasoning_gym")
    source = SourceConfig("gym", name="chain_sum", size=20, seed=3, options={"max_terms": 3})
    rows, report = load_source(source)
    assert len(rows) == 20
    assert str(report).startswith("chain_sum: 20 distinct problems in ")
    assert load_source(source)[0] == rows


def test_skipped_rows_are_reported(tmp_path: Path) -> None:
    path = rows_file(tmp_path, "a.jsonl", 3, extra="\n3" * 7)
    source = SourceConfig("file", path=path)
    with pytest.raises(DataError, match=f"{path}:4: a row should be an object, not a number"):
        load_data(DataConfig((source,), held_out=0), 0)
    data = load_data(DataConfig((source,), held_out=0, on_bad_row="skip"), 0)
    report = data.reports[0]
    assert (report.rows, report.skipped, len(report.reasons)) == (3, 7, 5)
    assert f"{path}: 3 rows in " in str(report) and "7 skipped" in str(report)
    assert str(report).endswith("  and 2 more")
    assert data.held_out == []


def test_a_source_that_is_held_out_whole_is_an_error(tmp_path: Path) -> None:
    sources = tuple(SourceConfig("file", path=rows_file(tmp_path, f"{n}.jsonl", 2), name=f"s{n}") for n in range(2))
    one = SourceConfig("file", path=rows_file(tmp_path, "one.jsonl", 1), name="one", weight=0.001)
    held = load_data(DataConfig((sources[0],), held_out=1), 0).held_out[0]
    alone = tmp_path / "alone.jsonl"
    alone.write_text(json.dumps({"question": held.prompt[0].content, "answer": "x"}))
    single = SourceConfig("file", path=str(alone), name="alone", weight=0.001)
    with pytest.raises(DataError, match="all questions of alone are held out; lower data.held_out or drop the source"):
        load_data(DataConfig((sources[0], single), held_out=1), 0)
    assert len(load_data(DataConfig((one,), held_out=200), 0).train[0]) == 1


FILE: dict[str, Any] = {"kind": "file", "path": "x.jsonl"}
GYM: dict[str, Any] = {"kind": "gym", "name": "chain_sum", "size": 3}


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"kind": "hub"}, "^kind is 'hub', it should be file or gym"),
        ({"kind": "file"}, "^path is missing: a source of the kind file needs one"),
        ({"kind": "gym", "name": "x"}, "^name or size is missing: a source of the kind gym needs both"),
        ({**GYM, "size": -1}, "^size is -1, it should be 1 or more"),
        ({**FILE, "weight": 0.0}, "^weight is 0.0, it should be above 0 and finite"),
        ({**FILE, "weight": float("nan")}, "^weight is nan"),
        ({**FILE, "options": {"a": 1}}, "^options doesn't belong to a source of the kind file"),
        ({**GYM, "path": "x"}, "^path doesn't belong to a source of the kind gym"),
        ({**GYM, "strip_calculator": True}, "^strip_calculator doesn't belong to a source of the kind gym"),
        ({**GYM, "answer_template": "{a}"}, "^answer_template doesn't belong"),
        ({**FILE, "prompt_template": "{a"}, "^prompt_template can't be read: expected '}'"),
        ({**FILE, "prompt_template": "{a.b}"}, "^prompt_template can't be read: '{a.b}' should hold the plain name"),
        ({**FILE, "answer_template": "{}"}, "^answer_template can't be read: '{}' should hold the plain name"),
        ({**FILE, "answer_template": "{a:>3}"}, "^answer_template can't be read"),
    ],
)
def test_wrong_source_settings(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        SourceConfig(**settings)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"sources": ()}, "^sources is empty"),
        ({"held_out": -1}, "^held_out is -1, it should be 0 or more"),
        ({"held_out": 1.0}, "^held_out is 1.0, a fraction should be at least 0 and below 1"),
        ({"on_bad_row": "warn"}, "^on_bad_row is 'warn', it should be stop or skip"),
        ({"max_length": 7}, "^max_length is 7, it should be 8 tokens or more"),
        ({"over_long": "keep"}, "^over_long is 'keep', it should be drop or cut"),
    ],
)
def test_wrong_data_settings(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DataConfig(**{"sources": (SourceConfig(**FILE),), **settings})
