"""Muon for the matrices of a model, and AdamW for its other parameters (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; learning rate: Liu et al. 2025, arXiv 2502.16982).

For a matrix X of A rows and B columns with the mean gradient G, `torch.optim.Muon` computes

    M = mu M + (1 - mu) G;   U = (1 - mu) G + mu M         nesterov=False: U = M
    X = (1 - lr weight_decay) X - lr s NS(U)               s = 0.2 sqrt(max(A, B)) with "match_rms_adamw"

NS, five Newton-Schulz iterations in bf16, replaces the singular values of U by numbers around 1. It is not linear:
the mean over the ranks of NS(U) is not NS of the mean. So gradients are compressed, with error feedback, and NS
takes their mean.

With owners, each matrix is iterated on one rank, which sends NS(U) to the others (`dgc.optim.owners`). Momenta and
parameters stay where they are, so a state does not depend on the number of ranks.

Differences from the paper: a matrix that holds several ones (queries, keys and values, or the gates of an LSTM) is
several matrices, each with NS and s of its own, and so is a stack [experts, A, B].
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dgc.comm.connect import default_transport
from dgc.comm.conversation import without_autocast
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.core.arguments import FLAG, NUMBER, WHOLE, require
from dgc.core.bucket import local_part
from dgc.engine.agreement import check_settings
from dgc.engine.options import (
    as_number,
    check_adam,
    check_optimizer_state,
    check_saved_groups,
    check_transport,
    loss_of,
    unique_prefix,
)
from dgc.optim.muon_rule import rows_of
from dgc.optim.owners import Alone, Exchange, Piece, Ranks, TransportRanks, matrices_of, replicated
from dgc.versions import TorchRange

TORCH = TorchRange("optim.MuonWithAdamW", oldest="2.9", newest="2.15", since={"Muon": "2.9"})
CPU_FLAGS = Path("/proc/cpuinfo")
NS = {"bf16": torch.bfloat16, "fp32": torch.float32}
BUFFER, MOMENTS = "momentum_buffer", {"step", "exp_avg", "exp_avg_sq"}
ADJUST_LR = ("match_rms_adamw", "original", None)  # None: as "original"
OWNERS = ("auto", "on", "off")
ALONE, COMMON = "this rank", "the ranks of the transport"
PLANNED = ("parts", "ns_precision")  # the settings on which the plan of a step depends
BATCH = 2**25  # elements of the matrices that are iterated together
_ANY = [torch.empty(1, 1, dtype=torch.float32)]  # optimizers take no empty list


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` for groups with `muon=True` and `torch.optim.AdamW` for others, as one optimizer.

    With ns_precision="bf16" it computes the bits of the two. `description()` says in which type it iterates.
    Schedulers and checkpoints see one optimizer. A scheduler that sets absolute rates, such as OneCycleLR, needs
    one for each group, and cycle_momentum=False, because the momenta of the two have other names. Parameters may
    be sharded by FSDP2, and may be stacks of matrices [experts, rows, columns]. The same matrices must have a
    gradient on all ranks.

    Args:
        params: Parameter groups of `muon_groups(model)`. A group may set what the optimizer has, and `muon` and
            `parts`, see `muon_groups`. The `lr` of a group with muon=True is the learning rate of Muon.
        lr: Learning rate of AdamW.
        betas: Coefficients of AdamW's first and second moment, each in [0, 1).
        eps: Added to the root of AdamW's second moment.
        weight_decay: Decoupled weight decay of both, with the learning rate of each.
        muon_lr_ratio: Learning rate of Muon divided by lr, positive.
        momentum: Coefficient of Muon's momentum, in [0, 1).
        nesterov: Use Nesterov momentum in Muon.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        adjust_lr_fn: Factor of Muon's learning rate by the shape of a matrix: "match_rms_adamw" is 0.2 times the
            root of its longer side, "original" the root of rows / columns, and at least 1.
        ns_precision: Type of Newton-Schulz iterations: "bf16", as torch's Muon, or "fp32", which is many times
            faster on a CPU without instructions for bf16. "auto" chooses the faster one for the device of each
            group's parameters when the group is added. The choice is a setting of the group, so a state keeps it.
        owners: Which matrices one rank iterates for others, and sends them the result. "auto": those of shards
            (FSDP2), whose rows are sent anyway, on the ranks that hold one copy together. "on": all, on all ranks
            that have the same mean gradients, also under DDP, DistributedOptimizer and on both dimensions of HSDP.
            "off": none. Every rank iterates all matrices, and gathers those of shards.
        update_bits: Size of an element that owners send, 32 or 16. In bf16 iterations it is 16, without loss.
        transport: Connects the ranks of "on", where parameters are no shards. None: the one of
            DistributedOptimizer or of dgc.ddp, or see `dgc.init`.

    Raises:
        ImportError: torch is older than 2.9, and has no Muon.
        ValueError: An argument or a setting of a group is out of range, no group has muon=True, or a parameter of
            Muon is no real matrix.

    Example:
        optimizer = MuonWithAdamW(muon_groups(model), lr=1e-3)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), TwoPhaseCompressor(bits=4))
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        muon_lr_ratio: float = 2.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_precision: str = "auto",
        owners: str = "auto",
        update_bits: int = 32,
        transport: Transport | None = None,
    ):
        TORCH.check(torch.optim, TORCH.since)
        if owners not in OWNERS:
            raise ValueError(f"owners must be one of {', '.join(OWNERS)}, not {owners!r}")
        if update_bits not in (16, 32):
            raise ValueError(f"update_bits must be 16 or 32, not {update_bits!r}")
        check_transport(transport)
        if transport is not None and owners != "on":
            raise ValueError('transport has no effect without owners="on"')
        self.owners, self._update_bits, self._connection = owners, update_bits, _Connection(transport)
        self._plan: tuple[Any, list[_Share], list[tuple[Any, int]]] | None = None
        require("a number", NUMBER, muon_lr_ratio=muon_lr_ratio)
        if not 0 < muon_lr_ratio < math.inf:
            raise ValueError(f"muon_lr_ratio must be above 0 and finite, not {muon_lr_ratio}")
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        common = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        known = fastest_precision(torch.device("cpu")) if ns_precision == "auto" else ns_precision
        _check_group({"muon": True, "betas": betas, **own, **common, "ns_precision": known})
        muon = _muon(lr=lr * muon_lr_ratio, weight_decay=weight_decay, **own)
        adamw = _adamw(**common, betas=(betas[0], betas[1]))
        self._settings = {
            True: {**muon.defaults, "parts": 1, "ns_precision": ns_precision},
            False: adamw.defaults,
        }  # by the group's `muon`
        if isinstance(params, nn.Module):
            raise ValueError(
                "MuonWithAdamW takes parameter groups, not a model: MuonWithAdamW(muon_groups(model))"
            )
        groups = [dict(group) if isinstance(group, dict) else {} for group in params]
        if not any(group.get("muon") for group in groups):
            raise ValueError("no group has muon=True: pass the groups of dgc.optim.muon_groups(model)")
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "muon": False})

    @property
    def setting_names(self) -> set[str]:
        """Names of the settings of a group. `defaults` has only the settings common to both kinds."""
        return {"muon", *self._settings[True], *self._settings[False]}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_settings", "owners", "_update_bits", "_connection")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plan = None
        super().__setstate__(state)

    def use_transport(self, transport: Transport, meter: TrafficMeter) -> None:
        """Share the matrices over the ranks of an adapter, which have the same mean gradients.

        Raises:
            ValueError: The optimizer was given a transport of other ranks.
        """
        given = self._connection.transport
        if given is not None and (given.rank, given.size) != (transport.rank, transport.size):
            raise ValueError(
                f"MuonWithAdamW shares its matrices over {given.size} ranks, and the gradients are the mean over "
                f"{transport.size}: leave out transport= of MuonWithAdamW"
            )
        self._connection, self._plan = _Connection(given or transport, meter), None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, not {type(param_group).__name__}")
        is_muon = bool(param_group.get("muon"))
        params = param_group["params"]
        params = params if isinstance(params, Tensor | set) else list(params)
        group = {**self._settings[is_muon], **param_group, "params": params, "muon": is_muon}
        given = [] if not is_muon else [params] if isinstance(params, Tensor) else params
        matrices = [each[1] if isinstance(each, tuple) else each for each in given]  # of named_parameters() too
        if matrices and group["ns_precision"] == "auto":
            group["ns_precision"] = fastest_precision(matrices[0].device)
        _check_group(group)
        for p in matrices:
            if p.dim() not in (2, 3) or p.is_complex():
                raise ValueError(f"Muon takes real matrices, not {tuple(p.shape)} of {p.dtype}: see muon_groups")
            rows_of(p.shape[-2:], group["parts"])
        super().add_param_group(group)

    def check_state(self, state: Mapping[str, Any]) -> None:
        groups, states = state["param_groups"], state["state"]
        if not any(group.get("muon") for group in groups):
            raise ValueError("the state is from an optimizer without Muon, which has no momentum for matrices")
        sizes = [
            (len(own["params"]), len(saved.get("params", own["params"])))
            for own, saved in zip(self.param_groups, groups, strict=False)
        ]
        if _kinds(groups) != _kinds(self.param_groups) or any(own != saved for own, saved in sizes):
            raise ValueError(
                "the state has other groups of Muon and AdamW: call muon_groups as in the run that saved it, with "
                "experts=False if AdamW had the stacks of experts"
            )
        check_saved_groups(self, state, _check_group)
        for own, saved in zip(self.param_groups, groups, strict=True):
            kept = {BUFFER} if own["muon"] else MOMENTS
            for i in saved.get("params", ()):
                if states.get(i) and not kept <= states[i].keys():
                    kind = "Muon" if own["muon"] else "AdamW"
                    raise ValueError(
                        f"parameter {i} of the state is of {kind}, which needs {sorted(kept)}, and has "
                        f"{sorted(states[i])}: call muon_groups as in the run that saved it"
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that was saved with the same groups."""
        check_optimizer_state(self, state_dict)
        super().load_state_dict(state_dict)

    @property
    def chosen_by_processor(self) -> dict[str, object]:
        """What must be the same on all ranks, and "auto" may have chosen by the processor."""
        return {"ns_precision": [group["ns_precision"] for group in self.param_groups if group["muon"]]}

    def description(self) -> str:
        """In which type the Newton-Schulz iterations run, and who has chosen it."""
        found = sorted({group["ns_precision"] for group in self.param_groups if group["muon"]})
        chosen = self._settings[True]["ns_precision"] == "auto"
        how = 'ns_precision="auto": the faster type here, or the loaded one' if chosen else "ns_precision"
        return f"Muon iterates in {' and '.join(found)} ({how})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        with without_autocast():
            self._step()
        return loss

    def _step(self) -> None:
        groups = self.param_groups
        matrices = [(p, g) for g, group in enumerate(groups) if group["muon"] for p in group["params"]]
        for p, _ in matrices:
            if p.grad is not None and p.grad.is_sparse:
                shape = tuple(p.shape)
                raise ValueError(f"Muon needs dense gradients, and a gradient of shape {shape} is sparse")
        # torch.distributed.checkpoint creates a state at a learning rate of 0, perhaps on one rank alone
        moves = any(float(group["lr"]) for group in groups if group["muon"])
        shares, gathered = self._planned(matrices) if moves else ([], [])
        # made for each step, because loading a state replaces groups and state
        adamw = _adamw()
        adamw.param_groups = [group for group in groups if not group["muon"]]
        adamw.state = self.state
        adamw.step()
        for p, g in matrices:
            if p.grad is not None:
                local_part(self._momentum(p)).lerp_(local_part(p.grad), 1 - groups[g]["momentum"])
        for share in shares:
            self._step_share(share)
        for p, g in gathered:
            if p.grad is not None:
                self._step_gathered(p, groups[g])

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(cast(Tensor, p.grad))
        return cast(Tensor, state[BUFFER])

    def _planned(self, matrices: Sequence[tuple[Any, int]]) -> tuple[list["_Share"], list[tuple[Any, int]]]:
        """The shares of parameters with their group's number, and the shards that every rank gathers."""
        key = [(id(p), p.device, g, *(self.param_groups[g][name] for name in PLANNED)) for p, g in matrices]
        if self._plan is None or self._plan[0] != key:
            shares: dict[Any, list[tuple[Any, int]]] = {}
            for p, g in matrices:
                dtype = NS[self.param_groups[g]["ns_precision"]]
                shares.setdefault((self._sharers(p), dtype, p.device), []).append((p, g))
            gathered = [each for (sharers, *_), own in shares.items() if sharers is None for each in own]
            self._plan = key, [self._share(*each) for each in shares.items() if each[0][0] is not None], gathered
        return self._plan[1:]

    def _sharers(self, p: Any) -> Any:
        """Who shares a parameter's matrices: ALONE, COMMON, or a mesh and dimensions. None: it is gathered."""
        if not hasattr(p, "to_local"):
            return COMMON if self.owners == "on" else ALONE
        # not at the top: a torch without torch.distributed has no shards
        from dgc.optim.dtensors import dims_of

        dims = None if self.owners == "off" else dims_of(p, self.owners == "on")
        if dims is None:
            return None
        return (p.device_mesh, dims) if dims else ALONE

    def _share(self, key: Any, own: list[tuple[Any, int]]) -> "_Share":
        sharers, dtype, device = key
        if isinstance(sharers, str):
            ranks: Ranks = self._connection.ranks(self._described(own)) if sharers == COMMON else Alone()
            layouts = [replicated(p.shape, ranks.size) for p, _ in own]
        else:
            from dgc.optim.dtensors import MeshRanks, layout_of

            ranks = MeshRanks(*sharers)
            layouts = [layout_of(p, sharers[1]) for p, _ in own]
        of_each = (matrices_of(i, p.shape, self.param_groups[g]["parts"]) for i, (p, g) in enumerate(own))
        exchange = Exchange(ranks, [matrix for matrices in of_each for matrix in matrices], layouts)
        return _Share(own, exchange, ranks.size > 1, torch.empty(0, dtype=dtype, device=device))

    def _step_share(self, share: "_Share") -> None:
        """The step of parameters whose matrices the same ranks share."""
        groups, exchange = self.param_groups, share.exchange
        rates = {g: float(groups[g]["lr"]) for g in {g for _, g in share.parameters}}

        def read(piece: Piece) -> Tensor:
            """U of what this rank holds of a matrix. A missing gradient counts as zero: sizes are fixed."""
            matrix = exchange.matrices[piece.matrix]
            p, g = share.parameters[matrix.parameter]
            if p.grad is None:
                return share.like.new_zeros(piece.shape)
            tensors = (local_part(tensor) for tensor in (p.grad, self._momentum(p)))
            gradient, momentum = (matrix.of(tensor, exchange.box(matrix), piece.part) for tensor in tensors)
            group = groups[g]
            u = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            return u.to(share.like.dtype)

        updates = self._iterated(share, exchange.gather(read, share.like))
        like = share.like
        if share.is_shared and self._update_bits == 16:
            like, updates = like.bfloat16(), [update.bfloat16() for update in updates]
        for p, g in share.parameters:
            if p.grad is not None:
                local_part(p.detach()).mul_(1 - rates[g] * groups[g]["weight_decay"])
        for piece, update in exchange.scatter(updates, like):
            matrix = exchange.matrices[piece.matrix]
            p, g = share.parameters[matrix.parameter]
            if p.grad is not None:
                x = matrix.of(local_part(p.detach()), exchange.box(matrix), piece.part)
                x.add_(update, alpha=-rates[g] * _scale(matrix.shape, groups[g]))

    def _iterated(self, share: "_Share", matrices: Sequence[Tensor]) -> list[Tensor]:
        """NS of the matrices that this rank owns, those of one shape together."""
        batches: dict[Any, list[int]] = {}
        for n, i in enumerate(share.exchange.own):
            matrix = share.exchange.matrices[i]
            p, g = share.parameters[matrix.parameter]
            # without owners matrices have the bits of torch's Muon, which takes them one by one
            together = share.is_shared or matrix.place is not None
            if p.grad is not None:
                batches.setdefault((g, matrix.shape, None if together else n), []).append(n)
        found = list[Tensor | None](len(matrices) * [None])
        for (g, shape, _), numbers in batches.items():
            most = max(1, BATCH // math.prod(shape))
            for some in (numbers[i : i + most] for i in range(0, len(numbers), most)):
                if len(some) == 1:
                    found[some[0]] = newton_schulz(matrices[some[0]], self.param_groups[g])
                    continue
                stack = newton_schulz(torch.stack([matrices[n] for n in some]), self.param_groups[g])
                for n, update in zip(some, stack.unbind(), strict=True):
                    found[n] = update
        return [torch.zeros_like(u) if of is None else of for u, of in zip(matrices, found, strict=True)]

    def _step_gathered(self, p: Any, group: dict[str, Any]) -> None:
        """The step of a shard of which every rank gathers and iterates the whole."""
        from dgc.optim.dtensors import on_whole

        x, g, m = map(local_part, (p.detach(), p.grad, self._momentum(p)))
        u = (g.lerp(m, group["momentum"]) if group["nesterov"] else m).to(NS[group["ns_precision"]])
        lr = float(group["lr"])
        x.mul_(1 - lr * group["weight_decay"]).add_(on_whole(p, u, partial(_steps, group)), alpha=-lr)

    def _described(self, parameters: Sequence[tuple[Any, int]]) -> list[Any]:
        """What must be the same on all ranks that share matrices."""
        rows = ((tuple(p.shape), self.param_groups[g]) for p, g in parameters)
        settings = ("parts", "ns_precision", "ns_steps", "momentum", "nesterov")
        return [self._update_bits, *((shape, *(group[name] for name in settings)) for shape, group in rows)]


@dataclass
class _Share:
    """Parameters whose matrices the same ranks share.

    Attributes:
        parameters: With the numbers of their groups.
        is_shared: Whether there are other ranks.
        like: An empty tensor of the type and on the device of the iterations.
    """

    parameters: list[tuple[Any, int]]
    exchange: Exchange
    is_shared: bool
    like: Tensor


class _Connection:
    """The transport of an optimizer, and of its copies, each of which opens a communicator of its own."""

    def __init__(self, transport: Transport | None, meter: TrafficMeter | None = None):
        self.transport, self._meter = transport, meter
        self._ranks: Ranks | None = None

    def __deepcopy__(self, memory: Any) -> "_Connection":
        return _Connection(self.transport, self._meter)

    def ranks(self, settings: Any) -> Ranks:
        """The ranks that share matrices. Collective, with settings that must be the same on all of them."""
        transport = self.transport or default_transport()
        if transport.size == 1:
            return Alone()
        if self._ranks is None:
            meter = self._meter or TrafficMeter(transport.local_size)
            self._ranks = TransportRanks(transport, meter, f"{unique_prefix(transport)}.muon")
        check_settings(transport, "muon.settings", matrices=settings)
        return self._ranks


def _kinds(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Whether each group is of Muon, and its parts. Some checkpoints have lists in place of tuples."""
    settings = [(group.get("muon"), group.get("parts")) for group in groups]
    return [(is_muon, list(parts) if isinstance(parts, Sequence) else parts) for is_muon, parts in settings]


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of a group is out of range."""
    if "muon_lr_ratio" in group:
        raise ValueError("muon_lr_ratio is not a setting of a group: give a group with muon=True an lr of its own")
    check_adam(group.get("betas", (0.0, 0.0)), 0.0, **{key: group[key] for key in ("lr", "eps", "weight_decay")})
    if not group["muon"]:
        return
    require("a number", NUMBER, momentum=group["momentum"])
    require("True or False", FLAG, nesterov=group["nesterov"])
    require("a whole number", WHOLE, ns_steps=group["ns_steps"])
    if not 0 <= group["momentum"] < 1 or not 1 <= group["ns_steps"] < 100:
        found = f"{group['momentum']} and {group['ns_steps']}"
        raise ValueError(f"Muon needs momentum in [0, 1) and ns_steps from 1 to 99, not {found}")
    coefficients = group.get("ns_coefficients", (0.0,) * 3)
    if (
        not isinstance(coefficients, Sequence)
        or len(coefficients) != 3
        or not all(math.isfinite(as_number(each)) for each in coefficients)
    ):
        raise ValueError(f"ns_coefficients must be three numbers, not {coefficients!r}")
    if group["ns_precision"] not in NS:
        raise ValueError(f"ns_precision must be one of auto, {', '.join(NS)}, not {group['ns_precision']!r}")
    if group["adjust_lr_fn"] not in ADJUST_LR:
        known = ", ".join(map(str, ADJUST_LR))
        raise ValueError(f"adjust_lr_fn must be one of {known}, not {group['adjust_lr_fn']!r}")


def fastest_precision(device: torch.device) -> str:
    """The type, "bf16" or "fp32", in which products of matrices are faster on a device.

    A model on the device "meta" is taken to get to a GPU if there is one.
    """
    if device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available()):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type in ("cpu", "meta"):
        return "bf16" if multiplies_bf16(CPU_FLAGS) else "fp32"
    return "bf16"


@cache
def multiplies_bf16(flags: Path) -> bool:
    """Whether the CPU has instructions for products of bf16, which PyTorch uses through oneDNN."""
    try:
        words = set(flags.read_text().split())
    except OSError:
        return False
    return torch.backends.mkldnn.is_available() and not words.isdisjoint(("avx512_bf16", "amx_bf16"))


def newton_schulz(u: Tensor, group: Mapping[str, Any]) -> Tensor:
    """U [A, B], or each of a stack [n, A, B], with singular values near 1, in its type.

    group: `ns_steps`, `ns_coefficients` and `eps`.
    """
    (a, b, c), is_tall, is_stack = group["ns_coefficients"], u.shape[-2] > u.shape[-1], u.dim() == 3
    add = torch.baddbmm if is_stack else torch.addmm
    y = u.mT if is_tall else u
    norm = y.norm(dim=(1, 2), keepdim=True) if is_stack else y.norm()
    y = y / norm.clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        k = y @ y.mT
        y = add(y, add(k, k, k, beta=b, alpha=c), y, beta=a)
    return y.mT if is_tall else y


def _steps(group: Mapping[str, Any], u: Tensor) -> Tensor:
    """s NS(U) of each matrix of a parameter, in fp32."""
    parts = u.split(rows_of(u.shape[-2:], group["parts"]), -2)
    return torch.cat([newton_schulz(part, group).float() * _scale(part.shape[-2:], group) for part in parts], -2)


def _scale(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """s, of a matrix."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _adamw(**settings: Any) -> Optimizer:
    """An AdamW whose groups are to be replaced."""
    return _part(AdamW(_ANY, **settings))


def _muon(**settings: Any) -> Optimizer:
    """A Muon whose groups are to be replaced."""
    return _part(torch.optim.Muon(_ANY, **settings))


def _part(optimizer: Any) -> Optimizer:
    optimizer.is_part_of_another = True  # see `before_steps`
    return cast(Optimizer, optimizer)
