"""Runs on every rank under torchrun: DDP with the compression hook beside DistributedOptimizer."""

import gc
import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc.comm import all_reduce
from dgc.comm.torch_distributed import connect
from dgc.compression import (
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    NonFiniteGradientError,
    PowerSGDCompressor,
    Route,
    Rule,
    ThresholdCompressor,
)
from dgc.ddp import DDPExchange, compress
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.wire import SignValues

Finding = dict[str, Any]
FEATURES, CLASSES, BUCKET_MB = 24, 6, 0.006
OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
}

METHODS: dict[str, Callable[[], Any]] = {
    "dgc": lambda: DGCCompressor(0.05, DGCSGDMemory(momentum=0.9)),
    "sign values": lambda: DGCCompressor(0.05, ResidualMemory(), values=SignValues()),
    "powersgd": lambda: PowerSGDCompressor(2),
    "powersgd paper": lambda: PowerSGDCompressor(2, mode="paper"),
    "2-bit": lambda: ThresholdCompressor(2, 0.01),
    "1-bit": lambda: ThresholdCompressor(1, 0.0),
    "dense": DenseCompressor,
    "fp16": FP16Compressor,
    "route": lambda: Route(
        [
            Rule(PowerSGDCompressor(1), name="layers.1"),
            Rule(DGCCompressor(0.1, ResidualMemory()), min_dim=2),
            Rule(FP16Compressor()),
        ]
    ),
}


class Net(nn.Module):
    """Layers are used in another order than they are registered, so that DDP rebuilds its buckets."""

    def __init__(self, layers: int = 5):
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers[1::2], *self.layers[::2]):
            x = x + layer(x).relu()
        return self.last(x)


class Convolutions(nn.Module):
    """Channels last, fp32 and bf16, one frozen, one ignored by DDP, and tied parameters."""

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
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.conv(x.view(-1, 3, 4, 2)[:, :, :, [0, 1, 0, 1]].contiguous()).relu()).mean((2, 3))
        return self.head(self.tied(self.shared(x.bfloat16()).relu()).float()) * self.ignored


class Branches(nn.Module):
    """Branch 0 is always used, and those that are named in `used`."""

    def __init__(self, branches: int = 3):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(branches))
        self.used: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.branches[i](x) for i in sorted(self.used)), self.branches[0](x))


def make(kind: type[nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def sgd(model: nn.Module, compression: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    if getattr(compression, "correction", None) is not None:
        return DGCSGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)


def digest(model: nn.Module) -> str:
    data = (p.detach().float().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(data)).hexdigest()


def data_of(rank: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    x = torch.randn(8, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (8,), generator=generator)


class Layouts:
    """The layouts of DDP's buckets, by step: the shapes in the order in which the hook gets them."""

    def __init__(self, exchange: DDPExchange):
        self.seen: list[list[list[int]]] = [[]]
        add, ids = exchange.add, {id(p): i for i, p in enumerate(exchange._slots)}

        def recording(bucket: Any) -> Any:
            self.seen[-1].append([ids[id(p)] for p in bucket.parameters()])
            if bucket.is_last():
                self.seen.append([])
            return add(bucket)

        exchange.add = recording  # type: ignore[method-assign]

    @property
    def changed(self) -> bool:
        return self.seen[0] != self.seen[1] and self.seen[1] == self.seen[-2]


def through_ddp(
    compression: Any, options: dict[str, Any], kind: type[nn.Module] = Net, steps: int = 5, passes: int = 1
) -> Finding:
    model = make(kind)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [".ignored"])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004, **options)  # type: ignore[arg-type]
    optimizer = sgd(model, compression)
    exchange = compress(ddp, compression, optimizer, bucket_mb=BUCKET_MB, transport=TRANSPORT)
    layouts = Layouts(exchange)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = data_of(TRANSPORT.rank, step, part)
            if part < passes - 1:
                with ddp.no_sync():
                    cross_entropy(ddp(x), y).backward()
            else:
                cross_entropy(ddp(x), y).backward()
        if kind is Convolutions:
            model.ignored.grad = None
        optimizer.step()
    return {
        "weights": digest(model),
        "error": exchange.error_norm(),
        "bytes": exchange.meter.payload_bytes,
        "rebuilt": layouts.changed,
    }


def through_optimizer(
    compression: Any, kind: type[nn.Module] = Net, steps: int = 5, passes: int = 1
) -> Finding:
    model = make(kind)
    if kind is Convolutions:
        model.ignored.requires_grad_(False)
    optimizer = DistributedOptimizer(
        sgd(model, compression),
        model.named_parameters(),
        compression,
        passes,
        bucket_mb=BUCKET_MB,
        transport=TRANSPORT,
    )
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = data_of(TRANSPORT.rank, step, part)
            cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    return {"weights": digest(model), "error": optimizer.error_norm(), "bytes": optimizer.meter.payload_bytes}


def equal_to_optimizer() -> Finding:
    """Every method in every mode of DDP, beside DistributedOptimizer."""
    found: Finding = {}
    for name, method in METHODS.items():
        found[name] = {"expected": through_optimizer(method())}
        for mode, options in OPTIONS.items():
            found[name][mode] = through_ddp(method(), options)
    return found


def kinds_of_parameters() -> Finding:
    found: Finding = {}
    for name in ("dgc", "powersgd", "2-bit"):
        found[name] = {"expected": through_optimizer(METHODS[name](), Convolutions)}
        for mode in ("default", "view"):
            found[name][mode] = through_ddp(METHODS[name](), OPTIONS[mode], Convolutions)
    return found


def accumulation() -> Finding:
    found: Finding = {}
    for name in ("dgc", "powersgd"):
        found[name] = {"expected": through_optimizer(METHODS[name](), passes=3)}
        for mode in ("default", "unused", "view"):  # static_graph begins with a backward pass outside no_sync
            found[name][mode] = through_ddp(METHODS[name](), OPTIONS[mode], passes=3)
    return found


def unused_parameters() -> Finding:
    """Branch 1 is used by one rank only, branch 2 by every rank in the first step and by none later."""
    found: Finding = {}
    last = TRANSPORT.rank == TRANSPORT.size - 1
    for name in ("dgc", "powersgd", "2-bit"):
        for view in (False, True):
            model, plain = make(Branches), make(Branches)
            ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=view)
            compression = METHODS[name]()
            optimizer = sgd(model, compression)
            exchange = compress(ddp, compression, optimizer, transport=TRANSPORT)
            expected = METHODS[name]()
            other = DistributedOptimizer(
                sgd(plain, expected), plain.named_parameters(), expected, transport=TRANSPORT
            )
            sent = []
            for step in range(4):
                for net in (model, plain):
                    net.used = {2} if step == 0 else {1} if last else set()
                x, y = data_of(TRANSPORT.rank, step)
                optimizer.zero_grad()
                cross_entropy(ddp(x), y).backward()
                optimizer.step()
                sent.append(float(model.branches[2].weight.grad.abs().sum()))
                other.zero_grad()
                cross_entropy(plain(x), y).backward()
                other.synchronize()
                with other.skip_synchronize():
                    other.step()
            found[f"{name} {view}"] = {
                "weights": digest(model),
                "expected": digest(plain),
                "error": exchange.error_norm() == other.error_norm(),
                "sent later": all(sent[1:]),
            }
            other.close()
    return found


def conservation() -> Finding:
    """All gradients since the start equal what was delivered and the mean of what the ranks keep."""
    found: Finding = {}
    for name, compression in {
        "dgc": DGCCompressor(0.1, ResidualMemory()),
        "powersgd": PowerSGDCompressor(1),
        "2-bit": ThresholdCompressor(2, 0.02),
    }.items():
        model, plain = make(Branches), make(Branches)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        exchange = compress(ddp, Route([Rule(compression, min_dim=2), Rule(DenseCompressor())]), transport=TRANSPORT)
        for step in range(6):
            model.used = plain.used = {2} if step == 0 else set()
            x, y = data_of(TRANSPORT.rank, step)
            cross_entropy(plain(x), y).backward()  # adds up
            model.zero_grad()
            cross_entropy(ddp(x), y).backward()
            totals = [torch.zeros_like(p) for p in model.parameters()] if step == 0 else totals
            for total, p in zip(totals, model.parameters(), strict=True):
                total += p.grad  # type: ignore[arg-type]
        # bucket order is the reverse of model order
        kept = torch.cat([e.flatten() for e in compression.errors()])
        delivered = torch.cat([t.flatten() for t in reversed(totals) if t.dim() == 2])
        local = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters() if p.dim() == 2]
        went_in = torch.cat([g.flatten() for g in reversed(local)])
        difference = all_reduce(TRANSPORT, went_in - kept, "mean") - delivered
        found[name] = {"difference": float(difference.abs().max()), "kept": exchange.error_norm()}
    return found


def loss_scaling() -> Finding:
    """The last rank overflows in one step. The error state must not depend on the scale."""
    found: Finding = {}
    for name in ("dgc", "powersgd", "2-bit"):
        for scale in (1.0, 2.0**12):
            model, compression = make(Net), METHODS[name]()
            ddp, optimizer = DistributedDataParallel(model), sgd(model, compression)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            exchange = compress(ddp, compression, optimizer, transport=TRANSPORT, grad_scaler=scaler)
            scales = []
            for step in range(4):
                optimizer.zero_grad()
                x, y = data_of(TRANSPORT.rank, step)
                overflow = step == 2 and TRANSPORT.rank == TRANSPORT.size - 1
                before = digest(model)
                scaler.scale(cross_entropy(ddp(x), y) * (1e38 if overflow else 1.0) * (10 if overflow else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale() / scale)
                moved = digest(model) != before
                assert moved != (step == 2), step
            found[f"{name} {scale}"] = [digest(model), exchange.error_norm(), exchange.dropped_steps, scales]
    return found


def nonfinite() -> Finding:
    """NaN on the last rank in one step, without a scaler."""
    found: Finding = {}
    for name in ("dgc", "powersgd", "2-bit", "dense"):
        for policy in ("skip", "raise"):
            for mode, options in OPTIONS.items():
                model, compression = make(Net), METHODS[name]()
                ddp, optimizer = DistributedDataParallel(model, **options), sgd(model, compression)  # type: ignore[arg-type]
                exchange = compress(ddp, compression, optimizer, transport=TRANSPORT, nonfinite=policy)
                messages, unmoved = [], []
                for step in range(5):
                    optimizer.zero_grad()
                    x, y = data_of(TRANSPORT.rank, step)
                    if step == 2 and TRANSPORT.rank == TRANSPORT.size - 1:
                        x[0, 0] = float("nan")
                    before = digest(model)
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        try:
                            cross_entropy(ddp(x), y).backward()
                        except NonFiniteGradientError as error:
                            messages.append(str(error))
                        optimizer.step()
                    messages += [str(w.message) for w in caught]
                    if digest(model) == before:
                        unmoved.append(step)
                found[f"{name} {policy} {mode}"] = {
                    "weights": digest(model),
                    "error": exchange.error_norm(),
                    "dropped": exchange.dropped_steps,
                    "messages": messages,
                    "unmoved": unmoved,
                }
    return found


def warm_up(counts: bool) -> tuple[str, list[float]]:
    model = make(Net)
    compression = DGCCompressor(0.02, DGCSGDMemory(momentum=0.9), warmup_epochs=3)
    ddp, optimizer = DistributedDataParallel(model), sgd(model, compression)
    exchange = compress(
        ddp, compression, optimizer, transport=TRANSPORT, steps_per_epoch=2 if counts else None
    )
    ratios = []
    for step in range(8):
        if not counts and step % 2 == 0:
            exchange.begin_epoch(step // 2)
        optimizer.zero_grad()
        x, y = data_of(TRANSPORT.rank, step)
        cross_entropy(ddp(x), y).backward()
        optimizer.step()
        ratios.append(exchange.compress_ratio)
    return digest(model), ratios


def epochs() -> Finding:
    return {"counted": warm_up(True), "called": warm_up(False)}


def buffers_are_released() -> Finding:
    """Tensors and futures that are alive after each step."""
    model, compression = make(Net), METHODS["powersgd"]()
    ddp, optimizer = DistributedDataParallel(model), sgd(model, compression)
    compress(ddp, compression, optimizer, transport=TRANSPORT)
    alive = []
    for step in range(6):
        optimizer.zero_grad()
        x, y = data_of(TRANSPORT.rank, step)
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        del loss
        gc.collect()
        alive.append(sum(issubclass(type(o), Tensor | torch.futures.Future) for o in gc.get_objects()))
    return {"alive": alive}


SCENARIOS = (
    equal_to_optimizer,
    kinds_of_parameters,
    accumulation,
    unused_parameters,
    conservation,
    loss_scaling,
    nonfinite,
    epochs,
    buffers_are_released,
)

if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    directory, *names = sys.argv[1:]
    TRANSPORT = connect()
    found = {scenario.__name__: scenario() for scenario in SCENARIOS if not names or scenario.__name__ in names}
    Path(directory, f"rank{TRANSPORT.rank}.json").write_text(json.dumps(found))
