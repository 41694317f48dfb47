"""Worked solutions of generated problems: which metadata hold one, how it is cleaned and which are unsound.

One table, WORKED, from a generator's name to the function that writes a solution, without the final answer's line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from refusion.data.arithmetic import false_equation, final_number, number, same_number

Entry = Mapping[str, Any]
"""An item as reasoning-gym gives it: question, answer, metadata."""


class Unsound(Exception):
    """A generated item's worked text can't be learnt from; the message is a reason to count by."""


def gsm_symbolic(entry: Entry) -> str:
    """The solution in metadata["answer_cot"], whose last line is `#### N`.

    Cleaned: `36.0` becomes `36`, `48=48` becomes `48`, blank lines and indents go.

    Raises:
        Unsound: braces left from a template, more than two decimals, a final number that differs from the answer,
            or an equation that isn't true (the generator cuts where it should round: `0.88*40 = 35`).
    """
    text, answer = str(entry["metadata"]["answer_cot"]), number(str(entry["answer"]))
    written = final_number(text)
    if answer is None or written is None or not same_number(written, answer):
        raise Unsound("final number differs from the answer")
    if re.search(r"[{}]", text + entry["question"]):
        raise Unsound("unfilled braces")
    if re.search(r"\d\.\d{3,}|\d[eE][-+]\d", text + entry["question"]):
        raise Unsound("more than two decimals")
    body = text[: text.rindex("####")]
    body = re.sub(r"(\d)\.0(?!\d)", r"\1", body)
    body = re.sub(r"(?<![*+\-/x×] )(?<![\w.*+\-/×])(\d+(?:\.\d+)?)=\1(?= [a-z])", r"\1", body)
    if false_equation(body):
        raise Unsound("false equation")
    return "\n".join(line.strip() for line in body.splitlines() if line.strip())


def chain_sum(entry: Entry) -> str:
    """Sums from left to right, one a line: `12 + 5 = 17`."""
    parts = str(entry["metadata"]["expression"]).split()
    total, lines = int(parts[0]), []
    for sign, term in zip(parts[1::2], map(int, parts[2::2]), strict=True):
        result = total + term if sign == "+" else total - term
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join(lines)


def prime_factorization(entry: Entry) -> str:
    """One division a line, smallest factor first: `84 / 2 = 42`."""
    rest, lines = int(entry["metadata"]["number"]), []
    for factor in entry["metadata"]["factors"][:-1]:
        lines.append(f"{rest} / {factor} = {rest // factor}")
        rest //= factor
    return "\n".join([*lines, f"{rest} is prime."])


def leg_counting(entry: Entry) -> str:
    """One animal a line, then the sum."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    animals = entry["metadata"]["animals"]
    lines = [f"{count} {name} x {ANIMALS[name]} legs = {count * ANIMALS[name]}" for name, count in animals.items()]
    total = sum(count * ANIMALS[name] for name, count in animals.items())
    return "\n".join([*lines, " + ".join(str(n * ANIMALS[name]) for name, n in animals.items()) + f" = {total}"])


def string_manipulation(entry: Entry) -> str:
    """The states that the rules lead through, one a line."""
    return "\n".join(str(state) for state in entry["metadata"]["states"])


WORKED: dict[str, Callable[[Entry], str]] = {
    "gsm_symbolic": gsm_symbolic,
    "chain_sum": chain_sum,
    "prime_factorization": prime_factorization,
    "leg_counting": leg_counting,
    "string_manipulation": string_manipulation,
}


def target(name: str, entry: Entry) -> str:
    """The text to learn: the worked solution where one is known, then `#### answer` (or the answer's lines behind it).

    Raises:
        Unsound: the item has no single written answer, or its worked text is inconsistent.
    """
    answer = entry["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise Unsound("no written answer")
    last = f"####\n{answer}" if "\n" in answer.strip() else f"#### {answer.strip()}"
    worked = WORKED[name](entry) if name in WORKED else ""
    return f"{worked}\n{last}" if worked else last
