"""Row files: shapes, templates and every sentence about a bad row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.data.rows import BadRows, Conversation, Message, RowFormat, read_conversations, to_conversation
from refusion.errors import DataError

GOOD = '{"question": "q?", "answer": "a"}'


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def turns(row: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in row.messages]


@pytest.mark.parametrize("ask, reply", [("query", "response"), ("prompt", "completion"), ("question", "answer")])
def test_pairs_are_read(ask: str, reply: str) -> None:
    row = to_conversation({ask: "1+1?", reply: " 2 \n", "system": "count"}, RowFormat(), "f:1")
    assert turns(row) == [("system", "count"), ("user", "1+1?"), ("assistant", "2")]
    assert row.origin == "f:1" and row.answer == "2" and len(row.prompt) == 2


def test_last_assistant_turn_is_the_answer() -> None:
    talk = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = to_conversation({"messages": [{"role": r, "content": c} for r, c in talk]}, RowFormat(), "f:1")
    assert turns(row) == talk
    assert row.answer == "d"


def test_calculator_marks_go_on_request() -> None:
    raw = {"question": "q", "answer": "48/2 = <<48/2=24>>24 clips\n#### 24"}
    assert to_conversation(raw, RowFormat(strip_calculator=True), "f:1").answer == "48/2 = 24 clips\n#### 24"
    assert "<<48/2=24>>" in to_conversation(raw, RowFormat(), "f:1").answer


def test_templates_take_fields_of_any_name() -> None:
    form = RowFormat(prompt_template="{topic}: {n} {{x}}", answer_template="> {reply}")
    assert turns(to_conversation({"topic": "t", "n": 3, "reply": "r"}, form, "f:1")) == [
        ("user", "t: 3 {x}"),
        ("assistant", "> r"),
    ]
    half = RowFormat(prompt_template="Solve: {question}")
    assert turns(to_conversation({"question": "q", "answer": "a"}, half, "f:1"))[0] == ("user", "Solve: q")


def test_template_text_from_a_row_is_not_a_template() -> None:
    row = to_conversation({"question": "{answer}", "answer": "a"}, RowFormat(prompt_template="{question}"), "f:1")
    assert row.prompt[0].content == "{answer}"


def test_system_is_added_only_where_none_is() -> None:
    bare = to_conversation({"prompt": "p", "completion": "c"}, RowFormat(), "f:1")
    assert bare.with_system("s").messages[0] == Message("system", "s")
    assert bare.with_system("s").with_system("t") == bare.with_system("s")
    assert bare.with_system(None) is bare


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.json", "r.json.gz"])
def test_formats_and_line_numbers(tmp_path: Path, name: str) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(3)]
    if ".jsonl" in name:
        text = "\n" + "\n\n".join(map(json.dumps, rows)) + "\r\n"
        lines = [2, 4, 6]
    else:
        text = "[\n" + ",\n".join(map(json.dumps, rows)) + "]"
        lines = [2, 3, 4]
    data = b"\xef\xbb\xbf" + text.encode()
    path = write(tmp_path, name, gzip.compress(data) if name.endswith(".gz") else data)
    found = read_conversations(path)
    assert [row.answer for row in found] == ["a0", "a1", "a2"]
    assert [row.origin for row in found] == [f"{path}:{line}" for line in lines]


@pytest.mark.parametrize(
    "text, line",
    [
        ('{"version": {"a": [1]}, "note": "[x]",\n "rows": [%s], "more": 1}', 2),
        ('{"data":[\n\n%s]}', 3),
        (" [ %s ] ", 1),
        ('[\n {"question": "[", "answer":\n "]"},\n%s]', 4),
    ],
)
def test_lines_of_json_rows(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path, "r.json", text % GOOD)
    assert read_conversations(path)[-1].origin == f"{path}:{line}"


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1)), min_size=1, max_size=5), st.sampled_from([None, 1])
)
def test_json_and_json_lines_agree(tmp_path_factory: pytest.TempPathFactory, pairs: list, indent: int | None) -> None:
    rows = [{"prompt": "p" + ask, "completion": "c" + reply} for ask, reply in pairs]
    folder = tmp_path_factory.mktemp("rows")
    lines = write(folder, "r.jsonl", "\n".join(json.dumps(row) for row in rows))
    whole = write(folder, "r.json", json.dumps({"rows": rows}, indent=indent))
    expected = [[("user", row["prompt"]), ("assistant", row["completion"].strip())] for row in rows]
    assert [turns(row) for row in read_conversations(lines)] == expected
    assert [turns(row) for row in read_conversations(whole)] == expected


BAD_ROWS = [
    ("3", "a row should be an object, not a number"),
    ("[]", "a row should be an object, not a list"),
    ("null", "a row should be an object, not nothing"),
    ('{"q": "x", "a": 1}', "has the fields 'q', 'a'; a row needs 'messages', 'query' with 'response', "),
    ("{}", "has the fields no field"),
    ('{"question": "x"}', "the field 'answer' is missing, it has 'question'"),
    ('{"answer": "x"}', "the field 'question' is missing"),
    ('{"question": "x", "answer": 3}', "'answer' should be text, not a number"),
    ('{"question": null, "answer": "3"}', "'question' should be text, not nothing"),
    ('{"question": "x", "answer": " \\n"}', "the answer is empty"),
    ('{"question": "", "answer": "y"}', "the user turn is empty"),
    ('{"question": "x", "answer": "y", "system": true}', "'system' should be text, not true or false"),
    ('{"question": "x", "answer": "\\ud83d"}', "the assistant turn holds '\\ud83d', half of a character"),
    ('{"messages": {}}', "'messages' should be a list, not an object"),
    ('{"messages": []}', "the last turn should be the assistant's answer, but it is missing"),
    ('{"messages": ["x"]}', "turn 1: should be an object, not text"),
    ('{"messages": [{"content": "x"}]}', "turn 1: the field 'role' is missing"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', "turn 1: 'content' should be text, not a list"),
    ('{"messages": [{"role": "tool", "content": "x"}]}', "turn 1: the role 'tool' should be one of system, user, ass"),
    (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
        "turn 2: a system turn should come first",
    ),
    (
        '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}',
        "the last turn should be the assistant's answer, but it is the user's",
    ),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "no user turn comes before the assistant's answer"),
    (
        '{"system": "s", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}, '
        '{"role": "assistant", "content": "y"}]}',
        "has 'system' and a system turn in 'messages'; keep one of them",
    ),
    ('{"question": "x"', "broken JSON: Expecting ',' delimiter"),
    ("[" * 100_000, "broken JSON: "),
    (b'{"question": "\xff"}', "byte 15 is not valid UTF-8"),
]


@pytest.mark.parametrize("row, reason", BAD_ROWS)
def test_a_bad_row_stops_with_file_line_and_reason(tmp_path: Path, row: str | bytes, reason: str) -> None:
    data = row if isinstance(row, bytes) else row.encode()
    path = write(tmp_path, "r.jsonl", GOOD.encode() + b"\n" + data + b"\n")
    with pytest.raises(DataError) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}:2: {reason}")


@pytest.mark.parametrize(
    "form, reason",
    [
        (RowFormat(prompt_template="{topic}"), "the template's field 'topic' is missing, it has 'question', 'answer'"),
        (RowFormat(answer_template="{answer}{list}"), "'list' should be text, not a list"),
    ],
)
def test_templates_name_what_is_missing(form: RowFormat, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        to_conversation({"question": "q", "answer": "a", "list": []}, form, "f:1")


def test_bad_rows_are_skipped_counted_and_the_first_reported(tmp_path: Path) -> None:
    lines = [GOOD, *(row for row, _ in BAD_ROWS if isinstance(row, str)), GOOD]
    path = write(tmp_path, "r.jsonl", "\n".join(lines))
    bad = BadRows("skip")
    assert len(read_conversations(path, bad=bad)) == 2
    assert bad.count == len(lines) - 2
    assert len(bad.reasons) == 5
    assert bad.reasons[0].startswith(f"{path}:2: a row should be an object")


@pytest.mark.parametrize(
    "name, data, reason",
    [
        ("r.csv", "", "should end in .jsonl or .json"),
        ("r", "", "should end in .jsonl or .json"),
        ("r.jsonl", "", "holds no usable row"),
        ("r.json", "[]", "holds no usable row"),
        ("r.jsonl.gz", "no gzip", "is not a whole gzip file"),
        ("r.jsonl.gz", gzip.compress(GOOD.encode())[:-9], "is not a whole gzip file"),
        ("r.json", "[\n1,\n", r"r.json:3: broken JSON: Expecting value"),
        ("r.json", "[" * 100_000, "r.json:1: broken JSON: nested too deep"),
        ("r.json", "3", "r.json:1: should hold a list of rows, or an object with one list, not 0"),
        ("r.json", '{"a": [], "b": []}', "not 2"),
        ("r.json", b'[\n"\xff"]', "r.json:2: the file is not valid UTF-8"),
        ("r.json", '[\n{"question": "x"}]', "r.json:2: the field 'answer' is missing"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, data: str | bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_conversations(write(tmp_path, name, data))


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing; check the path"):
        read_conversations(tmp_path / "none.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="can't be read: Is a directory"):
        read_conversations(tmp_path / "folder.jsonl")


def test_nothing_left_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no usable row \(1 skipped, the first because .*:1: a row should"):
        read_conversations(write(tmp_path, "r.jsonl", "1"), bad=BadRows("skip"))


def test_a_conversation_needs_prompt_and_answer() -> None:
    with pytest.raises(ValueError, match="f:1"):
        Conversation((Message("assistant", "a"),), "f:1")
    with pytest.raises(ValueError):
        Conversation((Message("user", "a"), Message("user", "b")), "f:1")
