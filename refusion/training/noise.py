"""Masking and shuffling of slots: one noised sequence out of one prompt and answer.

Noise is data: it depends on (seed, epoch, example) only, never on batch or device.
Source: arXiv 2512.13586 section 3.3; past-the-end slots and branches are ours.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from refusion.slots import slots

NO_LABEL = -100
GOLDEN = (math.sqrt(5) - 1) / 2
_TURN = 2**64
_GOLDEN_TURN = 0x9E3779B97F4A7C15  # GOLDEN in units of 1 / _TURN: ids up to 2**63 times a float lose their fraction


class NoiseSettings(Protocol):
    """What `noise` reads from a recipe's `noise` section (see refusion.training.recipe.NoiseConfig)."""

    @property
    def slot_sizes(self) -> Sequence[int]: ...
    @property
    def slot_weights(self) -> Sequence[float] | None: ...
    @property
    def min_ratio(self) -> float: ...
    @property
    def mask_ratio(self) -> str: ...
    @property
    def past_end_slots(self) -> int: ...
    @property
    def past_end_weight(self) -> float: ...
    @property
    def fill_last_slot(self) -> bool: ...
    @property
    def branch_share(self) -> float: ...
    @property
    def branch_masks(self) -> float: ...
    @property
    def branch_sizes(self) -> Sequence[int]: ...
    @property
    def branch_decay(self) -> float: ...


@dataclass(frozen=True)
class Noised:
    """A sequence in storage order: prompt, clean slots shuffled, masked slots in position order.

    tokens, positions: int64 [T].
    ar_labels: int64 [T], the next token inside a clean slot, NO_LABEL elsewhere.
    mdm_labels: int64 [T], the token at a mask's own position, NO_LABEL elsewhere.
    mdm_weights: float32 [T], 1 / (t L) at masked tokens (times the past-the-end weight), 0 elsewhere.
    mdm_shares: float32 [T], 1 at masked tokens (times the past-the-end weight), 0 elsewhere.
    slot_size, ratio: the k and t that were drawn; 0 in an example with branches.
    depth: int64 [T], at masks the distance from the last known token before it in position order
        (1 is the very next), 0 elsewhere; for validation.
    branch: int64 [T] or None; a cell that is not in a branch holds -1 and sees every cell before it that is in none.
        One of a branch holds the number of cells from the first one on that its branch stands behind: it sees these
        and the earlier cells of its branch. None: every cell sees all before it.
    """

    tokens: np.ndarray
    positions: np.ndarray
    ar_labels: np.ndarray
    mdm_labels: np.ndarray
    mdm_weights: np.ndarray
    mdm_shares: np.ndarray
    depth: np.ndarray
    slot_size: int
    ratio: float
    branch: np.ndarray | None = None


def generator(seed: int, epoch: int, example: int) -> np.random.Generator:
    """The random numbers of one example in one epoch."""
    return np.random.default_rng((seed, epoch, example))


def draw_ratio(settings: NoiseSettings, rng: np.random.Generator, seed: int, epoch: int, example: int) -> float:
    """t in (0, 1). "uniform" draws it; "stratified" walks a golden-ratio sequence over epochs and examples.

    Both are uniform over a corpus; stratified spreads t evenly over any run of example numbers
    and, for one example, over its epochs.
    """
    if settings.mask_ratio == "stratified":
        shift = float(np.random.default_rng((seed, 7919)).random())
        turns = (example + 2 * epoch) * _GOLDEN_TURN % _TURN / _TURN  # GOLDEN cubed is 2 GOLDEN - 1
        return (shift + turns) % 1.0
    return float(rng.random())


def noise(
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    mask_id: int,
    end_id: int,
    settings: NoiseSettings,
    seed: int,
    epoch: int,
    example: int,
    border_labels: bool = False,
    ended: bool = True,
) -> Noised:
    """Draws slot size, mask ratio, masks and order for one example.

    prompt, answer: token ids; the answer ends with its end token and has length L.
    The answer's last slot, when masked, is filled up to k with end tokens and followed by up to
    `past_end_slots` further masked slots of them, since decoding can't know where the text ends.
    When the last slot is clean the end is known, and nothing follows it.
    epoch: how often this example came before; with `example` it names one showing.
    border_labels: also label a clean slot's last token with the token at the next position.
    ended: False for an answer that was cut before its end token: then nothing follows it.

    Raises:
        ValueError: the answer is empty.
    """
    if not answer:
        raise ValueError("an answer needs at least one token (its end token)")
    rng = generator(seed, epoch, example)
    ratio = draw_ratio(settings, rng, seed, epoch, example)
    p = (1.0 - settings.min_ratio) * ratio + settings.min_ratio
    if settings.branch_share and rng.random() < settings.branch_share:
        return _branched(prompt, answer, mask_id, end_id, settings, rng, ended)
    sizes = list(settings.slot_sizes)
    weights = settings.slot_weights
    chances = None if weights is None else np.asarray(weights, dtype=float) / float(np.sum(weights))
    size = int(rng.choice(sizes, p=chances))
    parts = slots(len(answer), size)
    masked = rng.random(len(parts)) < p
    clean_order = rng.permutation(np.flatnonzero(~masked))
    extra = int(rng.integers(settings.past_end_slots + 1)) if settings.past_end_slots else 0

    out = _Builder(prompt, answer, end_id, mask_id)
    for index in clean_order:
        out.clean(parts[index], border_labels)
    weight, past = 1.0 / (p * len(answer)), settings.past_end_weight
    known = _known_positions(parts, masked)
    for index in np.flatnonzero(masked):
        part = parts[index]
        if index == len(parts) - 1 and ended and settings.fill_last_slot:
            part = range(part.start, part.start + size)
        out.masked(part, weight, past, known)
    if masked[-1] and ended:
        begin = parts[-1].start + size if settings.fill_last_slot else len(answer)
        out.masked(range(begin, begin + extra * size), weight, past, known)
    return out.build(size, ratio)


def _branched(
    prompt: Sequence[int], answer: Sequence[int], mask_id: int, end_id: int, settings: NoiseSettings,
    rng: np.random.Generator, ended: bool,
) -> Noised:
    """The answer in order, every token of it a label, and branches of masks behind distinct prefixes of it.

    A branch reaches past the end, where end tokens are to be predicted. The weights of the example's masks add up to 1.
    """
    sizes = list(settings.branch_sizes)
    count = min(max(round(settings.branch_masks * len(answer) * len(sizes) / sum(sizes)), 1), len(answer))
    out = _Builder(prompt, answer, end_id, mask_id)
    if prompt:
        out.ar[-1] = answer[0]
    out.clean(range(len(answer)), border_labels=True)
    cuts = np.sort(rng.choice(len(answer), size=count, replace=False))
    for cut, size in zip(cuts.tolist(), rng.choice(sizes, size=count).tolist(), strict=True):
        part = range(cut, cut + size if ended else min(cut + size, len(answer)))
        out.masked(part, 1.0, settings.past_end_weight, [cut - 1], settings.branch_decay, len(prompt) + cut)
    total = sum(out.weights) or 1.0
    out.weights = [weight / total for weight in out.weights]
    return out.build(0, 0.0)


def _known_positions(parts: Sequence[range], masked: np.ndarray) -> list[int]:
    """Sorted answer positions that end a known stretch; -1 is the prompt's last token."""
    return [-1] + [part.stop - 1 for part, hidden in zip(parts, masked, strict=True) if not hidden]


class _Builder:
    """Collects the storage order cell by cell."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], end_id: int, mask_id: int) -> None:
        self.answer, self.end_id, self.mask_id, self.offset = answer, end_id, mask_id, len(prompt)
        self.tokens = list(prompt)
        self.positions = list(range(len(prompt)))
        self.ar = [NO_LABEL] * len(prompt)
        self.mdm = [NO_LABEL] * len(prompt)
        self.weights = [0.0] * len(prompt)
        self.shares = [0.0] * len(prompt)
        self.depth = [0] * len(prompt)
        self.branch = [-1] * len(prompt)

    def clean(self, part: range, border_labels: bool) -> None:
        for at in part:
            follows = at + 1 < part.stop or (border_labels and at + 1 < len(self.answer))
            self._cell(self.answer[at], at, self.answer[at + 1] if follows else NO_LABEL, NO_LABEL, 0.0, 0.0, 0)

    def masked(
        self, part: range, weight: float, past_share: float, known: Sequence[int], decay: float = 1.0, branch: int = -1
    ) -> None:
        last = known[bisect_left(known, part.start) - 1]
        for at in part:
            inside = at < len(self.answer)
            token = self.answer[at] if inside else self.end_id
            share = (1.0 if inside else past_share) * decay ** (at - part.start)
            self._cell(self.mask_id, at, NO_LABEL, token, share * weight, share, at - last, branch)

    def _cell(
        self, token: int, at: int, ar: int, mdm: int, weight: float, share: float, depth: int, branch: int = -1
    ) -> None:
        self.tokens.append(token)
        self.positions.append(self.offset + at)
        self.ar.append(ar)
        self.mdm.append(mdm)
        self.weights.append(weight)
        self.shares.append(share)
        self.depth.append(depth)
        self.branch.append(branch)

    def build(self, size: int, ratio: float) -> Noised:
        def integers(values: list[int]) -> np.ndarray:
            return np.asarray(values, dtype=np.int64)

        return Noised(
            integers(self.tokens), integers(self.positions), integers(self.ar), integers(self.mdm),
            np.asarray(self.weights, dtype=np.float32), np.asarray(self.shares, dtype=np.float32),
            integers(self.depth), size, ratio, integers(self.branch) if max(self.branch) >= 0 else None,
        )
