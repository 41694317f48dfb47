"""A checkpoint -> a Hugging Face folder, which is either wholly there or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from refusion.checkpoint.folder import INDEX, SINGLE
from refusion.checkpoint.hf_config import write_config
from refusion.checkpoint.hf_tokenizer import tokenizer_files
from refusion.checkpoint.types import Checkpoint
from refusion.checkpoint.weights import named_parts
from refusion.errors import CheckpointError

MAX_SHARD_BYTES = 5_000_000_000
# files of a model folder that a new version replaces; others beside them are carried over
_OURS = ("*.safetensors", "*.index.json", "config.json", "generation_config.json", "tokenizer*", "vocab.*",
         "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*", "pytorch_model*.bin")


def save(checkpoint: Checkpoint, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Writes a checkpoint as a folder that transformers reads; returns the folder.

    An interrupt or a full disk leaves the old version. dtype: of the weights in the files; None
    for that in memory.

    Raises:
        CheckpointError: the folder is something else, or can't be written.
    """
    target = Path(folder).expanduser().resolve()
    if checkpoint.transformer.int8_head is not None:
        raise CheckpointError(f"{target}: a model in int8 can't be written; load it in a floating type")
    with replacing(target, "config.json", "a model") as partial:
        _write(checkpoint, partial, dtype or checkpoint.transformer.dtype)
    return target


@contextmanager
def replacing(target: Path, marker: str, thing: str) -> Iterator[Path]:
    """A folder beside `target` to write to, which takes its place when the block has ended without an error.

    marker: a file that an old version of the thing has; a folder with other things in it is left alone.

    Raises:
        CheckpointError: the target is something else, or can't be written.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give a folder to write {thing} to")
    if target.exists() and any(target.iterdir()) and not (target / marker).exists():
        raise CheckpointError(f"{target}: holds other things than {thing}; give a new or empty folder")
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        partial.chmod(0o777 & ~_umask())
        yield partial
        _exchange(partial, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"{target}: couldn't be written ({reason}) and what was there is unchanged; "
            "free the disk or choose another folder"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _exchange(partial: Path, target: Path) -> None:
    """Puts the finished folder in place; a failure between the two renames puts the old one back."""
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{partial.name}")
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    # the new version stands; the old folder stays beside it if its other files can't be moved
    with suppress(OSError):
        for item in old.iterdir():
            if not any(item.match(pattern) for pattern in _OURS) and not (target / item.name).exists():
                item.rename(target / item.name)
        shutil.rmtree(old)


def _write(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    config = checkpoint.config
    _write_weights(checkpoint, folder, dtype)
    generation = {
        **checkpoint.extra.get("generation_config", {}),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    described = {
        "config.json": write_config(config, str(dtype).removeprefix("torch.")),
        "generation_config.json": {key: value for key, value in generation.items() if value is not None},
    }
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in described.items()}
    texts.update(tokenizer_files(checkpoint.tokenizer, config.max_positions))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Name and weights of each tensor as Hugging Face splits them; views, not yet converted."""
    return ((part.huggingface, view) for _, part, view in named_parts(checkpoint.transformer))


def _shards(checkpoint: Checkpoint, dtype: torch.dtype) -> list[list[str]]:
    """Names of the tensors of each file, none above the limit unless a single tensor is."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in _tensors(checkpoint):
        nbytes = tensor.numel() * dtype.itemsize
        if shards[-1] and size + nbytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file that others may read as far as the umask lets them."""
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o666 & ~_umask())


def _write_weights(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    shards = _shards(checkpoint, dtype)
    views = dict(_tensors(checkpoint))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # a copy of one shard at a time: safetensors refuses views of a shared storage
        tensors = {name: views[name].to("cpu", dtype, copy=True).contiguous() for name in names}
        write_tensors(folder / file, tensors)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(view.numel() for view in views.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
