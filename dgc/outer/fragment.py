"""Fragments: parts of a model that are exchanged together, each with buckets and an outer optimizer of its own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.bucket import Segment
from dgc.comm.requests import Conversation
from dgc.compression.protocol import Result, conversation_of
from dgc.compression.route import Route
from dgc.gossip.model import FlatModel
from dgc.memory.state import FlatState, check_tensor
from dgc.optim.exchange.planning import MEGABYTE, plan_buckets
from dgc.outer.optimizers import OuterOptimizer


def divide(segments: Sequence[Segment], fragment_mb: float | None) -> list[list[Segment]]:
    """Divide a model's tensors, in their order, into fragments.

    Args:
        segments: The tensors.
        fragment_mb: Largest size of a fragment in MB (2**20 bytes of fp32), unless a single tensor is larger.
            None: one fragment.
    """
    fragments: list[list[Segment]] = [[]]
    for segment in segments:
        numel = sum(s.numel for s in fragments[-1]) + segment.numel
        if fragment_mb is not None and fragments[-1] and 4 * numel > fragment_mb * MEGABYTE:
            fragments.append([])
        fragments[-1].append(segment)
    return fragments


class Fragment:
    """Some tensors of a model, with z0, their values after the last exchange, and the optimizer of z0.

    Args:
        model: The model of this rank.
        segments: The tensors, as parts of the model.
        route: Chooses their compressors.
        outer: Makes the optimizer of z0.
        bucket_mb: Largest size of a bucket in MB.
        name: Prefix of the buckets' names, unique on the transport.
    """

    def __init__(
        self,
        model: FlatModel,
        segments: Sequence[Segment],
        route: Route,
        outer: OuterOptimizer,
        bucket_mb: float,
        name: str,
    ):
        self.model, self.segments = model, segments
        named = [(s.name, s.of(model.z)) for s in segments]
        self.planned = plan_buckets(named, route.compressor_for, bucket_mb, name)
        self._z0 = FlatState("z0")
        for plan in self.planned:
            self._z0.add(plan.bucket)
        buckets = [(plan.bucket, s) for plan in self.planned for s in plan.bucket.segments]
        z0 = {s.name: s.of(self._z0[bucket]) for bucket, s in buckets}
        mean = {s.name: s.of(bucket.flat) for bucket, s in buckets}
        self._tensors = [(s, z0[s.name], mean[s.name]) for s in segments]
        self.optimizer = outer(list(z0.values()))
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"outer must return an optimizer of torch for tensors, not {self.optimizer!r}")
        self._rates: list[Any] = [group.get("lr") for group in self.optimizer.param_groups]
        self.restart()

    def restart(self) -> None:
        """Begin from the present model, which is the same on all ranks."""
        for segment, z0, _ in self._tensors:
            z0.copy_(segment.of(self.model.z))

    def begin(self, x: Tensor, bias: float | Tensor = 1.0) -> Iterator[tuple[str, Conversation[Result]]]:
        """Store bias z0 - x, the pseudo-gradient, in the buckets. Returns (name, conversation) for each bucket.

        Args:
            x: [n] model, or biased model, of this rank.
            bias: The factor between the model and x, one number or [n].
        """
        for segment, z0, difference in self._tensors:
            factor = segment.of(bias) if isinstance(bias, Tensor) else bias
            torch.sub(z0 * factor, segment.of(x), out=difference)
        for plan in self.planned:
            yield plan.bucket.name, conversation_of(plan.compressor, plan.bucket)

    def keep(self, results: Sequence[Result]) -> None:
        """Store the means in the buckets."""
        for plan, result in zip(self.planned, results, strict=True):
            result.write_to(plan.bucket)

    def rollback(self) -> None:
        """Undo the exchange in the error state."""
        for plan in self.planned:
            plan.compressor.rollback(plan.bucket)

    @property
    def reads_inner_lr(self) -> bool:
        """Whether a step depends on the learning rate of the inner optimizer."""
        return "inner_lr" in self.optimizer.defaults

    def check_learning_rate(self) -> None:
        """Raise ValueError if the optimizer has no learning rate to schedule."""
        if any("lr" not in group for group in self.optimizer.param_groups):
            raise ValueError(
                "outer_schedule needs an outer optimizer with a learning rate, and "
                f"{type(self.optimizer).__name__} has none: leave outer_schedule out, or use Nesterov()"
            )

    def step(self, lr: float | None, factor: float | None = None) -> None:
        """Take an outer step on the mean in the buckets.

        Args:
            lr: Learning rate of the inner optimizer. None: go to the mean of the models, without the optimizer.
            factor: Of the outer optimizer's learning rate, as it was made. None: the rate is not changed.
        """
        for _, z0, mean in self._tensors:
            if lr is None:
                z0.sub_(mean)
            else:
                z0.grad = mean
        if lr is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["inner_lr"] = lr
                if factor is not None:
                    group["lr"] = factor * rate
            self.optimizer.step()
            for _, z0, _ in self._tensors:
                z0.grad = None

    def merge(self, alpha: float) -> None:
        """Set the model to alpha times itself and 1 - alpha times z0."""
        for segment, z0, _ in self._tensors:
            z = segment.of(self.model.z)
            if alpha:
                z.lerp_(z0, 1 - alpha)
            else:
                z.copy_(z0)

    # --- state --------------------------------------------------------------------------------------

    def means(self) -> dict[str, Tensor]:
        """Copies of the means in the buckets, by parameter name."""
        return {segment.name: mean.clone() for segment, _, mean in self._tensors}

    def load_means(self, means: Mapping[str, Tensor]) -> None:
        for segment, _, mean in self._tensors:
            check_tensor(f"mean of {segment.name}", means.get(segment.name), segment.shape)
            mean.copy_(means[segment.name])

    def state_dict(self) -> dict[str, Any]:
        outer = {s.name: _copied(self.optimizer.state.get(z0, {})) for s, z0, _ in self._tensors}
        return {"z0": self._z0.state_dict(), "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this fragment's part of a state of all fragments."""
        names = {s.name for s in self.segments}
        self._z0.load_state_dict({name: z0 for name, z0 in state["z0"].items() if name in names})
        missing = sorted(names - state["outer"].keys())
        if missing:
            raise ValueError(f"outer optimizer of another model: missing {missing}")
        for segment, z0, _ in self._tensors:
            loaded = state["outer"][segment.name]
            for key, value in loaded.items():
                if isinstance(value, Tensor):
                    check_tensor(f"outer {key} of {segment.name}", value, None, value.dtype)
                elif isinstance(value, str):
                    raise ValueError(f"outer {key} of {segment.name} is text: {value!r}")
            self.optimizer.state[z0] = _copied(loaded)
            if not loaded:
                del self.optimizer.state[z0]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
