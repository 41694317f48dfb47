"""Other engines on the same weights, greedy and left-to-right, for honest comparison.

A peer answers one prompt at a time and gives a Generation counted by the same rules.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from refusion.checkpoint import save
from refusion.errors import ConfigError
from refusion.generation import Generation, Model

PEERS = ("transformers",)


class Peer(Protocol):
    """An engine to compare with."""

    def answer(self, prompt: str, max_tokens: int) -> Generation:
        """The peer's greedy answer to a user's text."""
        ...


def open_peer(name: str, model: Model) -> Peer:
    """A peer on the model's weights, in the model's own type.

    Raises:
        ConfigError: the peer is unknown or its package isn't installed.
    """
    if name == "transformers":
        return TransformersPeer(model)
    raise ConfigError(f"unknown peer '{name}'; choose one of {', '.join(PEERS)}")


class TransformersPeer:
    """`generate` of transformers with its key-value cache on."""

    def __init__(self, model: Model) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise ConfigError("the peer transformers isn't installed; run `pip install transformers`") from None
        self._model = model
        with tempfile.TemporaryDirectory() as scratch:
            folder = save(model.checkpoint, Path(scratch) / "model")
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=model.transformer.dtype)
        self._peer = loaded.to(model.transformer.device).eval()

    @torch.inference_mode()
    def answer(self, prompt: str, max_tokens: int) -> Generation:
        """As Peer.answer. The first token's time is that of a pass over the prompt alone."""
        ids = self._model.prompt_ids(prompt)
        tokens = torch.tensor([ids], device=self._peer.device)
        ends = list(self._model.tokenizer.eos_ids)
        times: list[float] = []
        began = time.perf_counter()
        out = self._peer.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=ends, pad_token_id=ends[0], use_cache=True, streamer=_Clock(began, times),
        )
        seconds = time.perf_counter() - began
        return self._generation(out[0, len(ids) :].tolist(), ends, len(ids), seconds, times)

    def _generation(
        self, answer: list[int], ends: Sequence[int], prompt_tokens: int, seconds: float, times: Sequence[float]
    ) -> Generation:
        stop = next((at + 1 for at, token in enumerate(answer) if token in ends), None)
        answer = answer[:stop]
        first = times[1] if len(times) > 1 else seconds  # the streamer's first call brings the prompt
        return Generation(
            self._model.text(answer), answer, prompt_tokens, max(len(answer) - 1, 0), seconds, first,
            "length" if stop is None else "stop",
        )


class _Clock:
    """A streamer that only notes when tokens arrive."""

    def __init__(self, began: float, times: list[float]) -> None:
        self._began, self._times = began, times

    def put(self, value: Any) -> None:
        self._times.append(time.perf_counter() - self._began)

    def end(self) -> None:
        pass
