"""Generated problems with known answers, from reasoning-gym: for training and, apart from those, for evaluation.

The package is imported inside the functions: it is an extra and takes a second.
"""

from __future__ import annotations

import difflib
import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from refusion.data.arithmetic import final_number, number, same_number
from refusion.data.rows import Conversation, Message
from refusion.data.split import question_key
from refusion.data.worked import Unsound, target
from refusion.errors import ConfigError, DataError

CHUNK = 1000
"""Items drawn from one seed of the generator; a constant, so that more items begin with the same ones."""
TRIES_PER_ITEM = 20


@dataclass(frozen=True)
class Problem:
    """A generated question to be answered by a model.

    prompt: the user's turn. answer: the expected final answer. source: `generator:index`.
    """

    prompt: str
    answer: str
    source: str


@dataclass
class GymReport:
    """What a generation cost: distinct items kept, repeated questions, unsound items by reason, seconds."""

    name: str
    kept: int = 0
    repeated: int = 0
    unsound: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def unsound_share(self) -> float:
        """Unsound items as a share of the distinct ones."""
        bad = self.unsound.total()
        return bad / max(1, bad + self.kept)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.unsound.most_common())
        return (
            f"{self.name}: {self.kept} distinct problems in {self.seconds:.1f} s, {self.repeated} repeated and "
            f"{self.unsound.total()} unsound ones left out ({self.unsound_share:.1%}{': ' if reasons else ''}{reasons})"
        )


def generate(
    name: str, size: int, seed: int, options: Mapping[str, Any] | None = None
) -> tuple[list[Conversation], GymReport]:
    """`size` training rows with distinct questions, the same for the same arguments.

    Args:
        name: a generator of reasoning-gym, such as `gsm_symbolic`.
        options: its own settings, passed through (not `size` and `seed`).

    Raises:
        ConfigError: the generator or one of its options is unknown or out of range.
        DataError: reasoning-gym isn't installed, or the generator can't give so many distinct questions.
    """
    if size < 1:
        raise ConfigError(f"{size} problems of {name} were asked for, it should be 1 or more")
    report, started = GymReport(name), time.perf_counter()
    rows: list[Conversation] = []
    for index, entry in _distinct(name, size, f"train/{name}/{seed}", options or {}, report):
        try:
            text = target(name, entry)
        except Unsound as reason:
            report.unsound[str(reason)] += 1
            continue
        messages = (Message("user", entry["question"].strip()), Message("assistant", text))
        rows.append(Conversation(messages, f"{name}:{index}"))
        if len(rows) == size:
            break
    report.kept, report.seconds = len(rows), time.perf_counter() - started
    if len(rows) < size:
        raise DataError(f"{report}; {size} were asked for: lower the size or widen the generator's options")
    return rows, report


def problems(
    name: str, count: int, seed: int, exclude: Collection[str] = (), options: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Distinct questions for evaluation, none of them in `exclude` (texts; case and white space don't matter).

    They come from other seeds than `generate` uses. Unsound ones stay in: scores are to compare with others'.

    Raises:
        ConfigError, DataError: as `generate`.
    """
    report, barred = GymReport(name), {question_key(text) for text in exclude}
    found: list[Problem] = []
    if count < 1:
        return found
    for index, entry in _distinct(name, count + len(barred), f"problems/{name}/{seed}", options or {}, report):
        if question_key(entry["question"]) in barred or not isinstance(entry["answer"], str):
            continue
        found.append(Problem(entry["question"].strip(), entry["answer"].strip(), f"{name}:{index}"))
        if len(found) == count:
            return found
    raise DataError(f"{name} gave {len(found)} problems that aren't excluded, {count} were asked for; ask for fewer")


def is_correct(problem: Problem, text: str) -> bool:
    """Whether a generated text ends in the problem's answer.

    A number is compared by value with the first number behind the last `####`; any other answer as text, white space
    aside, with what follows the last `####`. Without `####` nothing is right.
    """
    _, mark, tail = text.rpartition("####")
    if not mark:
        return False
    expected = number(problem.answer)
    if expected is not None:
        given = final_number(text)
        return given is not None and same_number(given, expected)
    wanted = problem.answer.split()
    return tail.split() == wanted if "\n" in problem.answer else tail.strip().split("\n")[0].split() == wanted


def _distinct(
    name: str, size: int, stream: str, options: Mapping[str, Any], report: GymReport
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Running number and item for every new question, until too many items were drawn for `size`."""
    seen: set[str] = set()
    for number_of_chunk in range(TRIES_PER_ITEM * size // CHUNK + 1):
        digest = hashlib.sha256(f"{stream}/{number_of_chunk}".encode()).digest()
        chunk = _dataset(name, int.from_bytes(digest[:4], "big"), options)
        for at in range(CHUNK):
            entry = chunk[at]
            key = question_key(entry["question"])
            if key in seen:
                report.repeated += 1
                continue
            seen.add(key)
            yield number_of_chunk * CHUNK + at, entry


def _dataset(name: str, seed: int, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError("generated problems need reasoning-gym: pip install 'refusion[train]'") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        raise ConfigError(f"reasoning-gym has no generator '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    known = {item.name for item in fields(DATASETS[name][1])} - {"size", "seed"}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"{name} has no option '{key}'; {hint}")
    try:
        return reasoning_gym.create_dataset(name, size=CHUNK, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} refuses its options: {str(error) or 'a value is out of range'}") from None
