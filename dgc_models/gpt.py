"""Decoder-only transformer language model (Radford et al. 2019), with tied weights and pre-normalization."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention, then a perceptron of four times the width; each adds to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_in, self.perceptron_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        projected = self.queries_keys_values(self.attention_norm(x))
        parts = projected.view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], dropout_p=dropout, is_causal=True)
        x = x + self._drop(self.attention_out(mixed.transpose(1, 2).reshape(n, t, width)))
        return x + self._drop(self.perceptron_out(F.gelu(self.perceptron_in(self.perceptron_norm(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Input: tokens int64 [n, t], t at most `context`. Output: logits [n, t, vocabulary_size].

    Args:
        vocabulary_size: number of tokens.
        context: largest number of tokens in a row.
        width: of the residual stream.
        layers: number of blocks.
        heads: attention heads of a block; they divide `width`.
        dropout: probability, in the attention and after each half of a block.

    Raises:
        ValueError: if a size is less than 1, `heads` does not divide `width`, or `dropout` is not in [0, 1).

    Example:
        logits = GPT(vocabulary_size=128, context=64)(tokens)
    """

    def __init__(
        self,
        vocabulary_size: int,
        context: int = 64,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary_size": vocabulary_size, "context": context, "width": width}
        for name, value in (sizes | {"layers": layers, "heads": heads}).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if width % heads:
            raise ValueError(f"width {width} cannot be divided into {heads} heads: make it a multiple of heads")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
        self.vocabulary_size, self.context = vocabulary_size, context
        self.embedding, self.positions = nn.Embedding(vocabulary_size, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # Each block adds to the residual stream twice; this keeps its variance (Radford et al. 2019).
                scale = (2 * layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)
