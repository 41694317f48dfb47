"""Where a pass spends its time, part by part, from torch's profiler on the real pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from _passes import Pass
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import refusion.model.transformer as network

PREFIX = "part:"
MODULES = {
    "attention_norm": "norms", "mlp_norm": "norms", "query_norm": "norms", "key_norm": "norms", "norm": "norms",
    "qkv": "qkv", "out": "out", "gate_up": "gate_up", "down": "down", "embedding": "embedding",
}
"""Last part of a module's name -> part of a pass."""
FUNCTIONS = ("rotate", "rotation")
"""Functions of the network's file that are the part "rotation"."""
OPERATIONS = {
    "aten::scaled_dot_product_attention": "attention",
    "aten::reshape": "attention",
    "aten::copy_": "cache write",
    "aten::silu": "silu*mul",
    "aten::mul": "silu*mul",
    "aten::add": "residual",
}
"""Outermost operation outside those modules and functions -> part. Query heads are regrouped by a reshape."""
PARTS = (
    "embedding", "norms", "qkv", "rotation", "cache write", "attention", "out", "residual", "gate_up", "silu*mul",
    "down", "head", "views", "python",
)


def breakdown(subject: Pass, passes: int = 5) -> dict[str, float]:
    """Milliseconds of a pass by part, the mean of so many profiled passes.

    "python" is what no operation accounts for: the interpreter, calls of modules, launches; on a
    CPU the profiler's own cost too, which is why the sum may exceed the time of a plain pass.
    "views" are operations that move nothing. On a GPU the times are the kernels'.
    """
    cuda = subject.transformer.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with _marked(subject.transformer):
        _run(subject, 2)
        if cuda:
            torch.cuda.synchronize()
        with profile(activities=activities) as profiler:
            began = time.perf_counter()
            _run(subject, passes)
            if cuda:
                torch.cuda.synchronize()
            whole = (time.perf_counter() - began) * 1000
    found: dict[str, float] = {part: 0.0 for part in PARTS}
    events: Any = profiler.events()
    for event in events:
        part = part_of(event) if event.device_type.name == "CPU" else None
        if part is not None:
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            found[part] += microseconds / 1000 / passes
    found["python"] = max(whole / passes - sum(found.values()), 0.0)
    return found


def part_of(event: Any) -> str | None:
    """The part that an operation belongs to; None for a mark itself, whose own time is Python's."""
    if event.name.startswith(PREFIX):
        return None
    outermost = event
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        outermost, event = event, event.cpu_parent
    return OPERATIONS.get(outermost.name, "views")


def _run(subject: Pass, passes: int) -> None:
    for _ in range(passes):
        hidden = subject.step()
        with record_function(PREFIX + "head"):
            subject.head(hidden)


@contextmanager
def _marked(transformer: nn.Module) -> Iterator[None]:
    """Marks modules and functions for the profiler, and takes the marks away again."""
    with ExitStack() as stack:
        for name, module in transformer.named_modules():
            part = MODULES.get(name.split(".")[-1])
            if part is not None:
                _mark_module(stack, module, PREFIX + part)
        for name in FUNCTIONS:
            stack.enter_context(patch.object(network, name, _mark_function(getattr(network, name))))
        yield


def _mark_module(stack: ExitStack, module: nn.Module, label: str) -> None:
    open_marks: list[Any] = []

    def before(*_: Any) -> None:
        open_marks.append(record_function(label))
        open_marks[-1].__enter__()

    def after(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _mark_function(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def marked(*args: Any, **options: Any) -> Any:
        with record_function(PREFIX + "rotation"):
            return function(*args, **options)

    return marked
