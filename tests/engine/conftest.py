"""Makes `tests.engine.tiny` importable, however pytest was started; one thread is enough here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test here."""
