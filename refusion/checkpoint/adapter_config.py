"""What a peft adapter's adapter_config.json asks for; what can't be honoured is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion.checkpoint.jsonfile import read_object
from refusion.errors import CheckpointError

CONFIG = "adapter_config.json"
# keys that, where they are set, give an adapter's tensors another meaning
_VARIANTS = (
    "use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "megatron_config",
)
# ways to begin that leave the base as it is; others take something from it that the adapter doesn't hold
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """The keys of a peft LoraConfig that count when it is applied.

    rank, alpha: of modules that no pattern matches. rank_pattern, alpha_pattern: values by expressions that match
        the end of a module's name; the first that does counts.
    targets: modules with low-rank parts, as written. saved: ends of names of modules that are held whole.
    token_rows: ids of the embedding rows that are held whole, by the end of the module's name.
    tied: whether a tied head takes part in the changes of the embedding.
    base: the base model's name, where it is written down.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    targets: tuple[str, ...]
    saved: tuple[str, ...]
    token_rows: Mapping[str, tuple[int, ...]]
    tied: bool
    base: str | None

    def rank_of(self, module: str) -> int:
        """The rank of a module's low-rank part."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale(self, module: str) -> float:
        """What a module's low-rank product is multiplied by."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves(self, module: str) -> bool:
        """Whether a module is held whole."""
        return any(module.endswith(name) for name in self.saved)

    def rows_of(self, module: str) -> tuple[int, ...]:
        """Ids of a module's rows that are held whole."""
        return next((ids for name, ids in self.token_rows.items() if module.endswith(name)), ())


def lora_config(
    rank: int, alpha: float, *, targets: list[str], base: str | None, rows: list[int] | None = None,
    saved: list[str] | None = None, ranks: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The keys of a LoraConfig; those that older releases of peft don't know only where they are needed.

    targets: kinds of modules with low-rank parts. rows: ids of the embedding rows that are held whole. saved: kinds of
    modules that are held whole. ranks: of kinds of modules with another rank, whose alpha is this rank too.
    """
    odd = dict(ranks or {})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": alpha, "rank_pattern": odd, "alpha_pattern": odd, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
        "target_modules": targets, "modules_to_save": saved or None,
    }
    if rows:
        config["trainable_token_indices"] = {"embed_tokens": rows}
    return config


def _matching(pattern: Mapping[str, float], module: str, default: float) -> float:
    # as peft does, an expression and not a plain name
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json of a folder.

    Raises:
        CheckpointError: missing, damaged, of another method than LoRA, or with a feature that isn't supported.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{folder}: holds no {CONFIG}; give the folder of a peft adapter")
    raw = read_object(path)
    _refuse(raw, path)
    saved, targets = raw.get("modules_to_save"), raw.get("target_modules")
    base = raw.get("base_model_name_or_path")
    return AdapterConfig(
        rank=int(_number(path, "r", raw.get("r"), whole=True)),
        alpha=_number(path, "lora_alpha", raw.get("lora_alpha")),
        rank_pattern=_pattern(path, "rank_pattern", raw.get("rank_pattern"), whole=True),
        alpha_pattern=_pattern(path, "alpha_pattern", raw.get("alpha_pattern")),
        use_rslora=raw.get("use_rslora") is True,
        targets=_names(path, "target_modules", [targets] if isinstance(targets, str) else targets),
        saved=_names(path, "modules_to_save", saved),
        token_rows=_token_rows(path, raw.get("trainable_token_indices")),
        tied=raw.get("ensure_weight_tying") is True,
        base=base if isinstance(base, str) and base else None,
    )


def _refuse(raw: dict[str, Any], path: Path) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type {kind!r} isn't supported (LORA is); merge the adapter with peft")
    for key in _VARIANTS:
        if raw.get(key):
            raise CheckpointError(f"{path}: {key} isn't supported; merge the adapter with peft")
    if raw.get("bias") not in (None, "none"):
        raise CheckpointError(f"{path}: bias={raw['bias']!r} isn't supported; merge the adapter with peft")
    start = raw.get("init_lora_weights")
    if start not in _STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights={start!r} changes the base and isn't supported; "
            "let peft save it as plain LoRA (path_initial_model_for_weight_conversion)"
        )


def _number(path: Path, key: str, value: Any, whole: bool = False) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**31
    if not good or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise CheckpointError(f"{path}: {key} must be {kind} above 0, not {value!r}; restore the original file")
    return value


def _pattern(path: Path, key: str, value: Any, whole: bool = False) -> dict[str, float]:
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key} must be an object, not {value!r}; restore the original file")
    for name in value or {}:
        try:
            re.compile(rf"(.*\.)?({name})$")
        except re.error as error:
            raise CheckpointError(
                f"{path}: {key} holds {name!r}, which isn't a valid expression ({error}); restore the original file"
            ) from error
    return {name: _number(path, f"{key}.{name}", entry, whole) for name, entry in (value or {}).items()}


def _names(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) and name for name in value)):
        raise CheckpointError(f"{path}: {key} must be a list of names, not {value!r}; restore the original file")
    return tuple(value or ())


def _token_rows(path: Path, value: Any) -> dict[str, tuple[int, ...]]:
    rows = {"embed_tokens": value} if isinstance(value, list) else value
    good = rows is None or (isinstance(rows, dict) and all(
        isinstance(ids, list) and all(isinstance(i, int) and i >= 0 for i in ids) for ids in rows.values()
    ))
    if not good:
        raise CheckpointError(
            f"{path}: trainable_token_indices must hold token ids, not {value!r}; restore the original file"
        )
    return {name: tuple(ids) for name, ids in (rows or {}).items()}
