"""Several decoders in turns on the same problems and weights: scores, tokens per pass, speed.

All problems are answered in batches for scores and tokens per pass; the first `timed` of them
are also answered one at a time, every decoder in turn on each problem, for speed, so that a
slow minute of a shared machine falls on all alike. Nothing cold is timed.
"""

from __future__ import annotations

import dataclasses
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from refusion.data.gym import Problem, is_correct, problems
from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError
from refusion.evaluation.peers import PEERS, open_peer
from refusion.generation import Generation, Model, generate

BASELINE = "autoregressive"


@dataclass(frozen=True)
class BenchSettings:
    """What is run.

    task: a generator of reasoning-gym. limit: problems to score, 1 or more. decoders: in table order.
    decode: settings shared by all decoders (its `decoder` is replaced).
    batch_size: rows written together for the scores. timed: problems answered alone for speed; 0 or more.
    seed: of the problems. peers: other engines (refusion.evaluation.peers), on the timed problems only.
    """

    task: str = "gsm_symbolic"
    limit: int = 50
    decoders: tuple[str, ...] = ("refusion", "paper", BASELINE)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    batch_size: int = 8
    timed: int = 20
    seed: int = 0
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("batch_size", 1), ("timed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if not self.decoders:
            raise ConfigError("name at least one decoder to run")
        if len(set(self.decoders)) < len(self.decoders):
            raise ConfigError(f"a decoder is named twice in {', '.join(self.decoders)}")
        for decoder in self.decoders:
            dataclasses.replace(self.decode, decoder=decoder)
        for peer in self.peers:
            if peer not in PEERS:
                raise ConfigError(f"unknown peer '{peer}'; choose one of {', '.join(PEERS)}")
        if self.peers and not self.timed:
            raise ConfigError("peers answer the timed problems only; set timed to 1 or more")


@dataclass
class Sample:
    """One problem answered by one decoder: its text, the verdict and what it cost."""

    problem: Problem
    decoder: str
    generation: Generation
    correct: bool

    def to_dict(self) -> dict[str, Any]:
        return {"decoder": self.decoder, "prompt": self.problem.prompt, "answer": self.problem.answer,
                "correct": self.correct, "source": self.problem.source, **self.generation.to_dict()}


Runner = Callable[[str], Generation]
"""Answers one prompt."""

Progress = Callable[[str, int, int], None]
"""Called with a phase ("warm-up", "scores", "speed"), runs done and runs in all."""


def run_bench(
    model: Model,
    settings: BenchSettings,
    *,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
    samples: list[Sample] | None = None,
) -> dict[str, Any]:
    """Runs every decoder on every problem; {"rows": one per decoder, "settings": what was run}.

    exclude: questions that training has seen. samples: collects every scored answer.

    Raises:
        ConfigError: a decoder can't run on the model, or the task is unknown.
        DataError: the task can't give so many problems that aren't excluded.
    """
    tell = progress or (lambda phase, done, total: None)
    chosen = problems(settings.task, settings.limit, settings.seed, set(exclude))
    configs = {d: dataclasses.replace(settings.decode, decoder=d) for d in settings.decoders}
    runners: dict[str, Runner] = {d: partial(_answer, model, config) for d, config in configs.items()}
    for name in settings.peers:
        peer = open_peer(name, model)
        runners[name] = partial(peer.answer, max_tokens=settings.decode.max_tokens)
    for number, run in enumerate(runners.values()):
        tell("warm-up", number, len(runners))
        run(chosen[0].prompt)
    scored, walls = _scores(model, settings, configs, chosen, tell)
    alone = _speeds(runners, chosen[: settings.timed], tell)
    if samples is not None:
        samples.extend(sample for found in scored.values() for sample in found)
    rows = [_row(d, scored[d], walls[d]) | _speed(d, alone) for d in settings.decoders]
    rows += [_row(p, alone[p], sum(s.generation.seconds for s in alone[p])) | _speed(p, alone) for p in settings.peers]
    return {"rows": rows, "settings": _describe(model, settings, len(exclude))}


def _answer(model: Model, config: DecodeConfig, prompt: str) -> Generation:
    return generate(model, prompt, config)[0]


def _scores(
    model: Model, settings: BenchSettings, configs: dict[str, DecodeConfig], chosen: list[Problem], tell: Progress
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """All problems in batches, the decoders taking turns on each batch; wall seconds by decoder."""
    scored: dict[str, list[Sample]] = {d: [] for d in configs}
    walls = dict.fromkeys(configs, 0.0)
    done, total = 0, len(chosen) * len(configs)
    for turn, start in enumerate(range(0, len(chosen), settings.batch_size)):
        part = chosen[start : start + settings.batch_size]
        for decoder in _turn(list(configs), turn):
            began = time.perf_counter()
            answers = generate(model, [p.prompt for p in part], configs[decoder], batch_size=settings.batch_size)
            walls[decoder] += time.perf_counter() - began
            for problem, answer in zip(part, answers, strict=True):
                scored[decoder].append(Sample(problem, decoder, answer, is_correct(problem, answer.text)))
            done += len(part)
            tell("scores", done, total)
    return scored, walls


def _speeds(runners: dict[str, Runner], timed: list[Problem], tell: Progress) -> dict[str, list[Sample]]:
    """Problems one at a time, every decoder and peer in turn on each."""
    alone: dict[str, list[Sample]] = {name: [] for name in runners}
    for turn, problem in enumerate(timed):
        for name in _turn(list(runners), turn):
            answer = runners[name](problem.prompt)
            alone[name].append(Sample(problem, name, answer, is_correct(problem, answer.text)))
            tell("speed", sum(map(len, alone.values())), len(timed) * len(runners))
    return alone


def _turn(decoders: list[str], turn: int) -> list[str]:
    """The decoders, beginning with another one each time."""
    at = turn % len(decoders)
    return decoders[at:] + decoders[:at]


def _row(name: str, scored: list[Sample], wall: float) -> dict[str, Any]:
    """Score and cost over all of a decoder's answers: sums, not means of means."""
    answers = [s.generation for s in scored]
    tokens, forwards = sum(g.tokens for g in answers), sum(g.forwards for g in answers)
    return {
        "decoder": name,
        "problems": len(scored),
        "exact_match": sum(s.correct for s in scored) / len(scored),
        "tokens": tokens,
        "forwards": forwards,
        "tpf": tokens / forwards if forwards else 0.0,
        "batch_tps": tokens / wall,
        "at_length_limit": sum(g.finish_reason == "length" for g in answers),
        "empty": sum(not g.text.strip() for g in answers),
        "peak_memory_mb": _peak_memory_mb(),
    }


def _speed(name: str, alone: dict[str, list[Sample]]) -> dict[str, Any]:
    """Speed of the answers written alone, and relative to left-to-right on the same problems."""
    mine = [s.generation for s in alone[name]]
    if not mine:
        return {}
    speeds = [g.tps for g in mine]
    found: dict[str, Any] = {
        "tps": statistics.median(speeds),
        "tps_quartiles": _quartiles(speeds),
        "first_token_seconds": statistics.median(g.first_token_seconds for g in mine),
        "timed": len(mine),
    }
    base = [s.generation for s in alone.get(BASELINE, [])]
    ratios = [a.tps / b.tps for a, b in zip(mine, base, strict=False) if b.tps > 0]
    if ratios:
        found |= {"tps_ratio": statistics.median(ratios), "tps_ratio_quartiles": _quartiles(ratios)}
    return found


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _peak_memory_mb() -> float:
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _describe(model: Model, settings: BenchSettings, excluded: int) -> dict[str, Any]:
    transformer = model.transformer
    return {
        **dataclasses.asdict(settings),
        "excluded_questions": excluded,
        "model": model.checkpoint.source,
        "dtype": str(transformer.dtype).removeprefix("torch."),
        "device": str(transformer.device),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
