"""Settings of decoding, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refusion.errors import ConfigError

DECODERS = ("refusion", "paper", "autoregressive")
ACCEPTANCES = ("threshold", "greedy", "speculative")
PLANNERS = ("confidence", "margin", "entropy", "left-to-right", "random")
IMPROVEMENTS: dict[str, dict[str, Any]] = {
    "fused-pass": {"fused_pass": False},
    "bonus-token": {"bonus_token": False},
    "prompt-plan": {"prompt_plan": False},
    "stale-drafts": {"stale_factor": 0.0},
    "branches": {"branch_size": 0},
    "draft-threshold": {"draft_threshold": 0.0},
    "bounded-plan": {"plan_size": 1_000_000},
}
"""What the default decoder adds to the published one, and the settings that switch it off."""


@dataclass(frozen=True)
class DecodeConfig:
    """How one answer is written.

    decoder: one of DECODERS.
    max_tokens: answer length in tokens, at most; 1 or more.
    slot_size: k, positions per slot; 1 or more.
    block_size: positions filled at a time; at least slot_size.
    slot_threshold, token_threshold: in [0, 1].
    temperature: 0 or more; 0 takes the best token.
    top_p: in (0, 1].
    seed: fixes every draw, whatever the batch; the prompts of one call draw apart, by their place in it.
    stop: strings that end the text; they are cut from it.

    For the decoders `refusion` and `paper`:
    planner: what makes a slot certain, read at its first mask and compared with slot_threshold:
        "confidence" the highest probability; "margin" the best minus the second best probability;
        "entropy" exp(-H), the inverse perplexity; "random" a number in [0, 1) fixed by seed and
        slot index, the same for every prompt. "left-to-right" takes slots in order only: `paper`
        always the leftmost open one; `refusion` none but the leftmost and those that follow on
        the drafts from there without a gap, each of the latter if its highest probability exceeds
        slot_threshold.

    For the decoder `refusion` only; each improvement on the published algorithm can be switched off:
    fused_pass: a pass that verifies drafts also plans; otherwise every plan is a pass of its own.
    bonus_token: the verifier's own token behind an accepted prefix is kept. Without it a rejected
        draft leaves nothing, and a slot goes on with the next plan's first token unjudged, so the
        other acceptances than "threshold" need it.
    prompt_plan: the prompt's pass carries the first masks.
    acceptance: "threshold" keeps a draft token whose probability given all before it exceeds
        token_threshold (or that is the likeliest one); "greedy" keeps only the likeliest one;
        "speculative" keeps it where a draw from the verifier gives it, and the draw otherwise, so
        that judged tokens follow the verifier's distribution exactly (all of them do with
        slot_threshold 1 or planner "left-to-right"; at temperature 0 it is "greedy").
    draft_threshold: in [0, 1]; a slot's draft is verified up to its first token below it, and the
        rest stays masked for the next draft.
    stale_factor: in [0, 1]; what the probability of a draft behind a rejected token is multiplied
        by; 0 drops such drafts.
    plan_size: masks of the main plan in one pass, at most; 1 or more.
    branch_size: masks planted behind each draft token that may be rejected, so that the pass that
        rejects it has planned for that case too; 0 plants none.
    branch_threshold: in [0, 1]; the chance of being the first rejected that a draft token needs
        for a branch.
    """

    decoder: str = "refusion"
    max_tokens: int = 256
    slot_size: int = 8
    block_size: int = 32
    slot_threshold: float = 0.9
    token_threshold: float = 0.4
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    planner: str = "confidence"
    fused_pass: bool = True
    bonus_token: bool = True
    prompt_plan: bool = True
    acceptance: str = "threshold"
    draft_threshold: float = 0.2
    stale_factor: float = 0.5
    plan_size: int = 16
    branch_size: int = 4
    branch_threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.decoder not in DECODERS:
            raise ConfigError(f"unknown decoder '{self.decoder}'; choose one of {', '.join(DECODERS)}")
        if self.planner not in PLANNERS:
            raise ConfigError(f"unknown planner '{self.planner}'; choose one of {', '.join(PLANNERS)}")
        if self.acceptance not in ACCEPTANCES:
            raise ConfigError(f"unknown acceptance '{self.acceptance}'; choose one of {', '.join(ACCEPTANCES)}")
        if not self.bonus_token and self.acceptance != "threshold":
            raise ConfigError(f"acceptance '{self.acceptance}' needs bonus_token; choose 'threshold' or leave it on")
        for name in ("max_tokens", "slot_size", "block_size", "plan_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")
        if not isinstance(self.branch_size, int) or self.branch_size < 0:
            raise ConfigError(f"branch_size must be a whole number of 0 or more, got {self.branch_size!r}")
        if self.block_size < self.slot_size:
            raise ConfigError(
                f"block_size {self.block_size} is smaller than slot_size {self.slot_size}; a block holds whole slots"
            )
        for name in ("slot_threshold", "token_threshold", "draft_threshold", "stale_factor", "branch_threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie between 0 and 1, got {getattr(self, name)!r}")
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise ConfigError(f"temperature must be a finite number of 0 or more, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie above 0 and at most at 1, got {self.top_p!r}")
        if isinstance(self.stop, str):
            raise ConfigError("stop must be a list of strings, not one string")
        if any(not text for text in self.stop):
            raise ConfigError("a stop string must not be empty")
