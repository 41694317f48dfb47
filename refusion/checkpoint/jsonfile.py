"""Reads the small JSON files of a model folder with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refusion.errors import CheckpointError


def _no_constant(name: str) -> Any:
    raise ValueError(f"holds {name}, which isn't a value")


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} for an optional one that is absent.

    Raises:
        CheckpointError: missing, unreadable, not JSON or not an object.
    """
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing; fetch the model again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: isn't valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(content).__name__}; fetch the file again")
    return content
