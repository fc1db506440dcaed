"""0/1 Adam (Lu, Li, Zhang, De Sa, He 2022, arXiv 2202.06009, Algorithm 1): a second moment that is updated more
and more seldom, and local steps whose sum is exchanged in 1 bit per element.

A rank has its own m and x. x' is the model of all ranks after the last exchange. With the learning rate gamma and
weight decay lambda, in step t = 0, 1, ..

    always        rate = gamma / c1,   c1 = 1 - beta1**(t + 1)
    t in T_v      g = mean over the ranks of g_i, not compressed
                  v = beta2 v + (1 - beta2) g**2
    always        m = beta1 m + (1 - beta1) g
                  x = (1 - gamma lambda) x - rate m / (sqrt(v / c2) + eps)      c2 = 1 - beta2**(updates of v)
    t not in T_v  u = u + rate m
    t in T_u      u = DoubleSqueeze of u_i       m = u / (sum of the rates since the last exchange)
                                                 x' = x = x' - u / (sqrt(v / c2) + eps),   u = 0

Local steps begin when v is frozen. A step of T_v needs no second exchange: m, u and x remain equal on all ranks.

Payload in bytes: 4 n in a step of T_v (or the payload of `gradients`), in a step of T_u the payload of
DoubleSqueeze, otherwise nothing. Dense: 4 n.

Differences from the paper: the differences of `dgc.optim.OneBitAdam` (bias corrections, decoupled weight decay,
`floor`), and the order within a step, which follows DeepSpeed's code. v is updated before it is used, m takes
the mean gradient in steps of T_v, and x and u take the new m. Where v is zero, nothing moves. u, x' and the sum of
the rates decay as x does. If that sum is 0, m becomes 0. (DeepSpeed exchanges the gradients before local steps
begin. Here it is u in every step of T_u, and the residual needs no reset.)

If a mean gradient of T_v is not finite, no rank changes anything in this step. If a rank's u is not, all return to
x', with m = 0. A rank whose gradient is not finite leaves out a step of its own.

T_v     F = var_freeze_step, kappa = var_update_scaler:
        k_0 = 0,  k_(j+1) = k_j + 2**(j // kappa),  all k_j < F
T_u     every step before F; then the gap H is 1 for local_step_scaler steps, 2 for as many, 4, ..,
        and at most local_step_clipper. These are DeepSpeed's options.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.conversation import without_autocast
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.compression import Compressor, Route, StatelessCompressor
from dgc.contrib.double_squeeze import DoubleSqueezeCompressor
from dgc.core.arguments import NUMBER, WHOLE, checked, require
from dgc.core.dense import for_gradients
from dgc.core.state import check_tensor
from dgc.engine.agreement import check_equal, check_settings
from dgc.engine.options import as_route, check_adam, check_saved_groups, loss_of
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import Gossip
from dgc.local import BufferExchange
from dgc.local.steps import COMMON_START, check_momentum


@checked
class ZeroOneAdam(Optimizer):
    """Adam for `ZeroOneSteps`, which says when the second moment is updated and exchanges the first one (Lu et al.
    2022, arXiv 2202.06009, Algorithm 1).

    Args:
        params, lr, betas, eps, weight_decay, floor: As `dgc.optim.OneBitAdam`. After a sudden fall of the learning
            rate, momentum is too large for some steps.
        bias_correction: Divide the moments by 1 - beta**t. DeepSpeed does not.

    Example:
        optimizer = ZeroOneAdam(model.parameters(), lr=1e-3)
        optimizer = LocalOptimizer(optimizer, model.named_parameters(), ZeroOneSteps(var_freeze_step=1000))
    """

    # u of each parameter, fp32, to which the steps add what moves it while they leave the second moments
    buffers: Mapping[Tensor, Tensor] | None = None
    _updates_variance = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        floor: float = 0.01,
    ):
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction, floor=floor
        )
        super().__init__(params, defaults)

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_saved_groups(self, state, _check_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_state(state_dict)
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        first, new = self.param_groups[0], self.param_groups[-1]
        for count in ("steps", "variance_steps"):
            new[count] = 0 if new is first else first[count]

    @property
    def steps(self) -> int:
        """Number of steps so far, those without finite gradients included. The same on every rank."""
        return int(self.param_groups[0]["steps"])

    def advance(self, updates_variance: bool) -> None:
        """Begin the next step. updates_variance: whether .grad is the mean gradient, and changes v."""
        self._updates_variance = updates_variance
        for group in self.param_groups:
            group["steps"] += 1
            group["variance_steps"] += updates_variance

    def rate(self, group: Mapping[str, Any]) -> float:
        """The factor of the momentum in this step: gamma / c1."""
        c1 = 1 - group["betas"][0] ** group["steps"] if group["bias_correction"] else 1.0
        return float(group["lr"] / c1)

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """m and v of a parameter, which are zero before its first step."""
        state = self.state[p]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state["exp_avg"], state["exp_avg_sq"]

    def denominator(self, v: Float[Tensor, "..."], group: Mapping[str, Any]) -> Float[Tensor, "..."]:
        """sqrt(v / c2) + eps, in a new tensor."""
        c2 = 1 - group["betas"][1] ** max(1, group["variance_steps"]) if group["bias_correction"] else 1.0
        return v.sqrt().div_(c2**0.5).add_(group["eps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.buffers is None:
            raise ValueError(
                "ZeroOneAdam steps only within ZeroOneSteps: wrap it in LocalOptimizer(optimizer, "
                "model.named_parameters(), ZeroOneSteps(...)), or use torch.optim.AdamW"
            )
        loss = loss_of(closure)
        with without_autocast():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.numel():
                        self._update(p, p.grad, self.buffers[p], group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, u: Tensor, group: dict[str, Any]) -> None:
        (m, v), (beta1, beta2), rate = self.moments(p), group["betas"], self.rate(group)
        m.lerp_(dense(gradient), 1 - beta1)
        if self._updates_variance:
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            v.clamp_(min=group["floor"] * v.sum(dtype=torch.float64).div(max(1, v.numel())).to(v.dtype))
        m.masked_fill_(v == 0, 0.0)
        if not self._updates_variance:
            u.add_(m, alpha=rate)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(m, self.denominator(v, group), value=-rate)


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of a group is out of range."""
    check_adam(group["betas"], group["floor"], **{key: group[key] for key in ("lr", "eps", "weight_decay")})
    for count in ("steps", "variance_steps"):
        require("a whole number of at least 0", WHOLE, least=0, **{count: group.get(count, 0)})


def dense(gradient: Tensor) -> Tensor:
    """The gradient. Raises ValueError if it is sparse."""
    if gradient.is_sparse:
        raise ValueError("ZeroOneAdam takes dense gradients: set sparse=False in the embedding")
    return gradient


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The steps of T_v and the gaps of T_u. Steps count from 0. `ZeroOneSteps` has the same arguments."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __post_init__(self) -> None:
        require("a whole number of at least 1", WHOLE, least=1, **asdict(self))

    def updates_variance(self, t: int) -> bool:
        """Whether step t is in T_v."""
        kappa = self.var_update_scaler
        doublings = (t // kappa + 1).bit_length() - 1  # kappa (2**i - 1) is the first step with gaps of 2**i
        return t < self.var_freeze_step and (t - kappa * (2**doublings - 1)) % 2**doublings == 0

    def interval(self, t: int) -> int:
        """H: the gap of T_u in step t, which is in T_u if the last exchange was so many steps ago."""
        doublings = max(0, t - self.var_freeze_step) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, 62))

    def exchanges(self, steps: int) -> int:
        """Number of exchanges in the first `steps` steps, of gradients or sums."""
        count = local_steps = 0
        for t in range(steps):
            local_steps += 1
            if self.updates_variance(t) or local_steps >= self.interval(t):
                count, local_steps = count + 1, 0
        return count


class ZeroOneExchange(BufferExchange):
    what, counter = "an exchange of 0/1 Adam", "dropped_exchanges"


PARTS = ("z", "z0", "u")


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A parameter, the number of its group, its parts of x, x' and u, and the mean of its gradient."""

    name: str
    parameter: Tensor
    group: int
    z: Tensor
    z0: Tensor
    u: Tensor
    mean: Tensor


class ZeroOneSteps(Gossip):
    """0/1 Adam: the mean gradient at growing intervals, and local steps whose sum is exchanged in 1 bit per
    element (Lu et al. 2022, arXiv 2202.06009, Algorithm 1). It needs a `ZeroOneAdam` as the optimizer.

    Args:
        var_freeze_step: Steps until the second moment stays and local steps begin, at least 1. Take at least the
            warm-up of the learning rate.
        var_update_scaler: Updates of it after which the interval between them doubles, kappa.
        local_step_scaler: Steps after which the interval between exchanges doubles. Take those in which the
            learning rate halves.
        local_step_clipper: Largest interval between exchanges in steps, H. 1: no local steps.
        compression: Exchanges u, without momentum of its own. None: DoubleSqueezeCompressor, as 1-bit Adam.
        gradients: Exchanges the gradients of T_v. None sends them in fp32, `FP16Compressor()` in half the bytes.
        bucket_mb: Largest size of a message's tensors in MB. None: as `DistributedOptimizer`.

    Raises:
        ValueError: An argument is out of range, the optimizer is not a ZeroOneAdam, or it or the model differs
            between ranks.

    Example:
        >>> steps = ZeroOneSteps(var_freeze_step=1000, local_step_scaler=2000)
        >>> optimizer = ZeroOneAdam(model.parameters(), lr=1e-3)
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), steps)
    """

    keeps_start = needs_common_start = True

    def __init__(
        self,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 1000,
        local_step_clipper: int = 16,
        compression: Compressor | Route | None = None,
        gradients: StatelessCompressor | None = None,
        *,
        bucket_mb: float | None = None,
    ):
        self.schedule = ZeroOneSchedule(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        self.compression = as_route(DoubleSqueezeCompressor() if compression is None else compression)
        check_momentum(self.compression)
        self.gradients = for_gradients(gradients)
        self.bucket_mb = bucket_mb
        self.local_steps = 0  # since the last exchange
        self._senders: list[Any] = [rule.compressor for rule in self.compression.rules]  # then with their states
        self._adam: ZeroOneAdam | None = None

    @property
    def compress_ratio(self) -> float:  # type: ignore[override]
        """Of the next step; 1 in a step of T_v."""
        t = 0 if self._adam is None else self._adam.steps
        if self.schedule.updates_variance(t):
            return 1.0
        return min(c.compress_ratio for c in self._senders) / self.schedule.interval(t)

    @property
    def fixed_settings(self) -> dict[str, Any]:
        return asdict(self.schedule)

    def use_optimizer(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, ZeroOneAdam):
            raise ValueError(
                f"ZeroOneSteps exchanges the momentum of a ZeroOneAdam, and {type(optimizer).__name__} does not "
                "share its own: wrap a dgc.contrib.ZeroOneAdam, or use OuterSteps"
            )
        self._adam = optimizer

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        super().start(model, transport, meter, name)
        adam = self.adam
        self.rates = [0.0 for _ in adam.param_groups]  # sum of gamma since the last exchange
        check_settings(transport, f"{name}.optimizer", **self._common())
        size, to = self.bucket_mb, (transport, meter)
        self.exchange = ZeroOneExchange(model, self.compression, size, *to, f"{name}.u")
        self._mean_gradients = ZeroOneExchange(model, self.gradients, size, *to, f"{name}.gradients")
        self._senders = self.exchange.states
        group_of = {p: g for g, group in enumerate(adam.param_groups) for p in group["params"]}
        check_equal(model.z, transport, f"{name}.equal", "model at the start", COMMON_START)
        self._z0 = model.z.clone()
        self._tensors = [
            _Tensor(s.name, p, group_of[p], s.of(model.z), s.of(self._z0), u, self._mean_gradients.parts[s.name])
            for s, p in zip(model.segments, model.parameters, strict=True)
            for u in (self.exchange.parts[s.name],)
        ]
        adam.buffers = {tensor.parameter: tensor.u for tensor in self._tensors}

    @torch.no_grad()
    def begin_from(self, z: Tensor) -> None:
        self._z0.copy_(z)

    def _common(self) -> dict[str, object]:
        """What is equal on every rank in the step of an exchange."""
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.adam.param_groups]
        return {"param_groups": groups, "rates": self.rates}

    @property
    def adam(self) -> ZeroOneAdam:
        if self._adam is None:
            raise ValueError("ZeroOneSteps needs a ZeroOneAdam: pass both to LocalOptimizer, and not as a base")
        return self._adam

    def begin_epoch(self, epoch: int) -> None:
        for states in self.exchange.states:
            states.begin_epoch(epoch)

    def begin_step(self) -> None:
        return None

    @torch.no_grad()
    def update(self, step: Callable[[], object], lr: float) -> None:
        t = self.adam.steps
        if self.schedule.updates_variance(t):
            self._update_variance()
            return
        self.adam.advance(updates_variance=False)
        self._decay()
        step()
        self.model.gather()
        self.local_steps += 1
        if self.local_steps >= self.schedule.interval(t):
            self._synchronize()

    def _update_variance(self) -> None:
        """A step of T_v, of all ranks alike. u is zero before and after it."""
        self._mean_gradients.zero_()
        for tensor in self._tensors:
            if tensor.parameter.grad is not None:
                tensor.mean.copy_(dense(tensor.parameter.grad))
        is_finite = self._mean_gradients.average(**self._common())
        self.adam.advance(updates_variance=is_finite)
        if is_finite:
            for tensor in self._tensors:
                if tensor.parameter.grad is None:
                    tensor.parameter.grad = torch.zeros_like(tensor.parameter)
                tensor.parameter.grad.copy_(tensor.mean)
            self.adam.step()
            self.model.gather()
        self.restart()

    def _decay(self) -> None:
        """Weight decay of x' and u, and the sums of gamma. x decays in the optimizer's step."""
        factors = [1 - group["lr"] * group["weight_decay"] for group in self.adam.param_groups]
        for tensor in self._tensors:
            if factors[tensor.group] != 1:
                tensor.z0.mul_(factors[tensor.group])
                tensor.u.mul_(factors[tensor.group])
        for g, group in enumerate(self.adam.param_groups):
            self.rates[g] = factors[g] * self.rates[g] + self.adam.rate(group)

    def _synchronize(self) -> None:
        """A step of T_u: take m and x of all ranks from the mean of u."""
        if not self.exchange.average(**self._common()):
            self.exchange.zero_()
        groups = self.adam.param_groups
        for tensor in self._tensors:
            m, v = self.adam.moments(tensor.parameter)
            rate, u = self.rates[tensor.group], tensor.u.masked_fill_(v == 0, 0.0)
            m.copy_(u / rate if rate else torch.zeros_like(u))
            tensor.z.copy_(tensor.z0 - u / self.adam.denominator(v, groups[tensor.group]))
        self.model.scatter()
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin an interval from the present model."""
        self._z0.copy_(self.model.z)
        self.exchange.zero_()
        self.rates = [0.0 for _ in self.rates]
        self.local_steps = 0

    def synchronize_messages(self) -> None:
        return None

    def metrics(self) -> dict[str, float]:
        interval = self.schedule.interval(self.adam.steps)
        dropped = self.exchange.dropped + self._mean_gradients.dropped
        return {"interval": float(interval), "dropped_exchanges": float(dropped)}

    def errors(self) -> Iterable[Tensor]:
        return self.exchange.errors()

    def _state(self) -> dict[str, Any]:
        parts = {part: {t.name: getattr(t, part).clone() for t in self._tensors} for part in PARTS}
        counts = {"local_steps": self.local_steps, "dropped_gradients": self._mean_gradients.dropped}
        return {**parts, "rates": list(self.rates), **counts, **self.exchange.state_dict()}

    def _check_content(self, state: Mapping[str, Any]) -> None:
        for part in PARTS:
            if (found := state[part].keys()) != (names := {tensor.name for tensor in self._tensors}):
                raise ValueError(f"{part} of another model: of {sorted(map(str, found))}, not {sorted(names)}")
            for tensor in self._tensors:
                check_tensor(f"{part} of {tensor.name}", state[part][tensor.name], tensor.z.shape)
        if len(state["rates"]) != len(self.rates):
            raise ValueError(f"state of {len(state['rates'])} parameter groups, not {len(self.rates)}")
        require("a list of numbers", NUMBER, **{f"rates[{i}]": rate for i, rate in enumerate(state["rates"])})
        self.exchange.check(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.exchange.load_state_dict(state)
        for tensor in self._tensors:
            for part in PARTS:
                getattr(tensor, part).copy_(state[part][tensor.name])
        self.model.scatter()
        self.rates, self.local_steps = list(state["rates"]), state["local_steps"]
        self._mean_gradients.dropped = state["dropped_gradients"]
