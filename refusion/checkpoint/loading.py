"""One way in: a name, a folder, a file or a hub id -> a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from refusion.checkpoint import hub
from refusion.checkpoint.adapter import Application, read_adapter
from refusion.checkpoint.default import default_adapter, default_model
from refusion.checkpoint.folder import load_folder
from refusion.checkpoint.gguf import load_gguf
from refusion.checkpoint.saving import save
from refusion.checkpoint.types import Checkpoint
from refusion.errors import CheckpointError


def resolve(source: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder or .gguf file of a source; a hub id is fetched, without its weights where `weights` is False.

    Raises:
        CheckpointError: there is no such thing.
    """
    if str(source) == "default":
        return default_model()
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            if len(files) > 1:
                raise CheckpointError(f"{path}: holds {len(files)} GGUF files; name one of them")
            return files[0]
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: isn't a model; give a Hugging Face folder or a .gguf file")
        return path
    if isinstance(source, str) and hub.is_hub_id(source) and not source.endswith(".gguf"):
        return hub.fetch(source, revision, weights=weights)
    raise CheckpointError(
        f"{source}: there is no such folder or .gguf file; give one, a hub id of the form org/name, or 'default'"
    )


def chosen_adapter(source: str | Path, adapter: str | Path | None) -> str | Path | None:
    """The adapter that `load` applies to a source: the one asked for, else the default model's own."""
    if adapter is None:
        return default_adapter() if str(source) == "default" else None
    return None if str(adapter) == "none" else adapter


def load(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    mask_token_id: int | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """A network and its tokenizer.

    source: "default", a Hugging Face folder, a .gguf file, or a hub id ("org/name").
    dtype: of the weights in memory, whatever the file keeps.
    revision: branch, tag or commit of a hub id.
    mask_token_id: the mask token, for models whose files don't name it.
    adapter: a folder or hub id of a peft LoRA adapter to add to the weights; "none" keeps the
        default model's own off, which is added otherwise.

    Raises:
        CheckpointError: missing, damaged or not supported; one sentence that says the mend.
    """
    path = resolve(source, revision)
    read = load_gguf if path.is_file() else load_folder
    chosen = chosen_adapter(source, adapter)
    added = None if chosen is None else Application(read_adapter(chosen), str(source))
    checkpoint = read(
        path, dtype=dtype, device=device, mask_token_id=mask_token_id, adapt=added.adapt if added else None
    )
    if added:
        added.finish(checkpoint, dtype)
        checkpoint.extra["adapter"] = str(adapter or "default")
    checkpoint.source = str(source)
    return checkpoint


def convert(
    source: str | Path, folder: str | Path, dtype: torch.dtype = torch.bfloat16, *, revision: str | None = None
) -> Path:
    """Writes any loadable model as a Hugging Face folder with weights in `dtype`; returns the folder.

    Raises:
        CheckpointError: as `load` and `save`.
    """
    return save(load(source, dtype=dtype, revision=revision), folder)
