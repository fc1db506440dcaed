"""AD-PSGD: asynchronous averaging of pairs of ranks during training (Lian, Zhang, Zhang, Liu: ICML 2018,
arXiv 1710.06952, Algorithm 1).

Rank i has a model x_i. Its training thread and its gossip thread run independently:

    train     z = x_i; gradient g at z;   x_i = x_i - lr O(g)       for the direction O of any optimizer
    gossip    x_i, x_j = (x_i + x_j) / 2, at once for both, with a neighbour j on a bipartite graph

With N ranks, the mean of the models moves by -lr O(g) / N in every step of any rank. No rank waits for a slow rank
or network.

Differences from the paper: Neighbours are taken in turn, not at random. Any graph works if its odd-even pairs
connect all ranks. A rank initiates a limited number of averages per step, so that a fast network is not flooded.
An average takes effect on the two ranks one after the other, and steps in between are kept.

What else changes z, such as a limit of its norm, moves x alike. While gossip is paused, as before the first step,
x becomes z, so that weights may be loaded.

Host memory on each rank: x, two messages of its size (even ranks: one more for each reply in flight), and z once.
"""

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from math import inf
from typing import Any, TypeAlias

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.comm.channel import Channel, open_channel
from dgc.comm.requests import as_bytes
from dgc.core.arguments import checked
from dgc.gossip.graphs import bipartite_complete
from dgc.gossip.messages import opened, write_header_
from dgc.gossip.protocol import MISSING_ZERO_GRAD, Gossip
from dgc.gossip.topology import Graph, Topology, bipartite_subgraph, build_topology, peer_schedule

KIND, COUNTS = 3, 6  # words before the kind, and before the steps
MESSAGE = "a message of AD-PSGD"
TAGS = 2**14

HEARTBEATS_PER_TIMEOUT = 4
COUNTS_INTERVAL = 0.1  # seconds without an average after which an active rank requests step counts
ABORT_TIMEOUT = 2.0  # seconds to inform the other ranks of a failure
# Seconds between two polls of the network: a fraction of the time since the last message. Polling therefore delays
# a message by little more than this fraction, and a network without messages uses almost no CPU time.
MIN_SLEEP, MAX_SLEEP, SLEEP_FRACTION = 50e-6, 5e-3, 0.05


class GossipError(RuntimeError):
    """A rank has timed out or failed. The message names it."""


@checked
class ADPSGD(Gossip):
    """AD-PSGD: asynchronous averaging of pairs of ranks (Lian et al. 2018, arXiv 1710.06952, Algorithm 1).

    `synchronize_messages`, `resume` and `start` are collective, and ranks are independent between these calls. In
    `synchronize_messages` a rank waits for the others and still replies to their messages.

    Args:
        graph (callable): returns the topology for a number of ranks.
        averagings_per_step (float, optional): largest number of averages that an odd rank initiates per own step;
            None for as many as the network carries.
        timeout (float): seconds without a message after which a rank counts as lost. Every rank then raises
            GossipError in the next call. It should be longer than a pause for validation and checkpoints.

    Raises:
        ValueError: if averagings_per_step or timeout is not positive.

    Example:
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), ADPSGD(averagings_per_step=2))
    """

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
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the thread
        self._in_step = self._closing = False
        self._is_paused, self._cycle = True, 0

    def _prepare(self) -> None:
        if self._thread is not None:
            raise RuntimeError("this ADPSGD has been started already")
        pairs = bipartite_subgraph(build_topology(self.graph, self.size))
        self._counted, self._seen = (0, 0), self.z.clone()  # z as far as x has its changes
        x = self.z.to("cpu", copy=True)
        channel, local_size = open_channel(self._transport), self._meter.local_size
        self._protocol = AveragingProtocol(x, pairs, channel, self.averagings_per_step, self.timeout, local_size)
        self._changed = threading.Condition(self._protocol.lock)  # notified of each change that the thread awaits
        self._thread = threading.Thread(target=self._run, name="AD-PSGD gossip", daemon=True)
        self._thread.start()
        # MPI is also finalized at exit, and this thread must stop calling it before
        atexit.register(self.close)

    def _check(self) -> None:
        """Raises GossipError if the thread has failed."""
        if self._thread is None:
            raise RuntimeError("gossip has not been started")
        if self._closing:
            raise RuntimeError("gossip was closed")
        if isinstance(self._error, GossipError):
            raise GossipError(str(self._error)) from self._error
        if self._error is not None:
            raise GossipError(f"gossip has ended on this rank: {self._error!r}") from self._error

    # --- training ---------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Resumes gossip: even a rank without steps in this epoch must reply to the others."""
        self.resume()

    def begin_step(self) -> None:
        self.resume()
        self._take_changes()
        self._update_z()
        self._in_step = True

    @torch.no_grad()
    def _update_z(self) -> None:
        with self._protocol.lock:
            self.z.copy_(self._protocol.x)
        self._seen.copy_(self.z)
        self.model.scatter()

    @torch.no_grad()
    def _take_changes(self) -> None:
        """Changes x by what has changed z since the two were compared, or makes it equal to z during a pause."""
        if torch.equal(self.z, self._seen):
            return
        with self._protocol.lock:
            if self._is_paused:
                self._protocol.x.copy_(self.z)
            else:
                self._protocol.x.add_(torch.sub(self.z, self._seen, out=self._seen).cpu())
        self._seen.copy_(self.z)

    @torch.no_grad()
    def update(self, step: Callable[[], object], lr: float = 0.0) -> None:
        """Runs `step` on z, and moves x by the same difference."""
        self._check()
        if self._is_paused or not self._in_step:
            raise RuntimeError(MISSING_ZERO_GRAD)
        self._in_step = False
        with torch.enable_grad():
            step()
        self.model.gather()
        self._take_changes()
        with self._changed:
            self._protocol.count_step()
            self._changed.notify_all()
        self._update_meter()

    @property
    def progress(self) -> int:  # type: ignore[override]
        """As `Gossip`; exact after `synchronize_messages`."""
        with self._protocol.lock:
            return int(self._protocol.step_counts.sum())

    @property
    def is_running(self) -> bool:
        return not (self._is_paused or self._closing or self._error is not None)

    # --- pauses -----------------------------------------------------------------------------------------------

    def synchronize_messages(self) -> None:
        self._check()
        self._take_changes()
        with self._changed:
            self._protocol.is_draining = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_paused or self._error is not None)
        self._check()
        self._update_z()
        self._update_meter()

    def flush(self) -> None:
        """Same as `synchronize_messages`, because messages in flight cannot be separated from completed ones."""
        self._check()
        if self._is_paused:
            self._take_changes()
        else:
            self.synchronize_messages()

    def restart(self) -> None:
        raise RuntimeError("ADPSGD is asynchronous and cannot restart from a common model")

    def biased_parameters(self) -> Tensor:
        return self._protocol.x.to(self.z.device, copy=True)

    def metrics(self) -> dict[str, float]:
        return {"averagings": float(self._protocol.averagings)}

    def resume(self) -> None:
        """Continues gossip if it is paused. Collective, within `timeout` of the first rank's call."""
        self._check()
        if self._is_paused:
            self.model.gather()
            self._take_changes()
        with self._changed:
            if self._is_paused:
                self._protocol.begin()
                self._cycle += 1
                self._is_paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the gossip thread. Without `synchronize_messages` before, other ranks raise GossipError."""
        if self._thread is None:
            return
        atexit.unregister(self.close)
        with self._changed:
            was_closing, self._closing = self._closing, True
            self._changed.notify_all()
        self._thread.join()
        if not self._is_paused and not was_closing:
            _abandoned.append(self._protocol)

    def _state(self) -> dict[str, Any]:
        self._check()
        if not self._is_paused:
            raise RuntimeError("averages are in progress: call synchronize_messages() before saving or loading")
        return {"x": self._protocol.x, "steps": self.progress}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._protocol.x.copy_(state["x"])
        # only the sum is used from here on, for any number of ranks
        self._protocol.step_counts.zero_()
        self._protocol.step_counts[0] = state["steps"]
        self._update_z()

    def _update_meter(self) -> None:
        """Copies the byte counts to the meter, which no other thread may change."""
        sent, cross = self._protocol.sent_bytes, self._protocol.cross_bytes
        self._meter.payload_bytes += sent - self._counted[0]
        self._meter.wire_bytes += sent - self._counted[0]
        self._meter.cross_wire_bytes += cross - self._counted[1]
        self._counted = sent, cross

    # --- the gossip thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        protocol = self._protocol
        try:
            while not self._closing:
                self._run_cycle()
        except BaseException as error:
            # First try to inform the other ranks: the training thread may end the process when it gets the error.
            with suppress(Exception):
                if not isinstance(error, GossipError):
                    protocol.abort(self.rank)
                end = time.monotonic() + ABORT_TIMEOUT
                while protocol.is_aborting and time.monotonic() < end:
                    protocol.complete_sends()
                    time.sleep(MAX_SLEEP)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run_cycle(self) -> None:
        protocol = self._protocol
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused or self._closing)
        last_progress = time.monotonic()
        if not self._closing:
            protocol.open(self._cycle % TAGS, last_progress)
        while not (protocol.is_over or self._closing):
            now = time.monotonic()
            if protocol.poll(now):
                last_progress = now
            if protocol.is_idle:
                with self._changed:
                    seconds = min(COUNTS_INTERVAL, self.timeout / 10)
                    if self._changed.wait_for(lambda: protocol.can_send or self._closing, seconds):
                        last_progress = time.monotonic()
            elif not protocol.is_over:
                time.sleep(min(max(MIN_SLEEP, SLEEP_FRACTION * (now - last_progress)), MAX_SLEEP))
        if protocol.is_over:
            with self._changed:
                self._is_paused = True
                self._changed.notify_all()


class Kind(IntEnum):
    """Kind of a message; see `AveragingProtocol`."""

    AVERAGE = 0
    REPLY = 1
    COUNTS_REQUEST = 2
    COUNTS_REPLY = 3
    LEAVE = 4
    DONE = 5
    END = 6
    HEARTBEAT = 7
    ABORT = 8


# The receiver, and int64 words: 3 for the header (`dgc.gossip.messages`), kind, sender, number, the steps of all
# ranks; then x.
Outgoing: TypeAlias = tuple[int, Int64[Tensor, "words"]]


class AveragingProtocol:
    """The messages of one rank, over a `Channel`. No threads; no method waits or reads a clock.

    A cycle lasts from `begin` until the messages of all ranks are drained. Active ranks (odd) average with passive
    ranks (even):

        AVERAGE   active -> passive: a = x of the sender. The passive rank stores p = its x and does x += (a - p)/2
        REPLY     passive -> active: p. The active rank does x += (p - a)/2 to its current x

        COUNTS_REQUEST, COUNTS_REPLY  the same without x, from an active rank without a recent average

    The two changes are exact opposites, so the sum over ranks is preserved but for rounding. While a rank drains
    its messages, it starts no exchange. Passive ranks continue to reply:

        LEAVE     active -> each of its passive peers, after its last reply has arrived
        DONE      any rank -> rank 0, after it has left, or all its active peers have
        END       rank 0 -> all, after DONE from all: no message is in flight on any rank

    HEARTBEAT, between rank 0 and each other rank, shows that the sender runs, and ABORT reports a failed rank.
    Rank 0 monitors all ranks, and they monitor rank 0. A rank that waits for a reply also monitors the rank that
    owes it. Every lost rank is therefore detected by some rank, which informs all others.

    Every message contains the number of steps of each rank, as far as its sender has been informed. A receiver
    keeps the larger numbers, and slow ranks request counts as often as fast ones. A rank may leave when its
    numbers show enough steps. DONE and END make them exact.

    Payload in bytes, with n ranks and N elements: 8 (6 + n), and for AVERAGE and REPLY 8 ceil(N / 2) more.

    `lock` guards x, step_counts and credit between the training thread and the gossip thread.

    Args:
        x (Tensor): [n] fp32, this rank's model on the CPU, changed in place.
        bipartite (Topology): edges between odd and even ranks.
        channel (Channel): point-to-point messages.
        averagings_per_step, timeout (float): see `ADPSGD`. Averages for which there was no time are not made up.
        local_size (int): ranks of each machine, to count the bytes between machines.
    """

    def __init__(
        self,
        x: Float32[Tensor, "n"],
        bipartite: Topology,
        channel: Channel,
        averagings_per_step: float,
        timeout: float,
        local_size: int = 1,
    ):
        self.x, self.rank, self.size = x, channel.rank, bipartite.size
        self.peers = peer_schedule(bipartite, self.rank)
        self.is_active = self.rank % 2 == 1
        self.channel, self.averagings_per_step, self.timeout = channel, averagings_per_step, timeout
        self.lock = threading.Lock()
        self.step_counts = torch.zeros(self.size, dtype=torch.int64)
        self.averagings = 0
        self.sent_bytes = self.cross_bytes = 0  # since the start; those between machines
        self._local_size = local_size
        self._next_peer = self._next_counts_peer = 0  # positions in peers
        self._number = 0  # of the last message that expects a reply
        self._header = COUNTS + self.size  # words
        self._buffer = self._new_buffer()
        self._free_buffers = [self._new_buffer()] if self.is_active else []
        self._receive: Any = None
        self._sends: list[tuple[Any, Tensor]] = []
        self._aborting = False
        self.begin()

    def _new_buffer(self) -> Int64[Tensor, "words"]:
        """A buffer that can hold any message."""
        return torch.zeros(self._header + (self.x.numel() + 1) // 2, dtype=torch.int64)

    def begin(self) -> None:
        """Begins a cycle. No message may be in flight."""
        self.credit = inf if self.averagings_per_step == inf else 0.0  # averages that may be started
        self.awaited_rank: int | None = None
        self.is_draining = self._is_done = self._has_ended = False
        self._active_peers = set() if self.is_active else set(self.peers)  # peers that may still start an average
        self._not_done = set(range(1, self.size)) if self.rank == 0 else set()  # ranks that have not sent DONE

    def open(self, tag: int, now: float) -> None:
        """Begins to receive the messages of a cycle, which have a tag of their own."""
        self._tag = tag
        self._last_received = dict.fromkeys(range(self.size), now)
        self._last_heartbeat = self._last_poll = self._last_request = now
        self._start_receive()

    def count_step(self) -> None:
        """Counts a step of this rank. The caller holds the lock."""
        self.step_counts[self.rank] += 1
        self.credit = min(self.credit + self.averagings_per_step, max(1.0, self.averagings_per_step))

    @property
    def can_send(self) -> bool:
        """Whether this rank would initiate a message."""
        return self._can_average or self._can_finish

    @property
    def is_over(self) -> bool:
        """Whether the cycle is over and all of its messages have been sent."""
        return self._has_ended and not self._sends

    @property
    def is_aborting(self) -> bool:
        """Whether messages about a failure are still being sent."""
        return self._aborting and bool(self._sends)

    @property
    def is_idle(self) -> bool:
        """Whether only HEARTBEAT messages can arrive until this rank starts an exchange."""
        return self._is_free and not self._sends

    def poll(self, now: float) -> bool:
        """Receives and sends. Returns whether there was any message. now: seconds on any monotonic clock.

        Raises:
            GossipError, PayloadError: if a rank is lost, or a message is damaged. The error names its sender.
        """
        pause, self._last_poll = now - self._last_poll, now
        if pause >= self.timeout / HEARTBEATS_PER_TIMEOUT:  # this rank could not receive in this time
            self._last_received = {rank: time + pause for rank, time in self._last_received.items()}
        progressed = self.complete_sends()
        while self._receive is not None and self.channel.test(self._receive):
            progressed, self._receive = True, None
            has_x = int(self._buffer[KIND]) in (Kind.AVERAGE, Kind.REPLY)
            message = self._buffer if has_x else self._buffer[: self._header]
            sender = int(message[KIND + 1])
            opened(as_bytes(message), 8 * (message.numel() - KIND), MESSAGE, sender).wait()
            self._last_received[sender] = now
            self._send(self._reply_to(message))
            self._start_receive()
        if not self._sends:
            with self.lock:
                messages = self._next_messages()
                if not messages and now - self._last_request >= COUNTS_INTERVAL:
                    messages = self._request_counts()
            if self.awaited_rank is not None and messages:
                self._last_received[self.awaited_rank] = self._last_request = now
            self._send(messages)
            progressed = progressed or bool(messages)
        if not self._has_ended:
            self._send_heartbeats(now)
            self._check_timeouts(now)
        return progressed

    def complete_sends(self) -> bool:
        """Returns whether any send has been completed."""
        pending = []
        for handle, message in self._sends:
            if not self.channel.test(handle):
                pending.append((handle, message))
            elif not self.is_active and message.numel() > self._header:
                self._free_buffers.append(message)
        progressed = len(pending) < len(self._sends)
        self._sends = pending
        return progressed

    def abort(self, fault: int) -> None:
        """Informs all other ranks that rank `fault` is lost."""
        # Messages to a lost rank may never complete. They are kept, because the network still reads them.
        self._abandoned_sends, self._sends, self._aborting = self._sends, [], True
        others = [rank for rank in range(self.size) if rank not in (self.rank, fault)]
        self._send([self._header_only(Kind.ABORT, to, fault) for to in others])

    @property
    def _is_free(self) -> bool:
        return self.is_active and self.awaited_rank is None and not self.is_draining

    @property
    def _can_average(self) -> bool:
        return self._is_free and self.credit >= 1

    @property
    def _can_finish(self) -> bool:
        is_waiting = self.awaited_rank is not None or self._active_peers or self._not_done
        return self.is_draining and not self._is_done and not is_waiting

    def _next_messages(self) -> list[Outgoing]:
        if self._can_average:
            self.awaited_rank = self.peers[self._next_peer]
            self._next_peer = (self._next_peer + 1) % len(self.peers)
            self._number += 1
            self.credit -= 1
            return [(self.awaited_rank, self._write(self._free_buffers[0], Kind.AVERAGE, self._number))]
        if not self._can_finish:
            return []
        self._is_done = True
        if self.rank == 0:
            self._has_ended = True
            return [self._header_only(Kind.END, to) for to in range(1, self.size)]
        neighbours = sorted(set(self.peers)) if self.is_active else []
        leave = [self._header_only(Kind.LEAVE, to) for to in neighbours]
        return [*leave, self._header_only(Kind.DONE, 0)]

    def _request_counts(self) -> list[Outgoing]:
        if not self._is_free:
            return []
        self._next_counts_peer = (self._next_counts_peer + 1) % len(self.peers)
        self._number += 1
        self.awaited_rank = self.peers[self._next_counts_peer]
        return [self._header_only(Kind.COUNTS_REQUEST, self.awaited_rank, self._number)]

    def _reply_to(self, message: Int64[Tensor, "words"]) -> list[Outgoing]:
        """Processes a received message. Its memory may be reused afterwards."""
        kind, sender, number = message[KIND:COUNTS].tolist()
        with self.lock:
            torch.maximum(self.step_counts, message[COUNTS : self._header], out=self.step_counts)
            if kind == Kind.AVERAGE and sender in self._active_peers:
                buffer = self._free_buffers.pop() if self._free_buffers else self._new_buffer()
                reply = self._write(buffer, Kind.REPLY, number)
                self.x += self._x_of(message).sub_(self._x_of(reply)).mul_(0.5)
                self.averagings += 1
                return [(sender, reply)]
            if kind == Kind.COUNTS_REQUEST and sender in self._active_peers:
                return [self._header_only(Kind.COUNTS_REPLY, sender, number)]
            is_awaited = (sender, number) == (self.awaited_rank, self._number)
            if kind == Kind.COUNTS_REPLY and is_awaited:
                self.awaited_rank = None
            elif kind == Kind.REPLY and is_awaited:
                sent_x = self._x_of(self._free_buffers[0])
                self.x += self._x_of(message).sub_(sent_x).mul_(0.5)
                self.awaited_rank = None
                self.averagings += 1
            elif kind == Kind.LEAVE and sender in self._active_peers:
                self._active_peers.remove(sender)
            elif kind == Kind.DONE and sender in self._not_done:
                self._not_done.remove(sender)
            elif kind == Kind.END and self._is_done:
                self._has_ended = True
            elif kind == Kind.ABORT:
                fault = (
                    "failed: see its own output" if number == sender else f"timed out (reported by rank {sender})"
                )
                raise GossipError(f"gossip has ended: rank {number} {fault}")
            elif kind != Kind.HEARTBEAT:
                raise AssertionError(f"unexpected message {number} of kind {kind} from rank {sender}")
            return []

    def _header_only(self, kind: Kind, to: int, number: int = 0) -> Outgoing:
        return to, self._write(torch.empty(self._header, dtype=torch.int64), kind, number)

    def _write(self, message: Tensor, kind: Kind, number: int) -> Tensor:
        """Writes a message, with x if it has room for x."""
        message[KIND:COUNTS] = torch.tensor([kind, self.rank, number], dtype=message.dtype)
        message[COUNTS : self._header] = self.step_counts
        if message.numel() > self._header:
            self._x_of(message).copy_(self.x)
        return message

    def _x_of(self, message: Tensor) -> Tensor:
        return message[self._header :].view(torch.float32)[: self.x.numel()]

    def _send(self, messages: list[Outgoing]) -> None:
        for to, message in messages:
            write_header_(as_bytes(message), MESSAGE)
            self.sent_bytes += message.nbytes
            if to // self._local_size != self.rank // self._local_size:
                self.cross_bytes += message.nbytes
            self._sends.append((self.channel.isend(to, message, self._tag), message))

    def _start_receive(self) -> None:
        """Receives the next message, if another one can arrive in this cycle."""
        if not self._has_ended and (self.rank > 0 or self._active_peers or self._not_done):
            self._receive = self.channel.irecv(self._buffer, self._tag)

    def _send_heartbeats(self, now: float) -> None:
        if now - self._last_heartbeat >= self.timeout / HEARTBEATS_PER_TIMEOUT:
            self._last_heartbeat = now
            others = range(1, self.size) if self.rank == 0 else range(0 if self._is_done else 1)
            self._send([self._header_only(Kind.HEARTBEAT, to) for to in others])

    def _check_timeouts(self, now: float) -> None:
        monitored = self._not_done if self.rank == 0 else {0}
        if self.awaited_rank is not None:
            monitored = {*monitored, self.awaited_rank}
        for rank in sorted(monitored):
            if now - self._last_received[rank] > self.timeout:
                self.abort(rank)
                raise GossipError(
                    f"gossip has ended: rank {rank} timed out: it sent no message for {self.timeout:g} seconds. "
                    "It ended, hangs or has lost the network. If only the time between synchronize_messages() and "
                    "resume() was long, raise timeout"
                )


_abandoned: list[AveragingProtocol] = []  # the network may still read and write their messages
