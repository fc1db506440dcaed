"""0/1 Adam (Lu, Li, Zhang, De Sa, He 2022, arXiv 2202.06009, Algorithm 1): a second moment that is updated more
and more seldom, and local steps whose sum is exchanged in 1 bit per element.

A rank has its own m and x. x' is the model of all ranks after the last exchange. In step t = 0, 1, ..

    t in T_v      g = mean over the ranks of g_i, not compressed;  v is updated
    always        m = beta1 m + (1 - beta1) g,   x = x - gamma_t m / (sqrt(v) + eps),   u = u + gamma_t m
    t in T_u      u = DoubleSqueeze of u_i       m = u / (sum of gamma since the last exchange)
                                                 x' = x = x' - u / (sqrt(v) + eps),   u = 0

`ZeroOneSchedule` has the sets T_v and T_u, `ZeroOneAdam` m, v and the step. Local steps begin when v is frozen. A
step of T_v needs no second exchange: m, u and x remain the same on all ranks.

Payload in bytes: 4 n in a step of T_v (or that of `gradients`), in a step of T_u that of DoubleSqueeze, otherwise
nothing. Dense: 4 n.

Differences from the paper: the order within a step is that of DeepSpeed's code. v is updated before it is used, m
takes the mean gradient in steps of T_v, and x and u take the new m. Where v is zero, nothing moves. Weight decay
is decoupled: u, x' and the sum of gamma decay as x does. If that sum is 0, m becomes 0. (DeepSpeed exchanges the
gradients before local steps begin. Here it is u in every step of T_u, and the error state needs no reset.)

If a mean gradient of T_v is not finite, no rank changes anything in this step. If a rank's u is not, all return to
x', with m = 0. A rank whose gradient is not finite leaves out a step of its own.

The steps in which ranks communicate, as DeepSpeed's options choose them:

T_v     F = var_freeze_step, kappa = var_update_scaler:
        k_0 = 0,  k_(j+1) = k_j + 2**(j // kappa),  all k_j < F
T_u     every step before F; then the gap H is 1 for local_step_scaler steps, 2 for as many, 4, ..,
        and at most local_step_clipper
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.arguments import NUMBER, WHOLE, require
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.compression.dense import for_gradients
from dgc.compression.double_squeeze import DoubleSqueezeCompressor
from dgc.compression.protocol import Compressor, StatelessCompressor
from dgc.compression.route import Route
from dgc.engine.agreement import Agreement, check_equal, check_settings
from dgc.engine.buckets import keep_states, plan_buckets, states_in_order
from dgc.engine.loop import Engine, warn_of_drop
from dgc.engine.options import as_route, register_compressors
from dgc.engine.state import BucketStates, named_methods
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import Gossip
from dgc.local.exchange import AGREE, optimizer_text
from dgc.local.steps import COMMON_START, check_momentum
from dgc.local.zero_one_adam import ZeroOneAdam, dense
from dgc.state import check_count, check_tensor


class ZeroOneExchange:
    """Buffers in fp32, by parameter name, whose means over the ranks replace them. Construction is collective.

    Args:
        model: The model of this rank.
        route: Chooses the compressors.
        gradients: Averages gradients.
        bucket_mb: Largest size of a bucket in MB.
        transport: Connects the ranks.
        meter: Counts bytes and seconds.
        name: Prefix of lanes and messages, unique on the transport.

    Raises:
        ValueError: A compressor belongs to another optimizer, or does not fit the transport.
    """

    def __init__(
        self,
        model: FlatModel,
        route: Route,
        gradients: StatelessCompressor,
        bucket_mb: float,
        transport: Transport,
        meter: TrafficMeter,
        name: str,
    ):
        named = [(s.name, s.of(model.z)) for s in model.segments]
        self._planned = plan_buckets(named, route.compressor_for, bucket_mb, name)
        register_compressors(dict.fromkeys(plan.compressor for plan in self._planned), transport)
        keep_states(self._planned, transport.size, transport.rank)
        self.states = states_in_order(self._planned, named)
        self.parts = {s.name: s.of(plan.bucket.flat) for plan in self._planned for s in plan.bucket.segments}
        self.dropped = 0
        self._gradients = BucketStates(gradients)
        for plan in self._planned:
            self._gradients.add(plan.bucket, transport.size, transport.rank)
        # LocalOptimizer counts the dense bytes of all steps
        self._engine = Engine([[p] for p in self._planned], transport, meter, name, counts_dense=False)
        self._agreement = Agreement(transport, optimizer_text(name, named), "an exchange of 0/1 Adam", AGREE)
        self._warns = transport.rank == 0

    def zero_(self) -> None:
        for plan in self._planned:
            plan.bucket.flat.zero_()

    def average(self, common: Mapping[str, object], are_gradients: bool = False) -> bool:
        """Replace the buffers by their means, and return True. If these are not finite, return False.

        Args:
            common: What must be equal on every rank, by name.
            are_gradients: The buffers hold gradients, to be sent by `gradients` without error state.

        Raises:
            ValueError: Some of `common` is not.
        """
        with self._agreement.exchange():
            self._agreement.begin(are_gradients=are_gradients, **common)
            states, suffix = (self._gradients, ".gradients") if are_gradients else (None, "")
            for b in range(len(self._planned)):
                self._engine.start(b, states, suffix)
            self._agreement.end()
            outcome = self._engine.finish()
        if outcome.nonfinite is not None:
            self._drop(outcome.nonfinite)
            return False
        for plan, result in outcome.results:
            result.write_to(plan.bucket)
        return True

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if self.dropped == 1 and self._warns:
            effect = "every rank drops the steps since the exchange before"
            warn_of_drop(f"in an exchange of 0/1 Adam, {reason}", effect, "dropped_exchanges")

    def errors(self) -> Iterable[Tensor]:
        return (error for states in self.states for error in states.errors())

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        compression = {name: states.state_dict() for name, states in named_methods(self.states).items()}
        return {"compression": compression, "dropped": self.dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        compressors, saved = named_methods(self.states), state["compression"]
        if compressors.keys() != saved.keys():
            raise ValueError(f"state of other compressors: {sorted(saved)}, not {sorted(compressors)}")
        for name, compressor in compressors.items():
            compressor.load_state_dict(saved[name])
        self.dropped = state["dropped"]


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The steps of T_v and the gaps of T_u. Steps are counted from 0. The arguments are those of `ZeroOneSteps`.

    Raises:
        ValueError: if an argument is not a whole number of at least 1.
    """

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
        """H: the gap of T_u in step t."""
        doublings = max(0, t - self.var_freeze_step) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, 62))

    def exchanges_sum(self, t: int, local_steps: int) -> bool:
        """Whether step t, the `local_steps`-th since the last exchange, ends with an exchange: it is in T_u."""
        return local_steps >= self.interval(t)

    def exchanges(self, steps: int) -> int:
        """Number of exchanges in the first `steps` steps, of gradients or sums."""
        count = local_steps = 0
        for t in range(steps):
            local_steps += 1
            if self.updates_variance(t) or self.exchanges_sum(t, local_steps):
                count, local_steps = count + 1, 0
        return count


PARTS = ("z", "z0", "u")
STATE = {*PARTS, "rates", "local_steps", "compression", "dropped"}


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A parameter, the number of its group, and its parts of x, x' and u."""

    name: str
    parameter: Tensor
    group: int
    z: Tensor
    z0: Tensor
    u: Tensor


class ZeroOneSteps(Gossip):
    """0/1 Adam: the mean gradient at growing intervals, and local steps whose sum the ranks exchange in 1 bit per
    element (Lu et al. 2022, arXiv 2202.06009, Algorithm 1).

    It needs a `ZeroOneAdam` as the optimizer. Models differ between exchanges. The run's model is their mean.

    Args:
        var_freeze_step (int): number of first steps in which the second moment may be updated, at least 1. Local
            steps begin then. Take at least the warm-up of the learning rate.
        var_update_scaler (int): number of updates after which the interval between them doubles, kappa.
        local_step_scaler (int): number of steps after which the interval between exchanges doubles. Take those in
            which the learning rate halves.
        local_step_clipper (int): largest interval between exchanges in steps, H. 1: no local steps.
        compression (Compressor, Route, optional): exchanges u, without momentum of its own; None is
            DoubleSqueezeCompressor, the exchange of 1-bit Adam.
        gradients (StatelessCompressor, optional): exchanges the gradients from which the second moment is updated;
            None sends them in fp32, `FP16Compressor()` in half the bytes.
        bucket_mb (float): largest size of a message's tensors in MB (2**20 bytes of fp32).

    Raises:
        ValueError: if an argument is out of range, or by LocalOptimizer if its optimizer is not a ZeroOneAdam or
            differs between ranks, or if the model does.

    Example:
        >>> steps = ZeroOneSteps(var_freeze_step=1000, local_step_scaler=2000)
        >>> optimizer = ZeroOneAdam(model.parameters(), lr=1e-3)
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), steps)
    """

    is_synchronous, needs_groups = True, False

    def __init__(
        self,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 1000,
        local_step_clipper: int = 16,
        compression: Compressor | Route | None = None,
        gradients: StatelessCompressor | None = None,
        *,
        bucket_mb: float = 25.0,
    ):
        self.schedule = ZeroOneSchedule(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        self.compression = as_route(DoubleSqueezeCompressor() if compression is None else compression)
        check_momentum(self.compression)
        self.gradients = for_gradients(gradients)
        self.bucket_mb = bucket_mb
        self.local_steps = 0  # since the last exchange
        self._methods: list[Any] = [rule.compressor for rule in self.compression.rules]  # then with their states
        self._adam: ZeroOneAdam | None = None

    @property
    def compress_ratio(self) -> float:  # type: ignore[override]
        """Of the next step; 1 in a step of T_v."""
        t = 0 if self._adam is None else self._adam.steps
        if self.schedule.updates_variance(t):
            return 1.0
        return min(c.compress_ratio for c in self._methods) / self.schedule.interval(t)

    @property
    def fixed_settings(self) -> dict[str, Any]:
        return asdict(self.schedule)

    def use_optimizer(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, ZeroOneAdam):
            raise ValueError(
                f"ZeroOneSteps exchanges the momentum of a dgc.local.ZeroOneAdam, and {type(optimizer).__name__} "
                "does not share its own: wrap a ZeroOneAdam, or use OuterSteps"
            )
        self._adam = optimizer

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        adam, self.model = self.adam, model
        self.rates = [0.0 for _ in adam.param_groups]  # sum of gamma since the last exchange
        check_settings(transport, f"{name}.optimizer", **self._common())
        self.exchange = ZeroOneExchange(
            model, self.compression, self.gradients, self.bucket_mb, transport, meter, f"{name}.u"
        )
        self._methods = self.exchange.states
        group_of = {p: g for g, group in enumerate(adam.param_groups) for p in group["params"]}
        check_equal(model.z, transport, f"{name}.equal", "model at the start", COMMON_START)
        self._z0 = model.z.clone()
        self._tensors = [
            _Tensor(s.name, p, group_of[p], s.of(model.z), s.of(self._z0), self.exchange.parts[s.name])
            for s, p in zip(model.segments, model.parameters, strict=True)
        ]
        adam.use_buffers({tensor.parameter: tensor.u for tensor in self._tensors})

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
        for method in self._methods:
            method.begin_epoch(epoch)

    def begin_step(self) -> None:
        return None

    # --- one step ---------------------------------------------------------------------------------

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
        if self.schedule.exchanges_sum(t, self.local_steps):
            self._synchronize()

    def _update_variance(self) -> None:
        """A step of T_v, of all ranks alike. u is zero before and after it."""
        for tensor in self._tensors:
            if tensor.parameter.grad is not None:
                tensor.u.copy_(dense(tensor.parameter.grad))
        is_finite = self.exchange.average(self._common(), are_gradients=True)
        self.adam.advance(updates_variance=is_finite)
        if is_finite:
            for tensor in self._tensors:
                if tensor.parameter.grad is None:
                    tensor.parameter.grad = torch.zeros_like(tensor.parameter)
                tensor.parameter.grad.copy_(tensor.u)
            self.adam.step()
            self.model.gather()
        self._begin_interval()

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
        if not self.exchange.average(self._common()):
            self.exchange.zero_()
        groups = self.adam.param_groups
        for tensor in self._tensors:
            m, v = self.adam.moments(tensor.parameter)
            rate, u = self.rates[tensor.group], tensor.u.masked_fill_(v == 0, 0.0)
            m.copy_(u / rate if rate else torch.zeros_like(u))
            tensor.z.copy_(tensor.z0 - u / self.adam.denominator(v, groups[tensor.group]))
        self.model.scatter()
        self._begin_interval()

    @torch.no_grad()
    def _begin_interval(self) -> None:
        self._z0.copy_(self.model.z)
        self.exchange.zero_()
        self.rates = [0.0 for _ in self.rates]
        self.local_steps = 0

    # --- the common model -------------------------------------------------------------------------

    def synchronize_messages(self) -> None:
        return None

    def flush(self) -> None:
        return None

    def restart(self) -> None:
        self._begin_interval()

    def biased_parameters(self) -> Tensor:
        return self.model.z.clone()

    def metrics(self) -> dict[str, float]:
        interval = self.schedule.interval(self.adam.steps)
        return {"interval": float(interval), "dropped_exchanges": float(self.exchange.dropped)}

    def errors(self) -> Iterable[Tensor]:
        return self.exchange.errors()

    def close(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        parts = {part: {t.name: getattr(t, part).clone() for t in self._tensors} for part in PARTS}
        return {**parts, "rates": list(self.rates), "local_steps": self.local_steps, **self.exchange.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != STATE:
            raise ValueError(f"state of another algorithm: it has {sorted(state)}, not {sorted(STATE)}")
        for part in PARTS:
            if (found := state[part].keys()) != (names := {tensor.name for tensor in self._tensors}):
                raise ValueError(f"{part} of another model: of {sorted(found)}, not {sorted(names)}")
            for tensor in self._tensors:
                check_tensor(f"{part} of {tensor.name}", state[part][tensor.name], tensor.z.shape)
        if len(state["rates"]) != len(self.rates):
            raise ValueError(f"state of {len(state['rates'])} parameter groups, not {len(self.rates)}")
        require("a list of numbers", NUMBER, **{f"rates[{i}]": rate for i, rate in enumerate(state["rates"])})
        check_count("local_steps", state["local_steps"])
        self.exchange.load_state_dict(state)
        for tensor in self._tensors:
            for part in PARTS:
                getattr(tensor, part).copy_(state[part][tensor.name])
        self.model.scatter()
        self.rates, self.local_steps = list(state["rates"]), state["local_steps"]
