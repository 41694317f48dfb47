"""Models of the Hugging Face hub: fetched once into its cache, safetensors only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from refusion.checkpoint.reasons import reason
from refusion.errors import CheckpointError

_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_WEIGHTS = ("*.safetensors",)
# copies of the weights in other layouts that some repositories carry
_NEVER = ("consolidated*", "original/*", "onnx/*", "*.bin", "*.pth", "*.pt")


def is_hub_id(source: str) -> bool:
    """Whether a source has the form org/name."""
    return _IDENTIFIER.fullmatch(source) is not None


def fetch(source: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a hub model, downloaded where it isn't cached; `weights` False: descriptions only.

    Raises:
        CheckpointError: offline, unknown, private, or huggingface_hub isn't installed.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(f"{source}: install huggingface_hub to fetch models, or give a local folder") from error
    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(
            repo_id=source, revision=revision, allow_patterns=patterns, ignore_patterns=list(_NEVER)
        ))
    except Exception as error:  # httpx, OSError and a dozen of the hub's own
        raise CheckpointError(
            f"{source}: couldn't be fetched from the Hugging Face hub ({reason(error)}); "
            "check the name, the network and your access, or give a local folder"
        ) from error


def remote_tensors(source: str, revision: str | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each tensor of a hub model, read from the headers of its files there.

    Raises:
        CheckpointError: offline, unknown or without safetensors.
    """
    import huggingface_hub

    try:
        metadata: Any = huggingface_hub.get_safetensors_metadata(source, revision=revision)
    except Exception as error:  # as above
        raise CheckpointError(f"{source}: the headers of its weights can't be read ({reason(error)})") from error
    return {
        name: (tuple(tensor.shape), str(tensor.dtype))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
