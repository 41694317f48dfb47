"""Tiny models and tokenizers on disk, in both formats, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["The quick brown fox jumps over the lazy dog. ", "def add(a, b):\n    return a + b\n",
         "1 + 2 = 3, 10 * 12 = 120. ", "Zwölf Boxkämpfer jagen Viktor. ", "I'll say we've done it; they're here. "]
ROWS = 448
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}
NASTY = [
    "", " ", "hello", " hello", "  hello   world  ", "\n", "\n\n\n", "\t\tx\r\n y", "trailing   ", "\r\r\n\r",
    "12345 6789", "3.14159", "x1y22z333", "\u0661\u0662\u0663 \u00bd \u2167 \u00b2",
    "I'll they're WE'VE don't", "\u017f'S 'LL \u0130i", "naïve café Zürich", "e\u0301 \u00e9",
    "日本語のテキスト", "Привет, мир", "مرحبا", "\U0001f469\u200d\U0001f467 \U0001f389!", "\U0001f600\U0001f601",
    "a\u00a0b\u2003c\u200bd", "\u2028x\u2029", "\ufeffbom", "\x00\x01\x7f",
    "def f(x):\n\treturn {x: [1, 2]}  # note\n", "http://a.b/c?d=e&f#g", "$$$ ^^^ ~~~ ||| <<>>",
    "<|im_end|>", "a<|im_start|>b<|endoftext|>", "<|im_end", "a" * 300, "_" * 40,
]


def train_backend(pre: Any = None) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of 340 tokens, its control tokens first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre or pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    return backend


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    return train_backend()


@pytest.fixture(scope="session")
def qwen_backend(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary behind transformers' own pre-tokenizer and normaliser of Qwen2."""
    transformers = pytest.importorskip("transformers")
    model = json.loads(backend.to_str())["model"]
    made = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS], special_tokens=True)
    return made.backend_tokenizer


@pytest.fixture(scope="session")
def nasty() -> list[str]:
    return NASTY


@pytest.fixture(scope="session")
def write_tokenizer(backend: tokenizers.Tokenizer, qwen_backend: tokenizers.Tokenizer) -> Callable[..., None]:
    def write(folder: Path, qwen: bool = False, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (qwen_backend if qwen else backend).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
                  "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML,
                  "clean_up_tokenization_spaces": False, **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    return write


@pytest.fixture
def tiny(write_tokenizer: Callable[..., None]) -> Callable[..., Any]:
    """tiny(folder, family, **config changes): a random transformers model saved with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}

    def make(folder: Path, family: str = "llama", shard: str = "1GB", **changes: Any) -> Any:
        torch.manual_seed(0)
        ids = {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0}
        config = getattr(transformers, f"{classes[family]}Config")(**{**SHAPE, **ids, **changes})
        model = getattr(transformers, f"{classes[family]}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data.ndim == 1)
        model.tie_weights()
        model.save_pretrained(folder, max_shard_size=shard)
        write_tokenizer(folder, qwen=family == "qwen2")  # transformers has no other for this family
        return model

    return make


@pytest.fixture
def edit() -> Callable[..., None]:
    """edit(file, key=value): changes keys of a JSON file; ... removes one."""

    def change(file: Path, **values: Any) -> None:
        content = json.loads(file.read_text())
        for key, value in values.items():
            if value is ...:
                content.pop(key, None)
            else:
                content[key] = value
        file.write_text(json.dumps(content))

    return change


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """logits(transformer, tokens): those of our network over whole rows."""

    @torch.no_grad()
    def compute(transformer: Any, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return transformer.project(transformer(tokens, positions)).float()

    return compute


@pytest.fixture
def some_tokens() -> torch.Tensor:
    return torch.randint(3, 340, (2, 24), generator=torch.Generator().manual_seed(3))


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
GGUF_ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    if name in GGUF_ENDS:
        return GGUF_ENDS[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def permuted(array: Any, heads: int) -> Any:
    """What convert_hf_to_gguf.py does to queries and keys (LlamaModel.permute)."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf_config(writer: Any, c: Any, extra: dict[str, Any]) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in extra.items():
        add[type(value)](key, value)


def write_gguf_tokenizer(writer: Any, backend: tokenizers.Tokenizer, model: str, pre: str) -> None:
    content = json.loads(backend.to_str())["model"]
    vocab = [token for token, _ in sorted(content["vocab"].items(), key=lambda item: item[1])]
    vocab += [f"[PAD{i}]" for i in range(len(vocab), ROWS)]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if t in SPECIALS else 5 if t.startswith("[PAD") else 1 for t in vocab])
    writer.add_token_merges([" ".join(merge) for merge in content["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)


@pytest.fixture
def write_gguf(backend: tokenizers.Tokenizer) -> Callable[..., None]:
    """write_gguf(file, reference, kind): a transformers model as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf")

    def write(
        file: Path, reference: Any, kind: str = "F32", *, pre: str = "smollm", tokenizer_model: str = "gpt2",
        architecture: str = "", skip: str = "", extra: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
    ) -> None:
        c = reference.config
        family = architecture or c.model_type
        writer = gguf.GGUFWriter(str(file), family)
        write_gguf_config(writer, c, extra or {})
        write_gguf_tokenizer(writer, backend, tokenizer_model, pre)
        heads = {".q_proj": c.num_attention_heads, ".k_proj": c.num_key_value_heads} if family == "llama" else {}
        for name, tensor in reference.state_dict().items():
            if (name == "lm_head.weight" and c.tie_word_embeddings) or name == skip:
                continue
            array = tensor.float().numpy()
            for projection, count in heads.items():
                array = permuted(array, count) if projection in name else array
            stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
            packed = gguf.quants.quantize(np.ascontiguousarray(array), stored)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=stored)
        for name, array in (tensors or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write
