"""LSTM language model with tied weights, as in the PowerSGD study (Vogels et al. 2019, arXiv 1905.13727).

Press and Wolf 2017, arXiv 1608.05859: the output layer uses the weights of the embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn, zeros

State = tuple[Tensor, Tensor]


class LSTM(nn.Module):
    """Embedding, `layers` LSTM layers, and an output layer with the embedding's weights.

    Input: tokens int64 [n, t], and the state that an earlier call has returned; None: zeros. Output: logits
    [n, t, vocabulary_size], and the state after the last token (h and c, each [layers, n, width]).

    Under autocast on a CPU without bf16 instructions, the LSTM layers run in fp32: PyTorch has no others there.

    Args:
        vocabulary_size: number of tokens.
        width: of the embedding and of every layer.
        layers: number of LSTM layers.
        dropout: probability, after the embedding, between layers and after the last one.

    Raises:
        ValueError: if a size is less than 1 or `dropout` is not in [0, 1).

    Example:
        logits, state = LSTM(vocabulary_size=128, width=256, layers=1)(tokens)
    """

    def __init__(self, vocabulary_size: int, width: int = 650, layers: int = 3, dropout: float = 0.4) -> None:
        super().__init__()
        for name, value in (("vocabulary_size", vocabulary_size), ("width", width), ("layers", layers)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
        self.vocabulary_size = vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(zeros(vocabulary_size))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        embedded = self.dropout(self.embedding(tokens))
        if embedded.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            with torch.autocast("cpu", enabled=False):
                hidden, state = self.lstm(embedded, state)
        else:
            hidden, state = self.lstm(embedded, state)
        return F.linear(self.dropout(hidden), self.embedding.weight, self.bias), state
