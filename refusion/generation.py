"""Text in, text out: prompts to token ids, the engine, token ids to text and honest figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refusion import checkpoint as checkpoints
from refusion.checkpoint import Checkpoint, Tokenizer
from refusion.decoding import algorithm, cells_needed
from refusion.decoding.config import DecodeConfig
from refusion.engine import Engine, Finished
from refusion.errors import CapacityError, ConfigError
from refusion.model.config import ModelConfig
from refusion.model.int8 import quantize_linear_layers
from refusion.model.transformer import Transformer

Prompt = str | Sequence[dict[str, str]]
"""A user's text, or a conversation as a list of {"role", "content"}."""


@dataclass
class Generation:
    """One answer and what it cost.

    text: without the end token and without a stop string. token_ids: up to and including the end token.
    tokens: their count, which TPF and TPS count too. forwards: passes after the prompt's.
    seconds: from the prompt's first pass to the last token (for a batch: of this row).
    finish_reason: "stop" or "length".
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    forwards: int
    seconds: float
    first_token_seconds: float
    finish_reason: str
    events: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tpf(self) -> float:
        """Tokens per forward pass after the prompt's; 0.0 without such a pass."""
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def tps(self) -> float:
        """Tokens per second, the prompt's time included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that `refusion generate --json` prints."""
        return {
            "text": self.text, "tokens": self.tokens, "forwards": self.forwards, "tpf": round(self.tpf, 4),
            "seconds": round(self.seconds, 4), "tps": round(self.tps, 2), "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens, "first_token_seconds": round(self.first_token_seconds, 4),
        }


class Model:
    """A network with its tokenizer, ready to write."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def transformer(self) -> Transformer:
        return self.checkpoint.transformer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def is_refusion(self) -> bool:
        """Whether the model has a mask token, so that it can decode in parallel."""
        return self.config.mask_token_id is not None

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [T, V] of a causal pass over T token ids at positions 0..T-1; V with padding rows."""
        tokens = torch.tensor([list(token_ids)], device=self.transformer.device)
        if tokens.shape[1] == 0:
            return torch.zeros(0, self.config.vocab_size)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.transformer.project(self.transformer(tokens, positions))[0].float()

    def prompt_ids(self, prompt: Prompt, *, chat: bool = True, system: str | None = None) -> list[int]:
        """Token ids of a prompt; never empty. Special-token strings in it stay text.

        chat: put a text into the model's chat template as the user's turn, if it has one;
        otherwise the text is continued as it stands. system: what to say before it; without a
        template the two are joined by a newline.

        Raises:
            ConfigError: a system message for a text that is to be continued as it stands.
        """
        if not isinstance(prompt, str):
            messages = [dict(message) for message in prompt]
        elif chat and (self.tokenizer.has_chat_template or system is not None):
            messages = [{"role": "user", "content": prompt}]
        elif system is not None:
            raise ConfigError("a system message needs chat=True; put it into the prompt instead")
        else:
            return self.tokenizer.encode(prompt, bos=True) or [self._first_id()]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return self.tokenizer.chat(messages) or [self._first_id()]

    def _first_id(self) -> int:
        """What stands for an empty prompt: the beginning of a text, or the end of the one before."""
        bos, ends = self.tokenizer.bos_id, self.tokenizer.eos_ids
        if bos is None and not ends:
            raise ConfigError("the prompt is empty and this model has no token that begins a text; write a prompt")
        return ends[0] if bos is None else bos

    def start(self, ids: Sequence[int], config: DecodeConfig, *, index: int = 0) -> Callable[[Any], Any]:
        """The decoder for prompt ids, waiting for an engine's row.

        index: the prompt's place in its call; places draw apart under one seed.

        Raises:
            CapacityError: prompt and answer are longer than the model's context.
            ConfigError: as refusion.decoding.algorithm.
        """
        room, positions = self.config.max_positions - len(ids), self.config.max_positions
        if config.max_tokens > room:
            raise CapacityError(
                f"a prompt of {len(ids)} tokens leaves {room} of the model's {positions} positions for the answer; "
                f"ask for at most that many instead of {config.max_tokens}" if room > 0 else
                f"a prompt of {len(ids)} tokens leaves none of the model's {positions} positions for an answer; "
                "shorten it"
            )
        check = None
        if config.stop:
            check = StopSearch(config.stop, self.tokenizer.decode)
        return algorithm(
            config, ids, end_ids=self.tokenizer.eos_ids, mask_id=self.config.mask_token_id, stop_check=check,
            index=index,
        )

    def text(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """The text of an answer: no special tokens, nothing from the first stop string on."""
        text = self.tokenizer.decode(ids)
        cuts = [at for s in stop if (at := text.find(s)) >= 0]
        return text[: min(cuts)] if cuts else text


def first_stop(ids: list[int], *, stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """How many tokens reach up to the end of the first stop string in them, or None without one."""
    text = decode(ids)
    if not any(s in text for s in stop):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if any(s in decode(ids[:middle]) for s in stop):
            high = middle
        else:
            low = middle + 1
    return low


class StopSearch:
    """`first_stop` for an answer that grows, in time proportional to what is new.

    Only the tokens from a window's start on are decoded; a find is confirmed, and placed, by the
    whole answer. The window is moved where its text is the end of the whole text, and long enough
    that no stop string still to come can begin before it. So nothing is missed with a tokenizer
    whose later tokens change no settled character; replacement characters at the end of a text
    (an incomplete UTF-8 sequence) aren't settled.
    """

    # tokens kept beyond one for each character of a stop string: some have no character of their own
    _SLACK = 8

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._stop, self._decode, self._start = stop, decode, 0
        self._longest = max(map(len, stop))
        self._whole = any("\ufffd" in s for s in stop)

    def __call__(self, ids: list[int]) -> int | None:
        """How many of the tokens so far reach up to the end of the first stop string, or None without one."""
        text = self._decode(ids[self._start :])
        if any(s in text for s in self._stop):
            return first_stop(ids, stop=self._stop, decode=self._decode)
        later = len(ids) - self._longest - self._SLACK
        if later - self._start >= self._longest + self._SLACK and not self._whole:
            tail = self._decode(ids[later:])
            if text.endswith(tail) and len(tail.rstrip("\ufffd")) >= self._longest:
                self._start = later
        return None


DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": None, "auto": None,
}
"""Types of weights by name; None: the best floating type of the device."""


def load(
    source: str | Path = "default", *, device: str = "auto", dtype: str = "auto", mask_token_id: int | None = None,
    compile: bool = False, adapter: str | Path | None = None,
) -> Model:
    """Loads a model from a folder, a GGUF file, a hub id, or the default one.

    device: "auto" is CUDA where there is one. dtype: "float32", "bfloat16", "float16" or "auto":
    bfloat16 on CUDA and on CPUs with bfloat16 products, else float32; "int8" is "auto" with the
    linear layers in int8, on CPUs only. compile: fuse what lies between the matrix products with
    torch.compile, which takes a C++ compiler and, the first time, a minute. adapter: a folder or hub
    id of a peft LoRA adapter to add to the weights; "none" keeps the default model's own off.

    Raises:
        CheckpointError: the files are missing, damaged or not supported.
        ConfigError: device or dtype is unknown, or they don't go together.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device '{device}' can't be used: {str(error).splitlines()[0]}") from None
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")
    if dtype == "int8" and not where.startswith("cpu"):
        raise ConfigError(f"dtype int8 is for CPUs only; choose another for the device '{where}', or --device cpu")
    chosen = DTYPES[dtype] or (torch.bfloat16 if _has_bfloat16(where) else torch.float32)
    checkpoint = checkpoints.load(
        source, dtype=chosen, device=where, mask_token_id=mask_token_id, adapter=adapter
    )
    checkpoint.transformer.eval().requires_grad_(False)
    if dtype == "int8":
        quantize_linear_layers(checkpoint.transformer)
    if compile:
        checkpoint.transformer.compile_steps()
    return Model(checkpoint)


def _has_bfloat16(device: str) -> bool:
    if not device.startswith("cpu"):
        return True
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(check and check())


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    config: DecodeConfig | None = None,
    *,
    batch_size: int = 8,
    max_cells: int | None = None,
    chat: bool = True,
    system: str | None = None,
    record: bool = False,
    on_finish: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Answers to one prompt or many, in the prompts' order; up to batch_size are written together.

    Args:
        config: defaults to `refusion` where the model has a mask token, else left-to-right. Its seed and a
            prompt's index fix the prompt's draws; index 0 is the seed's own stream.
        max_cells: cells of the key-value cache that all of them together may hold (no limit where None);
            answers for which there is no room wait.
        record: keep the decoder's events in each Generation.
        on_finish: called with (index, generation) as each one ends.

    Raises:
        ConfigError, CapacityError: before anything runs, for the first prompt that can't be served.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, got {batch_size}")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], dict))
    wanted: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
    if config is None:
        config = DecodeConfig(decoder="refusion" if model.is_refusion else "autoregressive")
    ids = [model.prompt_ids(prompt, chat=chat, system=system) for prompt in wanted]
    starts = [model.start(prompt, config, index=index) for index, prompt in enumerate(ids)]
    engine = Engine(model.transformer, rows=max(1, min(batch_size, len(ids))), max_cells=max_cells)
    results: dict[int, Generation] = {}
    tickets = {
        engine.submit(start, cells=cells_needed(config, len(prompt)), record=record): index
        for index, (start, prompt) in enumerate(zip(starts, ids, strict=True))
    }
    while not engine.idle:
        for done in engine.step():
            index = tickets[done.ticket]
            results[index] = _generation(model, config, len(ids[index]), done)
            if on_finish:
                on_finish(index, results[index])
    return [results[index] for index in range(len(ids))]


def _generation(model: Model, config: DecodeConfig, prompt_tokens: int, done: Finished) -> Generation:
    return Generation(
        text=model.text(done.answer.tokens, config.stop),
        token_ids=done.answer.tokens,
        prompt_tokens=prompt_tokens,
        forwards=done.forwards,
        seconds=done.seconds,
        first_token_seconds=done.first_token_seconds,
        finish_reason=done.answer.finish_reason,
        events=list(done.events),
    )
