"""AD-PSGD: asynchronous averaging of pairs of ranks during training (Lian, Zhang, Zhang, Liu: ICML 2018,
arXiv 1710.06952, Algorithm 1).

Rank i has a model x_i. Its training thread and its gossip thread run independently:

    train     z = x_i; gradient g at z;   x_i = x_i - lr O(g)       for the direction O of any optimizer
    gossip    x_i, x_j = (x_i + x_j) / 2, at once for both, with a neighbour j on a bipartite graph

With N ranks, the mean of the models moves by -lr O(g) / N in every step of any rank, independently of the
averages. No rank waits for a slow rank or network. Odd ranks initiate an average, even ranks reply (`protocol`).

Differences from the paper: Neighbours are taken in turn from a peer schedule, not at random. Only pairs of the
schedule average; any graph works if its odd-even pairs connect all ranks. A rank initiates a limited number of
averages per step, so that a fast network is not flooded. An average takes effect on the two ranks one after the
other, and steps in between are kept. The optimizer steps on z, and x moves by the same difference.

Host memory on each rank: x, two messages of its size (even ranks: one more for each reply in flight), and z once.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor

from dgc.arguments import checked
from dgc.comm.channel import Channel, open_channel
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.gossip.adpsgd.link import MessageLink
from dgc.gossip.adpsgd.protocol import AveragingProtocol
from dgc.gossip.adpsgd.thread import GossipThread
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import MISSING_ZERO_GRAD
from dgc.gossip.topology.bipartite import bipartite_complete, bipartite_subgraph
from dgc.gossip.topology.topology import Graph, build_topology
from dgc.memory.state import check_tensor


@checked
class ADPSGD:
    """AD-PSGD: asynchronous averaging of pairs of ranks (Lian et al. 2018, arXiv 1710.06952, Algorithm 1).

    `synchronize_messages`, `resume` and `start` are collective: every rank calls them in the same order, at any
    time. In `synchronize_messages` a rank waits for the others and still replies to their messages. Between these
    calls, ranks are independent.

    Args:
        graph (callable): returns the topology for a number of ranks.
        averagings_per_step (float, optional): largest number of averages that an odd rank initiates per own step;
            None for as many as the network carries.
        timeout (float): seconds without a message after which a rank counts as lost. Every rank then raises
            GossipError in the next call. The default is longer than most pauses for validation and checkpoints.

    Raises:
        ValueError: if averagings_per_step or timeout is not positive.

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
            raise ValueError(f"averagings_per_step must be positive, or None, not {averagings_per_step}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, in seconds, not {timeout}")
        self.timeout = timeout
        self._model: FlatModel | None = None
        self._thread: GossipThread | None = None
        self._in_step = False

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        """Initializes a model that is equal on all ranks. Gossip begins with `begin_epoch` or `begin_step`."""
        self._model = model
        self._create_thread(model.z, open_channel(transport), meter)

    def start_on_channel(self, z: Tensor, channel: Channel, meter: TrafficMeter) -> None:
        """Starts gossip at once. z: [n] fp32, the model of forward and backward, equal on all ranks."""
        self._create_thread(z, channel, meter)
        self.resume()

    def _create_thread(self, z: Tensor, channel: Channel, meter: TrafficMeter) -> None:
        if self._thread is not None:
            raise RuntimeError("this ADPSGD has been started already")
        if z.dtype != torch.float32 or z.dim() != 1 or z.numel() == 0 or not z.is_contiguous():
            raise ValueError(f"z must be a contiguous fp32 vector, not {z.dtype} of shape {tuple(z.shape)}")
        graph = build_topology(self.graph, channel.size)
        self._z, self._meter, self._counted = z.detach(), meter, (0, 0.0)
        self._buffer = torch.empty_like(self._z)
        x = self._z.to("cpu", copy=True)
        self._protocol = AveragingProtocol(x, channel.rank, bipartite_subgraph(graph), self.averagings_per_step)
        self._thread = GossipThread(MessageLink(self._protocol, channel, self.timeout, meter.local_size))

    # --- training ---------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Resumes gossip: even a rank without steps in this epoch must reply to the others."""
        self._resume_if_paused()

    def begin_step(self) -> None:
        """Resumes gossip if it is paused, and sets z = x, which includes all averages so far."""
        self._resume_if_paused()
        self._update_z()
        self._in_step = True

    def _resume_if_paused(self) -> None:
        if self._checked_thread().is_paused:
            self.resume()

    @torch.no_grad()
    def _update_z(self) -> None:
        with self._protocol.lock:
            self._z.copy_(self._protocol.x)
        if self._model is not None:
            self._model.scatter()

    @torch.no_grad()
    def update(self, step: Callable[[], object], lr: float = 0.0) -> None:
        """Runs `step`, in which any optimizer moves z. x moves by the same difference."""
        thread = self._checked_thread()
        if thread.is_paused or not self._in_step:
            raise RuntimeError(MISSING_ZERO_GRAD)
        self._in_step = False
        before = self._buffer.copy_(self._z)
        with torch.enable_grad():
            step()
        if self._model is not None:
            self._model.gather()
        difference = torch.sub(self._z, before, out=before).cpu()
        with thread.changed:
            self._protocol.x.add_(difference)
            self._protocol.count_step()
            thread.changed.notify_all()
        self._update_meter()

    @property
    def progress(self) -> int:
        """Steps of all ranks, as far as this rank has been informed; exact after `synchronize_messages`."""
        with self._protocol.lock:
            return int(self._protocol.step_counts.sum())

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_running

    @property
    def averagings(self) -> int:
        """Number of averages with this rank."""
        return self._protocol.averagings

    # --- pauses -----------------------------------------------------------------------------------------------

    def synchronize_messages(self) -> None:
        """Waits until no rank averages and no message is in flight, then sets z = x. Collective."""
        self._checked_thread().pause()
        self._update_z()
        self._update_meter()

    def flush(self) -> None:
        """Same as `synchronize_messages`, because messages in flight cannot be separated from completed ones."""
        if not self._checked_thread().is_paused:
            self.synchronize_messages()

    def restart(self) -> None:
        raise RuntimeError("ADPSGD is asynchronous and cannot restart from a common model")

    def biased_parameters(self) -> Tensor:
        return self._protocol.x.to(self._z.device, copy=True)

    def bias(self) -> float:
        return 1.0

    def metrics(self) -> dict[str, float]:
        return {"averagings": float(self.averagings)}

    def errors(self) -> Iterable[Tensor]:
        return ()

    def resume(self) -> None:
        """Continues gossip after `synchronize_messages`. Collective, within `timeout` of the first rank's call."""
        self._checked_thread().resume()

    def close(self) -> None:
        """Ends the gossip thread. Without `synchronize_messages` before, other ranks raise GossipError."""
        if self._thread is not None:
            self._thread.close()

    def state_dict(self) -> dict[str, Any]:
        """This rank's model, and the number of steps of all ranks. Call it after `synchronize_messages`."""
        self._check_paused("state_dict()")
        return {"x": self._protocol.x.clone(), "steps": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call it after `synchronize_messages`, or before the first epoch."""
        self._check_paused("load_state_dict()")
        protocol = self._protocol
        if state.keys() != {"x", "steps"}:
            raise ValueError(f"state of another algorithm: it has {sorted(state)}, not ['steps', 'x']")
        check_tensor("x", state["x"], protocol.x.shape)
        protocol.x.copy_(state["x"])
        # only the sum is used from here on, for any number of ranks
        protocol.step_counts.zero_()
        protocol.step_counts[0] = state["steps"]
        self._update_z()

    def _check_paused(self, method: str) -> None:
        if not self._checked_thread().is_paused:
            raise RuntimeError(f"averages are in progress: call synchronize_messages() before {method}")

    def _checked_thread(self) -> GossipThread:
        if self._thread is None:
            raise RuntimeError("gossip has not been started")
        self._thread.check()
        return self._thread

    def _update_meter(self) -> None:
        """Copies the byte counts to the training thread's meter, which no other thread may change."""
        assert self._thread is not None
        sent = self._thread.link.meter
        payload, cross = sent.payload_bytes - self._counted[0], sent.cross_wire_bytes - self._counted[1]
        self._meter.payload_bytes += payload
        self._meter.wire_bytes += payload
        self._meter.cross_wire_bytes += cross
        self._counted = (self._counted[0] + payload, self._counted[1] + cross)
