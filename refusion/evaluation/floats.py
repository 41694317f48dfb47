"""A network's weights as floating numbers, whatever form its layers keep them in: for engines that take only those."""

from __future__ import annotations

import torch
from torch import Tensor

from refusion.checkpoint import Checkpoint
from refusion.checkpoint.weights import empty_transformer
from refusion.model.int8 import Int8Linear
from refusion.model.transformer import Transformer


def is_int8(transformer: Transformer) -> bool:
    """Whether the linear layers are in int8 (refusion.model.int8)."""
    return any(isinstance(module, Int8Linear) for module in transformer.modules())


def type_name(transformer: Transformer) -> str:
    """The type of the weights in words."""
    kind = str(transformer.dtype).removeprefix("torch.")
    return f"int8 and {kind}" if is_int8(transformer) else kind


def rounded(weight: Tensor) -> Tensor:
    """What an int8 layer makes of a weight [out, in], as float32."""
    layer = Int8Linear(weight)
    return layer.weight * layer.scale.unsqueeze(1)


def float_weights(transformer: Transformer) -> dict[str, Tensor]:
    """Every weight by the name it has in a network of floating numbers; those of int8 layers as float32."""
    found = {name: parameter.detach() for name, parameter in transformer.named_parameters()}
    for name, module in transformer.named_modules():
        if not isinstance(module, Int8Linear):
            continue
        if name == "int8_head":
            if transformer.config.tie_embeddings:
                continue
            name = "head"
        found[f"{name}.weight"] = module.weight * module.scale.unsqueeze(1)
        if module.bias is not None:
            found[f"{name}.bias"] = module.bias
    return found


def in_floats(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one with the weights of its int8 layers as floating numbers."""
    transformer = checkpoint.transformer
    if not is_int8(transformer):
        return checkpoint
    made = empty_transformer(transformer.config, transformer.dtype, transformer.device)
    weights = float_weights(transformer)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weights[name])
    return Checkpoint(made, checkpoint.tokenizer, checkpoint.source, checkpoint.extra)
