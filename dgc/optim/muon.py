"""Muon for the matrices of a model, and AdamW for its other parameters (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; learning rate: Liu et al. 2025, arXiv 2502.16982).

For a matrix X of A rows and B columns with the mean gradient G, `torch.optim.Muon` computes

    M = mu M + (1 - mu) G;   U = (1 - mu) G + mu M         nesterov=False: U = M
    X = (1 - lr weight_decay) X - lr s NS(U)               s = 0.2 sqrt(max(A, B)) with "match_rms_adamw"

NS, five Newton-Schulz iterations in bf16, replaces the singular values of U by numbers around 1. It is not linear:
the mean over the ranks of NS(U) is not NS of the mean. So gradients are compressed, with error feedback, and NS
takes their mean.

Differences from the paper: a matrix that holds several ones (queries, keys and values, or the gates of an LSTM) is
several matrices, each with NS and s of its own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dgc.comm.conversation import without_autocast
from dgc.core.arguments import FLAG, NUMBER, WHOLE, require
from dgc.core.bucket import local_part
from dgc.engine.options import as_number, check_adam, check_optimizer_state, check_saved_groups, loss_of
from dgc.optim.muon_rule import rows_of
from dgc.versions import TorchRange

TORCH = TorchRange("optim.MuonWithAdamW", oldest="2.9", newest="2.15", since={"Muon": "2.9"})
CPU_FLAGS = Path("/proc/cpuinfo")
NS = {"bf16": torch.bfloat16, "fp32": torch.float32}
BUFFER, MOMENTS = "momentum_buffer", {"step", "exp_avg", "exp_avg_sq"}
ADJUST_LR = ("match_rms_adamw", "original", None)  # None: as "original"
_ANY = [torch.empty(1, 1, dtype=torch.float32)]  # optimizers take no empty list


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` for groups with `muon=True` and `torch.optim.AdamW` for others, as one optimizer.

    With ns_precision="bf16" it computes the bits of the two. `description()` says in which type it iterates.
    Schedulers and checkpoints see one optimizer. A scheduler that sets absolute rates, such as OneCycleLR, needs
    one for each group, and cycle_momentum=False, because the momenta of the two have other names. Parameters may
    be sharded by FSDP2: each matrix is gathered once per step, in the type of `ns_precision`, and all ranks need
    the same matrices to have a gradient.

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
    ):
        TORCH.check(torch.optim, TORCH.since)
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
        return {**super().__getstate__(), "_settings": self._settings}

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
            if p.dim() != 2 or p.is_complex():
                raise ValueError(f"Muon takes real matrices, not {tuple(p.shape)} of {p.dtype}: see muon_groups")
            rows_of(p.shape, group["parts"])
        super().add_param_group(group)

    def check_state(self, state: Mapping[str, Any]) -> None:
        groups, states = state["param_groups"], state["state"]
        if not any(group.get("muon") for group in groups):
            raise ValueError("the state is from an optimizer without Muon, which has no momentum for matrices")
        if _kinds(groups) != _kinds(self.param_groups):
            raise ValueError(
                "the state has other groups of Muon and AdamW: call muon_groups as in the run that saved it"
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
        # made for each step, because loading a state replaces groups and state
        adamw, muon = _adamw(), _muon()
        adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        adamw.state = self.state
        adamw.step()
        muon.param_groups = []
        for group in self.param_groups:
            if group["muon"]:
                muon.param_groups.append({**group, "params": []})
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    if p.grad.is_sparse:
                        shape = tuple(p.shape)
                        raise ValueError(f"Muon needs dense gradients, and a gradient of shape {shape} is sparse")
                    if group["ns_precision"] == "fp32" or hasattr(p, "to_local") or _is_overwritten(p, group):
                        self._step_matrix(p, group)
                    else:
                        self._add(muon, p, group)
        muon.step()

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(cast(Tensor, p.grad))
        return cast(Tensor, state[BUFFER])

    def _add(self, muon: Optimizer, p: Tensor, group: dict[str, Any]) -> None:
        """Give the matrices of a parameter to the last group of Muon."""
        rows = rows_of(p.shape, group["parts"])
        assert p.grad is not None
        parts = (tensor.split(rows) for tensor in (p.detach(), p.grad, self._momentum(p)))
        for matrix, gradient, momentum in zip(*parts, strict=True):
            matrix.grad = gradient
            muon.state[matrix] = {BUFFER: momentum}
            muon.param_groups[-1]["params"].append(matrix)

    def _step_matrix(self, p: Any, group: dict[str, Any]) -> None:
        """The step of a parameter in fp32, or of a shard, for which all rows are gathered in the type of NS."""
        momentum, mu = self._momentum(p), group["momentum"]
        x, g, m = map(local_part, (p.detach(), p.grad, momentum))
        m.lerp_(g, 1 - mu)
        u = (g.lerp(m, mu) if group["nesterov"] else m).to(NS[group["ns_precision"]])
        if hasattr(p, "to_local"):
            # not at the top: a torch without torch.distributed has no shards
            from torch.distributed.tensor import DTensor, Replicate

            layout = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            whole = DTensor.from_local(u, p.device_mesh, p.placements, **layout).full_tensor()
            replicas = [Replicate()] * p.device_mesh.ndim
            steps = DTensor.from_local(self._steps(whole, group), p.device_mesh, replicas, run_check=False)
            step = steps.redistribute(placements=p.placements).to_local()
        else:
            step = self._steps(u, group)
        lr = float(group["lr"])
        x.mul_(1 - lr * group["weight_decay"]).add_(step, alpha=-lr)

    def _steps(self, u: Tensor, group: dict[str, Any]) -> Tensor:
        """s NS(U) of each matrix of a parameter, in fp32."""
        parts = u.split(rows_of(u.shape, group["parts"]))
        return torch.cat([newton_schulz(part, group).float() * _scale(part.shape, group) for part in parts])


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
    """U [A, B] with singular values near 1, in its type. group: `ns_steps`, `ns_coefficients` and `eps`."""
    (a, b, c), is_tall = group["ns_coefficients"], u.shape[0] > u.shape[1]
    y = u.T if is_tall else u
    y = y / y.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        k = y @ y.T
        y = torch.addmm(y, torch.addmm(k, k, k, beta=b, alpha=c), y, beta=a)
    return y.T if is_tall else y


def _is_overwritten(p: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether torch.optim.Muon's iterations in bf16 overwrite the momentum, which they take without a copy."""
    return p.dtype is torch.bfloat16 and not group["nesterov"]


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
