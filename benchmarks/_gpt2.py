"""A training step of GPT-2 through DDP with each hook, torch's and ours.

The model has the shapes of GPT-2 (Radford et al. 2019), 124 million parameters, and no dropout. With one rank
nothing is sent, so that the time over no hook is what a hook costs.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_step import TorchPowerSGD, torch_bf16, torch_fp16
from dgc import compression
from dgc.ddp import compress
from dgc.optim import DGCSGD

Step = Callable[[], None]
Sizes = tuple[int, int, int, int, int, int]
SMALL: Sizes = (64, 32, 1, 2, 2, 8)  # vocabulary, width, layers, heads, rows, tokens of a row
GPT2: Sizes = (50257, 768, 12, 12, 8, 1024)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.attention(self.ln_1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.project(mixed)
        wide: Tensor = self.up(self.ln_2(x))
        return x + self.down(F.gelu(wide, approximate="tanh"))


class Model(nn.Module):
    """GPT-2, whose output layer is its embedding. The result is the loss of the next token."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.ln(hidden), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def hooks(transport: Any) -> dict[str, Callable[[DistributedDataParallel, Any], Any]]:
    """By name, what registers a hook, given the model and its optimizer."""

    def ours(make: Callable[[], Any], **options: Any) -> Callable[[DistributedDataParallel, Any], Any]:
        return lambda model, optimizer: compress(model, make(), optimizer, transport=transport, **options)

    def dgc(values: str, indices: str) -> Any:
        return compression.DGCCompressor(0.001, values=values, indices=indices, warmup_epochs=0)

    epoch = {"steps_per_epoch": 100}
    return {
        "no hook": lambda model, optimizer: None,
        "torch, fp16": lambda model, optimizer: torch_fp16(model),
        "torch, bf16": lambda model, optimizer: torch_bf16(model),
        "torch, PowerSGD, rank 4": lambda model, optimizer: TorchPowerSGD(4, model),
        "fp16": ours(compression.FP16Compressor),
        DGC: ours(lambda: dgc("fp16", "int32"), **epoch),
        SIGNS_OF_DGC: ours(lambda: dgc("sign", "rice"), **epoch),
        "PowerSGD, rank 4": ours(lambda: compression.PowerSGDCompressor(4, num_iters_per_step=2)),
        "two phases, 8 bits": ours(compression.TwoPhaseCompressor),
        "signs": ours(compression.ScaledSignCompressor),
    }


DGC, SIGNS_OF_DGC = "DGC, 0.1 %, fp16 and int32", "DGC, 0.1 %, signs and Rice"


def steps(device: torch.device, sizes: Sizes, transport: Any) -> dict[str, Callable[[], Step]]:
    """Constructors of training steps, with AdamW, or DGCSGD for DGC. A GPU computes in bf16. Collective."""
    vocabulary, width, layers, heads, rows, tokens = sizes
    on_gpu = device.type == "cuda"

    def make(name: str, register: Callable[[DistributedDataParallel, Any], Any]) -> Step:
        gc.collect()  # the model before has reference cycles
        if on_gpu:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = DistributedDataParallel(Model(vocabulary, width, layers, heads, tokens).to(device))
        x = torch.randint(vocabulary, (rows, tokens), device=device)
        optimizer: Any
        if name in (DGC, SIGNS_OF_DGC):
            optimizer = DGCSGD(model.parameters(), lr=0.02, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=on_gpu)
        kept = register(model, optimizer)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert kept is not model  # the exchange lives as long as its steps

        return step

    return {f"GPT-2, {name}": lambda n=name, r=register: make(n, r) for name, register in hooks(transport).items()}  # type: ignore[misc]
