"""Dry runs of the measuring scripts on a tiny random network: what they write, never how fast it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import tiny_tokenizer

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = ("--shape", "tiny", "--device", "cpu", "--dtype", "float32")
DEVICE = (*TINY, "--behind", "5", "--counts", "1,4", "--batches", "2", "--repeats", "4", "--budget-seconds", "600",
          "--variants", "products,eager,graph")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The scripts as modules, found as they find each other when run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import _passes
        import _timing
        import device
        import pass_profile

        yield SimpleNamespace(device=device, pass_profile=pass_profile, passes=_passes, timing=_timing)
    torch.set_num_threads(threads)


def is_timed(row: dict[str, Any]) -> bool:
    low, high = row["quartiles"]
    return 0 < low <= row["milliseconds"] <= high


@pytest.fixture(scope="module")
def device_found(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("device") / "new" / "device.json"
    scripts.device.main([*DEVICE, "--json", str(file)])
    assert [path.name for path in file.parent.iterdir()] == ["device.json"], "nothing stays beside it"
    return json.loads(file.read_text())


def test_device_times_every_variant_of_every_pass(device_found: dict[str, Any]) -> None:
    assert device_found["settings"]["random_weights"] and device_found["settings"]["model"] == "tiny"
    rows = [row for row in device_found["rows"] if row["part"] == "passes"]
    assert [(row["tokens"], row["behind"], row["variant"]) for row in rows] == [
        (count, 5, variant) for count in (1, 4) for variant in ("products", "eager", "graph")
    ]
    for row in rows:
        if row["variant"] == "graph":
            assert "need a GPU" in row["note"] and "milliseconds" not in row
        else:
            assert is_timed(row) and row["repeats"] == 4 and row["over_one"] > 0 and row["over_weights"] > 0
    products, eager = rows[3:5]
    assert products["quartiles"][0] <= eager["quartiles"][1]


def test_device_measures_the_bandwidth_and_the_floor_it_sets(device_found: dict[str, Any]) -> None:
    [row] = [row for row in device_found["rows"] if row["part"] == "bandwidth"]
    assert row["weights_milliseconds"] == pytest.approx(row["weight_bytes"] / row["gb_per_second"] / 1e6)


def test_device_counts_what_the_engine_writes(device_found: dict[str, Any]) -> None:
    rows = {row["decoder"]: row for row in device_found["rows"] if row["part"] == "engine"}
    assert all(is_timed(row) and row["batch"] == 2 and row["repeats"] == 4 for row in rows.values())
    assert rows["autoregressive"]["tokens_per_pass"] == 1
    # a pass plans 16 or 32 tokens and the next one takes them all
    assert rows["refusion, all accepted"]["tokens_per_pass"] > 8
    assert rows["refusion, all accepted, plan 32"]["tokens_per_pass"] > 16
    assert 0.5 <= rows["refusion, greedy"]["tokens_per_pass"] < 8


def test_a_part_that_fails_is_a_row_and_the_rest_goes_on(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory\nand much more")

    monkeypatch.setattr(scripts.device, "filled_cache", fail)
    monkeypatch.setattr(scripts.device, "measure_bandwidth", fail)
    scripts.device.main([*DEVICE, "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    failed = [row["note"] for row in rows if row["part"] in ("bandwidth", "passes")]
    assert failed == ["RuntimeError: out of memory"] * 2
    assert any("tokens_per_second" in row for row in rows)


def test_a_spent_budget_leaves_rows_that_say_so(scripts: Any, tmp_path: Path) -> None:
    scripts.device.main([*DEVICE, "--budget-seconds", "0", "--parts", "passes,engine", "--json", str(tmp_path / "f")])
    rows = json.loads((tmp_path / "f").read_text())["rows"]
    assert {row["part"] for row in rows} == {"passes", "engine"}
    assert all("budget" in row["note"] or "GPU" in row["note"] for row in rows)


def trained_model() -> Any:
    """A stand-in for a trained model, with room for generated problems."""
    from refusion.checkpoint import Checkpoint, add_mask_token
    from refusion.generation import Model
    from tests.engine.tiny import tiny

    tokenizer = tiny_tokenizer()
    transformer = tiny(vocab_size=320, num_tokens=tokenizer.vocab_size, mask_token_id=None, max_positions=4096,
                       eos_token_ids=(0,))
    return Model(add_mask_token(Checkpoint(transformer, tokenizer, "tiny")))


@pytest.mark.parametrize("seconds", [600, 0])
def test_a_model_adds_the_table_of_decoders(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    import refusion

    monkeypatch.setattr(refusion, "load", lambda source, **options: trained_model(), raising=False)
    scripts.device.main(
        ["--model", "tiny", "--limit", "1", "--timed", "1", "--max-tokens", "16", "--parts", "bench",
         "--budget-seconds", str(seconds), "--json", str(tmp_path / "found.json")]
    )
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    if seconds:
        assert [row["name"] for row in rows] == ["refusion", "paper", "autoregressive"]
        assert all(row["problems"] == 1 and row["tps"] > 0 and row["tpf"] > 0 for row in rows)
    else:
        assert [row["part"] for row in rows] == ["bench"] and "cut at the time budget" in rows[0]["note"]


def test_a_card_that_is_too_small_gets_a_smaller_shape(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10e9, 12e9))
    name, why = scripts.device.choose_shape(None, torch.device("cuda"), torch.bfloat16)
    assert name == "qwen3-1.7b" and "qwen3-8b doesn't fit into 10 GB" in why
    assert scripts.device.choose_shape("qwen3-0.6b", torch.device("cuda"), torch.bfloat16) == ("qwen3-0.6b", "")
    assert scripts.device.choose_shape(None, torch.device("cpu"), torch.bfloat16)[0] == "tiny"


def test_a_gpu_that_is_asked_for_and_missing_is_one_clear_line(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        scripts.device.main(["--device", "cuda"])


@pytest.mark.parametrize(("name", "count"), [
    ("qwen3-8b", 8_190_735_360), ("qwen3-4b", 4_022_468_096), ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-0.6b", 596_049_920),
])
def test_shapes_have_the_published_number_of_parameters(scripts: Any, name: str, count: int) -> None:
    assert scripts.passes.parameters(scripts.passes.SHAPES[name]) == count


@pytest.mark.parametrize("count", [1, 6])
def test_a_static_pass_gives_the_logits_of_the_pass(scripts: Any, count: int) -> None:
    passes = scripts.passes
    transformer = passes.random_transformer(passes.SHAPES["tiny"], torch.float32, torch.device("cpu"))
    source = passes.Pass(transformer, passes.filled_cache(transformer, 300, count), count)
    static = passes.StaticPass(source)
    wanted = source()
    assert static.cells == 384 and wanted.shape == (count, 320) and wanted.std() > 0
    for _ in range(2):
        torch.testing.assert_close(static(), wanted, rtol=1e-4, atol=1e-5)


def test_variants_take_turns_and_one_that_fails_is_left_out(scripts: Any) -> None:
    calls: list[str] = []

    def good(name: str) -> Any:
        return lambda: calls.append(name)

    def bad() -> None:
        calls.append("bad")
        if calls.count("bad") == 2:
            raise ValueError("no more")

    clock = scripts.timing.Clock(torch.device("cpu"))
    found = scripts.timing.in_turns(clock, {"a": good("a"), "bad": bad, "b": good("b")}, 4, warm_up=0)
    assert calls[:3] == ["a", "bad", "b"] and calls[3:5] == ["bad", "b"] and calls.count("bad") == 2
    assert len(found["a"].times) == len(found["b"].times) == 4
    assert len(found["bad"].times) == 1 and found["bad"].note == "ValueError: no more"


def test_pass_profile_writes_times_ratios_and_parts(scripts: Any, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    scripts.pass_profile.main(
        [*TINY, "--behind", "5", "--tokens", "1,4", "--repeats", "4", "--profiled", "2", "--json", str(file)]
    )
    found = json.loads(file.read_text())
    times = {(row["tokens"], row["what"]): row for row in found["times"]}
    assert set(times) == {(count, what) for count in (1, 4) for what in scripts.pass_profile.KINDS}
    assert all(is_timed(row) and row["repeats"] == 4 for row in times.values())
    for count in (1, 4):
        assert times[count, "products"]["quartiles"][0] <= times[count, "pass"]["quartiles"][1]
    values = {(row["tokens"], row["ratio"]): row["value"] for row in found["ratios"]}
    assert values[1, "pass / pass(1)"] == 1 and len(values) == 6 and all(value > 0 for value in values.values())
    parts = {row["part"]: row for row in found["parts"]}
    for count in (1, 4):
        column = f"{count} tokens"
        measured = {part: parts[part][column] for part in scripts.pass_profile.PARTS}
        assert all(milliseconds > 0 for milliseconds in measured.values()), measured
        assert parts["sum"][column] == pytest.approx(sum(measured.values()))
        assert parts["plain pass"][column] == times[count, "pass"]["milliseconds"]
        assert all(column in parts[part] for part in ("reading", "engine's python"))


def test_the_profiler_leaves_the_network_as_it_was(scripts: Any) -> None:
    import refusion.model.transformer as network

    passes, rotate = scripts.passes, network.rotate
    transformer = passes.random_transformer(passes.SHAPES["tiny"], torch.float32, torch.device("cpu"))
    subject = passes.Pass(transformer, passes.filled_cache(transformer, 3, 2), 2)
    scripts.pass_profile.breakdown(subject, 1)
    assert network.rotate is rotate
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())


def test_the_readme_names_every_script() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for script in FOLDER.glob("[!_]*.py"):
        assert f"python benchmarks/{script.name}" in text, script.name
