"""The layers of `dgc_models.transformer.Transformer`, and what its decoder keeps between two tokens."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

KeysValues = tuple[Tensor, Tensor]  # of one layer, each [sentences, heads, positions, width // heads]


@dataclass
class DecoderState:
    """What the decoder keeps between the tokens of a translation."""

    source: list[KeysValues]  # of each layer, of the encoded source
    source_mask: Tensor  # bool [sentences, 1, 1, source length]; False at padding
    target: list[KeysValues] = field(default_factory=list)  # of each layer, of the target so far; empty: none

    @property
    def length(self) -> int:
        """Number of target tokens so far."""
        return self.target[0][0].size(2) if self.target else 0

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what was row `rows[i]`. Both are of the same source sentence."""
        self.target = [(keys[rows], values[rows]) for keys, values in self.target]


class Attention(nn.Module):
    """Multi-head attention, section 3.2.2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        for projection in (self.query, self.key, self.value):
            # As if the three were one matrix [3 * width, width]. Equal rates of forward and backward signals.
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.output.weight)
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.zeros_(projection.bias)

    def _split(self, x: Tensor) -> Tensor:
        """[sentences, positions, width] to [sentences, heads, positions, width // heads]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> KeysValues:
        """Keys and values of x, [sentences, positions, width]."""
        return self._split(self.key(x)), self._split(self.value(x))

    def forward(self, x: Tensor, to: KeysValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attention of each position of x to the positions of `to` where the mask is True."""
        dropout = self.dropout if self.training else 0.0
        heads = scaled_dot_product_attention(
            self._split(self.query(x)), *to, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
        result: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return result


class Residual(nn.Module):
    """The norm, the dropout and the shortcut around a sublayer."""

    def __init__(self, width: int, dropout: float, pre_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.pre_norm = pre_norm

    def enter(self, x: Tensor) -> Tensor:
        """The sublayer's input."""
        return self.norm(x) if self.pre_norm else x

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """The sublayer's result. change: the sublayer's output."""
        added = x + self.dropout(change)
        return added if self.pre_norm else self.norm(added)


class Layer(nn.Module):
    """One layer of the encoder or, with `is_decoder`, of the decoder."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, attention_dropout: float,
                 pre_norm: bool, is_decoder: bool) -> None:  # fmt: skip
        super().__init__()
        self.attention = Attention(width, heads, attention_dropout)
        self.around_attention = Residual(width, dropout, pre_norm)
        if is_decoder:
            self.cross_attention = Attention(width, heads, attention_dropout)
            self.around_cross_attention = Residual(width, dropout, pre_norm)
        grow, shrink = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for matrix in (grow, shrink):
            nn.init.xavier_uniform_(matrix.weight)
            nn.init.zeros_(matrix.bias)
        self.feed_forward = nn.Sequential(grow, nn.ReLU(), shrink)
        self.around_feed_forward = Residual(width, dropout, pre_norm)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))

    def encode(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [sentences, source length, width]. mask: False at padding."""
        entered = self.around_attention.enter(x)
        keys_values = self.attention.keys_values(entered)
        return self._feed_forward(self.around_attention.leave(x, self.attention(entered, keys_values, mask)))

    def decode(
        self, x: Tensor, past: KeysValues | None, source: KeysValues, mask: Tensor
    ) -> tuple[Tensor, KeysValues]:
        """Returns the output and the keys and values of all target tokens so far. x: the new tokens."""
        entered = self.around_attention.enter(x)
        keys_values = self.attention.keys_values(entered)
        if past is not None:
            keys_values = (torch.cat([past[0], keys_values[0]], 2), torch.cat([past[1], keys_values[1]], 2))
        # One new token attends to all that are there. Padding follows the tokens, so a causal mask excludes it.
        change = self.attention(entered, keys_values, causal=past is None)
        x = self.around_attention.leave(x, change)
        change = self.cross_attention(self.around_cross_attention.enter(x), source, mask)
        return self._feed_forward(self.around_cross_attention.leave(x, change)), keys_values
