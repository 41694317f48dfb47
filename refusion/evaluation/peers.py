"""Other engines on the same weights, greedy and left-to-right, for honest comparison.

A peer answers one prompt at a time and gives a Generation counted by the same rules.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from refusion.checkpoint import save
from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError
from refusion.evaluation.floats import in_floats
from refusion.generation import Generation, Model, first_stop

LLAMA_FLAGS = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON"
"""A build of llama.cpp without AMX, whose kernels crash on some CPUs that have it."""
PEERS = {
    "transformers": ("transformers", "`pip install transformers`"),
    "llama.cpp": (
        "llama_cpp",
        "`pip install llama-cpp-python`, which compiles for minutes (where its AMX code crashes, put "
        f'`CMAKE_ARGS="{LLAMA_FLAGS}"` in front)',
    ),
}
"""Package of each peer, and how to install it."""


class Peer(Protocol):
    """An engine to compare with.

    weights: what it runs, in words. note: what else a reader of its figures should know, or "".
    uses_torch: whether torch's counters of device memory see it.
    """

    weights: str
    note: str
    uses_torch: bool

    def answer(self, prompt_ids: Sequence[int], config: DecodeConfig) -> Generation:
        """The peer's greedy answer to a prompt's token ids; of the config, max_tokens and stop count."""
        ...

    def close(self) -> None:
        """Gives its memory back."""
        ...


def check_peer(name: str) -> None:
    """
    Raises:
        ConfigError: the peer is unknown or its package isn't installed.
    """
    if name not in PEERS:
        raise ConfigError(f"unknown peer '{name}'; choose one of {', '.join(PEERS)}")
    package, install = PEERS[name]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"the peer {name} isn't installed; run {install}, or leave it out of the peers")


def open_peer(name: str, model: Model, positions: int) -> Peer:
    """A peer on the model's weights.

    positions: how many tokens the longest prompt and its answer have together.

    Raises:
        ConfigError: as check_peer, or the peer can't run the model.
    """
    check_peer(name)
    if name == "transformers":
        return TransformersPeer(model)
    from refusion.evaluation.llama import LlamaPeer

    return LlamaPeer(model, positions)


def counted(
    model: Model, answer: list[int], prompt_tokens: int, stop: Sequence[str], seconds: float, first: float
) -> Generation:
    """A left-to-right engine's answer, cut behind the first end token or stop string, as our own are counted.

    The pass that read the prompt gave the first token, so there is a pass less than tokens.
    """
    ends = [at + 1 for at, token in enumerate(answer) if token in model.tokenizer.eos_ids][:1]
    if stop and (stopped := first_stop(answer, stop=stop, decode=model.tokenizer.decode)):
        ends.append(stopped)
    if ends:
        answer = answer[: min(ends)]
    return Generation(
        model.text(answer, stop), answer, prompt_tokens, max(len(answer) - 1, 0), seconds, first,
        "stop" if ends else "length",
    )


class TransformersPeer:
    """`generate` of transformers with its key-value cache on."""

    def __init__(self, model: Model) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        self._model = model
        dtype = model.transformer.dtype
        with tempfile.TemporaryDirectory() as scratch:
            folder = save(in_floats(model.checkpoint), Path(scratch) / "model")
            shown = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            finally:
                if shown:
                    logging.enable_progress_bar()
        self._peer: Any = loaded.to(model.transformer.device).eval()
        self.weights = f"the model's weights in {str(dtype).removeprefix('torch.')}"
        self.note = ""
        self.uses_torch = True

    @torch.inference_mode()
    def answer(self, prompt_ids: Sequence[int], config: DecodeConfig) -> Generation:
        """As Peer.answer."""
        tokens = torch.tensor([list(prompt_ids)], device=self._peer.device)
        ends = list(self._model.tokenizer.eos_ids)
        options: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}
        if config.stop:
            check = partial(first_stop, stop=config.stop, decode=self._model.tokenizer.decode)
            options["stopping_criteria"] = [_Stopping(len(prompt_ids), check)]
        times: list[float] = []
        began = time.perf_counter()
        out = self._peer.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=config.max_tokens, do_sample=False,
            use_cache=True, streamer=_Clock(began, times), **options,
        )
        seconds = time.perf_counter() - began
        first = times[1] if len(times) > 1 else seconds  # the streamer's first call brings the prompt
        answer = out[0, len(prompt_ids) :].tolist()
        return counted(self._model, answer, len(prompt_ids), config.stop, seconds, first)

    def close(self) -> None:
        """As Peer.close."""
        self._peer = None


class _Stopping:
    """Ends transformers' loop at a stop string in the answer."""

    def __init__(self, prompt_tokens: int, check: Any) -> None:
        self._prompt_tokens, self._check = prompt_tokens, check

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        found = self._check(input_ids[0, self._prompt_tokens :].tolist()) is not None
        return torch.tensor([found], device=input_ids.device)


class _Clock:
    """A streamer that only notes when tokens arrive."""

    def __init__(self, began: float, times: list[float]) -> None:
        self._began, self._times = began, times

    def put(self, value: Any) -> None:
        self._times.append(time.perf_counter() - self._began)

    def end(self) -> None:
        pass
