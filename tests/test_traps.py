"""The traps that the original DGC trainer holds for its users. Each test fails on what the original does."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from selection.shapes import indices_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from torch.utils.data import TensorDataset

from dgc import kernels
from dgc.bucket import Segment
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor
from dgc.kernels import Budget
from dgc.kernels.selection import as_selection
from dgc.memory import ClipByNorm, DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.selection import Sampled, plan_selection
from dgc.wire import PayloadError, SparseFormat
from dgc.wire.payload import PayloadPlan
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import ConfigError, instantiate, load
from dgc_training.data import evaluation_loader, worker_options
from dgc_training.evaluation import averaged_batch_norm, batch_norm_buffers, evaluate
from dgc_training.meters import TopKClassMeter
from dgc_training.schedule import Schedule
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import prepare_device
from dgc_training.synchronization import check_replicas

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def config(*words: Any) -> Any:
    args, overrides = parse_arguments(["--configs", *words])
    return load(args.configs, overrides)


def seeded(build: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def train(size: Any, body: Any) -> Any:
    """`body(model, transport)` on every rank, from one model; the results by rank."""

    models = [seeded(lambda: nn.Linear(30, 20)) for _ in range(size)]
    return LockstepWorld(size).run(lambda transport: body(models[transport.rank], transport))


def wrap(
    model: Any,
    transport: Any,
    ratio: float = 0.1,
    momentum: float = 0.9,
    lr: float = 0.1,
    decay: float = 0.0,
    compressor: Any = None,
    **options: Any,
) -> Any:
    inner = DGCSGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    compressor = compressor or DGCCompressor(ratio, DGCSGDMemory(momentum))
    return DistributedOptimizer(inner, model.named_parameters(), compressor, transport=transport, **options)


def test_trap_01_derived_settings_follow_the_command_line() -> None:
    """T_max, milestones and the memory's momentum are computed before overrides: the README's own
    --configs.train.num_epochs 500 lets the learning rate climb back to full."""
    tree = config(
        "configs/cifar/resnet20.py", "configs/dgc/wm5.py",
        "--configs.train.num_epochs", "500", "--configs.train.optimizer.momentum", "0.8",
    )  # fmt: skip
    assert tree.train.scheduler.T_max == 500 - tree.train.warmup_lr_epochs
    assert tree.train.compression.memory.momentum == 0.8
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = instantiate(tree.train.scheduler, optimizer)
    rates = []
    for _ in range(500 - tree.train.warmup_lr_epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == sorted(rates, reverse=True) and optimizer.param_groups[0]["lr"] == pytest.approx(0)
    tree = config("configs/imagenet/resnet18.py", "--configs.train.warmup_lr_epochs", "7")
    assert list(tree.train.scheduler.milestones) == [23, 53, 73]


def test_trap_02_every_config_and_script_is_complete() -> None:
    """CIFAR configs lack train.optimize_bn_separately; scripts name configs that do not exist."""
    modifiers = {
        "dgc": ["configs/cifar/resnet20.py"],
        "selection": ["configs/cifar/resnet20.py", "configs/dgc/wm5.py"],
        "cosine": ["configs/imagenet/resnet18.py"],
        "sgd": ["configs/numwords/tiny.py"],
        "pysource/sgd": ["configs/pysource/lstm.py"],
        "adam/fp16": ["configs/pysource/gpt.py", "configs/adam/onebit_adam.py"],
        "tokens400k": ["configs/wmt16/base.py"],
        "by_epoch": ["configs/numwords/tiny.py"],
        "topology": ["configs/cifar/resnet20.py", "configs/gossip/sgp.py"],
        **dict.fromkeys(("fp16", "bf16", "int8"), ["configs/cifar/resnet20.py", "configs/gossip/sgp.py"]),
        **dict.fromkeys(
            (
                *("chunks", "powersgd", "threshold", "quant", "sparse", "route", "gossip", "local", "adam"),
                *("dense",),
            ),
            ["configs/cifar/resnet20.py"],
        ),
    }
    experiments = [p for p in (ROOT / "configs").glob("*/*.py") if p.name != "__init__.py"]
    assert len(experiments) > 10
    for path in experiments:
        by_name = path.parent.name in ("gossip", "imagenet", "numwords", "wmt16") and modifiers.get(path.stem)
        by_path = modifiers.get(f"{path.parent.name}/{path.stem}")
        stack = by_path or by_name or modifiers.get(path.parent.name) or []
        tree = config(*stack, str(path.relative_to(ROOT)))
        assert isinstance(tree.train.optimize_bn_separately, bool), path
    for script in (ROOT / "scripts").rglob("*.sh"):
        for name in re.findall(r"\bconfigs/[\w/]+\.\w*", script.read_text()):
            assert (ROOT / name).exists(), f"{script} names {name}"


def test_trap_03_one_process_keeps_its_momentum() -> None:
    """On one rank no hook is registered and the optimizer leaves momentum to nobody: -1, -2, -3."""
    for ratio, shape in ((1.0, (1, 1)), (0.5, (1, 1)), (0.5, (1,))):
        p = nn.Parameter(torch.zeros(shape))
        memory = DGCSGDMemory(0.9, momentum_masking=False)
        inner = DGCSGD([p], lr=1.0, momentum=0.9)
        transport = LockstepWorld(1).transports[0]
        optimizer = DistributedOptimizer(inner, [("p", p)], DGCCompressor(ratio, memory), transport=transport)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
            seen.append(p.item())
        assert seen == pytest.approx([-1.0, -2.9, -5.61]), (ratio, shape)


def test_trap_04_nesterov_reaches_the_memory() -> None:
    """resnet50 sets optimizer.nesterov, the memory keeps False: only weight decay gets Nesterov."""
    tree = config("configs/imagenet/resnet50.py", "configs/dgc/wm5.py")
    assert tree.train.optimizer.nesterov is True and tree.train.compression.memory.nesterov is True
    model = nn.Linear(3, 3)
    inner = DGCSGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(ValueError, match="nesterov=False.*they must agree"):
        DistributedOptimizer(
            inner, None, DGCCompressor(0.1, DGCSGDMemory(0.9)), transport=LockstepWorld(1).transports[0]
        )


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_trap_05_nan_is_not_swallowed(ratio: Any) -> None:
    """A NaN coordinate is never selected, stays in velocity and momentum for ever, and nobody is told."""

    def body(model: Any, transport: Any) -> Any:
        if transport.rank == 1:
            model.weight.register_hook(Spoiler(at=1))
        optimizer = wrap(model, transport, ratio)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 30)).square().sum().backward()
            optimizer.step()
        assert optimizer.dropped_steps == 1
        own = optimizer.compression_state_dict()["DGCCompressor.0"]
        return model.weight.detach().clone(), [*own["momentums"].values(), *own["velocities"].values()]

    with pytest.warns(UserWarning, match="the gradient of weight on rank 1 has NaN or inf"):
        (one, state), (two, other) = train(2, body)
    assert torch.equal(one, two) and one.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in [*state, *other])


class Spoiler:
    """A gradient hook that spoils one element once."""

    def __init__(self, at: Any) -> None:
        self.left = at

    def __call__(self, gradient: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            gradient = gradient.clone()
            gradient[3, 4] = float("nan")
        return gradient


def tensors(memory: Any) -> Any:
    return [tensor for part in memory.values() for tensor in part.values()]


def test_trap_06_no_place_in_a_tensor_starves() -> None:
    """An over-full selection is cut in the order of indices: the last tenth got 6.1 % of the slots."""
    n = 10_000
    plan = plan_selection([Segment("w", 0, n, (n,), (1,))], 0.01)
    counts = torch.zeros(10)
    for draw in range(200):
        v = torch.randn(n, generator=torch.Generator().manual_seed(draw))
        counts += torch.bincount(indices_of(Sampled(), v, plan, draw) * 10 // n, minlength=10)
    shares = counts / counts.sum()
    assert float(shares.min()) > 0.09 and float(shares.max()) < 0.11


def test_trap_07_values_beyond_fp16_and_gradients_of_every_kind() -> None:
    """fp16 values overflow to inf; channels_last, grad None, zero_grad(set_to_none=True) and clipping raise."""

    def build() -> Any:
        layers = [nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False), nn.Flatten()]
        unused = nn.Linear(4, 4)
        model = nn.Sequential(*layers, nn.Linear(16, 2, bias=False), unused)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    models = [seeded(build) for _ in range(2)]

    def body(transport: Any) -> None:
        model = models[transport.rank]
        memory = DGCSGDMemory(0.9, gradient_clipping=ClipByNorm(1e9))
        compressor = DGCCompressor(0.1, memory, fp16_values=True)
        inner = DGCSGD(model.parameters(), lr=1e-12, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compressor, transport=transport)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            images = torch.ones(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
            # the unused layer stays outside of the graph: its .grad is None where set_to_none sets it
            (1e7 * model[:4](images).square().mean()).backward()
            optimizer.synchronize()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.dim() > 1])
            assert gradients.isfinite().all() and gradients.abs().max() > 65504
            with optimizer.skip_synchronize():
                optimizer.step()
        assert optimizer.dropped_steps == 0

    LockstepWorld(2).run(body)


def test_trap_08_broadcasting_the_optimizers_state_moves_nothing() -> None:
    """hvd.broadcast_optimizer_state steps on zero gradients: weights shrink by weight decay before training."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, lr=0.8, decay=0.01)
        before = model.weight.detach().clone()
        if transport.rank == 0:  # and nothing is exchanged: nobody else need take part
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        assert torch.equal(model.weight, before) and optimizer.meter.payload_bytes == 0

    train(2, body)


def test_trap_09_a_milestone_is_passed_once() -> None:
    """MultiStepLR resumed right after a milestone decays twice: 0.01 in place of 0.1."""
    schedulers = {"steps": lambda o: MultiStepLR(o, [2, 4]), "cosine": lambda o: CosineAnnealingLR(o, 6)}

    def build(make: Any) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return Schedule(optimizer, make, size=2, steps_per_epoch=2, warmup_epochs=1)

    def go(schedule: Any, epochs: Any) -> Any:
        seen = []
        for epoch in epochs:
            for step in range(2):
                schedule.begin_step(epoch, step)
                schedule.optimizer.step()
                seen.append(schedule.rates()[0])
        return seen

    for make in schedulers.values():
        expected = go(build(make), range(7))
        for resumed_at in range(1, 7):
            first = build(make)
            seen = go(first, range(resumed_at))
            second = build(make)
            second.optimizer.load_state_dict(first.optimizer.state_dict())
            second.load_state_dict(first.state_dict())
            assert seen + go(second, range(resumed_at, 7)) == expected
    assert min(go(build(schedulers["steps"]), range(5))) == pytest.approx(0.1)


def test_trap_10_a_checkpoint_repeats_its_reported_accuracy() -> None:
    """Each rank evaluates its own batch norm, rank 0's is kept, and padding counts some samples twice."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(31, 6, generator=generator), torch.randint(3, (31,), generator=generator)

    def results(model: Any, transport: Any) -> Any:
        loader = evaluation_loader(TensorDataset(inputs, targets), 4, rank=transport.rank, size=transport.size)
        return evaluate(model, {"test": loader}, lambda split: {split: TopKClassMeter(1)}, transport, CPU)["test"]

    models = [seeded(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))) for _ in range(3)]

    def body(transport: Any) -> Any:
        model = models[transport.rank]
        for buffer in batch_norm_buffers(model).values():
            buffer.copy_(torch.rand(6, generator=torch.Generator().manual_seed(transport.rank)) * 2)
        reported = results(model, transport)
        with averaged_batch_norm(model, transport):
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        return reported, saved, model

    ranks = LockstepWorld(3).run(body)
    assert len({reported for reported, _, _ in ranks}) == 1
    for size in (1, 2, 4):
        models = [nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(size)]
        for model in models:
            model.load_state_dict(ranks[1][1])

        def evaluated(transport: Any, models: Any = models) -> Any:
            return results(models[transport.rank], transport)

        for again in LockstepWorld(size).run(evaluated):
            assert again == ranks[0][0]
    model = ranks[0][2].eval()
    model.load_state_dict(ranks[0][1])
    assert ranks[0][0] == pytest.approx(100.0 * float((model(inputs).argmax(1) == targets).float().mean()))


def test_trap_11_one_decision_about_resuming_for_all_ranks(tmp_path: Path) -> None:
    """`latest` on some ranks only sends ranks down different branches: a hang. Removing an old file that is
    not there raises."""
    names = ["e0001", "e0002", "e0003", "e0004", "e0005"]

    def save(transport: Any) -> None:
        checkpoints = Checkpoints(tmp_path / "0", transport)
        for name in names:
            checkpoints.save(name, {"name": name}, {"rank": transport.rank})
            if transport.rank == 0 and name == "e0003":
                (tmp_path / "0" / "e0002" / "rank0.pt").unlink()

    LockstepWorld(2).run(save)

    def look(transport: Any) -> Any:
        """Rank 0 has the checkpoint; rank 1's disk is empty."""
        (tmp_path / str(transport.rank)).mkdir(exist_ok=True)
        checkpoints = Checkpoints(tmp_path / str(transport.rank), transport)
        found = checkpoints.find("latest")
        try:
            checkpoints.load(cast(str, found))
        except Exception as error:
            return found, f"{type(error).__name__}: {error}"
        return found, None

    (found, message), (also_found, also_message) = LockstepWorld(2).run(look)
    assert found == also_found == "e0005"
    for text in (message, also_message):
        assert text is not None and "UsageError" in text and "rank1.pt is missing" in text


def test_trap_12_no_gpu_no_scheduler_no_forced_determinism() -> None:
    """model.cuda() without asking, a crash where scheduler is None, and seed 42 that makes kernels slow."""
    tree = config("configs/cifar/resnet20.py", "--configs.train.scheduler", "null")
    assert tree.train.scheduler is None and tree.seed == 42 and tree.deterministic is False
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        assert prepare_device(tree, "cpu", LockstepWorld(1).transports[0]) == CPU
    torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = Schedule(optimizer, lambda scaled: None, size=1, steps_per_epoch=1)
    for epoch in range(3):
        schedule.begin_step(epoch, 0)
    assert schedule.rates() == [0.1]
    with pytest.raises(ConfigError, match="num_epoch"):
        config("configs/cifar/resnet20.py", "--configs.train.num_epoch", "5")


def test_trap_13_workers_never_fork_and_checkpoints_run_no_code(tmp_path: Path) -> None:
    """mp._supports_context is gone and the loader forks with MPI loaded; torch.load gets no map_location."""
    assert worker_options(2)["multiprocessing_context"] == "forkserver"
    torch.save({"weight": torch.ones(2)}, tmp_path / "good.pt")
    assert read_tensors(tmp_path / "good.pt")["weight"].device == CPU
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="code.pt cannot be read as a checkpoint"):
        read_tensors(tmp_path / "code.pt")


def test_trap_14_gathered_data_have_a_planned_size_and_are_checked() -> None:
    """ "allgathered data are random data once in a while": sizes change from step to step, nothing is checked."""

    def body(model: Any, transport: Any) -> Any:
        optimizer = wrap(model, transport, ratio=0.05)
        sizes = []
        for step in range(6):
            optimizer.zero_grad()
            # fewer and fewer elements differ from zero: the original sends as many as it finds
            model(torch.ones(2, 30) * (torch.arange(30) < 30 >> step)).sum().backward()
            before = optimizer.meter.payload_bytes
            optimizer.step()
            sizes.append(optimizer.meter.payload_bytes - before)
        check_replicas(model, transport)
        if transport.rank == 1:
            with torch.no_grad():
                model.weight[0, 0] += 1e-6
        with pytest.raises(RuntimeError, match="parameter weight of ranks? .*1"):
            check_replicas(model, transport)
        return sizes

    for sizes in train(3, body):
        assert len(set(sizes)) == 1
    codec, budget = kernels.of(torch.empty(0)).codec, Budget(torch.tensor([0, 10]), torch.tensor([4]), 4)
    selection = as_selection(torch.tensor([1, 5]), torch.ones(10), 4)
    plan = PayloadPlan(SparseFormat(), budget, 10)
    payload = plan.encode(codec, selection, torch.tensor(10)).payload
    random = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(PayloadError, match="rank 2"):
        plan.decode(codec, [payload, payload, random]).wait()
