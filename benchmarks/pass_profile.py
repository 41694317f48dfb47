"""What a pass costs by its number of tokens: against its matrix products, and part by part.

For every number of tokens behind the same cached cells, in turns: the pass with its head, the
pass without it, its matrix products alone, and the engine's step with and without reading. Then
the profiler says where the time of a pass goes.

    python benchmarks/pass_profile.py --json pass_profile.json
    python benchmarks/pass_profile.py --model FOLDER --dtype float32 --tokens 1,32
    python benchmarks/pass_profile.py --shape tiny --dtype float32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from _breakdown import PARTS, breakdown
from _passes import SHAPES, Pass, Products, filled_cache, random_tokens, random_transformer, weight_bytes
from _timing import Clock, Row, Run, Series, describe, in_turns, reason, show, spread, write

from refusion.decoding.contract import Answer, Ask, Step
from refusion.engine import Engine
from refusion.model.transformer import Transformer

TOKENS, BEHIND = (1, 8, 16, 32, 64, 128), 256
FLOATING = ("bfloat16", "float32", "float16")
KINDS = ("pass", "step", "products", "engine", "engine, nothing read")
COLUMNS = ("tokens", "what", "milliseconds", "quartiles", "repeats")
RATIO_COLUMNS = ("tokens", "ratio", "value", "quartiles", "repeats")


def engine_step(transformer: Transformer, behind: int, count: int, asked: int) -> Run:
    """A step of the engine with one row: `count` tokens behind `behind` committed cells, none of them kept.

    asked: tokens that are read, from the first on.
    """
    prompt = random_tokens(transformer.config, behind)
    fed = random_tokens(transformer.config, count, seed=1)
    step = Step(fed, range(behind, behind + count), [Ask(cell) for cell in range(asked)])
    served = 0

    def algorithm(row: Any) -> Iterator[Any]:
        nonlocal served
        yield Step(prompt, range(behind), kind="prompt")
        row.commit(range(behind))
        for again in repeat(step):
            served += 1
            yield again
        return Answer()

    engine = Engine(transformer, rows=1)
    engine.admit(algorithm, cells=behind + count)  # type: ignore[arg-type]
    while not served:
        engine.step()
    return engine.step


def measure(transformer: Transformer, options: argparse.Namespace) -> dict[tuple[int, str], Series]:
    """Times of every kind for every number of tokens, all in turns."""
    cache = filled_cache(transformer, options.behind, max(options.tokens))
    runs: dict[tuple[int, str], Run] = {}
    failed: dict[tuple[int, str], Series] = {}
    for count in options.tokens:
        asked = count if options.asked is None else min(options.asked, count)
        whole = Pass(transformer, cache, count, asked)
        runs[count, "pass"] = whole
        runs[count, "step"] = whole.step
        runs[count, "products"] = Products(transformer, count, asked)
        for kind, read in (("engine", asked), ("engine, nothing read", 0)):
            try:
                runs[count, kind] = engine_step(transformer, options.behind, count, read)
            except Exception as error:
                failed[count, kind] = Series(note=reason(error))
    named: dict[str, Run] = {f"{count} {kind}": run for (count, kind), run in runs.items()}
    # the wall clock: what the interpreter takes is part of the question
    found = in_turns(Clock(transformer.device, wall=True), named, options.repeats)
    return failed | {key: found[f"{key[0]} {key[1]}"] for key in runs}


def ratios(series: dict[tuple[int, str], Series], tokens: Sequence[int]) -> list[Row]:
    """Ratios and differences round by round, so that a slow minute falls on both sides alike."""
    def pairs(left: tuple[int, str], right: tuple[int, str], of: Callable[[float, float], float]) -> list[float]:
        empty = Series()
        return [of(a, b) for a, b in zip(series.get(left, empty).times, series.get(right, empty).times, strict=False)]

    def over(a: float, b: float) -> float:
        return a / b

    rows: list[Row] = []
    for count in tokens:
        named = {
            f"pass / pass({tokens[0]})": pairs((count, "pass"), (tokens[0], "pass"), over),
            "pass / products": pairs((count, "pass"), (count, "products"), over),
            "engine / pass": pairs((count, "engine"), (count, "pass"), over),
        }
        rows += [{"tokens": count, "ratio": name, **spread(of, "value")} for name, of in named.items() if of]
    return rows


def engine_parts(series: dict[tuple[int, str], Series], count: int) -> Row:
    """Milliseconds that the engine adds to a pass: what its step takes without reading, and the reading.

    Differences of times from the same rounds; on a busy machine they can come out below 0.
    """
    empty = Series()
    whole, step, engine, unread = (
        series.get((count, kind), empty).times for kind in ("pass", "step", "engine", "engine, nothing read")
    )
    found: Row = {}
    packing = [a - b for a, b in zip(unread, step, strict=False)]
    reading = [(e - u) - (w - s) for e, u, w, s in zip(engine, unread, whole, step, strict=False)]
    if packing and reading:
        found = {"reading": spread(reading)["milliseconds"], "engine's python": spread(packing)["milliseconds"]}
    return found


def parts(transformer: Transformer, options: argparse.Namespace, series: dict[tuple[int, str], Series]) -> list[Row]:
    """One row per part of a pass and one per addition of the engine, a column per number of tokens."""
    cache = filled_cache(transformer, options.behind, max(options.tokens))
    table: dict[str, Row] = {}
    for count in options.tokens:
        column = f"{count} tokens"
        try:
            found = breakdown(Pass(transformer, cache, count, options.asked), options.profiled)
        except Exception as error:
            found, note = {}, reason(error)
            table.setdefault("profiler", {"part": "profiler"})["note"] = note
        for part in PARTS:
            if part in found:
                table.setdefault(part, {"part": part})[column] = found[part]
        if found:
            table.setdefault("sum", {"part": "sum"})[column] = sum(found.values())
        if plain := series[count, "pass"].row().get("milliseconds"):
            table.setdefault("plain pass", {"part": "plain pass"})[column] = plain
        for part, milliseconds in engine_parts(series, count).items():
            table.setdefault(part, {"part": part})[column] = milliseconds
    order = (*PARTS, "sum", "plain pass", "reading", "engine's python", "profiler")
    return sorted(table.values(), key=lambda row: order.index(row["part"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="folder, GGUF file or hub id")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, auto")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float32, float16; of a model also int8 and auto")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="of a pass, commas between")
    parser.add_argument("--behind", type=int, default=BEHIND, help="cached cells")
    parser.add_argument("--asked", type=int, help="tokens that go through the head, at most; all by default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profiled", type=int, default=5, help="passes under the profiler")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    for name in ("repeats", "profiled", "behind", "asked"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.shape and options.dtype not in FLOATING:
        parser.error(f"--dtype of random weights must be one of {', '.join(FLOATING)}, got {options.dtype}")
    if min(options.tokens) < 1:
        parser.error("--tokens must be 1 or more each")
    return options


def open_transformer(options: argparse.Namespace) -> Transformer:
    if options.shape is None:
        import refusion

        return refusion.load(options.model, device=options.device, dtype=options.dtype).transformer
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if options.device == "auto" else options.device)
    return random_transformer(SHAPES[options.shape], getattr(torch, options.dtype), device)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    transformer = open_transformer(options)
    settings = {
        **describe(transformer), "model": options.shape or options.model, "random_weights": options.shape is not None,
        "weight_bytes": weight_bytes(transformer), "behind": options.behind, "asked": options.asked,
        "repeats": options.repeats, "profiled": options.profiled,
    }
    series = measure(transformer, options)
    times: list[Row] = [
        {"tokens": count, "what": kind, **series[count, kind].row()} for count in options.tokens for kind in KINDS
    ]
    found: Row = {"settings": settings, "times": times, "ratios": ratios(series, options.tokens)}
    write(options.json, found)
    show(times, COLUMNS)
    print()
    show(found["ratios"], RATIO_COLUMNS)
    found["parts"] = parts(transformer, options, series)
    write(options.json, found)
    print("\nmilliseconds by part, under the profiler up to the sum, without it below")
    show(found["parts"], ("part", *(f"{count} tokens" for count in options.tokens)))


if __name__ == "__main__":
    main()
