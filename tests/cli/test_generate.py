"""`refusion generate`: prompts from everywhere, options to settings, text and JSON out, errors in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from refusion.cli.app import app
from refusion.decoding.config import DecodeConfig
from refusion.errors import CheckpointError, ConfigError

KEYS = {"text", "tokens", "forwards", "tpf", "seconds", "tps", "finish_reason"}


def test_text_on_stdout_and_figures_on_stderr(api, call):
    result = call("generate", "2 + 2?")
    assert result.exit_code == 0
    assert result.stdout == "answer 0: 2 + 2?\n"
    assert result.stderr == "6 tokens, 3 forwards, TPF 2.00, TPS 12.0, 0.50 s, finish: stop\n"
    assert api.loads == [{"source": "default", "device": "auto", "dtype": "auto", "mask_token_id": None,
                          "compile": False, "adapter": None}]
    run = api.run
    assert run["prompts"] == ["2 + 2?"] and run["config"] == DecodeConfig()
    assert run["batch_size"] == 8 and run["chat"] is True and run["system"] is None


def test_one_prompt_as_json_is_one_object(api, call):
    result = call("generate", "--json", "Zürich?")
    facts = json.loads(result.stdout)
    assert facts.keys() >= KEYS
    assert facts["text"] == "answer 0: Zürich?" and facts["tokens"] == 6 and facts["forwards"] == 3
    assert facts["tpf"] == 2.0 and facts["tps"] == 12.0 and facts["finish_reason"] == "stop"
    assert result.stdout.count("\n") == 1 and result.stderr == ""


def test_options_reach_the_settings(api, call):
    result = call(
        "generate", "--model", "some/folder", "--decoder", "paper", "--max-tokens", 40, "--slot-size", 4,
        "--block-size", 16, "--slot-threshold", 0.7, "--token-threshold", 0.2, "--temperature", 0.6, "--top-p", 0.9,
        "--seed", 5, "--stop", "\n\n", "--stop", "END", "--system", "Be brief.", "--batch-size", 3, "--device", "cpu",
        "--dtype", "float32", "--mask-token-id", 9, "--acceptance", "greedy", "--draft-threshold", 0.5,
        "--stale-factor", 0, "--plan-size", 12, "--compile", "--adapter", "some/adapter", "--max-cells", 900, "hello",
    )
    assert result.exit_code == 0, result.output
    assert api.loads == [{"source": "some/folder", "device": "cpu", "dtype": "float32", "mask_token_id": 9,
                          "compile": True, "adapter": "some/adapter"}]
    assert api.run["config"] == DecodeConfig(
        decoder="paper", max_tokens=40, slot_size=4, block_size=16, slot_threshold=0.7, token_threshold=0.2,
        temperature=0.6, top_p=0.9, seed=5, stop=("\n\n", "END"), acceptance="greedy", draft_threshold=0.5,
        stale_factor=0.0, plan_size=12,
    )
    assert api.run["system"] == "Be brief." and api.run["batch_size"] == 3 and api.run["max_cells"] == 900


def test_raw_leaves_the_template_out(api, call, failing):
    assert call("generate", "--raw", "Once upon").exit_code == 0
    assert api.run["chat"] is False
    assert "--system needs the chat template" in failing(call("generate", "--raw", "--system", "s", "x"), 2)


@pytest.mark.parametrize("args", [("-",), ()])
@pytest.mark.parametrize(("stdin", "prompt"), [
    ("one\ntwo\n", "one\ntwo"), ("", ""), ("\n", ""), ("a\n\n", "a\n"), ("x\r\n", "x"), ("\ufeffüber", "über"),
])
def test_a_pipe_is_one_prompt(api, call, args, stdin, prompt):
    assert call("generate", *args, stdin=stdin.encode()).exit_code == 0
    assert api.run["prompts"] == [prompt]


def test_an_empty_prompt_is_an_empty_turn(api, call):
    assert call("generate", "").exit_code == 0
    assert api.run["prompts"] == [""]


def test_a_terminal_without_a_prompt_is_a_usage_error(api, call, failing, monkeypatch):
    from refusion.cli import prompts

    class Terminal:
        def isatty(self) -> bool:
            return True

    for stdin in (Terminal(), None):
        monkeypatch.setattr(prompts, "sys", type("Sys", (), {"stdin": stdin}))
        assert "give a PROMPT" in failing(call("generate"), 2)
    assert not api.loads


def test_a_pipe_that_is_not_text(api, call, failing):
    assert "isn't UTF-8 at byte 1" in failing(call("generate", stdin=b"a\xff"), 1)


def test_a_file_with_a_prompt_on_each_line(api, call, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\r\n\n  two\u2028 \nthree", encoding="utf-8", newline="")
    result = call("generate", "--file", file)
    assert api.run["prompts"] == ["one", "  two\u2028 ", "three"]
    assert result.stdout == "answer 0: one\n\nanswer 1:   two\u2028 \n\nanswer 2: three\n"
    assert result.stderr.count("TPF") == 3


def test_a_jsonl_file_and_one_object_a_line(api, call, tmp_path):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    rows: list[Any] = [{"prompt": "a\nb"}, {"question": "q", "answer": "42"}, {"messages": messages, "id": 3}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    result = call("generate", "--file", file, "--json")
    assert api.run["prompts"] == ["a\nb", "q", messages]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["text"][:9] for line in lines] == ["answer 0:", "answer 1:", "answer 2:"]
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.parametrize("order", [list, lambda rows: rows[::-1], lambda rows: rows[1::2], lambda rows: []])
def test_output_follows_the_prompts_whatever_finishes_first(api, call, tmp_path, order):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"p{at}\n" for at in range(5)))
    api.order = order
    result = call("generate", "-f", file, "--json")
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert texts == [f"answer {at}: p{at}" for at in range(5)]


@pytest.mark.parametrize(("line", "reason"), [
    ("{", "broken JSON"), ("3", "should be a JSON object"), ('{"text": "x"}', "with prompt, question or messages"),
    ('{"prompt": 3}', "prompt should be a text"), ('{"messages": []}', "at least one message"),
    ('{"messages": [{"role": "user"}]}', "a role and a content"), ('{"messages": ["hi"]}', "a role and a content"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last message is the assistant's"),
])
def test_a_bad_row_is_named_by_its_line(api, call, failing, tmp_path, line, reason):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    said = failing(call("generate", "--file", file), 1)
    assert f"{file}:2: " in said and reason in said
    assert not api.loads


def test_files_that_cannot_be_read(api, call, failing, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "holds no prompt" in failing(call("generate", "--file", empty), 1)
    assert "No such file" in failing(call("generate", "--file", tmp_path / "none"), 1)
    assert "can't be read" in failing(call("generate", "--file", tmp_path), 1)
    assert "not both" in failing(call("generate", "--file", empty, "prompt"), 2)


def test_messages_need_the_template(api, call, failing, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert "messages need the chat template" in failing(call("generate", "--raw", "--file", file), 2)


@pytest.mark.parametrize("asked", [(), ("--decoder", "autoregressive")])
def test_a_model_without_a_mask_token_decodes_left_to_right(api, call, asked):
    api.mask_token_id = None
    result = call("generate", *asked, "--model", "plain", "x")
    assert result.exit_code == 0 and api.run["config"].decoder == "autoregressive"
    assert result.stdout == "answer 0: x\n"
    assert result.stderr.startswith("plain has no mask token (not a ReFusion model): decoding left to right\n")


@pytest.mark.parametrize("decoder", ["refusion", "paper"])
def test_a_parallel_decoder_needs_a_mask_token(api, call, failing, decoder):
    api.mask_token_id = None
    said = failing(call("generate", "--decoder", decoder, "x"), 2)
    assert decoder in said and "no mask token" in said and not api.runs


def test_a_model_with_a_mask_token_obeys(api, call):
    call("generate", "--decoder", "autoregressive", "x")
    assert api.run["config"].decoder == "autoregressive"


@pytest.mark.parametrize(("args", "reason"), [
    (("--decoder", "best"), "unknown decoder 'best'"), (("--max-tokens", 0), "max_tokens"),
    (("--slot-size", 64), "block_size 32 is smaller than slot_size 64"), (("--temperature", -1), "temperature"),
    (("--top-p", 0), "top_p"), (("--slot-threshold", 1.5), "slot_threshold"), (("--stop", ""), "stop string"),
    (("--acceptance", "some"), "unknown acceptance"),
    (("--batch-size", 0), "--batch-size"), (("--slot-size", "x"), "--slot-size"), (("--nonsense",), "--nonsense"),
])
def test_bad_settings_are_said_before_the_model_is_loaded(api, call, failing, args, reason):
    assert reason in failing(call("generate", *args, "x"), 2)
    assert not api.loads


def test_errors_of_the_run_are_one_line(api, call, failing):
    api.error = CheckpointError("the file\nis damaged")
    assert failing(call("generate", "x"), 1) == "the file is damaged"
    api.error = ConfigError("device cuda:9 isn't there")
    assert failing(call("generate", "x"), 2) == "device cuda:9 isn't there"


def test_debug_shows_the_error_itself(api, call):
    api.error = CheckpointError("damaged")
    result = call("--debug", "generate", "x")
    assert result.exception is api.error and result.exit_code == 1


def test_a_bug_is_not_hidden(api, call):
    api.error = ZeroDivisionError("bug")
    assert call("generate", "x").exception is api.error


def test_an_interrupt_is_a_line_and_130(api, call):
    api.error = KeyboardInterrupt()
    result = call("generate", "x")
    assert result.exit_code == 130 and result.stderr == "interrupted\n" and result.stdout == ""


def test_main_runs_the_app(api, monkeypatch, capsys):
    from refusion.cli import main

    monkeypatch.setattr(sys, "argv", ["refusion", "generate", "hello"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert capsys.readouterr().out == "answer 0: hello\n"
    assert app.registered_commands and Path(sys.modules["refusion.cli"].__file__ or "").is_file()


def test_improvements_are_switched_off_by_name(api, call):
    assert call("generate", "--without", "fused-pass", "--without", "branches", "hello").exit_code == 0
    config = api.run["config"]
    assert (config.fused_pass, config.branch_size, config.bonus_token) == (False, 0, True)
    result = call("generate", "--without", "luck", "hello")
    assert result.exit_code == 2 and "--without knows no 'luck'; choose one of fused-pass" in result.output
