"""What a checkpoint is, from the headers of its files alone."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from refusion.checkpoint import hub
from refusion.checkpoint.adapter import FACTS, SINGLE, find_adapter, read_facts
from refusion.checkpoint.adapter_config import CONFIG, read_adapter_config
from refusion.checkpoint.folder import Weights, read_description
from refusion.checkpoint.gguf import complete, read_config
from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.gguf_tokenizer import read_tokenizer
from refusion.checkpoint.loading import chosen_adapter, resolve
from refusion.checkpoint.names import table
from refusion.checkpoint.tokenizer import Tokenizer
from refusion.model.config import ModelConfig

_Headers = dict[str, tuple[tuple[int, ...], str]]


def info(
    source: str | Path, *, revision: str | None = None, adapter: str | Path | None = None
) -> dict[str, Any]:
    """Facts about a model with the adapter that `load` adds, or about an adapter; no weights are loaded.

    Keys: source, path, format ("huggingface" or "gguf"), family, config (all fields of ModelConfig),
    parameters (a count), dtypes (tensors of each type), tensors (name, shape, dtype of each), files
    (name, bytes), bytes (their sum), tokenizer (vocab_size, eos, bos, chat_template), mask_token
    ({"id", "token"} or None) and adapter (its facts or None). Those of an adapter: source, path, format
    ("adapter"), base, rank, alpha, targets, saved, mask_token, parameters, dtypes, tensors, files, bytes.

    Raises:
        CheckpointError: as `load`.
    """
    path = resolve(source, revision, weights=False)
    if (path / CONFIG).exists() and not (path / "config.json").exists():
        return _adapter_facts(source, find_adapter(source))
    facts = _model_facts(source, path, revision)
    chosen = chosen_adapter(source, adapter)
    facts["adapter"] = None if chosen is None else _adapter_facts(chosen, find_adapter(chosen))
    if facts["adapter"] and facts["mask_token"] is None:
        facts["mask_token"] = facts["adapter"]["mask_token"]
    return facts


def _adapter_facts(source: str | Path, path: Path) -> dict[str, Any]:
    config, facts = read_adapter_config(path), read_facts(path / FACTS)
    with ExitStack() as stack:
        weights = Weights(path, stack, SINGLE)
        headers: _Headers = {name: weights.header(name) for name in weights}
    return {
        "source": str(source),
        "path": str(path),
        "format": "adapter",
        "base": facts.base or config.base,
        "rank": config.rank,
        "alpha": config.alpha,
        "targets": sorted(config.targets),
        "saved": sorted(config.saved),
        "mask_token": None if facts.mask is None else {"id": facts.mask[0], "token": facts.mask[1]},
        "parameters": sum(prod(shape) for shape, _ in headers.values()),
        **_tables(headers, sorted(path.iterdir())),
    }


def _tables(headers: _Headers, files: list[Path]) -> dict[str, Any]:
    sizes = [{"name": file.name, "bytes": file.stat().st_size} for file in files if file.is_file()]
    return {
        "dtypes": dict(Counter(kind for _, kind in headers.values()).most_common()),
        "tensors": [{"name": name, "shape": list(shape), "dtype": kind} for name, (shape, kind) in headers.items()],
        "files": sizes,
        "bytes": sum(size["bytes"] for size in sizes),
    }


def _model_facts(source: str | Path, path: Path, revision: str | None) -> dict[str, Any]:
    if path.is_file():
        file = GgufFile(path)
        tokenizer = read_tokenizer(file)
        config = complete(read_config(file), tokenizer)
        headers: _Headers = {tensor.name: (tensor.shape, tensor.kind) for tensor in file.tensors.values()}
        return _facts(source, path, "gguf", config, tokenizer, headers, [path])
    config, tokenizer, _ = read_description(path)
    remote = isinstance(source, str) and hub.is_hub_id(source) and not Path(source).exists()
    if remote and not any(path.glob("*.safetensors")):
        headers = hub.remote_tensors(str(source), revision)
    else:
        with ExitStack() as stack:
            weights = Weights(path, stack)
            headers = {name: weights.header(name) for name in weights}
    return _facts(source, path, "huggingface", config, tokenizer, headers, sorted(path.iterdir()))


def _facts(
    source: str | Path, path: Path, form: str, config: ModelConfig, tokenizer: Tokenizer, headers: _Headers,
    files: list[Path],
) -> dict[str, Any]:
    mask = config.mask_token_id
    return {
        "source": str(source),
        "path": str(path),
        "format": form,
        "family": config.family,
        "config": asdict(config),
        "parameters": sum(prod(part.shape) for parts in table(config).values() for part in parts),
        **_tables(headers, files),
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "eos": [{"id": i, "token": tokenizer.id_to_token(i)} for i in tokenizer.eos_ids],
            "bos": None if tokenizer.bos_id is None else
            {"id": tokenizer.bos_id, "token": tokenizer.id_to_token(tokenizer.bos_id)},
            "chat_template": tokenizer.has_chat_template,
        },
        "mask_token": None if mask is None else {"id": mask, "token": tokenizer.id_to_token(mask)},
    }
