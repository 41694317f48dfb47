"""Hugging Face's config.json <-> ModelConfig; what isn't supported is refused by name."""

from __future__ import annotations

from typing import Any

from refusion.checkpoint.hf_rope import read_rope, write_rope
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig

LARGEST_COUNT = 2**31
MOST_LAYERS = 10_000
FAMILIES = ("llama", "qwen2", "qwen3")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Values:
    """The keys of one config file; a wrong value is reported with the file's and the key's name."""

    def __init__(self, raw: dict[str, Any], file: str) -> None:
        self.raw = raw
        self.file = file

    def fail(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {sentence}")

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero.

        Raises:
            CheckpointError: missing without a default, or something else.
        """
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing; restore the original config")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST_COUNT:
            raise self.fail(f"{key} must be a number above 0 of usual size, not {value!r}; restore the original config")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self.fail(f"{key} must be a whole number, not {value!r}; restore the original config")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, not {value!r}; restore the original config")
        return bool(value)

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id, or None where it is absent or outside the vocabulary."""
        value = self.raw.get(key)
        known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
        return int(value) if known and value is not None else None


def _names(raw: dict[str, Any]) -> list[str]:
    """What a config calls its own architecture, the names of its custom code included."""
    architectures = raw.get("architectures")
    auto_map = raw.get("auto_map")
    names = [raw.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    names += list(auto_map.values()) if isinstance(auto_map, dict) else []
    return [name for name in names if isinstance(name, str)]


def names_refusion(raw: dict[str, Any]) -> bool:
    """Whether the config is of a published ReFusion model, whose code is a changed Qwen3."""
    return any("refusion" in name.lower() for name in _names(raw))


def family_of(raw: dict[str, Any], file: str) -> str:
    """The family a config describes; custom code named in it is never run.

    Raises:
        CheckpointError: another architecture.
    """
    kind = raw.get("model_type")
    if kind in FAMILIES:
        return str(kind)
    for family, architecture in _ARCHITECTURES.items():
        if architecture in (raw.get("architectures") or []):
            return family
    if names_refusion(raw):
        return "qwen3"
    if isinstance(kind, str) and "moe" in kind.lower():
        raise CheckpointError(f"{file}: mixture of experts (MoE, '{kind}') isn't supported; use a dense model")
    raise CheckpointError(f"{file}: model_type {kind!r} isn't supported (llama, qwen2 and qwen3 are)")


def _refuse_features(v: Values) -> None:
    raw = v.raw
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise v.fail(f"mixture of experts (MoE, {key} {raw[key]}) isn't supported; use a dense model")
    layers = raw.get("layer_types") or []
    other = next((kind for kind in layers if kind != "full_attention"), None) if isinstance(layers, list) else layers
    if raw.get("use_sliding_window") or other == "sliding_attention":
        raise v.fail("sliding-window attention isn't supported; use a model with full attention")
    if other is not None:
        raise v.fail(f"layers of type {other!r} aren't supported; use a model with full attention")
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise v.fail(
            f"quantization_config ({method or 'of an unknown method'}) isn't supported; "
            "use unquantised safetensors or a GGUF file"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key):
            raise v.fail(f"logit soft-capping ({key}) isn't supported")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise v.fail(f"hidden_act {activation!r} isn't supported (silu is)")


def read_config(raw: dict[str, Any], file: str, mask_token_id: int | None = None) -> ModelConfig:
    """The architecture a config.json describes.

    mask_token_id: overrides the config's own. End tokens and num_tokens are completed by the
    caller, who knows the tokenizer.

    Raises:
        CheckpointError: a value is missing or impossible, or a feature isn't supported.
    """
    family = family_of(raw, file)
    v = Values(raw, file)
    _refuse_features(v)
    heads, hidden = v.count("num_attention_heads"), v.count("hidden_size")
    usual = 128 if family == "qwen3" else max(hidden // heads, 1)
    attention_bias = v.flag("attention_bias")
    vocab, layers = v.count("vocab_size"), v.count("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise v.fail(f"num_hidden_layers must be at most {MOST_LAYERS}, not {layers}; restore the original config")
    mask = mask_token_id if mask_token_id is not None else raw.get("mask_token_id")
    if mask is not None and (isinstance(mask, bool) or not isinstance(mask, int)):
        raise v.fail(f"mask_token_id must be a token id, not {mask!r}; restore the original config")
    ours = raw.get("refusion")
    tokens = Values(ours, file).count("num_tokens", vocab) if isinstance(ours, dict) else 0
    theta, scaling = read_rope(v.raw, v.fail, v.count("max_position_embeddings", 2048 if family == "llama" else 32768))
    try:
        return ModelConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=v.count("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=v.count("num_key_value_heads", heads),
            head_dim=v.count("head_dim", usual),
            max_positions=v.count("max_position_embeddings", 2048 if family == "llama" else 32768),
            family=family,
            rms_eps=v.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=v.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and v.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            num_tokens=tokens,
            mask_token_id=mask,
            bos_token_id=v.token("bos_token_id", vocab),
            pad_token_id=v.token("pad_token_id", vocab),
        )
    except ValueError as error:
        raise v.fail(f"the values don't fit together: {error}") from error


def check_family(c: ModelConfig, file: str) -> None:
    """
    Raises:
        CheckpointError: biases or norms that the family's layers don't have.
    """
    expected = {
        "llama": not c.qk_norm and c.qkv_bias == c.output_bias,
        "qwen2": not c.qk_norm and c.qkv_bias and not c.output_bias and not c.mlp_bias,
        "qwen3": c.qk_norm and c.qkv_bias == c.output_bias and not c.mlp_bias,
    }
    if not expected.get(c.family, False):
        raise CheckpointError(
            f"{file}: the biases or norms aren't those of the {c.family} family; this kind of model isn't supported"
        )


def write_config(c: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a network, in the form that all releases of transformers read.

    Raises:
        CheckpointError: Hugging Face's family has no place for a feature.
    """
    check_family(c, "config.json")
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": _one_or_list(c.eos_token_ids),
        "pad_token_id": c.pad_token_id,
        "mask_token_id": c.mask_token_id,
        "refusion": {"num_tokens": c.num_tokens},
        **write_rope(c),
    }
    if c.family != "qwen2":
        raw["attention_bias"] = c.qkv_bias
    if c.family == "llama":
        raw["mlp_bias"] = c.mlp_bias
    else:
        raw["use_sliding_window"] = False
    return raw


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
