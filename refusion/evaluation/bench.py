"""Several decoders and peers in turns on the same questions and weights: scores, tokens per pass, speed, memory.

The first `timed` questions are answered one at a time, everyone in turn on each, for speed, so that a slow minute
of a shared machine falls on all alike. Then the decoders answer all questions in batches, in turns too, for scores
and tokens per pass; the peers are closed by then. Nothing cold is timed.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from refusion.data.gym import problems
from refusion.decoding.config import DecodeConfig
from refusion.errors import CapacityError, ConfigError, DataError
from refusion.evaluation.figures import BASELINE, Batch, Measured, Sample, figures
from refusion.evaluation.floats import type_name
from refusion.evaluation.memory import PeakMemory
from refusion.evaluation.peers import PEERS, Peer, open_peer
from refusion.evaluation.questions import Question, from_problem, read_questions
from refusion.evaluation.variants import Variant
from refusion.generation import Generation, Model, generate

LIMIT = 50
"""Problems of a task where no limit is given."""
_WARM_TOKENS = 8


@dataclass(frozen=True)
class BenchSettings:
    """What is run.

    task: a generator of reasoning-gym. limit: questions to score, 1 or more; None: LIMIT of a task, all of a file.
    decoders: in table order. decode: settings shared by all rows (its `decoder` is replaced).
    batch_size: rows written together for the scores. timed: questions answered alone for speed; 0 or more.
    seed: of the task's problems. peers: other engines (refusion.evaluation.peers), on the timed questions only.
    variants: further rows, behind the decoders. prompts: a file of questions instead of the task.
    """

    task: str = "gsm_symbolic"
    limit: int | None = None
    decoders: tuple[str, ...] = ("refusion", "paper", BASELINE)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    batch_size: int = 8
    timed: int = 20
    seed: int = 0
    peers: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    prompts: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("batch_size", 1), ("timed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be {least} or more, got {value}")
        if not self.decoders and not self.variants:
            raise ConfigError("name at least one decoder to run")
        if len(set(self.decoders)) < len(self.decoders):
            raise ConfigError(f"a decoder is named twice in {', '.join(self.decoders)}")
        for peer in self.peers:
            if peer not in PEERS:
                raise ConfigError(f"unknown peer '{peer}'; choose one of {', '.join(PEERS)}")
        if self.peers and not self.timed:
            raise ConfigError("peers answer the timed questions only; set timed to 1 or more")
        names = [*self.decoders, *self.peers]
        for variant in self.variants:
            if variant.name in names:
                raise ConfigError(f"there are two rows of the name '{variant.name}'; give the variant another")
            names.append(variant.name)
        _ = self.configs

    @property
    def configs(self) -> dict[str, DecodeConfig]:
        """The settings of each of our own rows."""
        return {
            **{decoder: dataclasses.replace(self.decode, decoder=decoder) for decoder in self.decoders},
            **{variant.name: variant.apply(self.decode) for variant in self.variants},
        }

    @property
    def title(self) -> str:
        """The task, or the name of the file of prompts."""
        return self.task if self.prompts is None else self.prompts.name


Progress = Callable[[str, int, int], None]
"""Called with a phase ("warm-up", "speed", "scores"), runs done and runs in all."""


class BenchInterrupted(KeyboardInterrupt):
    """The run was broken off; `found` is what run_bench gives, over the questions that every row has answered."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__("interrupted: the figures are of what was complete, and no file was written")
        self.found = found


def run_bench(
    model: Model,
    settings: BenchSettings,
    *,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
    samples: list[Sample] | None = None,
) -> dict[str, Any]:
    """Runs every decoder and peer; {"rows": one for each, "settings": what was run}.

    exclude: questions that training has seen. samples: collects every scored answer.

    Raises:
        ConfigError: a decoder or peer can't run on the model, or the task is unknown.
        DataError: the file of prompts can't be used, or the task can't give so many problems that aren't excluded.
        CapacityError: a question and its answer are longer than the model's context.
        BenchInterrupted: Ctrl-C when there was something complete.
    """
    run = _Run(model, settings, _questions(settings, exclude), progress or (lambda phase, done, total: None))
    try:
        run.speed()
        run.scores()
    except KeyboardInterrupt:
        if not (part := run.measured.complete()):
            raise
        raise BenchInterrupted(run.result(part, len(exclude)) | {"interrupted": True}) from None
    if samples is not None:
        samples.extend(s for batches in run.measured.batches.values() for batch in batches for s in batch.samples)
    return run.result(run.measured, len(exclude))


def _questions(settings: BenchSettings, exclude: Sequence[str]) -> list[Question]:
    if settings.prompts is not None:
        return read_questions(settings.prompts, settings.limit, exclude)
    found = problems(settings.task, settings.limit or LIMIT, settings.seed, set(exclude))
    return [from_problem(problem) for problem in found]


@dataclass(frozen=True)
class _Runner:
    """One row's way to answer a question alone. others: bytes that engines of other rows hold meanwhile."""

    decoder: str
    answer: Callable[[int], Generation]
    measures_memory: bool = True
    others: int = 0


class _Run:
    """One bench: its questions, and what has been measured so far."""

    def __init__(self, model: Model, settings: BenchSettings, questions: list[Question], tell: Progress) -> None:
        self.model, self.settings, self.questions, self.tell = model, settings, questions, tell
        self.configs = settings.configs
        self.timed = questions[: settings.timed]
        self.ids = [_fitting(model, question, self.configs) for question in questions]
        self.memory = PeakMemory(model.transformer.device)
        self.measured = Measured({name: [] for name in self.configs}, {})
        self.peers: dict[str, tuple[str, str]] = {}

    def speed(self) -> None:
        """Questions one at a time, every decoder and peer in turn on each."""
        if not self.timed:
            return
        with ExitStack() as stack:
            runners = self._warm(stack)
            self.measured.alone = {name: [] for name in runners}
            done, total = 0, len(self.timed) * len(runners)
            self.tell("speed", done, total)
            for turn, question in enumerate(self.timed):
                for name in _turn(list(runners), turn):
                    runner = runners[name]
                    self.memory.reset()
                    answer = runner.answer(turn)
                    peak = self.memory.peak() if runner.measures_memory else None
                    used = None if peak is None else peak - runner.others
                    self.measured.alone[name].append(Sample(question, name, runner.decoder, answer, used))
                    done += 1
                    self.tell("speed", done, total)

    def scores(self) -> None:
        """All questions in batches, the decoders taking turns on each batch."""
        size = self.settings.batch_size
        done, total = 0, len(self.questions) * len(self.configs)
        self.tell("scores", done, total)
        for config in self.configs.values():
            short = dataclasses.replace(config, max_tokens=min(config.max_tokens, _WARM_TOKENS))
            generate(self.model, [q.prompt for q in self.questions[:size]], short, batch_size=size)
        self.memory.give_back()
        for turn, start in enumerate(range(0, len(self.questions), size)):
            part = self.questions[start : start + size]
            for name in _turn(list(self.configs), turn):
                self.measured.batches[name].append(self._batch(name, part))
                done += len(part)
                self.tell("scores", done, total)

    def _batch(self, name: str, part: list[Question]) -> Batch:
        config = self.configs[name]
        self.memory.reset()
        began = time.perf_counter()
        answers = generate(self.model, [q.prompt for q in part], config, batch_size=self.settings.batch_size)
        seconds = time.perf_counter() - began
        peak = self.memory.peak()
        samples = [Sample(q, name, config.decoder, answer) for q, answer in zip(part, answers, strict=True)]
        return Batch(samples, seconds, peak)

    def _warm(self, stack: ExitStack) -> dict[str, _Runner]:
        """Every row's runner, after one answer that isn't timed; peers are opened, and closed with the stack."""
        total = len(self.configs) + len(self.settings.peers)
        runners: dict[str, _Runner] = {}
        for name, config in self.configs.items():
            self.tell("warm-up", len(runners), total)
            runners[name] = _Runner(config.decoder, partial(self._alone, config))
            runners[name].answer(0)
        held: dict[str, int] = {}
        for name in self.settings.peers:
            self.tell("warm-up", len(runners), total)
            self.memory.give_back()
            before = self.memory.now() or 0
            peer = open_peer(name, self.model, max(map(len, self.ids)) + self.settings.decode.max_tokens)
            stack.callback(peer.close)
            self.peers[name] = peer.weights, self._note(peer)
            seen = peer.uses_torch or self.model.transformer.device.type == "cpu"
            runners[name] = _Runner(name, partial(self._by_peer, peer), seen)
            runners[name].answer(0)
            self.memory.give_back()
            held[name] = max((self.memory.now() or 0) - before, 0)
        ours = sum(t.nbytes for t in chain(self.model.transformer.parameters(), self.model.transformer.buffers()))
        for name, runner in runners.items():
            others = sum(size for other, size in held.items() if other != name) + (ours if name in held else 0)
            runners[name] = dataclasses.replace(runner, others=others)
        return runners

    def _alone(self, config: DecodeConfig, at: int) -> Generation:
        return generate(self.model, [self.questions[at].prompt], config, batch_size=1)[0]

    def _by_peer(self, peer: Peer, at: int) -> Generation:
        return peer.answer(self.ids[at], self.settings.decode)

    def _note(self, peer: Peer) -> str:
        sampled = "greedy, where the decoders sample" if self.settings.decode.temperature > 0 else ""
        return "; ".join(filter(None, (peer.note, sampled)))

    def result(self, measured: Measured, excluded: int) -> dict[str, Any]:
        """What run_bench gives for what was measured."""
        settings, transformer = self.settings, self.model.transformer
        kind = type_name(transformer)
        changes = {variant.name: dict(variant.changes) for variant in settings.variants}
        rows: list[dict[str, Any]] = []
        for name, config in self.configs.items():
            about = {"name": name, "decoder": config.decoder, "changes": changes.get(name, {}),
                     "weights": f"the model's weights in {kind}"}
            rows.append(about | figures(name, measured))
        for name, (weights, note) in self.peers.items():
            about = {"name": name, "decoder": name, "changes": {}, "weights": weights}
            rows.append(about | ({"note": note} if note else {}) | figures(name, measured))
        described = {
            **dataclasses.asdict(settings),
            "prompts": None if settings.prompts is None else str(settings.prompts),
            "limit": len(self.questions),
            "excluded_questions": excluded,
            "model": self.model.checkpoint.source,
            "adapter": self.model.checkpoint.extra.get("adapter"),
            "dtype": kind,
            "device": str(transformer.device),
            "threads": torch.get_num_threads(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
        return {"rows": rows, "settings": described}


def _fitting(model: Model, question: Question, configs: dict[str, DecodeConfig]) -> list[int]:
    """A question's token ids, which fit into the model's context with every row's answer."""
    try:
        ids = model.prompt_ids(question.prompt)
        for config in configs.values():
            model.start(ids, config)
    except (CapacityError, DataError) as error:
        raise type(error)(f"{question.source}: {error}") from None
    return ids


def _turn(names: list[str], turn: int) -> list[str]:
    """The rows, beginning with another one each time."""
    at = turn % len(names)
    return names[at:] + names[:at]
