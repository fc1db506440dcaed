"""The models of `benchmarks.train_step`, each with a batch and a loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from dgc_models import LSTM

VOCABULARY, WIDTH, LAYERS, CONTEXT = 16384, 512, 6, 64
WORDS = 28869  # of WikiText-2, as in the PowerSGD study
MODELS = ("resnet18", "resnet50", "vgg16", "lm", "lstm")
OF_TOKENS = ("lm", "lstm")


class LanguageModel(nn.Module):
    """A causal Transformer: 27 million parameters, of which the tied embedding has 8 million."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        return hidden @ self.embedding.weight.T


class LSTMWithoutState(LSTM):
    """The three-layer LSTM of the PowerSGD study without dropout: 29 million parameters, 19 of the embedding."""

    def __init__(self) -> None:
        super().__init__(WORDS, width=650, layers=3, dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)[0]


@dataclass(frozen=True)
class Work:
    """A model and its batch.

    Attributes:
        model: All ranks have the same parameters.
        loss: Runs the forward pass, given the model or its wrapper.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


def make(name: str, batch: int, image: int, rank: int) -> Work:
    """A model with a batch of this rank.

    Args:
        name: One of MODELS.
        batch: Samples of this rank: images, or sequences of 64 tokens.
        image: Pixels in each direction.
        rank: Each rank has other samples.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank + 1)
    if name in OF_TOKENS:
        model: nn.Module = LanguageModel() if name == "lm" else LSTMWithoutState()
        words = VOCABULARY if name == "lm" else WORDS
        inputs = torch.randint(words, (batch, CONTEXT), generator=generator)
        targets = torch.randint(words, (batch, CONTEXT), generator=generator)
    else:
        from torchvision import models

        model = models.get_model(name)
        inputs = torch.randn(batch, 3, image, image, generator=generator)
        targets = torch.randint(1000, (batch,), generator=generator)

    def loss(wrapped: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(wrapped(inputs).flatten(0, -2), targets.flatten())

    return Work(model, loss)
