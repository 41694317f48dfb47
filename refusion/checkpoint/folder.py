"""A Hugging Face folder -> network and tokenizer; safetensors only, never pickle."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refusion.checkpoint.hf_config import names_refusion, read_config
from refusion.checkpoint.hf_tokenizer import read_tokenizer
from refusion.checkpoint.jsonfile import read_object
from refusion.checkpoint.names import Part, table
from refusion.checkpoint.reasons import reason
from refusion.checkpoint.tokenizer import Tokenizer
from refusion.checkpoint.types import Checkpoint
from refusion.checkpoint.weights import Adapt, check_shape, empty_transformer, fill
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_PREFIX = "model."


def weight_files(folder: Path, single: str = SINGLE) -> list[Path]:
    """The safetensors files of a folder; single: the name where there is only one.

    Raises:
        CheckpointError: there are none, or the index names one that is missing.
    """
    index = folder / f"{single}.index.json"
    if index.exists():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise CheckpointError(f"{index}: has no weight_map; fetch the file again")
        shards = sorted(set(names.values()))
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index}: names a file elsewhere ({shard}); fetch the index again")
            if not (folder / shard).exists():
                raise CheckpointError(f"{folder / shard}: the index names this file but it is missing; fetch it again")
        return [folder / shard for shard in shards]
    if (folder / single).exists():
        return [folder / single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder}: holds only pickled weights, which may run code when opened; convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: holds no {single}; fetch the model again")


class Weights:
    """The tensors of all safetensors files of a folder, read one by one.

    Raises:
        CheckpointError: a file is damaged, cut short, or two hold the same tensor.
    """

    def __init__(self, folder: Path, stack: ExitStack, single: str = SINGLE) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}
        self.paths = weight_files(folder, single)
        for path in self.paths:
            try:
                handle = stack.enter_context(safe_open(str(path), framework="pt"))
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                why = reason(error)
                raise CheckpointError(f"{path}: is damaged or cut short ({why}); fetch the file again") from error
            for name in names:
                if name in self._files:
                    raise CheckpointError(f"{path}: tensor {name} is also in another file; fetch the model again")
                self._files[name] = (path, handle)
        # checkpoints of the bare network lack the prefix
        self._prefixed = any(name.startswith(_PREFIX) for name in self._files)

    def __iter__(self) -> Any:
        return iter(self._files)

    def stored_name(self, name: str) -> str:
        return name if self._prefixed else name.removeprefix(_PREFIX)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type of a tensor, without reading it."""
        view = self._files[name][1].get_slice(name)
        return tuple(view.get_shape()), view.get_dtype()

    def read(self, part: Part) -> Tensor:
        """A tensor of a model whose `check` has passed."""
        return self.tensor(self.stored_name(part.huggingface))

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name in the files."""
        return self._files[name][1].get_tensor(name)

    def _check_part(self, part: Part) -> None:
        name = self.stored_name(part.huggingface)
        if name not in self._files:
            where = self.paths[0] if len(self.paths) == 1 else self.folder
            raise CheckpointError(f"{where}: tensor {name} is missing; fetch the model again")
        path = self._files[name][0]
        shape, kind = self.header(name)
        check_shape(str(path), name, shape, part.shape)
        if kind not in _FLOATS:
            raise CheckpointError(
                f"{path}: tensor {name} is of type {kind}, which isn't supported; "
                "use unquantised weights or a GGUF file"
            )

    def check(self, config: ModelConfig) -> None:
        """
        Raises:
            CheckpointError: a tensor is missing, of another shape, not of a floating-point type, or has
                no place in the architecture.
        """
        for parts in table(config).values():
            for part in parts:
                self._check_part(part)
        known = {self.stored_name(part.huggingface) for parts in table(config).values() for part in parts}
        for name in sorted(set(self._files) - known):
            # an old buffer, and the copy of a tied embedding
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings):
                continue
            raise CheckpointError(
                f"{self._files[name][0]}: tensor {name} is unexpected in the {config.family} architecture; "
                "this kind of model isn't supported"
            )


def read_description(folder: Path, mask_token_id: int | None = None) -> tuple[ModelConfig, Tokenizer, dict[str, Any]]:
    """Config, tokenizer and generation_config.json of a folder, without its weights.

    Raises:
        CheckpointError: a file is missing or damaged, or the model isn't supported.
    """
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(f"{folder}: is an adapter, not a model; load its base with this as the adapter")
        raise CheckpointError(f"{folder}: holds no config.json; give the folder of a Hugging Face model")
    file = str(folder / "config.json")
    raw = read_object(folder / "config.json")
    config = read_config(raw, file, mask_token_id)
    generation = read_object(folder / "generation_config.json", optional=True)
    tokenizer = read_tokenizer(folder, raw, generation)
    mask = config.mask_token_id
    if mask is None and names_refusion(raw):
        mask = tokenizer.mask_id if tokenizer.mask_id is not None else tokenizer.token_to_id("<|mask|>")
        if mask is None or mask >= config.vocab_size:
            raise CheckpointError(f"{file}: names no mask token; pass mask_token_id (151670 for GSAI-ML/ReFusion)")
    tokenizer.use_mask(mask)
    tokens = config.num_tokens if "refusion" in raw else max(tokenizer.vocab_size, (mask or 0) + 1)
    config = replace(
        config,
        num_tokens=min(tokens, config.vocab_size),
        mask_token_id=mask,
        eos_token_ids=tuple(i for i in tokenizer.eos_ids if i < config.vocab_size),
        bos_token_id=_inside(tokenizer.bos_id, config),
        pad_token_id=_inside(tokenizer.pad_id, config),
    )
    return config, tokenizer, generation


def _inside(index: int | None, config: ModelConfig) -> int | None:
    return index if index is not None and index < config.vocab_size else None


def load_folder(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str, mask_token_id: int | None = None,
    adapt: Adapt | None = None,
) -> Checkpoint:
    """A checkpoint from a Hugging Face folder; adapt: see refusion.checkpoint.weights.fill.

    Raises:
        CheckpointError: a file is missing or damaged, or the model isn't supported.
    """
    config, tokenizer, generation = read_description(folder, mask_token_id)
    with ExitStack() as stack:
        weights = Weights(folder, stack)
        weights.check(config)
        transformer = empty_transformer(config, dtype, device)
        fill(transformer, weights.read, adapt)
    extra: dict[str, Any] = {"format": "huggingface"}
    if generation:
        extra["generation_config"] = generation
    return Checkpoint(transformer, tokenizer, str(folder), extra)
