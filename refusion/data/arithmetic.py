"""Numbers and equations inside written solutions: reading them, comparing them, finding false ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_NUMBER = r"[$€£¥]?\d[\d,]*(?:\.\d+)?"
_EQUATION = re.compile(
    rf"(?<![\w.,/%*+\-=×÷(])(?<![*+\-/x×÷=] )({_NUMBER}(?:\s*[*+\-/x×÷]\s*{_NUMBER})+)"
    rf"\s*=\s*[$€£¥]?(-?\d[\d,]*(?:\.\d+)?)(?!\d|[.,]\d|\s*[*/×÷+:]|\s*x\s|\s*-\s*\d)(%?)"
)
_SIGNS = str.maketrans({"x": "*", "×": "*", ",": None, "$": None, "€": None, "£": None, "¥": None, " ": None})
_FINAL = re.compile(r"####[ \t]*(.*)")
_FIRST_NUMBER = re.compile(r"[-+]?[$€£¥]?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d/])")
TOLERANCE = Fraction(6, 1000)
"""Largest difference taken for rounding: half a cent and a little."""


def number(text: str) -> Decimal | None:
    """The value of a text that is one number; commas, a currency sign and a percent sign may stand with it."""
    cleaned = re.sub(r"[,$€£¥%]", "", text).strip().rstrip(".")
    if not re.fullmatch(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", cleaned):
        return None
    try:
        return Decimal(cleaned)
    except InvalidOperation:
        return None


def final_text(text: str) -> str | None:
    """What stands on the line of the last `####`, or None without one."""
    found = _FINAL.findall(text)
    return found[-1].strip() if found else None


def final_number(text: str) -> Decimal | None:
    """The first number behind the last `####`, units and currency ignored; None when there is none."""
    line = final_text(text)
    match = _FIRST_NUMBER.search(line) if line else None
    return number(match[0]) if match else None


def same_number(left: Decimal, right: Decimal) -> bool:
    """Equality up to a millionth of the larger one."""
    return abs(left - right) <= Decimal("1e-6") * max(abs(left), abs(right), Decimal(1))


def false_equation(text: str) -> str | None:
    """The first plain equation in a text whose sides differ by more than rounding, such as `0.88*40 = 35`.

    Only chains of numbers and + - * / on the left and one number on the right are judged; brackets are not read.
    """
    for match in _EQUATION.finditer(text):
        claimed = Fraction(match[2].replace(",", "")) / (100 if match[3] else 1)
        if all(abs(value - claimed) > TOLERANCE for value in _readings(match[1])):
            return match[0]
    return None


def _readings(expression: str) -> Iterator[Fraction]:
    """An expression's possible values: `12÷2/5` may mean 12/(2/5), as fractions are written."""
    plain = expression.translate(_SIGNS)
    try:
        yield _evaluate(plain.replace("÷", "/"))
        if "÷" in plain:
            first, *rest = (_evaluate(part) for part in plain.split("÷"))
            for value in rest:
                first /= value
            yield first
    except ZeroDivisionError:
        return


def _evaluate(plain: str) -> Fraction:
    """Numbers joined by + - * / , the last two first."""
    tokens = re.findall(r"\d+(?:\.\d+)?|[*/+-]", plain)
    total, term = Fraction(0), Fraction(tokens[0])
    for sign, value in zip(tokens[1::2], map(Fraction, tokens[2::2]), strict=True):
        if sign == "*":
            term *= value
        elif sign == "/":
            term /= value
        else:
            total, term = total + term, value if sign == "+" else -value
    return total + term
