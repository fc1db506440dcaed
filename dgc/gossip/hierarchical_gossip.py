"""Gossip between machines of L ranks each. Each machine is a node, as in Stochastic Gradient Push (Assran, Loizou,
Ballas, Rabbat: ICML 2019, arXiv 1811.10792, section 5: 8 GPUs per node).

All ranks of a machine have the same model z and optimizer. On every rank:

    g = mean of the gradients of the machine's ranks              one all-reduce inside the machine, or by
                                                                  DDP (averages_gradients=False)
    z = z - lr O(g)                                               for the direction O of any optimizer
    base on slice l of z, with local rank l on other machines     any synchronous algorithm that needs no
                                                                  matrices, which slices do not have
    z = concatenation of the L slices                             one all-gather inside the machine

A machine therefore acts as a single rank with L times the batch. Each rank sends 1/L of the data between machines.
With the topology `hierarchical`, in contrast, every rank has its own model and sends all of it.

Differences from the paper: There, one rank of a machine communicates for all and sends the parameters to the
others before each forward pass. Here, a machine drops a step if any of its ranks has a gradient with NaN or inf.

Payload per step and rank in bytes: the payload of the base for n/L elements, which alone compress_ratio counts,
and inside the machine 4 (n + number of tensors) for gradients, unless DDP averages them, and 4 ceil(n/L) for
slices.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dgc.comm.collectives import find_machine_rank
from dgc.comm.conversation import RunningConversation
from dgc.comm.requests import AllGather, AllReduce, Conversation, Request, as_bytes
from dgc.comm.transport import CrossMachineTransport
from dgc.core.arguments import checked
from dgc.gossip.model import ModelSlice
from dgc.gossip.protocol import MISSING_ZERO_GRAD, Gossip
from dgc.gossip.sgp import SGP


@checked
class HierarchicalGossip(Gossip):
    """Gossip between machines, with all-reduce inside each machine (arXiv 1811.10792, section 5).

    The transport must have the groups `local` and `cross`: `connect(hierarchical=True, point_to_point=True)`.

    Args:
        base (Gossip, optional): synchronous algorithm between machines; default `SGP()`.
        averages_gradients (bool): whether to average gradients inside a machine. False: they are equal already,
            as with DistributedDataParallel among the ranks of a machine. The first step checks that.

    Raises:
        ValueError: if base is asynchronous, by `start` if the machines have different numbers of ranks or more
            ranks than the model has elements, or by the first step if gradients differ and are not averaged.

    Example:
        >>> transport = connect(hierarchical=True, point_to_point=True)
        >>> gossip = HierarchicalGossip(SGP())
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), gossip, transport=transport)
    """

    needs_groups = True

    def __init__(self, base: Gossip | None = None, *, averages_gradients: bool = True):
        base = base or SGP()
        if not base.is_synchronous:
            raise ValueError(
                f"{type(base).__name__} is asynchronous, but all ranks of a machine take the same steps: use a "
                "synchronous algorithm such as SGP"
            )
        self.base, self.compress_ratio = base, base.compress_ratio
        self.averages_gradients = averages_gradients
        self._in_step = self._is_stale = False
        self._must_compare = not averages_gradients

    def _prepare(self) -> None:
        place = find_machine_rank(self._transport, "HierarchicalGossip")
        self._local_size = L = place.local_size
        n = self.z.numel()
        if n < L:
            raise ValueError(f"a model of {n} elements cannot be divided into {L} slices, one for each rank")
        self._bounds = [i * n // L for i in range(L + 1)]
        self._slice = slice(*self._bounds[place.local_rank : place.local_rank + 2])
        part = ModelSlice(self.model, self._slice.start, self._slice.stop)
        self.base.start(part, CrossMachineTransport(self._transport), self._meter, f"{self.name}.cross")
        self.compress_ratio = self.base.compress_ratio

    def begin_from(self, z: Tensor) -> None:
        self.base.begin_from(z[self._slice])

    def begin_epoch(self, epoch: int) -> None:
        self.base.begin_epoch(epoch)

    def begin_step(self) -> None:
        if self._in_step:
            return
        self._in_step = True
        self.base.begin_step()
        self._gather_slices()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self._is_stale:
            raise RuntimeError(MISSING_ZERO_GRAD)
        self.base.update(partial(self._step_with_mean_gradient, step), lr)
        self._in_step, self._is_stale = False, self._local_size > 1

    def _step_with_mean_gradient(self, step: Callable[[], object]) -> None:
        if self._must_compare and self._local_size > 1:
            self._compare_gradients()
        self.has_skipped = self.averages_gradients and not self._average_gradients()
        if not self.has_skipped:
            step()

    def _run_locally(self, label: str, request: Request) -> Any:
        def conversation() -> Conversation[Any]:
            (reply,) = yield (request,)
            return reply

        return RunningConversation(f"{self.name}.{label}", conversation(), self._transport, self._meter).finish()

    def _compare_gradients(self) -> None:
        digest = 0
        for p in self.model.parameters:
            if p.grad is not None:
                digest = crc32(as_bytes(p.grad.to_dense().cpu().contiguous()).numpy().tobytes(), digest)
        digests = torch.tensor([digest, -digest], dtype=torch.int64)
        # a copy, in which the transport may store the reply
        if not torch.equal(self._run_locally("digest", AllReduce(digests.clone(), "max", group="local")), digests):
            raise ValueError(
                "the ranks of a machine have different gradients, and averages_gradients=False: wrap the model in "
                "DistributedDataParallel with the ranks of the machine as its process_group, or leave it True"
            )
        self._must_compare = False

    @torch.no_grad()
    def _average_gradients(self) -> bool:
        """Returns whether the mean is finite, which is the same on all ranks of the machine."""
        if self._local_size == 1:
            return True
        n = self.model.numel
        # [n] gradients, then for each parameter the fraction of ranks that have a gradient for it
        flat = torch.zeros(n + len(self.model.parameters), dtype=torch.float32, device=self.z.device)
        for i, (p, segment) in enumerate(self.model.pairs()):
            if p.grad is not None:
                segment.of(flat[:n]).copy_(p.grad.to_dense())
                flat[n + i] = 1.0
        mean = self._run_locally("gradients", AllReduce(flat, group="local"))
        if not bool(mean.isfinite().all()):
            return False
        fractions = mean[n:].tolist()
        for (p, segment), fraction in zip(self.model.pairs(), fractions, strict=True):
            if fraction:
                p.grad = segment.of(mean[:n]).to(p.dtype)
        return True

    @torch.no_grad()
    def _gather_slices(self) -> None:
        if self._local_size == 1:
            return
        own = self.z[self._slice]
        padded = own.new_zeros(-(-self.z.numel() // self._local_size))
        padded[: own.numel()] = own
        parts = self._run_locally("slices", AllGather(padded, group="local"))
        for part, first, end in zip(parts, self._bounds, self._bounds[1:], strict=False):
            self.z[first:end] = part[: end - first]
        self.model.scatter()
        self._is_stale = False

    def synchronize_messages(self) -> None:
        self.base.synchronize_messages()
        self._gather_slices()

    def flush(self) -> None:
        self.base.flush()
        self._gather_slices()

    def restart(self) -> None:
        self.base.restart()

    def biased_parameters(self) -> Tensor:
        """L times this rank's slice, and zeros elsewhere. The mean over all ranks is the mean over machines."""
        x = torch.zeros_like(self.z)
        x[self._slice] = self.base.biased_parameters() * self._local_size
        return x

    def bias(self) -> Tensor:
        factor = torch.zeros_like(self.z)
        factor[self._slice] = self.base.bias() * self._local_size
        return factor

    @property
    def averages_momentum(self) -> bool:  # type: ignore[override]
        return self.base.averages_momentum

    @property
    def keeps_start(self) -> bool:  # type: ignore[override]
        return self.base.keeps_start

    @property
    def needs_common_start(self) -> bool:  # type: ignore[override]
        return self.base.needs_common_start

    @property
    def replica_group(self) -> int | None:  # type: ignore[override]
        """The machine, if the algorithm between machines lets replica groups join."""
        return self.base.replica_group

    def join(self) -> None:
        self.base.join()
        self._is_stale = self._local_size > 1  # the slices are gathered by all machines at the same moment

    def metrics(self) -> dict[str, float]:
        return self.base.metrics()

    def errors(self) -> Iterable[Tensor]:
        return self.base.errors()

    def close(self) -> None:
        super().close()
        self.base.close()

    def _state(self) -> dict[str, Any]:
        # the slice prevents sums of slices from different local ranks
        return {"z": self.z, "slice": [self._slice.start, self._slice.stop], "base": {}}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict()}

    def _check_content(self, state: Mapping[str, Any]) -> None:
        if list(state["slice"]) != [self._slice.start, self._slice.stop]:
            raise ValueError(
                "state of another slice of the model: HierarchicalGossip resumes only with the same number "
                "of ranks on each machine"
            )
        self.base.loader(state["base"])

    def _load(self, state: Mapping[str, Any]) -> None:
        self.z.copy_(state["z"])
        self.base.load_state_dict(state["base"])
        self.model.scatter()
        self._in_step = self._is_stale = False
