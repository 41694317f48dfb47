"""What a device gives: times of passes against their floor, the engine's throughput, decoders on a trained model.

One run of under ten minutes. Without --model the weights are random, of Qwen3-8B's shape in
bfloat16, or of the largest shape that fits. What doesn't work or doesn't fit into the time is a
row that says so.

    python benchmarks/device.py --json device.json
    python benchmarks/device.py --model FOLDER --json device.json
    python benchmarks/device.py --device cpu --shape tiny --budget-seconds 120
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _engine_rows import BATCHES, DECODERS, engine_row, engine_samples
from _passes import (
    SHAPES,
    Captured,
    Pass,
    Products,
    StaticPass,
    compiled_static_layer,
    compiled_twin,
    filled_cache,
    parameters,
    random_transformer,
    static_layer,
    weight_bytes,
)
from _timing import Budget, Clock, Row, Run, Series, describe, in_turns, reason, show, spread, write

from refusion.model.transformer import Transformer

COUNTS, BEHIND = (1, 8, 32, 128), (512, 4096)
VARIANTS = ("products", "products_graph", "eager", "compiled", "graph", "compiled_static", "compiled_graph")
PARTS = ("bandwidth", "passes", "engine", "bench")
PASS_COLUMNS = (
    "tokens", "behind", "variant", "milliseconds", "quartiles", "repeats", "over_products", "over_weights",
    "over_one", "difference", "setup_seconds",
)
ENGINE_COLUMNS = (
    "engine", "batch", "decoder", "tokens_per_second", "tokens_per_pass", "milliseconds", "quartiles", "repeats",
)
BENCH_COLUMNS = ("name", "problems", "exact_match", "tpf", "tps", "tps_ratio", "tps_ratio_quartiles", "batch_tps")
GRAPH_NEEDS_CUDA = "not here: CUDA graphs need a GPU"


@dataclass
class Bench:
    """One run: what it measures, the time it has, and what it has found."""

    transformer: Transformer
    options: argparse.Namespace
    budget: Budget
    settings: Row
    rows: list[Row] = field(default_factory=list)
    bandwidth: float | None = None
    compiled: Transformer | None = None
    layer: Callable[..., torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    def add(self, rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
        """Keeps rows, prints them and writes the file anew."""
        self.rows += rows
        if columns:
            show(rows, columns)
        write(self.options.json, {"settings": self.settings, "rows": self.rows})

    def compiled_transformer(self) -> Transformer:
        if self.compiled is None:
            self.compiled = compiled_twin(self.transformer)
        return self.compiled

    def compiled_layer(self) -> Callable[..., torch.Tensor]:
        if self.layer is None:
            self.layer = compiled_static_layer()
        return self.layer


def measure_bandwidth(bench: Bench) -> None:
    """Bytes read and written per second by a plain copy."""
    size = 2**26
    if bench.device.type == "cuda":
        size = min(2**31, torch.cuda.mem_get_info(bench.device)[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    times = in_turns(Clock(bench.device), {"copy": lambda: target.copy_(source)}, bench.options.repeats)["copy"].times
    found = spread([2 * size / (ms * 1e6) for ms in times], "gb_per_second")
    bench.bandwidth = found["gb_per_second"]
    read = weight_bytes(bench.transformer)
    floor = read / (found["gb_per_second"] * 1e6)
    bench.add(
        [{"part": "bandwidth", "copied_bytes": size, **found, "weight_bytes": read, "weights_milliseconds": floor}],
        ("part", "gb_per_second", "quartiles", "repeats", "weight_bytes", "weights_milliseconds"),
    )


def measure_passes(bench: Bench, budget: Budget) -> None:
    """Every variant of every pass, in turns."""
    one: dict[tuple[int, str], float] = {}
    costs: dict[str, float] = {}
    for behind in bench.options.behind:
        try:
            cache = filled_cache(bench.transformer, behind, max(bench.options.counts))
        except Exception as error:
            bench.add([{"part": "passes", "behind": behind, "note": reason(error)}], PASS_COLUMNS)
            continue
        for count in bench.options.counts:
            makers = pass_makers(bench, Pass(bench.transformer, cache, count))
            named = {"part": "passes", "tokens": count, "behind": behind}
            rows = [named | row for row in pass_rows(bench, makers, budget, costs)]
            relate(rows, one, bench)
            bench.add(rows, PASS_COLUMNS)


def pass_makers(bench: Bench, source: Pass) -> dict[str, Callable[[], Any]]:
    """What sets each variant of a pass up; calling its result runs the pass."""
    products = Products(source.transformer, source.count)
    statics: dict[str, StaticPass] = {}

    def static(compiled: bool = False) -> StaticPass:
        name = "compiled" if compiled else "plain"
        if name not in statics:
            statics[name] = StaticPass(source, bench.compiled_layer() if compiled else static_layer)
        return statics[name]

    makers: dict[str, Callable[[], Any]] = {
        "products": lambda: products,
        "products_graph": lambda: Captured(products),
        "eager": lambda: source,
        "compiled": lambda: Pass(bench.compiled_transformer(), source.cache, source.count),
        "graph": lambda: Captured(static()),
        "compiled_static": lambda: static(compiled=True),
        "compiled_graph": lambda: Captured(static(compiled=True)),
    }
    return {name: makers[name] for name in VARIANTS if name in bench.options.variants}


def pass_rows(
    bench: Bench, makers: dict[str, Callable[[], Any]], budget: Budget, costs: dict[str, float]
) -> list[Row]:
    """One row per variant: its time, what setting it up took, and how far its logits are from the eager ones.

    costs: longest set-up of each variant so far; one that wouldn't fit any more is skipped.
    """
    rows: dict[str, Row] = {name: {"variant": name} for name in makers}
    runs: dict[str, Run] = {}
    wanted: torch.Tensor | None = None
    for name, make in makers.items():
        if name.endswith("graph") and bench.device.type != "cuda":
            rows[name]["note"] = GRAPH_NEEDS_CUDA
            continue
        if budget.left < costs.get(name, 0.0):
            rows[name]["note"] = "skipped: the time budget is spent"
            continue
        began = time.perf_counter()
        try:
            runs[name] = make()
            logits: Any = runs[name]()
            Clock(bench.device).synchronize()
        except Exception as error:
            runs.pop(name, None)
            rows[name]["note"] = reason(error)
        else:
            if name == "eager":
                wanted = logits.float()
            elif not name.startswith("products") and wanted is not None:
                rows[name]["difference"] = float((logits.float() - wanted).abs().max() / wanted.abs().max())
            rows[name]["setup_seconds"] = time.perf_counter() - began
        costs[name] = max(costs.get(name, 0.0), time.perf_counter() - began)
    series: dict[str, Series] = in_turns(Clock(bench.device), runs, bench.options.repeats, budget)
    return [row | (series[name].row() if name in series else {}) for name, row in rows.items()]


def relate(rows: list[Row], one: dict[tuple[int, str], float], bench: Bench) -> None:
    """Adds to rows of one pass their ratios to its products, to reading the weights, and to one token's pass."""
    timed = [row for row in rows if "milliseconds" in row]
    products = [row["milliseconds"] for row in timed if row["variant"].startswith("products")]
    for row in timed:
        key, milliseconds = (row["behind"], row["variant"]), row["milliseconds"]
        if row["tokens"] == 1:
            one[key] = milliseconds
        if products:
            row["over_products"] = milliseconds / min(products)
        if bench.bandwidth:
            row["over_weights"] = milliseconds * bench.bandwidth * 1e6 / weight_bytes(bench.transformer)
        if key in one:
            row["over_one"] = milliseconds / one[key]


def measure_engine(bench: Bench, budget: Budget) -> None:
    """Steps of the engine for several batches and decoders, eager and with the package's compiled step."""
    for name in ("eager", "compiled"):
        if name not in bench.options.variants:
            continue
        for batch in bench.options.batches:
            found: dict[str, list[tuple[float, int]]] = {d: [] for d in DECODERS}
            notes: dict[str, str] = {}
            for _ in range(2):  # the decoders take turns
                for decoder in DECODERS:
                    if decoder in notes:
                        continue
                    if budget.left <= 0:
                        notes[decoder] = "skipped or cut: the time budget is spent"
                        continue
                    steps = -(-bench.options.repeats // 2)
                    try:
                        transformer = bench.transformer if name == "eager" else bench.compiled_transformer()
                        found[decoder] += engine_samples(transformer, DECODERS[decoder], batch, steps, budget)
                    except Exception as error:
                        notes[decoder] = reason(error)
            rows = [
                {"part": "engine", "engine": name, "batch": batch, "decoder": decoder}
                | engine_row(found[decoder], batch, bench.options.repeats)
                | ({"note": notes[decoder]} if decoder in notes else {})
                for decoder in DECODERS
            ]
            bench.add(rows, ENGINE_COLUMNS)


def measure_bench(bench: Bench, model: Any, budget: Budget) -> None:
    """Decoders in turns on generated problems; where the time ends first, the figures of what is complete."""
    from refusion.decoding.config import DECODERS as ALL
    from refusion.decoding.config import DecodeConfig
    from refusion.evaluation.bench import BenchSettings, run_bench

    def progress(phase: str, done: int, total: int) -> None:
        if budget.left <= 0:
            raise KeyboardInterrupt  # the run answers it with what is complete

    decoders = ALL if model.is_refusion else ("autoregressive",)
    options = bench.options
    decode = DecodeConfig(max_tokens=options.max_tokens)
    settings = BenchSettings(limit=options.limit, timed=options.timed, decoders=decoders, decode=decode)
    try:
        found, note = run_bench(model, settings, progress=progress), {}
    except KeyboardInterrupt as stop:
        if budget.left > 0:
            raise
        found = getattr(stop, "found", {"rows": [{}]})
        note = {"note": f"cut at the time budget, {settings.limit} problems were asked for"}
    bench.add([{"part": "bench", **row, **note} for row in found["rows"]], BENCH_COLUMNS)


def choose_shape(asked: str | None, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The shape to run, and a line on why it isn't the one that was asked for.

    A quarter more than the weights, and 4 GB, are kept for caches, logits and compiled code.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif asked is None:
        return "tiny", "no GPU: random weights of the shape tiny, a dry run whose times mean nothing"
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = list(SHAPES)
    wanted = asked or names[0]
    for name in names[names.index(wanted) :]:
        need = parameters(SHAPES[name]) * dtype.itemsize * 1.25 + (4e9 if name != "tiny" else 0)
        if need <= free:
            why = f"{wanted} doesn't fit into {free / 1e9:.0f} GB: falls back to {name}" if name != wanted else ""
            return name, why
    return names[-1], f"{wanted} doesn't fit into {free / 1e9:.0f} GB: falls back to {names[-1]}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def words(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub id; adds the table of decoders")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape; qwen3-8b on a GPU")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--budget-seconds", type=float, default=570.0, help="time for all, loading included")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--counts", type=numbers, default=COUNTS, help="tokens of a pass, commas between")
    parser.add_argument("--behind", type=numbers, default=BEHIND, help="cached cells, commas between")
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="rows of the engine, commas between")
    parser.add_argument("--variants", type=words, default=VARIANTS, help=f"of {','.join(VARIANTS)}")
    parser.add_argument("--parts", type=words, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--limit", type=int, default=64, help="problems of the table of decoders")
    parser.add_argument("--timed", type=int, default=8, help="of them answered alone too")
    parser.add_argument("--max-tokens", type=int, default=256, help="of their answers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    for name, known in (("variants", VARIANTS), ("parts", PARTS)):
        for word in getattr(options, name):
            if word not in known:
                parser.error(f"--{name}: unknown '{word}'; choose of {', '.join(known)}")
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    budget = Budget(options.budget_seconds)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if options.device == "auto" else options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"--device {device}: torch finds no GPU; try --device cpu --shape tiny, a dry run")
        torch.cuda.set_device(device)
    model: Any = None
    if options.model:
        import refusion

        model = refusion.load(options.model, device=str(device), dtype=options.dtype)
        transformer, shape = model.transformer, options.model
    else:
        dtype = getattr(torch, options.dtype)
        shape, why = choose_shape(options.shape, device, dtype)
        print(why or f"random weights of the shape {shape}", flush=True)
        transformer = random_transformer(SHAPES[shape], dtype, device)
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings = {**describe(transformer), "model": shape, "random_weights": model is None, "options": asked}
    bench = Bench(transformer, options, budget, settings)
    parts: dict[str, Callable[[], None]] = {
        "bandwidth": lambda: measure_bandwidth(bench),
        "passes": lambda: measure_passes(bench, budget.share(0.5 if model else 0.65)),
        "engine": lambda: measure_engine(bench, budget.share(0.5 if model else 1.0)),
    }
    if model is not None:
        parts["bench"] = lambda: measure_bench(bench, model, budget)
    for name, run in parts.items():
        if name not in options.parts:
            continue
        print(f"\n{name} ({budget.left:.0f} s left)", flush=True)
        try:
            run()
        except Exception as error:
            bench.add([{"part": name, "note": reason(error)}], ("part",))
    print(f"\ndone, {budget.left:.0f} of {options.budget_seconds:.0f} s left")


if __name__ == "__main__":
    main()
