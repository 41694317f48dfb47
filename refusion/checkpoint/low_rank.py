"""A tuned network and its base -> an adapter: the closest differences of low rank.

For a linear layer with the difference D = W_tuned - W_base, the product B A of rank r that is closest to D is its
truncated singular value decomposition (Eckart and Young, 1936). What counts for the network is not D but D x at the
inputs x that occur; with their second moment S = E[x x^T] = L L^T, the best B A for these is B = U, A = U^T D, where
U holds the r leading left singular vectors of D L.

Legend of shape suffixes: O outputs, I inputs of a linear layer, R rank, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from refusion.checkpoint.adapter import (
    BIAS,
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    HEAD,
    LORA_A,
    LORA_B,
    ROWS,
    Facts,
    facts_of,
)
from refusion.checkpoint.adapter_config import lora_config
from refusion.checkpoint.hub import is_hub_id
from refusion.checkpoint.mask import add_mask_token
from refusion.checkpoint.names import table
from refusion.checkpoint.types import Checkpoint
from refusion.checkpoint.weights import named_parts
from refusion.errors import CheckpointError, ConfigError
from refusion.model.transformer import Transformer

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm")
EXACT_WIDTH = 2048
"""Matrices whose smaller side is longer are decomposed by a randomised method: the exact one takes minutes there."""
DAMPING = 1e-4
"""Share of the mean second moment that every direction of the inputs gets besides, in case few were seen."""


@dataclass(frozen=True)
class MatrixError:
    """What is lost of a module's difference: |D - B A| / |D| in the Frobenius norm, after rounding.

    rank: 0 where the difference was left out. weighted: the same of D L, where second moments were given.
    """

    module: str
    rank: int
    error: float
    weighted: float | None = None

    @property
    def kind(self) -> str:
        """The module's name without its layer."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class Extraction:
    """An adapter for refusion.checkpoint.adapter.write_adapter, and how close it is to the tuned network."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    facts: Facts
    matrices: list[MatrixError]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors.values())

    def mean_errors(self) -> dict[str, tuple[float, float | None]]:
        """Mean error and mean weighted error of each kind of module, and of all linear layers under "mean"."""
        groups: dict[str, list[MatrixError]] = {}
        for one in self.matrices:
            groups.setdefault(one.kind, []).append(one)
        groups["mean"] = [one for one in self.matrices if one.kind in KINDS]
        means: dict[str, tuple[float, float | None]] = {}
        for kind, found in groups.items():
            weighted = [one.weighted for one in found if one.weighted is not None]
            means[kind] = (
                sum(one.error for one in found) / len(found), sum(weighted) / len(weighted) if weighted else None
            )
        return means


@torch.inference_mode()
def second_moments(
    transformer: Transformer, sequences: Iterable[tuple[Iterable[int], Iterable[int]]]
) -> dict[str, Tensor]:
    """E[x x^T], float32 [I, I], of each linear layer's inputs, by our module's name.

    sequences: token ids and positions of one row each, in storage order.

    Raises:
        ConfigError: there is no sequence.
    """
    sums: dict[str, Tensor] = {}
    handles = []
    for name, module in transformer.layers.named_modules(prefix="layers"):
        if isinstance(module, nn.Linear):
            def add(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                x = inputs[0].flatten(0, -2).float()
                sums[name] = x.T @ x if name not in sums else sums[name].addmm_(x.T, x)

            handles.append(module.register_forward_pre_hook(add))
    count = 0
    try:
        for tokens, positions in sequences:
            ids = torch.tensor([list(tokens)], device=transformer.device)
            transformer(ids, torch.tensor([list(positions)], device=transformer.device))
            count += ids.shape[1]
    finally:
        for handle in handles:
            handle.remove()
    if not count:
        raise ConfigError("there is no row to measure the layers' inputs on; give a file with more")
    return {name: total / count for name, total in sums.items()}


def factor(delta_OI: Tensor, rank: int, root_II: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """B [O, R] and A [R, I] with the least |(delta - B A) root|; R is `rank`, or the smaller side where that is less.

    root_II: L of the inputs' second moment L L^T; None: all directions of the inputs count alike.
    """
    left_OR = _leading(delta_OI if root_II is None else delta_OI @ root_II, min(rank, *delta_OI.shape))
    right_RI = left_OR.T @ delta_OI
    # both factors get the same size, or one of them would lose small numbers in float16
    size_R = right_RI.norm(dim=1).sqrt()
    safe_R = torch.where(size_R > 0, size_R, torch.ones_like(size_R))
    return left_OR * size_R, right_RI / safe_R.unsqueeze(1)


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Orthonormal columns that span the `rank` leading left singular vectors."""
    outputs, inputs = matrix.shape
    if min(outputs, inputs) > EXACT_WIDTH:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            left, _, _ = torch.svd_lowrank(matrix, q=min(rank + 16, outputs, inputs), niter=8)
        return left[:, :rank]
    if outputs <= inputs:
        return torch.linalg.eigh(matrix @ matrix.T)[1][:, -rank:].flip(1)
    right = torch.linalg.eigh(matrix.T @ matrix)[1][:, -rank:].flip(1)
    return torch.linalg.qr(matrix @ right)[0]


def root_of(moment_II: Tensor) -> Tensor:
    """L, float64, of a second moment L L^T that is damped a little, so that it has one."""
    damped = moment_II.double().clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean() + torch.finfo(torch.float32).tiny)
    return torch.linalg.cholesky(damped)


def extract(
    base: Checkpoint,
    tuned: Checkpoint,
    rank: int,
    *,
    embedding_rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    moments: Mapping[str, Tensor] | None = None,
) -> Extraction:
    """The adapter of a rank that makes of `base` what is closest to `tuned`.

    Linear layers become low-rank parts; norms, biases and the mask token's row are kept whole, in float32. Both
    should be loaded in float32. The base gets the mask token of the tuned model, where it has none.

    embedding_rank: of the embedding's difference and an untied head's; 0 leaves them out. moments: of the inputs,
    from `second_moments` of the tuned network.

    Raises:
        ConfigError: a rank is out of range.
        CheckpointError: the two differ in shape or mask token, or not in any linear layer.
    """
    if rank < 1 or embedding_rank < 0:
        raise ConfigError(f"rank is {rank} and embedding_rank {embedding_rank}; they should be at least 1 and 0")
    facts = facts_of(base)
    facts = replace(facts, mask=_shared_mask(base, tuned))
    work = _Work(base, tuned, dtype)
    work.linears(rank, moments)
    work.whole_modules()
    work.embedding(facts.mask, embedding_rank)
    name = base.source if is_hub_id(base.source) else None
    return Extraction(work.config(rank, name), work.tensors, facts, work.matrices)


def _shared_mask(base: Checkpoint, tuned: Checkpoint) -> tuple[int, str] | None:
    """The tuned model's mask token, which the base then has too."""
    wanted = tuned.config.mask_token_id
    if wanted is not None:
        add_mask_token(base)
        if base.config.mask_token_id != wanted:
            raise CheckpointError(
                f"{tuned.source} has the mask token {wanted}, but {base.source} gets {base.config.mask_token_id}; "
                "give the base that it was tuned from"
            )
    shapes = [{part.huggingface: part.shape for parts in table(one.config).values() for part in parts}
              for one in (base, tuned)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        ours, theirs = (found.get(name) for found in shapes)
        if ours != theirs:
            raise CheckpointError(
                f"{name} has the shape {list(theirs or ())} in {tuned.source} and {list(ours or ())} in {base.source}; "
                "give the base that it was tuned from"
            )
    return None if wanted is None else (wanted, tuned.tokenizer.id_to_token(wanted) or "")


class _Work:
    """One extraction: collects tensors, errors and what adapter_config.json has to say of them."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, dtype: torch.dtype) -> None:
        self.dtype, self.tied = dtype, base.config.tie_embeddings
        self.tensors: dict[str, Tensor] = {}
        self.matrices: list[MatrixError] = []
        self.ranks: dict[str, int] = {}
        self.saved: list[str] = []
        self.biased = False
        self.rows: list[int] = []
        # module -> (our parameter without its kind, kind, weights of both)
        pairs = zip(named_parts(base.transformer), named_parts(tuned.transformer), strict=True)
        self.parts = {
            part.huggingface: (name.rpartition(".")[0], before, after)
            for (name, part, before), (_, _, after) in pairs
        }

    def changed(self, kind: str, ending: str) -> bool:
        """Whether any module of a kind differs in its weight or bias."""
        return any(not torch.equal(before, after) for name, (_, before, after) in self.parts.items()
                   if name.endswith(f"{kind}.{ending}"))

    def linears(self, rank: int, moments: Mapping[str, Tensor] | None) -> None:
        """Low-rank parts of the linear layers of all kinds that differ."""
        self.biased = any(self.changed(kind, "bias") for kind in KINDS)
        kinds = {kind for kind in KINDS if self.changed(kind, "weight") or self.changed(kind, "bias")}
        if not kinds:
            raise CheckpointError("the tuned model and its base are alike in all linear layers; nothing to extract")
        shared, root = "", None
        for name, (ours, before, after) in self.parts.items():
            module, _, ending = name.rpartition(".")
            kind = module.rpartition(".")[2]
            if kind not in kinds or ending != "weight":
                continue
            if moments is not None and ours != shared:
                shared, root = ours, root_of(moments[ours])
            delta = after.double() - before.double()
            b, a = (part.to(self.dtype) for part in factor(delta, rank, root))
            self.ranks[kind] = a.shape[0]
            self.tensors |= {f"{module}.{LORA_A}": a, f"{module}.{LORA_B}": b}
            self._note(module, a.shape[0], delta, b.double() @ a.double(), root)
            if self.biased:
                _, old, new = self.parts.get(f"{module}.bias", ("", torch.zeros(1), torch.zeros(1)))
                self.tensors[f"{module}.{BIAS}"] = (new - old).float().expand(delta.shape[0]).clone()

    def _note(self, module: str, rank: int, delta: Tensor, product: Tensor, root: Tensor | None) -> None:
        left = delta - product
        weighted = None if root is None else _ratio(left @ root, delta @ root)
        self.matrices.append(MatrixError(module, rank, _ratio(left, delta), weighted))

    def whole_modules(self) -> None:
        """Norms of all kinds that differ, held whole."""
        self.saved = [kind for kind in NORMS if self.changed(kind, "weight")]
        for name, (_, _, after) in self.parts.items():
            if any(name.endswith(f"{kind}.weight") for kind in self.saved):
                self.tensors[name] = after.float().clone()

    def embedding(self, mask: tuple[int, str] | None, rank: int) -> None:
        """The mask token's row, and the low-rank parts of the embedding and an untied head where they are asked for."""
        if rank and self.biased:
            raise ConfigError("peft has no form for changed biases together with a low-rank embedding; "
                              "leave embedding_rank at 0")
        for module in (EMBEDDING, HEAD):
            if f"{module}.weight" not in self.parts:
                continue
            _, before, after = self.parts[f"{module}.weight"]
            delta = after.double() - before.double()
            if not delta.any():
                continue
            row = mask[0] if mask is not None and module == EMBEDDING else None
            if rank:
                left, right = (part.to(self.dtype) for part in _vocabulary_factors(delta, rank, row))
                if module == EMBEDDING:
                    self.tensors |= {f"{module}.{EMBEDDING_A}": left.T, f"{module}.{EMBEDDING_B}": right.T}
                else:
                    self.tensors |= {f"{module}.{LORA_A}": right, f"{module}.{LORA_B}": left}
                self.ranks[module.rpartition(".")[2]] = right.shape[0]
                self._note(module, right.shape[0], delta, left.double() @ right.double(), None)
                continue
            kept = torch.zeros_like(delta)
            if row is not None:
                self.rows = [row]
                self.tensors[f"{module}.{ROWS}"] = after[self.rows].float()
                kept[row] = delta[row]
            self._note(module, 0, delta, kept, None)

    def config(self, rank: int, base: str | None) -> dict[str, Any]:
        """The keys of a LoraConfig."""
        config = lora_config(
            rank, rank, targets=sorted(self.ranks), base=base, rows=self.rows, saved=self.saved,
            ranks={kind: found for kind, found in self.ranks.items() if found != rank},
        )
        if self.biased:
            config["lora_bias"] = True
        if self.tied and "embed_tokens" in self.ranks:
            config["ensure_weight_tying"] = True
        return config


def _vocabulary_factors(delta_VE: Tensor, rank: int, row: int | None) -> tuple[Tensor, Tensor]:
    """[V, R] and [R, E]; peft can't hold a single row whole besides these, so it gets a rank of its own."""
    if row is None:
        return factor(delta_VE, rank)
    others = delta_VE.clone()
    others[row] = 0
    left_VR, right_RE = factor(others, rank)
    one = torch.zeros_like(left_VR[:, :1])
    one[row] = 1
    return torch.cat((left_VR, one), dim=1), torch.cat((right_RE, delta_VE[row].unsqueeze(0)))


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part.norm() / whole.norm()) if whole.any() else 0.0
