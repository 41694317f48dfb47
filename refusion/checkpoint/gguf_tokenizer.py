"""The tokenizer inside a GGUF file, rebuilt as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.reasons import reason
from refusion.checkpoint.tokenizer import Tokenizer
from refusion.errors import CheckpointError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# what llama.cpp ends a text at, whatever the metadata say, when it is a control token
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
# the pieces that llama.cpp's "default" splits by, one after the other
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

_SMOLLM_NAMES = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
_QWEN2_NAMES = {"qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"}
_LLAMA3_NAMES = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral"}
_GPT2_NAMES = {"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"}


def _split(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]


def _pre_tokenizer(name: str, path: str) -> tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None]:
    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SMOLLM_NAMES:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), None
    if name in _QWEN2_NAMES:
        return pre_tokenizers.Sequence([*_split(_QWEN2), plain_bytes]), normalizers.NFC()
    if name in _LLAMA3_NAMES:
        return pre_tokenizers.Sequence([*_split(_LLAMA3), plain_bytes]), None
    if name in _GPT2_NAMES:
        return gpt2, None
    if name == "default":
        return pre_tokenizers.Sequence([*_split(*_DEFAULT), plain_bytes]), None
    raise CheckpointError(
        f"{path}: the pre-tokenizer '{name}' isn't known (smollm, qwen2, llama-bpe, gpt-2 and default are); "
        "use the Hugging Face folder of the model"
    )


def read_tokenizer(file: GgufFile, mask_token_id: int | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    Raises:
        CheckpointError: it isn't byte-level BPE, or its pre-tokenizer isn't known.
    """
    kind = file.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: the tokenizer model '{kind}' isn't supported (byte-level BPE, 'gpt2', is); "
            "use the Hugging Face folder of the model"
        )
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens have {len(types)} types; convert the model again")
    # rows that only pad the vocabulary got made-up tokens
    used = next((place for place in range(len(types), 0, -1) if types[place - 1] != _UNUSED), 0)
    tokens, types = tokens[:used], types[:used]
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    before, normalizer = _pre_tokenizer(name, str(file.path))
    try:
        bpe = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,  # type: ignore[arg-type]
            ignore_merges=name in _LLAMA3_NAMES,
        )
    except Exception as error:  # tokenizers raises plain Exception
        why = reason(error)
        raise CheckpointError(f"{file.path}: merges and vocabulary don't fit ({why}); convert it again") from error
    backend = Backend(bpe)
    backend.pre_tokenizer = before
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    added = [(token, types[index]) for index, token in enumerate(tokens) if types[index] in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added])
    return _wrapped(file, backend, tokens, types, mask_token_id)


def _wrapped(file: GgufFile, backend: Backend, tokens: list[str], types: list[int], mask_id: int | None) -> Tokenizer:
    def identifier(key: str) -> int | None:
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        return int(value) if isinstance(value, int) and 0 <= value < len(tokens) else None

    ends = [identifier(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    controls = {token: index for index, token in enumerate(tokens) if types[index] == _CONTROL}
    ends += [controls.get(text) for text in _END_TEXTS]
    bos = identifier("bos_token_id")
    template = file.metadata.get("tokenizer.chat_template")
    by_name = file.metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    add_bos = bos is not None and bool(file.metadata.get("tokenizer.ggml.add_bos_token", by_name))
    if add_bos:
        start = tokens[bos or 0]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, bos)]
        )
    return Tokenizer(
        backend,
        eos_ids=[index for index in ends if index is not None],
        bos_id=bos,
        pad_id=identifier("padding_token_id"),
        unk_id=identifier("unknown_token_id"),
        mask_id=mask_id if mask_id is not None else identifier("mask_token_id"),
        chat_template=template if isinstance(template, str) else None,
        add_bos=add_bos,
    )
