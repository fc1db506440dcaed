"""Models that are trained on ranks of torch.distributed, through DDP with the compression hook or without DDP."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from typing import Any

import torch
from parallel.found import Finding, digest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc import compression as methods
from dgc.compression import Route, Rule
from dgc.ddp import compress
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer, MuonWithAdamW, muon_groups
from dgc.sparse.payloads import SignValues

FEATURES, CLASSES, BUCKET_MB = 24, 6, 0.006
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
}


def top_k() -> methods.DGCCompressor:
    return methods.DGCCompressor(0.1, ResidualMemory())


METHODS: dict[str, Callable[[], Any]] = {
    "dgc": lambda: methods.DGCCompressor(0.05, DGCSGDMemory(momentum=0.9)),
    "sign values": lambda: methods.DGCCompressor(0.05, ResidualMemory(), values=SignValues()),
    "reduce_scatter": lambda: methods.DGCCompressor(0.05, DGCSGDMemory(momentum=0.9), exchange="reduce_scatter"),
    "powersgd": lambda: methods.PowerSGDCompressor(2),
    "powersgd paper": lambda: methods.PowerSGDCompressor(2, mode="paper"),
    "2-bit": lambda: methods.ThresholdCompressor(2, 0.01),
    "1-bit": lambda: methods.ThresholdCompressor(1, 0.0),
    "8 bits": methods.TwoPhaseCompressor,
    "4 bits": lambda: methods.TwoPhaseCompressor(4, 64),
    "hadamard": lambda: methods.TwoPhaseCompressor(4, 64, hadamard=True),
    "dense": methods.DenseCompressor,
    "fp16": methods.FP16Compressor,
    "ef21": lambda: methods.EF21Compressor(top_k()),
    "route": lambda: Route(
        [Rule(methods.PowerSGDCompressor(1), name="layers.1"), Rule(top_k(), min_dim=2), Rule(METHODS["fp16"]())]
    ),
}
SOME = ("dgc", "powersgd", "2-bit", "4 bits")
SAVED = [*SOME, "route", "ef21"]
if hasattr(torch.optim, "Muon"):  # of torch 2.9
    METHODS["muon"] = lambda: methods.TwoPhaseCompressor(4)
    SAVED.append("muon")


class Net(nn.Module):
    """Layers are used in another order than they are registered, so that DDP rebuilds its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers[1::2], *self.layers[::2]):
            x = x + layer(x).relu()
        return self.last(x)


class Convolutions(nn.Module):
    """Channels last, fp32, bf16 and complex, one frozen, one ignored by DDP, and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored = nn.Parameter(torch.ones(CLASSES))
        self.head = nn.Linear(16, CLASSES)
        self.shared = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.tied = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.tied.weight = self.shared.weight
        self.frozen = nn.Conv2d(8, 16, 1)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(3, 8, 3)
        self.mix = nn.Parameter(torch.randn(CLASSES, CLASSES, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex64))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.conv(x.view(-1, 3, 4, 2)[:, :, :, [0, 1, 0, 1]].contiguous()).relu()).mean((2, 3))
        x = self.head(self.tied(self.shared(x.bfloat16()).relu()).float()) * self.ignored
        return (x.to(torch.complex64) @ self.mix + self.shift).abs()


class Branches(nn.Module):
    """Branch 0 is always used, and those that are named in `used`."""

    used: set[int] = set()

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.branches[i](x) for i in sorted(self.used)), self.branches[0](x))


def optimizer_of(model: nn.Module, method: Any, compression: Any) -> torch.optim.Optimizer:
    if method == "muon":
        return MuonWithAdamW(muon_groups(model, ["last.*"], {"layers.1.weight": 2}), lr=0.01, ns_precision="fp32")
    sgd = torch.optim.SGD if getattr(compression, "correction", None) is None else DGCSGD
    momentum = 0.0 if getattr(compression, "has_momentum", False) else 0.9
    return sgd(model.parameters(), lr=0.05, momentum=momentum, weight_decay=1e-3)


def data_of(rank: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(8, FEATURES, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator)


class Trainer:
    def __init__(
        self, transport: Any, method: Any, through: str = "ddp", net: Any = Net, passes: int = 1, **options: Any
    ):
        compression = METHODS[method]() if isinstance(method, str) else method
        torch.manual_seed(0)
        self.model: Any = net()
        self.transport, self.passes, self.layouts = transport, passes, [[]]  # type: ignore[var-annotated]
        self.inner = optimizer_of(self.model, method, compression)
        self.uses_ddp = through == "ddp"
        of_exchange = ("nonfinite", "grad_scaler", "steps_per_epoch", "bucket_mb", "hierarchical")
        kept = {k: options.pop(k) for k in of_exchange if k in options}
        kept = {"transport": transport, "bucket_mb": BUCKET_MB, **kept}
        self.exchange: Any
        self.forward: Any = self.model
        if self.uses_ddp:
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, [".ignored"])
            self.forward = DistributedDataParallel(self.model, bucket_cap_mb=0.004, **options)
            self.exchange = compress(self.forward, compression, self.inner, **kept)
            self.exchange.add = partial(self.recording, self.exchange.add)
        else:
            if net is Convolutions:
                self.model.ignored.requires_grad_(False)
            named = self.model.named_parameters()
            self.exchange = DistributedOptimizer(self.inner, named, compression, passes, **kept)

    def recording(self, add: Any, bucket: Any) -> Any:
        self.layouts[-1].append([id(p) for p in bucket.parameters()])
        if bucket.is_last():
            self.layouts.append([])
        return add(bucket)

    @property
    def rebuilt(self) -> bool:
        return self.layouts[0] != self.layouts[-2]

    def backward(self, step: int, factor: float = 1.0, scaler: Any = None) -> None:
        self.inner.zero_grad()
        for part in range(self.passes):
            x, y = data_of(self.transport.rank, step, part)
            last = part == self.passes - 1
            with self.forward.no_sync() if self.uses_ddp and not last else nullcontext():
                loss = cross_entropy(self.forward(x * factor), y)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if self.uses_ddp and isinstance(self.model, Convolutions):
            self.model.ignored.grad = None

    def step(self, step: int, factor: float = 1.0) -> None:
        self.backward(step, factor)
        if self.uses_ddp:
            self.inner.step()
        else:
            self.exchange.synchronize()
            with self.exchange.skip_synchronize():
                self.exchange.step()

    def train(self, steps: Iterable[int] = range(5)) -> "Trainer":
        for step in steps:
            self.step(step)
        return self

    @property
    def weights(self) -> str:
        return digest(self.model.parameters())

    @property
    def findings(self) -> Finding:
        error, sent = self.exchange.error_norm(), self.exchange.meter.payload_bytes
        return {"weights": self.weights, "error": error, "bytes": sent}

    def state(self) -> bytes:
        states = [self.model.state_dict(), self.inner.state_dict(), self.exchange.compression_state_dict()]
        torch.save(states, file := BytesIO())
        return file.getvalue()

    def load(self, state: bytes) -> None:
        model, optimizer, compression = torch.load(BytesIO(state), weights_only=True)
        self.model.load_state_dict(model)
        self.inner.load_state_dict(optimizer)
        self.exchange.load_compression_state_dict(compression)
