"""Files of prompts: shapes of rows, which answers can be scored, errors with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refusion.errors import DataError
from refusion.evaluation.questions import Question, read_questions


def rows_file(folder: Path, *rows: Any, name: str = "q.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_text_file_holds_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffZwölf?\r\n\n  \nwhy #### 3\n".encode())
    first, second = read_questions(path)
    assert (first.prompt, first.answer, first.source) == ("Zwölf?", None, f"{path}:1")
    assert (second.prompt, second.answer, second.source) == ("why #### 3", None, f"{path}:4")
    assert first.is_right("anything") is None


def test_rows_of_every_shape(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = read_questions(rows_file(
        tmp_path, {"question": "q", "answer": "so it is\n#### 1,200"}, {"prompt": "p"}, {"query": "x", "response": "4"},
        {"messages": talk}, {"question": "n", "answer": 7.5}, {"prompt": "other names", "answer": "Paris"},
        {"system": "Be brief.", "question": "s", "answer": ""},
    ))
    assert [(q.prompt, q.answer, q.marked) for q in found] == [
        ("q", "1,200", True), ("p", None, True), ("x", "4", False), (talk, None, True), ("n", "7.5", False),
        ("other names", "Paris", False),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "s"}], None, True),
    ]
    assert found[-1].source.endswith("q.jsonl:7")


def test_a_json_list_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text('{"data": [\n {"question": "1"},\n {"question": "2"},\n {"question": "3"}]}')
    assert [q.source for q in read_questions(path, 2)] == [f"{path}:2", f"{path}:3"]


@pytest.mark.parametrize(("answer", "marked", "text", "right"), [
    ("1,200", True, "so\n#### 1200.0 pens", True), ("1200", True, "1200", False), ("1200", True, "#### 12", False),
    ("42", False, "42", True), ("42", False, " 42.0\n", True), ("42", False, "it is 42", False),
    ("42", False, "it is\n#### 42", True), ("42", False, "42\n#### 41", False), ("Paris", False, "Paris", True),
    ("New York", False, " New  York\n", True), ("Paris", False, "Paris, I think", False), ("42", False, "", False),
])
def test_what_counts_as_right(answer: str, marked: bool, text: str, right: bool) -> None:
    assert Question("q", answer, "f:1", marked).is_right(text) is right


@pytest.mark.parametrize("answer", [
    "The sky is blue because of scattering.", "two\nlines", "It holds:\nfirst\nsecond", "#### ",
])
def test_a_text_for_an_answer_is_not_scored(tmp_path: Path, answer: str) -> None:
    [question] = read_questions(rows_file(tmp_path, {"question": "q", "answer": "#\n" * (answer == "#### ") + answer}))
    assert question.answer is None and question.is_right(answer) is None


def test_questions_of_a_training_are_left_out(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"question": "What is  1?"}, {"question": "what is 2?"})
    assert [q.prompt for q in read_questions(path, exclude=["what IS 1?"])] == ["what is 2?"]
    with pytest.raises(DataError, match="only questions of the excluded training"):
        read_questions(path, exclude=["what is 1?", "What is 2?"])


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("q.jsonl", b'{"question": "a"}\n{"question": 5}\n', "q.jsonl:2: 'question' should be text"),
    ("q.jsonl", b'{"question": "a"}\n\n{"question": \n', "q.jsonl:3: broken JSON"),
    ("q.jsonl", b'{"question": "a"}\n[1]\n', "q.jsonl:2: a row should be an object"),
    ("q.jsonl", b'{"text": "a"}\n', "q.jsonl:1: has the fields 'text'"),
    ("q.jsonl", b'{"question": " "}\n', "q.jsonl:1: the user turn is empty"),
    ("q.jsonl", b'{"question": "a", "answer": true}\n', "q.jsonl:1: 'answer' should be text"),
    ("q.jsonl", b'{"messages": []}\n', "q.jsonl:1: the last turn"),
    ("q.json", b'[{"question": "a"},\n 3]', "q.json:2: a row should be an object"),
    ("q.jsonl.gz", b"plain", "is not a whole gzip file"),
    ("q.txt", b"fine\nb\xe4d\n", "q.txt:2: byte 2 is not valid UTF-8"),
    ("q.txt", b" \n\n", "holds no prompt"),
    ("q.jsonl", b"\n", "holds no prompt"),
])
def test_bad_files_give_file_and_line(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read_questions(tmp_path / name)
    assert reason in str(error.value) and name in str(error.value)


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name} is missing"):
        read_questions(tmp_path / name)
