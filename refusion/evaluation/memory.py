"""How much memory a run needs at most, where the system can tell it run by run."""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"
"""What Linux takes in clear_refs for setting the peak back to what is resident now (proc(5))."""


class PeakMemory:
    """The peak since the last `reset`, in bytes: of the device on CUDA, else of the whole process.

    On a CPU only Linux can set the peak back; elsewhere nothing is measured rather than the peak of everything
    that ran before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.works = self._cuda or (device.type == "cpu" and _reset_process_peak())

    def reset(self) -> None:
        """Starts anew."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.works:
            _reset_process_peak()

    def peak(self) -> int | None:
        """The most since `reset`; None where it can't be known."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM") if self.works else None

    def now(self) -> int | None:
        """What is in use; None where it can't be known."""
        if self._cuda:
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS") if self.works else None

    def give_back(self) -> None:
        """Returns what isn't used to the system, so that it doesn't count for whatever runs next."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
        elif self.works:
            with suppress(OSError, AttributeError):  # another C library than glibc
                ctypes.CDLL(None).malloc_trim(0)


def _reset_process_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _status("VmHWM") is not None


def _status(key: str) -> int | None:
    """A line of the process's status, in bytes."""
    try:
        found = re.search(rf"^{key}:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
