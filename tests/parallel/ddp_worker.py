"""Runs on every rank under torchrun: DDP with the compression hook beside DistributedOptimizer.

Most functions return what must be alike on all ranks.
"""

import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from parallel.found import Finding, digest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc.compression import (
    DenseCompressor,
    DGCCompressor,
    EF21Compressor,
    FP16Compressor,
    NonFiniteGradientError,
    PowerSGDCompressor,
    Route,
    Rule,
    ThresholdCompressor,
    TwoPhaseCompressor,
)
from dgc.ddp import compress
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer, MuonWithAdamW, muon_groups
from dgc.wire import SignValues

FEATURES, CLASSES, BUCKET_MB = 24, 6, 0.006
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
}

METHODS: dict[str, Callable[[], Any]] = {
    "dgc": lambda: DGCCompressor(0.05, DGCSGDMemory(momentum=0.9)),
    "sign values": lambda: DGCCompressor(0.05, ResidualMemory(), values=SignValues()),
    "reduce_scatter": lambda: DGCCompressor(0.05, DGCSGDMemory(momentum=0.9), exchange="reduce_scatter"),
    "gtopk": lambda: DGCCompressor(0.05, ResidualMemory(), exchange="gtopk", values=SignValues()),
    "powersgd": lambda: PowerSGDCompressor(2),
    "powersgd paper": lambda: PowerSGDCompressor(2, mode="paper"),
    "2-bit": lambda: ThresholdCompressor(2, 0.01),
    "1-bit": lambda: ThresholdCompressor(1, 0.0),
    "8 bits": TwoPhaseCompressor,
    "4 bits": lambda: TwoPhaseCompressor(4, 64),
    "hadamard": lambda: TwoPhaseCompressor(4, 64, hadamard=True),
    "dense": DenseCompressor,
    "fp16": FP16Compressor,
    "ef21": lambda: EF21Compressor(DGCCompressor(0.1, ResidualMemory())),
    "route": lambda: Route(
        [
            Rule(PowerSGDCompressor(1), name="layers.1"),
            Rule(DGCCompressor(0.1, ResidualMemory()), min_dim=2),
            Rule(FP16Compressor()),
        ]
    ),
}
SOME = ("dgc", "powersgd", "2-bit", "4 bits")
SAVED = [*SOME, "route", "ef21"]
if hasattr(torch.optim, "Muon"):  # of torch 2.9
    METHODS["muon"] = lambda: TwoPhaseCompressor(4)
    SAVED.append("muon")


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

    def __init__(self, branches: int = 3):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(branches))
        self.used: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.branches[i](x) for i in sorted(self.used)), self.branches[0](x))


def sgd(model: nn.Module, compression: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    if getattr(compression, "correction", None) is not None:
        return DGCSGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return MuonWithAdamW(muon_groups(model, ["last.*"], {"layers.1.weight": 2}), lr=0.01, ns_precision="fp32")


def data_of(rank: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    x = torch.randn(8, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (8,), generator=generator)


class Trainer:
    """A model that is trained through DDP with the hook, or through DistributedOptimizer."""

    def __init__(
        self,
        transport: Any,
        method: str | Any,
        through: str = "ddp",
        net: type[nn.Module] = Net,
        bucket_mb: float = BUCKET_MB,
        passes: int = 1,
        **options: Any,
    ):
        compression = METHODS[method]() if isinstance(method, str) else method
        torch.manual_seed(0)
        self.model: Any = net()
        self.transport, self.passes, self.layouts = transport, passes, [[]]  # type: ignore[var-annotated]
        self.inner = muon(self.model) if method == "muon" else sgd(self.model, compression)
        self.uses_ddp = through == "ddp"
        kept = {k: options.pop(k) for k in ("nonfinite", "grad_scaler", "steps_per_epoch") if k in options}
        kept |= {"transport": transport, "bucket_mb": bucket_mb}
        self.exchange: Any
        self.forward: Any
        if self.uses_ddp:
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, [".ignored"])
            self.forward = DistributedDataParallel(self.model, bucket_cap_mb=0.004, **options)
            self.exchange = compress(self.forward, compression, self.inner, **kept)
            self._record_layouts()
        else:
            if net is Convolutions:
                self.model.ignored.requires_grad_(False)
            self.forward = self.model
            self.exchange = DistributedOptimizer(
                self.inner, self.model.named_parameters(), compression, passes, **kept
            )

    def _record_layouts(self) -> None:
        add = self.exchange.add

        def recording(bucket: Any) -> Any:
            self.layouts[-1].append([id(p) for p in bucket.parameters()])
            if bucket.is_last():
                self.layouts.append([])
            return add(bucket)

        self.exchange.add = recording

    @property
    def rebuilt(self) -> bool:
        """Whether DDP's buckets have changed since the first step."""
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

    def step(self, step: int) -> None:
        self.backward(step)
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

    def state(self) -> Any:
        states = [self.model.state_dict(), self.inner.state_dict(), self.exchange.compression_state_dict()]
        torch.save(states, file := BytesIO())
        return file.getvalue()

    def load(self, state: bytes) -> None:
        model, optimizer, compression = torch.load(BytesIO(state), weights_only=True)
        self.model.load_state_dict(model)
        self.inner.load_state_dict(optimizer)
        self.exchange.load_compression_state_dict(compression)


def beside_optimizer(
    transport: Any, method: str, modes: Iterable[str], net: type[nn.Module] = Net, passes: int = 1
) -> str:
    """DDP in these modes trains as DistributedOptimizer does. Returns the weights."""
    options: Any = {"net": net, "passes": passes}
    expected = Trainer(transport, method, "optimizer", **options).train().findings
    for mode in modes:
        trainer = Trainer(transport, method, **options, **OPTIONS[mode]).train()
        assert trainer.findings == expected, mode
        # buckets change after the first step, unless unused parameters may differ from step to step
        assert trainer.rebuilt == (mode != "unused"), mode
    return str(expected["weights"])


def unused_parameters(transport: Any) -> list[str]:
    """Branch 1 is used by the last rank only, branch 2 by every rank in the first step and by none later."""
    found = []
    last = transport.rank == transport.size - 1
    for method in SOME:
        for is_view in (False, True):
            options: Any = {"find_unused_parameters": True, "gradient_as_bucket_view": is_view}
            ddp = Trainer(transport, method, net=Branches, **options)
            other = Trainer(transport, method, "optimizer", net=Branches)
            for step in range(4):
                ddp.model.used = other.model.used = {2} if step == 0 else {1} if last else set()
                ddp.step(step)
                other.step(step)
                assert ddp.model.branches[2].weight.grad.any(), (method, is_view, step)
            assert ddp.findings == other.findings, (method, is_view)
            found.append(ddp.weights)
    return found


def with_a_bad_step(trainer: Trainer, train: Callable[[int, bool], None]) -> Finding:
    """Findings after five steps, of which the one with a bad gradient on the last rank has moved nothing.

    Args:
        trainer: What is trained.
        train: Does one step. It gets its number, and whether the gradients of this rank are bad.
    """
    for step in range(5):
        before = trainer.weights
        train(step, step == 2 and trainer.transport.rank == trainer.transport.size - 1)
        assert (trainer.weights == before) == (step == 2), step
    assert trainer.findings["error"] < 100
    return trainer.findings


def loss_scaling(transport: Any) -> list[str]:
    """The last rank overflows in one step. The error state is unscaled."""

    def run(method: str, scale: float) -> Finding:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer = Trainer(transport, method, grad_scaler=scaler)

        def train(step: int, bad: bool) -> None:
            trainer.backward(step, 1e30 if bad else 1.0, scaler)
            scaler.step(trainer.inner)
            scaler.update()
            assert scaler.get_scale() == (scale if step < 2 else scale / 2)

        found = with_a_bad_step(trainer, train)
        assert trainer.exchange.dropped_steps == 1 and found["error"] > 0
        return found

    found = []
    for method in SOME:
        small, large = run(method, 1.0), run(method, 2.0**12)
        assert small == large, method
        found.append(small["weights"])
    return found


def nonfinite(transport: Any) -> list[str]:
    """NaN on the last rank in one step, without a scaler."""

    def run(method: str, policy: str, mode: str) -> Finding:
        trainer, messages = Trainer(transport, method, nonfinite=policy, **OPTIONS[mode]), list[str]()

        def train(step: int, bad: bool) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    trainer.backward(step, math.nan if bad else 1.0)
                except NonFiniteGradientError as error:
                    messages.append(str(error))
            trainer.inner.step()
            messages.extend(str(warning.message) for warning in caught)

        found = with_a_bad_step(trainer, train)
        assert trainer.exchange.dropped_steps == (policy == "skip")
        assert len(messages) == (policy == "raise" or transport.rank == 0)
        assert all(f"on rank {transport.size - 1} has NaN or inf" in message for message in messages)
        return found

    found = []
    for method in ("dgc", "powersgd", "dense", "4 bits"):
        expected = run(method, "skip", "default")
        for mode in OPTIONS if method == "dgc" else ("default",):
            for policy in ("skip", "raise"):
                assert run(method, policy, mode) == expected, (method, policy, mode)
        found.append(expected["weights"])
    return found


def epochs(transport: Any) -> str:
    """A warm-up, with epochs that are counted or set."""
    found = []
    for steps_per_epoch in (2, None):
        compression = DGCCompressor(0.02, DGCSGDMemory(momentum=0.9), warmup_epochs=3)
        trainer = Trainer(transport, compression, steps_per_epoch=steps_per_epoch)
        ratios = []
        for step in range(8):
            if steps_per_epoch is None and step % 2 == 0:
                trainer.exchange.begin_epoch(step // 2)
            trainer.step(step)
            ratios.append(trainer.exchange.compress_ratio)
        assert ratios[0] == ratios[1] > ratios[2] == ratios[3] > ratios[4] == ratios[-1] == 0.02
        found.append(trainer.findings)
    assert found[0] == found[1]
    return str(found[0]["weights"])


def end_of(trainer: Trainer, state: bytes = b"") -> Finding:
    if state:
        trainer.load(state)
    findings = trainer.train(range(3, 6)).findings
    return {key: findings[key] for key in ("weights", "error")}


def checkpoints(transport: Any, folder: Path) -> Finding:
    """States that are saved after three steps, by DDP and by DistributedOptimizer, and loaded into the other.

    Returns the end of each run.
    """
    found: Finding = {}
    for method in SAVED:
        ddp, other = (Trainer(transport, method, through).train(range(3)) for through in ("ddp", "optimizer"))
        of_ddp, of_other = ddp.state(), other.state()
        Path(folder, f"{method}.{transport.rank}.pt").write_bytes(of_ddp)
        expected = end_of(ddp)
        assert end_of(Trainer(transport, method), of_ddp) == expected, method
        assert end_of(Trainer(transport, method), of_other) == expected, method
        assert end_of(Trainer(transport, method, "optimizer"), of_ddp) == expected, method
        others = [Trainer(transport, method, through, bucket_mb=1) for through in ("ddp", "optimizer")]
        in_other_buckets = [end_of(trainer, of_ddp) for trainer in others]
        assert in_other_buckets[0] == in_other_buckets[1], method
        assert method != "2-bit" or in_other_buckets[0]["weights"] == expected["weights"]
        found[method] = expected
    return found


def uneven_data(transport: Any) -> list[str]:
    """The last rank has data for two more steps, with NaN in the last but one."""
    last = transport.rank == transport.size - 1
    found = []
    for mode in ("default", "unused"):
        trainer = Trainer(transport, "dgc", **OPTIONS[mode])
        with trainer.forward.join():
            for step in range(5 if last else 3):
                trainer.backward(step, math.nan if step == 3 else 1.0)
                trainer.inner.step()
        assert trainer.exchange.dropped_steps == 1, mode
        found.append(trainer.weights)
    return found


def delivered(transport: Any) -> None:
    """The means of blocks go into DDP's buckets. Ours get no memory, unless parameters may be unused."""
    for method, mode, uses_flat in (
        ("8 bits", "default", False),
        ("4 bits", "view", False),
        ("8 bits", "unused", True),
        ("hadamard", "default", True),
    ):
        buckets = [plan.bucket for plan in Trainer(transport, method, **OPTIONS[mode]).train().exchange._planned]
        assert buckets and all(("_flat" in vars(bucket)) == uses_flat for bucket in buckets), (method, mode)
        assert all(bucket.destinations is None for bucket in buckets), (method, mode)


def several_exchanges(transport: Any) -> None:
    """Two backward passes outside no_sync are two exchanges, and the first mean takes part in the second.

    As the documentation says, that is exact without compression, and gives other sums with it.
    """
    for method in ("dense", "sign values"):
        trainer, once = Trainer(transport, method), Trainer(transport, method, passes=2)
        for part in range(2):
            x, y = data_of(transport.rank, 0, part)
            cross_entropy(trainer.forward(x), y).backward()
        once.backward(0)
        pairs = zip(trainer.model.parameters(), once.model.parameters(), strict=True)
        difference = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
        assert difference < 1e-6 if method == "dense" else difference > 0.01, (method, difference)


def memory(transport: Any) -> None:
    """Tensors and futures that are alive after each step, and whether a discarded model is freed."""
    gc.freeze()  # leave out what other scenarios made
    trainer = Trainer(transport, "powersgd")
    alive = []
    for step in range(24):
        trainer.step(step)
        gc.collect()
        alive.append(sum(issubclass(type(o), Tensor | torch.futures.Future) for o in gc.get_objects()))
    gc.unfreeze()
    del trainer
    ddp = DistributedDataParallel(Net())
    compress(ddp, METHODS["2-bit"](), transport=transport)
    ddp(data_of(transport.rank, 0)[0]).sum().backward()
    discarded = weakref.ref(ddp)
    del ddp
    gc.collect()
    # threads of the transport may hold a few tensors of the last step; a leak would add some in every step
    assert alive[-1] < alive[5] + 12, alive
    assert discarded() is None


def resumed(transport: Any, folder: Path) -> Finding:
    """The end of a run that continues from a checkpoint of another process."""
    return {
        method: end_of(Trainer(transport, method), (folder / f"{method}.{transport.rank}.pt").read_bytes())
        for method in SAVED
    }


class Failing(DenseCompressor):
    """Fails on the last rank in the third step."""

    steps = 0

    def reduce(self, bucket: Any, state: Any) -> Any:
        self.steps += bucket.name.endswith(".0")
        if self.steps == 3 and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("the compressor's own")
        return (yield from super().reduce(bucket, state))


def failure(transport: Any) -> Finding:
    """The error of one rank ends backward there. The others fail when that rank has ended."""
    trainer = Trainer(transport, Failing())
    start = perf_counter()
    try:
        trainer.train()
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    try:
        trainer.step(5)
    except RuntimeError as error:
        found["afterwards"] = str(error)
    return {**found, "seconds": perf_counter() - start}
