"""Peaks by run: what one run needed isn't counted for the next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from refusion.evaluation import memory
from refusion.evaluation.memory import PeakMemory

STATUS = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /proc/self."""
    (tmp_path / "clear_refs").write_text("")
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    return tmp_path


def test_the_process_peak_is_set_back_and_read(proc: Path) -> None:
    found = PeakMemory(torch.device("cpu"))
    (proc / "clear_refs").write_text("")
    found.reset()
    assert (proc / "clear_refs").read_text() == "5"
    assert found.works and found.peak() == 2 * 2**20 and found.now() == 2**20
    found.give_back()
    assert found.now() == 2**20


def test_a_peak_that_can_not_be_set_back_is_not_given(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CLEAR", proc / "none" / "clear_refs")
    found = PeakMemory(torch.device("cpu"))
    found.reset()
    assert not found.works and found.peak() is None and found.now() is None


def test_other_devices_than_cuda_and_cpu_are_not_measured(proc: Path) -> None:
    found = PeakMemory(torch.device("meta"))
    assert not found.works and found.peak() is None


def test_a_real_peak_follows_what_is_allocated() -> None:
    found = PeakMemory(torch.device("cpu"))
    if not found.works:
        assert found.peak() is None
        return
    size = 64 * 2**20
    found.reset()
    before = found.peak()
    block = torch.ones(size // 4)
    during = found.peak()
    assert before is not None and during is not None and during - before > size * 0.8
    del block
    found.give_back()
    found.reset()
    after = found.peak()
    assert after is not None and after < during - size * 0.5
