"""AD-PSGD: ranks that average in pairs during training (Lian, Zhang, Zhang, Liu: ICML 2018, arXiv 1710.06952,
Algorithm 1).

Rank i has a model x_i. Its training thread and its gossip thread run independently:

    train     z = x_i; gradient g at z;   x_i = x_i - lr O(g)       for the direction O of any optimizer
    gossip    x_i, x_j = (x_i + x_j) / 2, at once for both, with a neighbour j on a bipartite graph

With N ranks, the mean of the models moves by -lr O(g) / N in every step of any rank, independently of the
averages. No rank waits for a slow rank or network. Odd ranks initiate an average, even ranks answer
(`adpsgd_protocol`).

Differences from the paper: Neighbours are taken in turn from a book, not at random. Only pairs in the book
average; any graph works if its odd-even pairs connect all ranks. A rank initiates a limited number of averages per
step, so that a fast network is not flooded. An average takes effect on the two ranks one after the other, and
steps in between are kept. The optimizer steps on z, and x moves by the same difference.

Host memory on each rank: x, two messages of its size (even ranks: one more for each answer in flight), and z once.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor

from dgc.comm.channel import Channel, channel_of
from dgc.comm.meter import Meter
from dgc.comm.transport import Transport
from dgc.gossip.adpsgd.link import Link
from dgc.gossip.adpsgd.protocol import Member
from dgc.gossip.adpsgd.thread import GossipThread
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import NOT_BEGUN
from dgc.gossip.topology.bipartite import bipartite_complete, odd_even
from dgc.gossip.topology.topology import Graph, made
from dgc.memory.state import check_tensor


class ADPSGD:
    """AD-PSGD: asynchronous averaging in pairs (Lian et al. 2018, arXiv 1710.06952, Algorithm 1).

    Args:
        graph (callable): makes the topology for a number of ranks.
        averagings_per_step (float, optional): largest number of averages that an odd rank initiates per own step;
            None for as many as the network carries.
        timeout (float): seconds of silence after which a rank counts as lost. Every rank then raises GossipError
            in the next call.

    Raises:
        ValueError: if averagings_per_step or timeout is not positive.

    `settle`, `resume` and `start` are collective: every rank calls them in the same order, at any time. A rank in
    `settle` waits for the others and still answers their messages. Between these calls, ranks are independent.

    Example:
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), ADPSGD(averagings_per_step=2))
    """

    needs_groups = False
    is_synchronous = False
    compress_ratio = 1.0

    def __init__(
        self,
        graph: Graph = bipartite_complete,
        averagings_per_step: float | None = 1.0,
        timeout: float = 300.0,
    ):
        self.graph = graph
        self.averagings_per_step = inf if averagings_per_step is None else float(averagings_per_step)
        if not self.averagings_per_step > 0:
            raise ValueError(f"averagings_per_step must be above 0, or None, not {averagings_per_step}")
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, not {timeout}")
        self.timeout = timeout
        self._model: FlatModel | None = None
        self._gossip: GossipThread | None = None
        self._begun = False

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        """Initializes a model that is the same on every rank. Gossip begins with `begin_epoch` or `begin_step`."""
        self._model = model
        self._prepare(model.z, channel_of(transport), meter)

    def begin(self, z: Tensor, channel: Channel, meter: Meter) -> None:
        """Starts gossip. z [n] fp32: the model of forward and backward, the same on every rank."""
        self._prepare(z, channel, meter)
        self.resume()

    def _prepare(self, z: Tensor, channel: Channel, meter: Meter) -> None:
        if self._gossip is not None:
            raise RuntimeError("this ADPSGD has been started")
        if z.dtype != torch.float32 or z.dim() != 1 or z.numel() == 0 or not z.is_contiguous():
            raise ValueError(f"z must be one contiguous row of fp32, not {z.dtype} of shape {tuple(z.shape)}")
        graph = made(self.graph, channel.size)
        self._z, self._meter, self._seen = z.detach(), meter, 0
        self._before = torch.empty_like(self._z)
        x = self._z.to("cpu", copy=True)
        self._member = Member(x, channel.rank, odd_even(graph), self.averagings_per_step)
        self._gossip = GossipThread(Link(self._member, channel, self.timeout))

    # --- training ---------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Resumes after `settle`: even a rank without steps in this epoch must answer the others."""
        self._resume_if_settled()

    def begin_step(self) -> None:
        """Sets z = x, which includes all averages so far. Resumes after `settle`."""
        self._resume_if_settled()
        self._show()
        self._begun = True

    def _resume_if_settled(self) -> None:
        if self._running().is_settled:
            self.resume()

    @torch.no_grad()
    def _show(self) -> None:
        with self._member.lock:
            self._z.copy_(self._member.x)
        if self._model is not None:
            self._model.scatter()

    @torch.no_grad()
    def update(self, step: Callable[[], object], lr: float = 0.0) -> None:
        """Runs `step`, in which any optimizer moves z. x moves by the same difference."""
        gossip = self._running()
        if gossip.is_settled or not self._begun:
            raise RuntimeError(NOT_BEGUN)
        self._begun = False
        self._before.copy_(self._z)
        with torch.enable_grad():
            step()
        if self._model is not None:
            self._model.gather()
        change = torch.sub(self._z, self._before, out=self._before).cpu()
        with gossip.changed:
            self._member.x.add_(change)
            self._member.count_step()
            gossip.changed.notify_all()
        self._account()

    @property
    def progress(self) -> int:
        """Steps of all ranks, as far as known on this rank; exact after `settle`."""
        with self._member.lock:
            return int(self._member.counts.sum())

    @property
    def is_under_way(self) -> bool:
        return self._gossip is not None and self._gossip.is_under_way

    @property
    def averagings(self) -> int:
        """Number of averages with this rank."""
        return self._member.averagings

    # --- pauses -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits until no rank averages and no message is in flight, then sets z = x. Collective."""
        self._running().settle()
        self._show()
        self._account()

    def hold(self) -> None:
        """Same as `settle`, because messages in flight cannot be separated from completed ones."""
        if not self._running().is_settled:
            self.settle()

    def restart(self) -> None:
        raise RuntimeError("ranks that train at paces of their own have no model in common to go on from")

    def numerator(self) -> Tensor:
        return self._member.x.to(self._z.device, copy=True)

    def gauges(self) -> dict[str, float]:
        return {"averagings": float(self.averagings)}

    def errors(self) -> Iterable[Tensor]:
        return ()

    def resume(self) -> None:
        """Continues gossip after `settle`. Collective, within `timeout` of the first rank's call."""
        self._running().resume()

    def close(self) -> None:
        """Ends the gossip thread. Without `settle` before, other ranks raise GossipError."""
        if self._gossip is not None:
            self._gossip.close()

    def state_dict(self) -> dict[str, Any]:
        """This rank's model, and the number of steps of all ranks. Call it after `settle`."""
        if not self._running().is_settled:
            raise RuntimeError("averages are under way: settle() before state_dict()")
        return {"x": self._member.x.clone(), "steps": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call it after `settle`, or before the first epoch."""
        if not self._running().is_settled:
            raise RuntimeError("averages are under way: settle() before load_state_dict()")
        member = self._member
        if state.keys() != {"x", "steps"}:
            raise ValueError(f"state of another algorithm: {sorted(state)}")
        check_tensor("x", state["x"], member.x.shape)
        member.x.copy_(state["x"])
        # only the sum is used from here on, for any number of ranks
        member.counts.zero_()
        member.counts[0] = state["steps"]
        self._show()

    def _running(self) -> GossipThread:
        if self._gossip is None:
            raise RuntimeError("gossip has not been started")
        self._gossip.check()
        return self._gossip

    def _account(self) -> None:
        """Copies the counts to the training thread's meter, which no other thread may change."""
        assert self._gossip is not None
        sent = self._gossip.link.meter.payload_bytes
        self._meter.payload_bytes += sent - self._seen
        self._meter.wire_bytes += sent - self._seen
        self._seen = sent
