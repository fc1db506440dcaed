"""The Transformer for translation, with one embedding for source, target and output.

Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762. With d = width, for one head of size
d_h = d / heads:

    attention(Q, K, V) = softmax(Q K^T / sqrt(d_h)) V                                                  equation 1
    feed_forward(x) = max(0, x W_1 + b_1) W_2 + b_2                                                     equation 2
    x_0 = sqrt(d) * embedding(token) + position         position: sines and cosines of section 3.5
    x <- norm(x + dropout(sublayer(x)))                 or x + dropout(sublayer(norm(x))), with pre_norm
    logits = x embedding^T                              section 3.4

Differences from the paper:

- The initialization, which the paper does not state, is fairseq's: Xavier uniform for matrices, N(0, 1/d)
  for the embedding.
- `pre_norm` moves the norm to the input of a sublayer (Wang et al. 2019, arXiv 1906.01787), which trains without a
  long warm-up of the learning rate. One more norm follows the last layer then.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dgc_models.transformer_layers import DecoderState, KeysValues, Layer


class Transformer(nn.Module):
    """Encoder and decoder. Input: token numbers; output: logits [sentences, target length, vocabulary].

    Args:
        vocabulary: number of tokens, of source and target together.
        width: size of an embedding, a multiple of 2 * heads.
        heads: attention heads of each layer.
        hidden: size of the feed-forward layers.
        layers: layers of the encoder, and layers of the decoder.
        dropout: probability that an element of an embedding or of a sublayer's output is dropped.
        attention_dropout: the same for an attention weight.
        pre_norm: whether norms are at the inputs of the sublayers.
        padding: the token that fills shorter sentences up, at their ends.
        max_length: the most tokens of a sentence.

    Raises:
        ValueError: if a number is out of range, or if a sentence is longer than `max_length`.
    """

    positions: Tensor

    def __init__(
        self,
        vocabulary: int,
        width: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        layers: int = 6,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        pre_norm: bool = False,
        padding: int = 0,
        max_length: int = 1024,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "width": width, "heads": heads, "hidden": hidden, "layers": layers}
        for name, value in {**sizes, "max_length": max_length}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name, probability in (("dropout", dropout), ("attention_dropout", attention_dropout)):
            if not 0 <= probability < 1:
                raise ValueError(f"{name} is {probability}; it must be at least 0 and less than 1")
        if width % (2 * heads):
            raise ValueError(f"width is {width}; it must be a multiple of 2 * heads, {2 * heads}")
        if not 0 <= padding < vocabulary:
            raise ValueError(f"padding is {padding}; it must be one of the {vocabulary} tokens of the vocabulary")
        self.padding = padding
        self.max_length = max_length
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)

        def stack(is_decoder: bool) -> nn.ModuleList:
            options = (width, heads, hidden, dropout, attention_dropout, pre_norm, is_decoder)
            return nn.ModuleList(Layer(*options) for _ in range(layers))

        self.encoder, self.decoder = stack(is_decoder=False), stack(is_decoder=True)
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(width) if pre_norm else nn.Identity() for _ in range(2)
        )
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.register_buffer("positions", sinusoids(max_length, width), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the token after each target token.

        Args:
            source: int64 [sentences, source length].
            target: int64 [sentences, target length]. It begins with the token that begins a sentence.
        """
        return self.next_logits(target, self.encode(source))

    def encode(self, source: Tensor) -> DecoderState:
        """Encodes the source sentences, for `next_logits`."""
        mask = (source != self.padding)[:, None, None, :]
        x = self._embed(source, 0)
        for layer in _layers(self.encoder):
            x = layer.encode(x, mask)
        x = self.encoder_norm(x)
        return DecoderState([layer.cross_attention.keys_values(x) for layer in _layers(self.decoder)], mask)

    def next_logits(self, target: Tensor, state: DecoderState) -> Tensor:
        """Adds target tokens to `state` and returns the logits of the token after each of them.

        Args:
            target: int64 [sentences, new tokens]. Any number at first, then one at a time.
            state: of `encode`.
        """
        assert not state.target or target.size(1) == 1, "tokens are added one at a time after the first call"
        x = self._embed(target, state.length)
        past: Sequence[KeysValues | None] = state.target or [None] * len(self.decoder)
        state.target = []
        for layer, before, source in zip(_layers(self.decoder), past, state.source, strict=True):
            x, keys_values = layer.decode(x, before, source, state.source_mask)
            state.target.append(keys_values)
        return linear(self.decoder_norm(x), self.embedding.weight)

    def _embed(self, tokens: Tensor, start: int) -> Tensor:
        end = start + tokens.size(1)
        if end > self.max_length:
            raise ValueError(f"a sentence has {end} tokens; max_length of the model is {self.max_length}")
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions[start:end]
        embedded: Tensor = self.dropout(x)
        return embedded


def _layers(stack: nn.ModuleList) -> list[Layer]:
    return cast(list[Layer], list(stack))


def sinusoids(length: int, width: int) -> Tensor:
    """The encoding of positions, [length, width]: column 2i is sin(position / 10000^(2i / width)), 2i + 1 cos."""
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000) / width))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()


def transformer_base(vocabulary: int, dropout: float = 0.1, pre_norm: bool = False) -> Transformer:
    """The paper's base model. 60,522,496 parameters with a vocabulary of 32,000."""
    return Transformer(vocabulary, dropout=dropout, pre_norm=pre_norm)


def transformer_big(vocabulary: int, dropout: float = 0.3, pre_norm: bool = False) -> Transformer:
    """The paper's big model. 209,125,376 parameters with a vocabulary of 32,000."""
    return Transformer(vocabulary, width=1024, heads=16, hidden=4096, dropout=dropout, pre_norm=pre_norm)
