"""Adapters as peft keeps them: a base and low-rank differences -> the tuned network, and such a folder -> disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refusion.checkpoint import hub
from refusion.checkpoint.adapter_config import CONFIG, AdapterConfig, read_adapter_config
from refusion.checkpoint.folder import Weights
from refusion.checkpoint.jsonfile import read_object
from refusion.checkpoint.mask import add_mask_token, set_config
from refusion.checkpoint.names import Part, table
from refusion.checkpoint.saving import replacing, write_tensors
from refusion.checkpoint.types import Checkpoint
from refusion.checkpoint.weights import Read, named_parts
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig
from refusion.model.transformer import Transformer

SINGLE = "adapter_model.safetensors"
FACTS = "refusion_adapter.json"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
PREFIX = "base_model.model."
LORA_A, LORA_B, BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
ROWS = "token_adapter.trainable_tokens_delta"
_BASE = "base_layer.weight"
_ENDINGS = (LORA_A, LORA_B, BIAS, EMBEDDING_A, EMBEDDING_B, ROWS, _BASE, "weight", "bias")
_SAMPLED_ROWS, _SAMPLES, _TOLERANCE = 64, 16, 0.01


@dataclass(frozen=True)
class Facts:
    """What peft's files don't say, in a file of ours beside them.

    base: the base model's name. mask: id and text of the mask token that was added to it.
    samples: some values of some of the base's tensors, by which another base is noticed.
    """

    base: str | None = None
    mask: tuple[int, str] | None = None
    samples: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory; changes: its tensors by Hugging Face's module name and what peft puts behind it."""

    folder: Path
    config: AdapterConfig
    facts: Facts
    changes: Mapping[str, Mapping[str, Tensor]]

    def fail(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {sentence}")

    def weight(self, module: str, base: Tensor) -> Tensor:
        """A module's weight as this adapter changes it, in float32 where it is more than replaced.

        Raises:
            CheckpointError: a tensor is missing or doesn't fit the base.
        """
        parts = self.changes.get(module, {})
        saved = parts.get("weight", parts.get(_BASE))
        weight = base if saved is None else self._fitting(module, saved, base.shape).to(base.device)
        left, right = parts.get(LORA_B), parts.get(LORA_A)
        if module == EMBEDDING:
            a, b = parts.get(EMBEDDING_A), parts.get(EMBEDDING_B)
            left, right = (None if a is None else a.T), (None if b is None else b.T)
        if left is None and right is None:
            return weight
        if left is None or right is None:
            raise self.fail(f"holds only half of the low-rank part of {module}; fetch the adapter again")
        rank = self.config.rank_of(module)
        left = self._fitting(module, left, (weight.shape[0], rank)).to(weight.device, torch.float32)
        right = self._fitting(module, right, (rank, weight.shape[1])).to(weight.device, torch.float32)
        return torch.addmm(weight.float(), left, right, alpha=self.config.scale(module))

    def bias(self, module: str, base: Tensor) -> Tensor:
        """A module's bias as this adapter changes it."""
        parts = self.changes.get(module, {})
        if "bias" in parts:
            return self._fitting(module, parts["bias"], base.shape)
        if BIAS not in parts:
            return base
        return base.float() + self._fitting(module, parts[BIAS], base.shape).float() * self.config.scale(module)

    def set_rows(self, module: str, weight: Tensor) -> None:
        """Puts the rows of a module that are held whole into its weight."""
        rows = self.changes.get(module, {}).get(ROWS)
        if rows is None:
            return
        ids = self.config.rows_of(module)
        if ids and max(ids) >= weight.shape[0]:
            raise self.fail(f"changes token {max(ids)}, but the base has only {weight.shape[0]}; give its own base")
        weight[list(ids)] = self._fitting(module, rows, (len(ids), weight.shape[1])).to(weight)

    def check(self, config: ModelConfig) -> None:
        """
        Raises:
            CheckpointError: a tensor has no place in a network of this shape.
        """
        places = _places(config)
        for module, parts in self.changes.items():
            for ending, tensor in parts.items():
                if ending not in places.get(module, ()) and not (ending == BIAS and not tensor.any()):
                    raise self.fail(
                        f"the base has no place for {module}.{ending}; give the base that the adapter was made for"
                    )

    def _fitting(self, module: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != tuple(shape):
            raise self.fail(
                f"a tensor of {module} has shape {list(tensor.shape)} where {list(shape)} is needed; "
                "give the base that the adapter was made for"
            )
        return tensor


def _places(config: ModelConfig) -> dict[str, set[str]]:
    """For each module of a network, what an adapter may hold of it."""
    places: dict[str, set[str]] = {}
    for part in (part for parts in table(config).values() for part in parts):
        module, _, kind = part.huggingface.rpartition(".")
        low_rank = {LORA_A, LORA_B} if len(part.shape) == 2 else {BIAS} if kind == "bias" else set()
        places.setdefault(module, set()).update({kind}, low_rank)
    # a tied head has no tensor of its own in the base
    places[HEAD] = {LORA_A, LORA_B, ROWS, _BASE, "weight"}
    places[EMBEDDING] = {EMBEDDING_A, EMBEDDING_B, ROWS, _BASE, "weight"}
    return places


def find_adapter(source: str | Path) -> Path:
    """The folder of an adapter; a hub id is fetched.

    Raises:
        CheckpointError: there is no such folder.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, str) and hub.is_hub_id(source) and not path.exists():
        return hub.fetch(source)
    raise CheckpointError(f"{source}: there is no such adapter folder; give one that holds {CONFIG}")


def read_adapter(source: str | Path) -> Adapter:
    """An adapter from its folder, which peft or `write_adapter` wrote, or from the hub.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is of a kind that isn't supported.
    """
    folder = find_adapter(source)
    config = read_adapter_config(folder)
    facts = read_facts(folder / FACTS)
    changes: dict[str, dict[str, Tensor]] = {}
    with ExitStack() as stack:
        weights = Weights(folder, stack, SINGLE)
        for name in weights:
            module, ending = _split(name)
            if not ending:
                raise CheckpointError(f"{folder}: tensor {name} isn't supported; merge the adapter with peft")
            changes.setdefault(module, {})[ending] = weights.tensor(name)
    return Adapter(folder, config, facts, changes)


def _split(name: str) -> tuple[str, str]:
    bare = name.removeprefix(PREFIX)
    for ending in _ENDINGS:
        if name != bare and bare.endswith(f".{ending}"):
            return bare.removesuffix(f".{ending}"), ending
    return bare, ""


def read_facts(path: Path) -> Facts:
    """Our own facts about an adapter; none where the file is absent, as beside adapters that peft wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    raw = read_object(path, optional=True)
    try:
        mask = raw.get("mask_token")
        return Facts(
            base=None if raw.get("base") is None else str(raw["base"]),
            mask=None if mask is None else (int(mask["id"]), str(mask["token"])),
            samples={str(name): [float(v) for v in values] for name, values in raw.get("samples", {}).items()},
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: isn't what this release writes; fetch the file again") from error


def sampled_names(config: ModelConfig) -> list[str]:
    """Tensors of a base whose samples are kept: at both ends and in the middle."""
    layers = sorted({0, config.num_layers // 2, config.num_layers - 1})
    ends = ("self_attn.q_proj.weight", "mlp.down_proj.weight")
    return [f"{EMBEDDING}.weight", "model.norm.weight", *(f"model.layers.{at}.{end}" for at in layers for end in ends)]


def sample(tensor: Tensor) -> list[float]:
    """Values spread over a tensor's first rows, which a longer vocabulary doesn't move."""
    flat = tensor[:_SAMPLED_ROWS].flatten()
    return [float(flat[at * (flat.numel() - 1) // (_SAMPLES - 1)]) for at in range(_SAMPLES)]


def facts_of(base: Checkpoint) -> Facts:
    """What an adapter notes of the base that it is made for, as it is before it gets a mask token."""
    views = {part.huggingface: view for _, part, view in named_parts(base.transformer)}
    return Facts(
        base=base.source if hub.is_hub_id(base.source) else Path(base.source).name,
        samples={name: sample(views[name]) for name in sampled_names(base.config)},
    )


class Application:
    """One adapter on its way into one network: `adapt` while the base is read, then `finish` for the vocabulary."""

    def __init__(self, adapter: Adapter, base: str) -> None:
        self.adapter, self.base = adapter, base

    def adapt(self, transformer: Transformer, read: Read) -> Read:
        """For refusion.checkpoint.weights.fill: reads each tensor of the base with its change added.

        Raises:
            CheckpointError: the adapter belongs to another base.
        """
        self.adapter.check(transformer.config)
        if self._low_rank(EMBEDDING) or self._low_rank(HEAD):
            # these two change when the mask token is there, and are rounded only then
            for module in (transformer.embedding, transformer.head):
                if module is not None:
                    module.weight = nn.Parameter(torch.empty_like(module.weight, dtype=torch.float32))

        def changed(part: Part) -> Tensor:
            tensor = read(part)
            self._compare(part.huggingface, tensor)
            module, _, kind = part.huggingface.rpartition(".")
            if module in (EMBEDDING, HEAD):
                return tensor
            return self.adapter.weight(module, tensor) if kind == "weight" else self.adapter.bias(module, tensor)

        return changed

    def _compare(self, name: str, tensor: Tensor) -> None:
        wanted = self.adapter.facts.samples.get(name)
        if wanted is None:
            return
        found, asked = torch.tensor(sample(tensor)), torch.tensor(wanted)
        allowed = _TOLERANCE * (asked.abs() + asked.abs().mean())
        if found.shape != asked.shape or ((found - asked).abs() > allowed).any():
            raise self.adapter.fail(
                f"was made for another base than {self.base} ({name} differs); "
                f"load it over its own, {self.adapter.facts.base or 'which it does not name'}"
            )

    @torch.no_grad()
    def finish(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Adds the mask token, changes the embedding and the head, and rounds them to `dtype`.

        peft changes a tied embedding and its head apart unless it is told to keep them tied; then
        the network gets a head of its own.

        Raises:
            CheckpointError: the adapter's mask token is another than the base's.
        """
        adapter, transformer = self.adapter, checkpoint.transformer
        self._add_mask(checkpoint)
        if transformer.head is None and self._apart():
            head = nn.Linear(checkpoint.config.hidden_size, checkpoint.config.vocab_size, bias=False, device="meta")
            head.weight = nn.Parameter(transformer.embedding.weight.clone())
            transformer.head = head
            set_config(transformer, replace(checkpoint.config, tie_embeddings=False))
        for name, module in ((EMBEDDING, transformer.embedding), (HEAD, transformer.head)):
            if module is not None:
                weight = adapter.weight(name, module.weight)
                adapter.set_rows(name, weight)
                module.weight = nn.Parameter(weight.to(dtype))

    def _add_mask(self, checkpoint: Checkpoint) -> None:
        wanted = self.adapter.facts.mask
        if wanted is None:
            return
        add_mask_token(checkpoint)
        found = checkpoint.config.mask_token_id
        if found != wanted[0]:
            raise self.adapter.fail(
                f"was made for the mask token {wanted[1]} ({wanted[0]}), but {self.base} has {found}; "
                "load it over its own base"
            )

    def _apart(self) -> bool:
        config, changes = self.adapter.config, self.adapter.changes
        if config.tied:
            return False
        saved = any("weight" in changes.get(module, {}) and config.saves(module) for module in (EMBEDDING, HEAD))
        return saved or self._low_rank(EMBEDDING) or self._low_rank(HEAD) or ROWS in changes.get(HEAD, {})

    def _low_rank(self, module: str) -> bool:
        return bool({LORA_A, EMBEDDING_A} & self.adapter.changes.get(module, {}).keys())


def write_adapter(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    facts: Facts,
    *,
    max_shard_bytes: int | None = None,
) -> Path:
    """Writes an adapter as peft does, wholly or not at all; returns the folder.

    config: keys of a LoraConfig. tensors: by Hugging Face's module name and what is behind it in peft's names.
    max_shard_bytes: of a file's tensors, at most, unless one alone is larger. peft reads a single file only, so
    more than one is for `refusion` alone.

    Raises:
        CheckpointError: the folder is something else, or can't be written.
    """
    target = Path(folder).expanduser().resolve()
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    shards = _shards(named, max_shard_bytes)
    ours = {
        "base": facts.base,
        "mask_token": None if facts.mask is None else {"id": facts.mask[0], "token": facts.mask[1]},
        "samples": facts.samples,
    }
    with replacing(target, CONFIG, "an adapter") as partial:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            stem = SINGLE.removesuffix(".safetensors")
            file = SINGLE if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(partial / file, {name: named[name].detach().cpu().contiguous() for name in names})
            weight_map.update(dict.fromkeys(names, file))
        texts: dict[str, Mapping[str, Any]] = {CONFIG: dict(config), FACTS: ours}
        if len(shards) > 1:
            texts[f"{SINGLE}.index.json"] = {"weight_map": weight_map}
        for name, content in texts.items():
            (partial / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return target


def _shards(tensors: Mapping[str, Tensor], limit: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        nbytes = prod(tensor.shape) * tensor.dtype.itemsize
        if limit is not None and shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards
