"""The sections of a recipe, the data's apart. Messages begin with the field's name; the reader adds the section's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from refusion.errors import ConfigError


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _one_of(name: str, value: str, allowed: Collection[str]) -> None:
    _need(value in allowed, f"{name} is '{value}', it should be {' or '.join(allowed)}")


def _at_least(name: str, value: float, low: float) -> None:
    _need(value >= low, f"{name} is {value}, it should be {low} or more")


def _above(name: str, value: float, low: float) -> None:
    _need(value > low, f"{name} is {value}, it should be above {low}")


@dataclass(frozen=True)
class ModelSection:
    """The model that training starts from.

    source: `default`, a folder, a GGUF file or a hub id. dtype: of the weights while training, float32 or bfloat16.
    adapter: a LoRA adapter to begin with, a folder or hub id; `none` begins with the plain source, `default` too.
    """

    source: str = "default"
    dtype: str = "float32"
    adapter: str = "none"

    def __post_init__(self) -> None:
        _need(bool(self.source), "source is empty, it should name a model")
        _need(bool(self.adapter), "adapter is empty, it should name a folder or be 'none'")
        _one_of("dtype", self.dtype, ("float32", "bfloat16"))


@dataclass(frozen=True)
class NoiseConfig:
    """How answers are cut into slots and masked (DESIGN.md, section 6).

    slot_sizes: positions in a slot, one drawn per example; each 1 or more.
    slot_weights: chances of the sizes, relative, 0 or more; None: all alike.
    min_ratio: floor of the mask ratio t; above 0, at most 1.
    mask_ratio: `uniform` draws t for each example alone, `stratified` spreads t over the examples of a step.
    past_end_slots: most slots of end tokens appended behind the answer; 0 or more.
    past_end_weight: loss weight of their tokens, 0 or more; 1 counts them as others.
    fill_last_slot: whether the answer's last slot is filled up with end tokens.
    branch_share: share of examples, 0 to 1, that are shown as the default decoder meets them instead: the answer in
        order, and branches of masks behind some of its prefixes, each of which sees that prefix and itself only.
    branch_masks: masks in such an example's branches, as a multiple of its answer's length, about; above 0.
    branch_sizes: masks in a branch, one drawn per branch; each 1 or more.
    branch_decay: the weight of a branch's masks falls by this factor from one to the next; above 0, at most 1.
    """

    slot_sizes: tuple[int, ...] = (4, 8, 16, 32)
    slot_weights: tuple[float, ...] | None = None
    min_ratio: float = 1e-3
    mask_ratio: str = "uniform"
    past_end_slots: int = 1
    past_end_weight: float = 1.0
    fill_last_slot: bool = True
    branch_share: float = 0.0
    branch_masks: float = 1.0
    branch_sizes: tuple[int, ...] = (4, 8, 16)
    branch_decay: float = 1.0

    def __post_init__(self) -> None:
        _need(bool(self.slot_sizes), "slot_sizes is empty, it needs at least one size")
        for size in self.slot_sizes:
            _need(size >= 1, f"slot_sizes holds {size}, every size should be 1 or more")
        if self.slot_weights is not None:
            sizes, weights = len(self.slot_sizes), self.slot_weights
            _need(len(weights) == sizes, f"slot_weights has {len(weights)} entries, slot_sizes has {sizes}")
            _need(min(weights) >= 0 < max(weights), "slot_weights should be 0 or more, and one of them above 0")
        _need(0 < self.min_ratio <= 1, f"min_ratio is {self.min_ratio}, it should be above 0 and at most 1")
        _one_of("mask_ratio", self.mask_ratio, ("uniform", "stratified"))
        _at_least("past_end_slots", self.past_end_slots, 0)
        _at_least("past_end_weight", self.past_end_weight, 0)
        _need(0 <= self.branch_share <= 1, f"branch_share is {self.branch_share}, it should be from 0 to 1")
        _above("branch_masks", self.branch_masks, 0)
        _need(bool(self.branch_sizes), "branch_sizes is empty, it needs at least one size")
        for size in self.branch_sizes:
            _need(size >= 1, f"branch_sizes holds {size}, every size should be 1 or more")
        _need(0 < self.branch_decay <= 1, f"branch_decay is {self.branch_decay}, it should be above 0 and at most 1")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank training (arXiv 2106.09685): the weights stay, differences B A of them are trained.

    rank: of the differences, on every linear layer of every block; 0 trains all weights instead.
    alpha: the differences are scaled by alpha / rank; 0 stands for rank. Give a learning rate some ten times as high
        as for all weights.
    dtype: of the adapter that the run ends with, float32, float16 or bfloat16; checkpoints keep float32.
    max_shard_bytes: of a file of it; more than one are for refusion, not for peft. 0: one file.
    """

    rank: int = 0
    alpha: float = 0.0
    dtype: str = "bfloat16"
    max_shard_bytes: int = 0

    def __post_init__(self) -> None:
        _at_least("rank", self.rank, 0)
        _at_least("max_shard_bytes", self.max_shard_bytes, 0)
        _one_of("dtype", self.dtype, ("float32", "float16", "bfloat16"))
        _at_least("alpha", self.alpha, 0)
        if not self.alpha:
            object.__setattr__(self, "alpha", float(self.rank))


@dataclass(frozen=True)
class LossConfig:
    """L = L_AR + mdm_weight * L_MDM (arXiv 2512.13586).

    mdm_weight: lambda, 0 or more.
    mdm_normalizer: `ratio` weighs a masked token by 1/(t*L), as published; `mean` takes the mean over masked tokens.
    border_labels: whether a clean slot's last token learns the text's next token too.
    """

    mdm_weight: float = 1.0
    mdm_normalizer: str = "ratio"
    border_labels: bool = False

    def __post_init__(self) -> None:
        _at_least("mdm_weight", self.mdm_weight, 0)
        _one_of("mdm_normalizer", self.mdm_normalizer, ("ratio", "mean"))


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule.

    lr: peak learning rate, above 0.
    schedule: `cosine` falls to 0 over the run, `constant` stays, `trapezoid` stays and falls to 0 at the end.
    warmup_steps: optimizer steps of linear rise from 0; 0 or more.
    decay_fraction: share of the run that the trapezoid falls; above 0, at most 1.
    betas: each at least 0, below 1. eps: above 0. weight_decay: 0 or more. clip_norm: largest norm of the gradient,
        above 0.
    batch_tokens: tokens in an optimizer step; 1 or more.
    micro_tokens: tokens in a forward pass; 0 stands for batch_tokens, and it is never more.
    total_tokens: the run ends when so many tokens were seen; 1 or more.
    """

    lr: float = 1e-4
    schedule: str = "cosine"
    warmup_steps: int = 50
    decay_fraction: float = 0.2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    batch_tokens: int = 4096
    micro_tokens: int = 0
    total_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip_norm", "decay_fraction"):
            _above(name, getattr(self, name), 0)
        for name in ("batch_tokens", "total_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "weight_decay", "micro_tokens"):
            _at_least(name, getattr(self, name), 0)
        _one_of("schedule", self.schedule, ("cosine", "constant", "trapezoid"))
        _need(self.decay_fraction <= 1, f"decay_fraction is {self.decay_fraction}, it should be at most 1")
        for beta in self.betas:
            _need(0 <= beta < 1, f"betas holds {beta}, it should be at least 0 and below 1")
        if not self.micro_tokens:
            object.__setattr__(self, "micro_tokens", self.batch_tokens)
        if self.micro_tokens > self.batch_tokens:
            raise ConfigError(f"micro_tokens is {self.micro_tokens}, more than batch_tokens, {self.batch_tokens}")


@dataclass(frozen=True)
class RunConfig:
    """One run of a training.

    out: folder of checkpoints and logs. seed: of noise and order, 0 or more.
    precision: of the forward pass, float32 or bfloat16 (autocast). compile: whether torch.compile is used.
    threads: CPU threads, 1 or more; None: torch's choice.
    log_every, validate_every: optimizer steps, 1 or more. validation_rows: held-out rows used each time, 0 or more.
    checkpoint_every_minutes: above 0. keep_checkpoints: the newest so many stay, 1 or more.
    """

    out: str
    seed: int = 0
    precision: str = "float32"
    compile: bool = False
    threads: int | None = None
    log_every: int = 10
    validate_every: int = 200
    validation_rows: int = 100
    checkpoint_every_minutes: float = 10.0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _need(bool(self.out), "out is empty, it should name a folder")
        _one_of("precision", self.precision, ("float32", "bfloat16"))
        for name in ("seed", "validation_rows"):
            _at_least(name, getattr(self, name), 0)
        for name in ("log_every", "validate_every", "keep_checkpoints"):
            _at_least(name, getattr(self, name), 1)
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        _above("checkpoint_every_minutes", self.checkpoint_every_minutes, 0)
