"""Gossip between machines of L ranks each, for clusters with fast links inside a machine. Each machine is a node,
as in Stochastic Gradient Push (Assran, Loizou, Ballas, Rabbat: ICML 2019, arXiv 1811.10792, section 5: 8 GPUs per
node).

All ranks of a machine have the same model z and optimizer. On every rank:

    g = mean over the machine of its ranks' gradients             one all-reduce inside the machine
    z = z - lr O(g)                                               for the direction O of any optimizer
    base on z's slice l, with local rank l on other machines      any synchronous algorithm of `dgc.gossip`,
                                                                  but PowerGossip: slices have no matrices
    z = the L slices, put together                                one all-gather inside the machine

Ranks of a machine therefore keep equal models, and a machine acts as a single rank with L times the batch. Each
rank sends 1/L of the data between machines, over its own links and network cards.

The topology `hierarchical` also suits such clusters, but every rank has its own model: ranks of a machine average
models every second round, step on their own gradients, and each sends a whole model to other machines.

Differences from the paper: There, one rank of a machine communicates for all and sends the parameters to the
others before each forward pass. Here, a machine drops a step if any of its ranks has a gradient with NaN or inf.

Payload per step and rank in bytes: the base's with n/L elements, inside the machine 4 (n + number of tensors) for
gradients and 4 ceil(n/L) for slices. compress_ratio counts only the data between machines.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.comm.collectives import all_reduce
from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import Meter
from dgc.comm.requests import AllGather, AllReduce, Conversation
from dgc.comm.transport import Transport
from dgc.gossip.cross_machine import Cross, Slice
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import NOT_BEGUN, Gossip
from dgc.gossip.pushsum.sgp import SGP
from dgc.memory.state import check_tensor


class Machines:
    """Gossip between machines, with all-reduce inside each machine (arXiv 1811.10792, section 5).

    Args:
        base (Gossip, optional): synchronous algorithm between machines; default `SGP()`.

    Raises:
        ValueError: if base is asynchronous, or by `start` if the number of ranks differs between machines or the
            model has fewer parameters than a machine has ranks.

    The transport must have groups, as that of `connect(hierarchical=True, point_to_point=True)`.

    Example:
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), Machines(SGP()), transport=transport)
    """

    needs_groups = True
    is_synchronous = True

    def __init__(self, base: Gossip | None = None):
        base = base or SGP()
        if not base.is_synchronous:
            raise ValueError(f"{type(base).__name__} has no steps in common, which ranks of a machine must have")
        self.base, self.compress_ratio = base, base.compress_ratio
        self._begun = self._is_apart = False

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        self.name, self.model, self._transport, self._meter = name, model, transport, meter
        L, local, n = transport.group_size("local"), transport.group_rank("local"), model.z.numel()
        own = torch.tensor([-L, L], dtype=torch.int64)
        smallest, most = all_reduce(transport, own, "max", f"{name}.machines").tolist()
        if -smallest != most:
            raise ValueError(
                f"Machines needs as many ranks on each machine as on any other, here are {-smallest} to {most}"
            )
        if n < L:
            raise ValueError(f"a model of {n} parameters cannot be shared by {L} ranks of a machine")
        self._bounds = [i * n // L for i in range(L + 1)]
        self._own = slice(self._bounds[local], self._bounds[local + 1])
        self._locals = L
        self.base.start(Slice(model, self._own.start, self._own.stop), Cross(transport), meter, f"{name}.cross")
        self.compress_ratio = self.base.compress_ratio

    def begin_epoch(self, epoch: int) -> None:
        self.base.begin_epoch(epoch)

    def begin_step(self) -> None:
        if self._begun:
            return
        self._begun = True
        self.base.begin_step()
        self._put_together()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self._is_apart:
            raise RuntimeError(NOT_BEGUN)
        self.base.update(partial(self._step_together, step), lr)
        self._begun, self._is_apart = False, self._locals > 1

    def _step_together(self, step: Callable[[], object]) -> None:
        if self._average_gradients():
            step()

    # --- inside the machine -----------------------------------------------------------------------

    def _inside(self, what: str, conversation: Conversation[Tensor]) -> Tensor:
        return RunningConversation(f"{self.name}.{what}", conversation, self._transport, self._meter).finish()

    @torch.no_grad()
    def _average_gradients(self) -> bool:
        """Returns whether the mean is finite, which is the same on all ranks of the machine."""
        if self._locals == 1:
            return True
        mean = self._inside("gradients", self._mean_gradients())
        if not bool(mean.isfinite().all()):
            return False
        n = self.model.z.numel()
        has_one = mean[n:].tolist()
        for p, segment, some in zip(self.model.parameters, self.model.segments, has_one, strict=True):
            if some:
                p.grad = segment.of(mean[:n]).to(p.dtype)
        return True

    def _mean_gradients(self) -> Conversation[Float32[Tensor, "n_and_tensors"]]:
        """[n] gradients, and for each parameter the fraction of ranks with a gradient: a rank may have none."""
        n = self.model.z.numel()
        flat = torch.zeros(n + len(self.model.parameters), dtype=torch.float32, device=self.model.z.device)
        for i, (p, segment) in enumerate(zip(self.model.parameters, self.model.segments, strict=True)):
            if p.grad is not None:
                segment.of(flat[:n]).copy_(p.grad.to_dense())
                flat[n + i] = 1.0
        (mean,) = yield (AllReduce(flat, group="local"),)
        return mean

    @torch.no_grad()
    def _put_together(self) -> None:
        if self._locals > 1:
            self._inside("slices", self._slices())
            self.model.scatter()
            self._is_apart = False

    def _slices(self) -> Conversation[Tensor]:
        z, bounds = self.model.z, self._bounds
        padded = z.new_zeros(-(-z.numel() // self._locals))
        padded[: self._own.stop - self._own.start] = z[self._own]
        (parts,) = yield (AllGather(padded, group="local"),)
        for part, first, end in zip(parts, bounds, bounds[1:], strict=False):
            z[first:end] = part[: end - first]
        return z

    # --- the common model -------------------------------------------------------------------------

    def settle(self) -> None:
        self.base.settle()
        self._put_together()

    def hold(self) -> None:
        self.base.hold()
        self._put_together()

    def restart(self) -> None:
        self.base.restart()

    def numerator(self) -> Tensor:
        """This rank's slice times L, and zeros: the mean over all ranks is the mean of the machines."""
        x = torch.zeros_like(self.model.z)
        x[self._own] = self.base.numerator() * self._locals
        return x

    def gauges(self) -> dict[str, float]:
        return self.base.gauges()

    def errors(self) -> Iterable[Tensor]:
        return self.base.errors()

    def close(self) -> None:
        self.settle()
        self.base.close()

    def state_dict(self) -> dict[str, Any]:
        own = [self._own.start, self._own.stop]  # prevents sums of slices from different local ranks
        return {"z": self.model.z.clone(), "slice": own, "base": self.base.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"z", "slice", "base"}:
            raise ValueError(f"state of another algorithm: {sorted(state)}, here are ['base', 'slice', 'z']")
        if list(state["slice"]) != [self._own.start, self._own.stop]:
            raise ValueError("state of another place in a machine: Machines goes on with as many ranks on each")
        check_tensor("z", state["z"], self.model.z.shape)
        self.model.z.copy_(state["z"])
        self.base.load_state_dict(state["base"])
        self.model.scatter()
        self._begun = self._is_apart = False
