"""Linear layers in int8, for processors that multiply bytes faster than they read bfloat16.

Weights are rounded once, symmetrically, with a scale per output channel; inputs at run time,
with a scale per token (the W8A8 scheme of arXiv 2208.07339 without its outlier part). Sums are
exact in int32. Norms, rotation, attention and the embedding stay in the model's own type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from refusion.model.transformer import Transformer

LARGEST = 127


class Int8Linear(nn.Module):
    """y = x W^T + b with W int8 [out, in], x rounded token by token."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in] in any floating type."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scale = weight.detach().float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
        rounded = (weight.detach().float() / scale.unsqueeze(1)).round_().to(torch.int8)
        self.register_buffer("weight", rounded)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        largest = flat.abs().amax(dim=1, keepdim=True).float()
        scale = largest.clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
        rounded = (flat / scale).round().to(torch.int8)
        sums = torch.ops.aten._int_mm(rounded, self.weight.t())
        out = (sums * scale).mul(self.scale).to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_linear_layers(transformer: Transformer) -> Transformer:
    """Replaces every linear layer, the head's product included, in place; for reading only, not for training.

    A tied embedding keeps its own rows for looking tokens up, so the head's int8 copy comes on top.
    """
    output = transformer.embedding.weight if transformer.head is None else transformer.head.weight
    transformer.int8_head = Int8Linear(output)
    transformer.head = None
    for module in list(transformer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child.weight, child.bias))
    return transformer
