"""Uses of wrapped, copied, converted and regrouped optimizers and models: each gives what it gives without
compression, or is refused with one clear error.
"""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from optim import nets, wrappers
from sharding import fsdp, fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from dgc import ddp
from dgc.aggregate import Config, PowerSGD, optimizer_step
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.torch_distributed import connect
from dgc.compression import DenseCompressor
from dgc.engine.state import HasCompression
from dgc.local import OuterSteps
from dgc.optim import DGCSGD, DistributedOptimizer, LocalOptimizer
from dgc.versions import minor_version

pytestmark = [pytest.mark.usefixtures("no_type_checks")]
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.more, self.last = (
            nn.Linear(a, b) for a, b in ((6, 8), (8, 8), (8, 8), (8, 3))
        )

    def forward(self, x: Any) -> Any:
        return self.last(self.more(self.middle(self.first(x).tanh()).tanh()).tanh())


_lock = threading.Lock()


def net() -> Any:
    with _lock, torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


@dataclass
class Trained:
    """A model, and what trains it.

    Attributes:
        module: The user's model. model: With an adapter's wrapper.
        inner: The optimizer that was built. given: What the adapter gets. outer: What the loop steps.
        exchange: What has the state of the exchange, if any.
        ranks: Those on whose data this one trains.
    """

    module: Any
    model: Any
    inner: Any
    given: Any
    outer: Any
    exchange: Any
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    seen: dict[str, Any] = field(default_factory=dict)
    step: Any = None
    scheduler: Any = None
    ema: Any = None

    def loss(self, number: int) -> Any:
        dtype = next(p.dtype for p in self.module.parameters())
        losses = []
        for rank in self.ranks:
            x, y = (each.to(dtype) for each in nets.data(number, rank))
            losses.append((self.model(x) - y).square().mean())
        return sum(losses) / len(losses)

    def backward(self, number: int) -> None:
        self.loss(number).backward()

    def run(self, number: int) -> None:
        self.outer.zero_grad()
        self.backward(number)
        (self.step or self.outer.step)()

    def result(self) -> dict[str, Any]:
        found = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in self.module.named_parameters()}
        return {name: p.detach().clone() for name, p in found.items()}


# --- adapters -------------------------------------------------------------------------------------------


@dataclass
class Use:
    """What differs from plain training.

    Attributes:
        prepare: Returns the model. make: Returns its optimizer. give: Returns what the adapter gets of it.
        outside: Returns what the loop steps of what the adapter has made.
        after, during: Act before the first and the second step.
        run: Takes a step.
        is_exchanged: Whether each step is one exchange.
    """

    prepare: Callable[[Any], Any] = lambda model: model
    make: Callable[[Any, Any], Any] = lambda model, kind: kind(model.parameters(), lr=0.1, momentum=0.9)
    give: Callable[[Any], Any] = lambda optimizer: optimizer
    outside: Callable[[Any], Any] = lambda outer: outer
    after: Callable[[Trained], Any] = lambda trained: None
    during: Callable[[Trained], Any] = lambda trained: None
    run: Callable[[Trained, int], Any] = lambda trained, number: trained.run(number)
    is_exchanged: bool = True


def begin(use: Use, kind: Any, model: Any = None) -> tuple[Any, Any, Any]:
    model = use.prepare(net())
    optimizer = use.make(model, kind)
    return model, optimizer, use.give(optimizer)


def finish(use: Use, trained: Trained) -> dict[str, Any]:
    trained.outer = use.outside(trained.outer)
    use.after(trained)
    for number in range(STEPS):
        if number == 1:
            use.during(trained)
        use.run(trained, number)
    if isinstance(trained.exchange, HasCompression) and use.is_exchanged:
        assert trained.exchange.compression_state_dict()["identity"]["step"] == STEPS
    return {**trained.result(), **trained.seen}


def plain(use: Use, ranks: tuple[int, ...], kind: Any) -> dict[str, Any]:
    model, optimizer, given = begin(use, kind)
    return finish(use, Trained(model, model, optimizer, given, given, None, ranks=ranks))


def plain_ddp(use: Use, kind: Any) -> Any:
    model, optimizer, given = begin(use, kind)
    return finish(use, Trained(model, DistributedDataParallel(model), optimizer, given, given, None))


def plain_fsdp(use: Use, kind: Any) -> Any:
    own = copy.copy(use)
    own.prepare = lambda model: shard(use.prepare(model), init_device_mesh("cpu", (1,)))
    model, optimizer, given = begin(own, kind)
    return finish(own, Trained(model, model, optimizer, given, given, None))


def whole_dgc() -> Any:
    return nets.dgc(1.0)


def simulated(body: Callable[[Any], Any]) -> Any:
    first, second = LockstepWorld(2).run(body)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs between ranks"
    return first


def in_optimizer(use: Use, transport: Any, make: Any = lambda: None, kind: Any = SGD) -> Any:
    def body(transport: Any) -> Any:
        model, optimizer, given = begin(use, kind)
        own = DistributedOptimizer(given, model.named_parameters(), make(), transport=transport)
        return finish(use, Trained(model, model, optimizer, given, own, own, transport.rank, (transport.rank,)))

    return simulated(body)


def in_local_steps(use: Use, transport: Any) -> Any:
    def body(transport: Any) -> Any:
        model, optimizer, given = begin(use, SGD)
        own = LocalOptimizer(given, model.named_parameters(), OuterSteps(1), transport=transport)
        return finish(use, Trained(model, model, optimizer, given, own, own, transport.rank, (transport.rank,)))

    return simulated(body)


def in_ddp(use: Use, transport: Any, make: Any = whole_dgc, kind: Any = DGCSGD) -> Any:
    model, optimizer, given = begin(use, kind)
    hooked = DistributedDataParallel(model)
    exchange = ddp.compress(hooked, make() or DenseCompressor(), given, transport=transport)
    return finish(use, Trained(model, hooked, optimizer, given, given, exchange))


def shard(model: Any, mesh: Any) -> Any:
    return fully_shard(model, mesh=mesh)


def in_fsdp(use: Use, transport: Any) -> Any:
    own = copy.copy(use)
    own.prepare = lambda model: shard(use.prepare(model), fsdp.local_mesh(transport))
    model, optimizer, given = begin(own, DGCSGD)
    exchange = fsdp.compress(model, nets.dgc(1.0), transport=transport)
    return finish(own, Trained(model, model, optimizer, given, given, exchange))


def in_quantized_fsdp(use: Use, transport: Any) -> Any:
    own = copy.copy(use)
    own.prepare = lambda model: shard(use.prepare(model), init_device_mesh("cpu", (1,)))
    model, optimizer, given = begin(own, SGD)
    quantizer = fsdp.quantize(model, 4, 8)
    return finish(own, Trained(model, model, optimizer, given, given, quantizer))


def in_aggregator(use: Use, transport: Any) -> Any:
    def body(transport: Any) -> Any:
        model, optimizer, given = begin(use, SGD)
        powersgd = PowerSGD([p for g in given.param_groups for p in g["params"]], Config(2), transport)
        ranks = (transport.rank,)
        trained = Trained(model, model, optimizer, given, given, powersgd, transport.rank, ranks)
        trained.step = lambda: optimizer_step(trained.outer, powersgd)
        return finish(use, trained)

    return simulated(body)


ADAPTERS: dict[str, Any] = {
    "optimizer": in_optimizer,
    "optimizer, dgc": partial(in_optimizer, make=whole_dgc, kind=DGCSGD),
    "local": in_local_steps,
    "ddp": in_ddp,
    "fsdp": in_fsdp,
    "fsdp quantized": in_quantized_fsdp,
    "aggregate": in_aggregator,
    "ddp, dense": partial(in_ddp, make=lambda: None, kind=SGD),
}
KINDS = {"optimizer, dgc": DGCSGD, "ddp": DGCSGD, "fsdp": DGCSGD}


# --- uses -----------------------------------------------------------------------------------------------


def copied_dict(optimizer: Any) -> Any:
    kind: Any = type("Copied", (type(optimizer),), {})
    made = kind.__new__(kind)
    made.__dict__ = dict(vars(optimizer))
    return made


def through_pickle(optimizer: Any) -> Any:
    """The pickle refers to the same parameters."""
    known = {id(p): p for g in optimizer.param_groups for p in g["params"]}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return id(obj) if id(obj) in known else None

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return known[pid]

    Pickler(file := io.BytesIO()).dump(optimizer)
    file.seek(0)
    return Unpickler(file).load()


def groups(model: Any, kind: Any, *, options: Any = ({}, {}), parts: Any = ((0, 3), (3, None))) -> Any:
    parameters = list(model.parameters())
    of_each = [{"params": parameters[a:b], **own} for (a, b), own in zip(parts, options, strict=True)]
    return kind(of_each, lr=0.1, momentum=0.9)


def in_two_calls(model: Any, kind: Any) -> Any:
    parameters = list(model.parameters())
    optimizer = kind(parameters[:2], lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.05})
    return optimizer


def with_scheduler(t: Trained, number: int, of: str) -> None:
    if number == 0:
        t.scheduler = torch.optim.lr_scheduler.StepLR(getattr(t, of), 1, 0.5)
    t.run(number)
    t.scheduler.step()


def to(model: Any, dtype: Any) -> Any:
    return model.to(dtype)


def convert_parameters(optimizer: Any, dtype: Any) -> Any:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data.to(dtype)
    return optimizer


def convert(dtype: Any) -> Any:
    return lambda t: t.module.to(dtype)


def replace_weight(t: Trained) -> None:
    t.module.middle.weight = nn.Parameter(t.module.middle.weight.detach().clone())


def move_parameter(t: Trained) -> None:
    first, second = t.inner.param_groups
    second["params"].insert(0, first["params"].pop())


def tie(model: Any) -> Any:
    model.more.weight = model.middle.weight
    return model


def frozen(model: Any) -> Any:
    model.middle.requires_grad_(False)
    return model


def trainable(model: Any, kind: Any) -> Any:
    return kind([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def set_data(t: Trained) -> None:
    for p in t.module.parameters():
        p.data = p.data.clone() * 0.5


def restride(t: Trained) -> None:
    w = t.module.middle.weight
    w.data = w.data.t().contiguous().t()


def load_weights(t: Trained, **options: Any) -> None:
    t.module.load_state_dict({n: v * 0.5 for n, v in t.module.state_dict().items()}, **options)


def reload(t: Trained, of: str) -> None:
    state = copy.deepcopy(getattr(t, of).state_dict())
    for group in state["param_groups"]:
        group["lr"] = 0.05
    getattr(t, of).load_state_dict(state)


def with_closure(t: Trained, number: int) -> None:
    def closure() -> Any:
        t.outer.zero_grad()
        loss = t.loss(number)
        loss.backward()
        return loss

    t.outer.step(closure)


def twice(t: Trained, number: int) -> None:
    t.outer.zero_grad()
    t.backward(number)
    t.backward(number + 100)
    (t.step or t.outer.step)()


def with_clipping(t: Trained, number: int) -> None:
    t.outer.zero_grad()
    t.backward(number)
    clip_grad_norm_(t.module.parameters(), 0.1)
    (t.step or t.outer.step)()


def zeroing(how: str) -> Any:
    def run(t: Trained, number: int) -> None:
        owner, _, to_none = how.partition(" ")
        getattr(t, owner).zero_grad(set_to_none=to_none == "none")
        t.backward(number)
        (t.step or t.outer.step)()

    return run


def halve(model: Any) -> Any:
    for p in model.parameters():
        p.register_hook(lambda g: g * 0.5)
    return model


def halve_gradient(p: Any) -> None:
    p.grad.mul_(0.5)


def halve_after(model: Any) -> Any:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve_gradient)
    return model


class Checkpointed(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)


def ema(t: Trained, number: int) -> None:
    if number == 0:
        t.ema = AveragedModel(t.module)
    t.run(number)
    t.ema.update_parameters(t.module)
    t.seen = {f"ema.{n}": p.detach().clone() for n, p in t.ema.named_parameters()}


def with_copy(t: Trained) -> None:
    """A copy of the model trains alone, beside the model."""
    other = copy.deepcopy(t.module)
    optimizer = SGD(other.parameters(), lr=0.1)
    (other(torch.ones(1, 6)).sum()).backward()
    optimizer.step()
    t.seen = {f"copy.{n}": p.detach().clone() for n, p in other.named_parameters()}


def embedding(model: Any, sparse: bool = True) -> Any:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.net = nn.Embedding(20, 6, sparse=sparse, _weight=torch.ones(20, 6)), model

        def forward(self, x: Any) -> Any:
            return self.net(self.words((x.abs().sum(1) * 3).long() % 20))

    return Embedded()


class Lazy(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head = model, nn.LazyLinear(3)

    def forward(self, x: Any) -> Any:
        return self.head(self.model(x))


def dried(model: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        lazy = Lazy(model)
        lazy(torch.ones(1, 6))
    return lazy


def normed(model: Any) -> Any:
    parametrizations.weight_norm(model.middle)
    return model


class Symmetric(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized(model: Any) -> Any:
    register_parametrization(model.middle, "weight", Symmetric())
    return model


def unfreeze(t: Trained) -> None:
    t.module.requires_grad_(True)


def add_group(owner: str) -> Any:
    def act(t: Trained) -> None:
        t.module.first.register_parameter("new", nn.Parameter(torch.ones(3)))
        getattr(t, owner).add_param_group({"params": [t.module.first.new]})

    return act


class Extra(nn.Module):
    def __init__(self, model: Any, extra: Any) -> None:
        super().__init__()
        self.model, self.extra = model, nn.Parameter(extra)

    def forward(self, x: Any) -> Any:
        return self.model(x) * (1 + self.extra.sum())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.lstm(x)[0])


def recurrent(_: Any) -> Any:
    with _lock, torch.random.fork_rng():
        torch.manual_seed(0)
        return Recurrent()


class Subclass(nn.Parameter):
    pass


def subclassed(model: Any) -> Any:
    model.middle.weight = Subclass(model.middle.weight.detach().clone())
    return model


def flagged(**flags: Any) -> Use:
    return Use(make=lambda model, kind: kind(model.parameters(), lr=0.1, momentum=0.9, **flags))


def set_groups(t: Trained) -> None:
    t.outer.param_groups = [dict(group, lr=0.05) for group in t.outer.param_groups]


def recreate(t: Trained) -> None:
    """The optimizer of a replaced weight, in place of the old one."""
    replace_weight(t)
    t.inner.param_groups[0]["params"] = list(t.module.parameters())


def replace_optimizer(t: Trained) -> None:
    made = type(t.inner)(t.module.parameters(), lr=0.05, momentum=0.9)
    if t.outer is t.inner or t.outer is t.given:
        t.outer = made
    else:
        t.outer.inner = made
    t.inner = made


def replace_both(t: Trained) -> None:
    load_weights(t, assign=True)
    replace_optimizer(t)


ZEROING = [f"{owner} {how}" for owner in ("outer", "inner", "module") for how in ("none", "zero")]
FLAGS: list[dict[str, bool]] = [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}]
USES: dict[str, Use] = {
    **{kind.__name__: Use(give=kind) for kind in (*wrappers.KNOWN, wrappers.Lookahead)},
    **{f"{kind.__name__} outside": Use(outside=kind) for kind in wrappers.KNOWN},
    "copied __dict__": Use(give=copied_dict),
    "copied __dict__ outside": Use(outside=copied_dict),
    "copy": Use(give=copy.copy),
    "copy outside": Use(outside=copy.copy),
    "deepcopy": Use(give=copy.deepcopy),
    "deepcopy outside": Use(outside=copy.deepcopy),
    "pickle": Use(give=through_pickle),
    "pickle outside": Use(outside=through_pickle),
    "deepcopy of inner midway": Use(during=lambda t: copy.deepcopy(t.inner)),
    "scheduler inner": Use(run=partial(with_scheduler, of="inner")),
    "scheduler outer": Use(run=partial(with_scheduler, of="outer")),
    "scheduler given": Use(run=partial(with_scheduler, of="given")),
    "two groups": Use(make=groups),
    "two lrs": Use(make=partial(groups, options=({"lr": 0.2}, {"lr": 0.01}))),
    "two decays": Use(make=partial(groups, options=({"weight_decay": 0.2}, {"weight_decay": 0.01}))),
    "two momenta": Use(make=partial(groups, options=({"momentum": 0.5}, {}))),
    "nesterov": Use(make=lambda model, kind: kind(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
    "dampening": Use(make=lambda model, kind: kind(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)),
    "no momentum": Use(make=lambda model, kind: kind(model.parameters(), lr=0.1)),
    "empty group": Use(make=lambda model, kind: groups(model, kind, parts=((0, None), (0, 0)))),
    "tensor lr": Use(make=lambda model, kind: kind(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)),
    "lr midway": Use(during=lambda t: t.outer.param_groups[0].update(lr=0.01)),
    "momentum midway": Use(during=lambda t: t.outer.param_groups[0].update(momentum=0.5)),
    "groups reversed": Use(make=groups, during=lambda t: t.inner.param_groups.reverse()),
    "parameters reversed": Use(make=groups, during=lambda t: t.inner.param_groups[0]["params"].reverse()),
    "parameter moved": Use(make=partial(groups, options=({"lr": 0.2}, {})), during=move_parameter),
    "parameter removed": Use(during=lambda t: t.inner.param_groups[0]["params"].pop(0)),
    "groups set": Use(during=set_groups),
    "some parameters only": Use(make=lambda model, kind: kind(list(model.parameters())[2:], lr=0.1, momentum=0.9)),
    "group added before": Use(make=in_two_calls),
    "group added inner": Use(after=add_group("inner")),
    "group added outer": Use(after=add_group("outer")),
    "frozen before": Use(prepare=frozen),
    "frozen before, left out": Use(prepare=frozen, make=trainable),
    "frozen midway": Use(during=lambda t: t.module.middle.requires_grad_(False)),
    "unfrozen midway": Use(prepare=frozen, during=unfreeze),
    **{f"{d} before": Use(prepare=partial(to, dtype=d)) for d in (torch.float64, torch.bfloat16)},
    **{f"{d} between": Use(give=partial(convert_parameters, dtype=d)) for d in (torch.float64, torch.bfloat16)},
    **{f"{d} after": Use(after=convert(d)) for d in (torch.float64, torch.bfloat16)},
    **{f"{d} midway": Use(during=convert(d)) for d in (torch.float64, torch.bfloat16)},
    "data set": Use(during=set_data),
    "strides changed": Use(during=restride),
    "weight replaced": Use(after=replace_weight),
    "weight replaced and recreated": Use(after=recreate),
    "weight replaced midway": Use(during=replace_weight),
    "weights loaded after": Use(after=load_weights),
    "weights loaded midway": Use(during=load_weights),
    "weights assigned": Use(during=partial(load_weights, assign=True), is_exchanged=False),
    "tied": Use(prepare=tie),
    "tied after": Use(after=lambda t: tie(t.module)),
    "compiled before": Use(prepare=partial(torch.compile, backend="eager")),
    "data parallel": Use(prepare=nn.DataParallel),
    "ddp": Use(prepare=DistributedDataParallel),
    "ema": Use(run=ema),
    "copy of model": Use(during=with_copy),
    "model pickled": Use(during=lambda t: pickle.loads(pickle.dumps(t.module))),
    "state loaded inner": Use(during=partial(reload, of="inner")),
    "state loaded outer": Use(during=partial(reload, of="outer")),
    **{
        f"zero_grad {how}": Use(run=zeroing(how))
        for how in ("outer none", "outer zero", "inner none", "inner zero", "module none", "module zero")
    },
    **{
        str(flags): flagged(**flags)
        for flags in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True})
    },
    "weight norm": Use(prepare=normed),
    "weight norm after": Use(after=lambda t: normed(t.module)),
    "parametrized": Use(prepare=parametrized),
    "parametrized after": Use(after=lambda t: parametrized(t.module)),
    "pruned after": Use(after=lambda t: prune.l1_unstructured(t.module.middle, "weight", 0.3)),
    "lazy": Use(prepare=Lazy),
    "lazy, dried": Use(prepare=dried),
    "meta": Use(prepare=lambda m: m.to("meta")),
    "sparse embedding": Use(prepare=embedding),
    "closure": Use(run=with_closure),
    "two backward passes": Use(run=twice, is_exchanged=False),
    "clipping": Use(run=with_clipping),
    "gradient hook": Use(prepare=halve),
    "gradient hook after": Use(after=lambda t: halve(t.module)),
    "accumulated hook": Use(prepare=halve_after),
    "accumulated hook after": Use(after=lambda t: halve_after(t.module)),
    "checkpointed": Use(prepare=Checkpointed),
    "scalar": Use(prepare=lambda m: Extra(m, torch.tensor(0.5))),
    "empty": Use(prepare=lambda m: Extra(m, torch.zeros(0))),
    "transposed": Use(prepare=lambda m: Extra(m, torch.full((3, 4), 0.01).t())),
    "recurrent": Use(prepare=recurrent),
    "subclass": Use(prepare=subclassed),
    "inner stepped": Use(outside=lambda o: getattr(o, "inner", o)),
    "copy given, original stepped": Use(give=copy.copy, after=lambda t: setattr(t, "outer", t.inner)),
    "optimizer replaced": Use(during=replace_optimizer),
    "weights assigned, optimizer replaced": Use(during=replace_both),
    "eval": Use(prepare=lambda m: m.eval()),
    "state cleared": Use(during=lambda t: t.outer.state.clear()),
}

if minor_version(torch.__version__) >= (2, 6):  # torch takes names since then
    USES["named groups"] = Use(make=lambda m, kind: kind(list(m.named_parameters()), lr=0.1, momentum=0.9))

# --- what is expected -----------------------------------------------------------------------------------

FEW = ("optimizer", "optimizer, dgc", "local", "ddp", "fsdp", "fsdp quantized", "aggregate")
DENSE = ("optimizer", "local", "fsdp quantized", "aggregate", "ddp, dense")
ONLY = {
    # of DGC the means contain momentum, and others average what was clipped
    "clipping": ("optimizer", "optimizer, dgc", "ddp, dense", "fsdp quantized"),
    # gradients of an earlier exchange get the momentum of a memory twice
    "two backward passes": (*DENSE, "optimizer, dgc"),
    # DGC keeps its momentum
    "state cleared": DENSE,
    "optimizer replaced": (*DENSE, "optimizer, dgc", "ddp"),
    # torch's optimizers cannot save their state then
    **{str(flags): DENSE for flags in FLAGS},  # DGCSGD has none of them
    "parameter removed": tuple(adapter for adapter in FEW if adapter != "local"),
    # the loop steps what the adapter does not know
    "closure": tuple(adapter for adapter in FEW if adapter != "aggregate"),
    "copy given, original stepped": ("optimizer", "optimizer, dgc", "ddp", "fsdp", "fsdp quantized", "aggregate"),
}

Refusals = dict[tuple[str, ...], str]
# what torch refuses without compression too
NOT_WITH = {
    "ddp": {
        *("frozen midway", "weight replaced", "weight replaced and recreated", "weight replaced midway"),
        *("tied after", "weight norm after", "parametrized after", "lazy", "meta"),
    },
    "fsdp": {
        *("deepcopy of inner midway", "ema", "copy of model", "model pickled", "{'fused': True}", "lazy", "meta"),
        *(f"{dtype} {when}" for dtype in (torch.float64, torch.bfloat16) for when in ("between", "midway")),
        *("weight norm after", "parametrized after", "pruned after", "sparse embedding", "scalar", "transposed"),
    },
}
# of each use, the adapters that refuse it, and some of their words
OUTER: tuple[str, ...] = ("optimizer", "optimizer, dgc", "local")
BOTH = OUTER[:2]
OF_DGC: tuple[str, ...] = ("optimizer, dgc", "ddp", "fsdp")
SHARDED: tuple[str, ...] = ("fsdp", "fsdp quantized")
HELD: Refusals = {OUTER: "steps another optimizer, .* pass the (DGC)?SGD"}
IN_LIGHTNING: Refusals = {OUTER: "pass the wrapped optimizer to Lightning, and step the .*Optimizer itself"}
COPIED: Refusals = {
    OUTER: "cannot be copied or pickled: save",
    ("ddp",): "is not the optimizer that compress was given",
}
LACKING: Refusals = {
    OUTER: "named_parameters lacks 8 parameters",
    ("ddp",): "to 4 parameters that the optimizer lacks",
}
DIFFERING: Refusals = {OF_DGC: "memory has momentum=0.9, .*: they must agree"}
OTHERS: Refusals = {
    ("aggregate",): "PowerSGD was built with other parameters than the optimizer, or in another order"
}
ADDED = "requires a gradient now but did not when .*, or was added since: close\\(\\) it and wrap"
REPLACED: Refusals = {SHARDED: "were replaced after dgc.fsdp.*: replace them before"}
NOT_IN_DDP = "was replaced or added after DistributedDataParallel was built"
NOT_IN_FSDP = "each machine would train first.new alone: .*call compress with the whole model"
CONVERTED: Refusals = {
    (*BOTH, "aggregate"): "was planned as torch.float32.*: convert .*the model .*before",
    ("ddp",): "was planned as torch.float32.*averages no gradient of it. Convert",
}
OF_FLOAT64: Refusals = {("fsdp quantized",): "are torch.float64, not torch.float32 .*reduce_dtype=torch.float32"}
FROZEN: Refusals = {
    ("fsdp",): "was frozen or unfrozen after",
    ("fsdp quantized",): "if parameters were frozen, unfrozen",
}
TWICE: Refusals = {BOTH: "received more gradients than .* Step this optimizer, not the one that it wraps"}
CHANGED: Refusals = {BOTH: "changed between backward and step.*call optimizer.synchronize\\(\\) first"}
UNFROZEN: Refusals = {OUTER: ADDED, ("ddp",): "required no gradient when DistributedDataParallel was built.*build"}
REFUSED: dict[str, Refusals] = {
    **{kind.__name__: HELD for kind in wrappers.KNOWN},
    "Lookahead": {**HELD, ("ddp",): "steps another optimizer, DGCSGD, .*: pass that one"},
    "_FabricOptimizer outside": IN_LIGHTNING,
    "LightningOptimizer outside": IN_LIGHTNING,
    "copied __dict__ outside": {
        OUTER: "has the attributes of another one",
        ("ddp",): "is not the optimizer that compress was given",
    },
    "copy outside": COPIED,
    "pickle outside": COPIED,
    "deepcopy": LACKING,
    "deepcopy outside": {OUTER: COPIED[OUTER], **OTHERS},
    "two momenta": DIFFERING,
    "nesterov": DIFFERING,
    "no momentum": DIFFERING,
    "dampening": {OF_DGC: "dampening is not defined .*: set dampening=0"},
    "momentum midway": {OF_DGC: "was 0.9 and is now 0.5.*it must not change"},
    "groups reversed": OTHERS,
    "parameters reversed": OTHERS,
    "parameter removed": OTHERS,
    "some parameters only": {("ddp",): "to 1 parameters that the optimizer lacks, such as first.weight: pass one"},
    "group added inner": {OUTER: ADDED, ("ddp",): NOT_IN_DDP, ("fsdp",): NOT_IN_FSDP, **OTHERS},
    "group added outer": {
        OUTER: "parameters cannot be added here: close\\(\\)",
        ("ddp",): NOT_IN_DDP,
        ("fsdp",): NOT_IN_FSDP,
        **OTHERS,
    },
    "frozen midway": FROZEN,
    "unfrozen midway": {**UNFROZEN, **FROZEN},
    "torch.float64 before": OF_FLOAT64,
    "torch.float64 after": {**CONVERTED, **OF_FLOAT64},
    "torch.bfloat16 after": CONVERTED,
    "torch.float64 midway": CONVERTED,
    "torch.bfloat16 midway": CONVERTED,
    "strides changed": {("ddp",): "another memory order than when DistributedDataParallel was built"},
    "weight replaced": REPLACED,
    "weight replaced and recreated": {OUTER: ADDED, **REPLACED, **OTHERS},
    "weights assigned": REPLACED,
    "weights assigned, optimizer replaced": {OUTER: ADDED, ("ddp",): NOT_IN_DDP, **REPLACED, **OTHERS},
    "tied after": REPLACED,
    "ddp": {BOTH: "is in DistributedDataParallel, .*use dgc.ddp.compress in place of DistributedOptimizer"},
    "lazy": {(*OUTER, "aggregate"): "has no shape yet, as its module is lazy: run a forward pass before"},
    "meta": {(*OUTER, "aggregate"): 'has no values yet, as it is on the device "meta": call to_empty'},
    "empty": {SHARDED: "has no elements, and FSDP2 cannot reduce the gradient of such a parameter"},
    "sparse embedding": {("ddp",): "has sparse gradients, which DDP does not put into buckets: set sparse=False"},
    "two backward passes": TWICE,
    "clipping": CHANGED,
    "accumulated hook after": {**CHANGED, ("fsdp",): "an optimizer that steps during backward is not supported"},
    "inner stepped": {**TWICE, ("local",): "step the LocalOptimizer, or close\\(\\) it"},
    "copy given, original stepped": {**TWICE, ("ddp",): "is not the optimizer that compress was given"},
    "optimizer replaced": {
        ("optimizer, dgc",): "was not told that the compression's memory applies momentum",
        ("ddp",): "is not the optimizer that compress was given",
    },
}


@pytest.fixture(scope="module")
def transport() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with patch("dgc.optim.local.warn_of_ddp"):  # it looks at all objects of the process
        yield connect(hierarchical=True)
    dist.destroy_process_group()


@cache
def without_compression(name: str, family: str, kind: Any) -> Any:
    run = {"ddp": plain_ddp, "fsdp": plain_fsdp}.get(family)
    return run(USES[name], kind) if run else plain(USES[name], (0, 1), kind)


def family_of(adapter: str) -> str:
    return next((family for family in NOT_WITH if adapter.startswith(family)), "plain")


# each exchange of DDP and FSDP2 opens process groups, whose hundreds of threads would slow down other tests
WITH_GROUPS = ("ddp", "fsdp")
CASES = [
    pytest.param(name, adapter, marks=[pytest.mark.proof] if adapter.startswith(WITH_GROUPS) else [])
    for name in USES
    for adapter in ONLY.get(name, FEW)
    if name not in NOT_WITH.get(family_of(adapter), ())
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_a_use_gives_what_it_gives_without_compression_or_is_refused(
    request: pytest.FixtureRequest, name: str, adapter: str
) -> None:
    needs_groups = name == "ddp" or adapter.startswith(WITH_GROUPS)
    transport = request.getfixturevalue("transport") if needs_groups else None
    run = partial(ADAPTERS[adapter], USES[name], transport)
    words = next((words for refusing, words in REFUSED.get(name, {}).items() if adapter in refusing), None)
    if words is not None:
        with pytest.raises((ValueError, RuntimeError, TypeError), match=words):
            run()
        return
    found, expected = run(), without_compression(name, family_of(adapter), KINDS.get(adapter, SGD))
    tolerance = 2e-2 if torch.bfloat16 in {value.dtype for value in found.values()} else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
