"""Generated problems: the same every time, distinct, sound, and scored by their final number."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.data.arithmetic import false_equation, final_number, number
from refusion.data.gym import Problem, generate, is_correct, problems
from refusion.data.split import question_key
from refusion.data.worked import WORKED, Unsound, gsm_symbolic, prime_factorization, target
from refusion.errors import ConfigError, DataError

pytest.importorskip("reasoning_gym")


def item(cot: str, answer: str, question: str = "How many?") -> dict:
    return {"question": question, "answer": answer, "metadata": {"answer_cot": cot}}


def test_generation_depends_on_its_arguments_only() -> None:
    first, _ = generate("gsm_symbolic", 60, 5)
    again, _ = generate("gsm_symbolic", 60, 5)
    longer, _ = generate("gsm_symbolic", 80, 5)
    other, _ = generate("gsm_symbolic", 60, 6)
    assert first == again == longer[:60]
    assert first != other
    assert first[0].origin.startswith("gsm_symbolic:")


def test_questions_are_distinct_and_targets_end_in_the_scorers_answer() -> None:
    rows, report = generate("gsm_symbolic", 1500, 1)
    assert len({question_key(row.prompt[0].content) for row in rows}) == 1500
    for row in rows:
        last = row.answer.splitlines()[-1]
        assert last.startswith("#### ") and number(last[5:]) is not None
        assert row.answer.count("####") == 1
        assert "{" not in row.answer and "\n\n" not in row.answer and not false_equation(row.answer)
    assert report.kept == 1500
    assert 0.01 < report.unsound_share < 0.1
    assert str(report).startswith("gsm_symbolic: 1500 distinct problems in ")


@pytest.mark.parametrize("name", sorted(WORKED))
def test_worked_generators_give_targets_that_score(name: str) -> None:
    for index, (row, held) in enumerate(zip(generate(name, 30, 1)[0], problems(name, 30, 1), strict=True)):
        answer = row.answer.rsplit("#### ", 1)[1]
        assert is_correct(Problem(row.prompt[0].content, answer, "x"), row.answer), index
        assert held.answer and is_correct(held, f"so\n#### {held.answer}")


def test_worked_steps_are_right() -> None:
    for row in generate("chain_sum", 30, 1)[0]:
        *steps, last = row.answer.splitlines()
        assert last == f"#### {steps[-1].split(' = ')[1]}"
    entry = {"question": "?", "answer": "2 × 2 × 21", "metadata": {"number": 84, "factors": [2, 2, 3, 7]}}
    assert prime_factorization(entry).splitlines() == ["84 / 2 = 42", "42 / 2 = 21", "21 / 3 = 7", "7 is prime."]


def test_answers_without_a_worked_text() -> None:
    row = generate("spell_backward", 3, 1)[0][0]
    assert row.answer.startswith("#### ") and "\n" not in row.answer
    grid = generate("rotate_matrix", 3, 1)[0][0]
    assert grid.answer.startswith("####\n")
    held = problems("rotate_matrix", 1, 1)[0]
    assert is_correct(held, f"turned:\n####\n{held.answer}")
    assert not is_correct(held, f"####\n{held.answer}\n1 2")


def test_options_pass_through() -> None:
    rows, _ = generate("chain_sum", 5, 1, {"min_terms": 2, "max_terms": 2})
    assert all(len(row.answer.splitlines()) == 2 for row in rows)


def test_held_out_problems_avoid_the_excluded() -> None:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    every = {row.prompt[0].content for row in generate("chain_sum", 150, 1, options)[0]}
    found = problems("chain_sum", 40, 1, {text.upper() + " " for text in every}, options)
    assert len({problem.prompt for problem in found}) == 40
    assert not every & {problem.prompt for problem in found}
    assert found == problems("chain_sum", 40, 1, every, options)
    assert problems("chain_sum", 0, 1) == []
    assert problems("gsm_symbolic", 20, 1) != problems("gsm_symbolic", 20, 2)


def test_too_few_distinct_questions_is_an_error() -> None:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    with pytest.raises(DataError, match=r"200 distinct problems.* 300 were asked for: lower the size or widen"):
        generate("chain_sum", 300, 1, options)
    with pytest.raises(DataError, match="chain_sum gave 200 problems that aren't excluded, 300 were asked for"):
        problems("chain_sum", 300, 1, (), options)
    with pytest.raises(DataError, match="no written answer"):
        generate("graph_color", 1, 1)


@pytest.mark.parametrize(
    "name, size, options, reason",
    [
        ("gsm_symbolc", 1, {}, "reasoning-gym has no generator 'gsm_symbolc'; did you mean 'gsm_symbolic'"),
        ("?", 1, {}, r"reasoning-gym has no generator '\?'$"),
        ("chain_sum", 1, {"min_term": 1}, "chain_sum has no option 'min_term'; did you mean 'min_terms'"),
        ("gsm_symbolic", 1, {"size": 1}, "gsm_symbolic has no option 'size'; it has difficulty"),
        ("gsm_symbolic", 1, {"difficulty": 3.0}, "gsm_symbolic refuses its options: a value is out of range"),
        ("chain_sum", 1, {"min_terms": 0}, "chain_sum refuses its options: min_terms must be positive"),
        ("chain_sum", 1, {"min_terms": "x"}, "chain_sum refuses its options: "),
        ("chain_sum", 0, {}, "0 problems of chain_sum were asked for, it should be 1 or more"),
    ],
)
def test_wrong_settings(name: str, size: int, options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        generate(name, size, 1, options)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="pip install 'refusion\\[train\\]'"):
        generate("gsm_symbolic", 1, 1)


def test_the_package_is_imported_late() -> None:
    code = "import sys, refusion.data.gym, refusion.data.sources; sys.exit('reasoning_gym' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "entry, reason",
    [
        (item("2 + 2 = 4\n#### 5", "4"), "final number differs from the answer"),
        (item("2 + 2 = 4", "4"), "final number differs from the answer"),
        (item("a\n#### x", "x"), "final number differs from the answer"),
        (item("{n} + 2 = 4\n#### 4", "4"), "unfilled braces"),
        (item("2 + 2 = 4\n#### 4", "4", "How many {x}?"), "unfilled braces"),
        (item("0.6666666 of 6\n#### 4", "4"), "more than two decimals"),
        (item("0.88*40 = 35\n#### 35", "35"), "false equation"),
    ],
)
def test_unsound_items(entry: dict, reason: str) -> None:
    with pytest.raises(Unsound, match=reason):
        gsm_symbolic(entry)


def test_worked_text_is_cleaned() -> None:
    cot = "Start:\n\n   • 37.0 - 1.05 = 35.95\nHe gets 48=48 emails, 3*2.0=6.0.\n#### 36.0"
    assert target("gsm_symbolic", item(cot, "36")) == (
        "Start:\n• 37 - 1.05 = 35.95\nHe gets 48 emails, 3*2=6.\n#### 36"
    )


TRUE = ["2 + 3 * 4 = 14", "£10 - £4=£6", "10 / 4 = 2.5", "14÷1/2=28", "12 ÷ 2 = 6", "5 / 20 = 25%", "1/3=0.33"]
TRUE += ["$300,000 x 3/100 = $9,000.", "3 * 4 = 12 * 1", "8(37)=296", "(2 + 3) * 4 = 20", "15/60 = 1/4", "4/0 = 1 ÷ x"]
TRUE += ["50% * 50% = 25%", "He has 5 = 5", "6 - 2*2 - 1 = 1", "7×2=14"]


@pytest.mark.parametrize("text", TRUE)
def test_true_or_unread_equations(text: str) -> None:
    assert false_equation(f"so {text} and") is None


@pytest.mark.parametrize("text", ["0.88*40 = 35", "2352/60=39", "£39.24 - £30.24 = £8", "2 + 2 = 5", "1 / 4 = 20%"])
def test_false_equations(text: str) -> None:
    assert false_equation(f"so {text} and 1 + 1 = 2") == text


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), min_size=1, max_size=4), st.integers(0, 99))
def test_equations_agree_with_python(rest: list[tuple[str, int]], first: int) -> None:
    expression = str(first) + "".join(f" {sign} {value}" for sign, value in rest)
    assert false_equation(f"{expression} = {eval(expression)}") is None
    assert false_equation(f"{expression} = {eval(expression) + 1}") is not None


@pytest.mark.parametrize(
    "text, verdict",
    [
        ("so\n#### 1234", True),
        ("#### 1,234", True),
        ("#### $1234.00 dollars.", True),
        ("####1234", True),
        ("#### 9\nno, wait\n#### 1234", True),
        ("#### 1234\n#### 9", False),
        ("#### -1234", False),
        ("#### 12345", False),
        ("#### 1234.5", False),
        ("1234", False),
        ("####", False),
        ("####\n1234", False),
        ("#### 1234/5", False),
        ("", False),
    ],
)
def test_numbers_are_scored_by_value(text: str, verdict: bool) -> None:
    assert is_correct(Problem("?", "1234", "x:0"), text) is verdict


@pytest.mark.parametrize("text, verdict", [("#### 2 ×  3", True), ("#### 2 × 3\nmore", True), ("#### 6", False)])
def test_other_answers_are_scored_as_text(text: str, verdict: bool) -> None:
    assert is_correct(Problem("?", "2 × 3", "x:0"), text) is verdict


@pytest.mark.parametrize("text", ["1 2", "1/2", "", "-", "x", "1.2.3", "1e5", "#"])
def test_texts_that_are_no_number(text: str) -> None:
    assert number(text) is None


@given(st.decimals(-(10**9), 10**9, places=2))
def test_final_numbers_survive(value: object) -> None:
    assert final_number(f"a 7\n#### {value}\n") == value
    assert final_number(f"#### {value:,}") == value
    assert number(f"${value}") == value
