"""Outer steps of a replica group that meets others in rounds: `OuterSteps` in which members come and go.

The exchange of a round is the one of `dgc.local`, over a transport between the members of the round. What differs:

- The fragments of a round, and the factor of the outer learning rate, follow from the number of the round, because
  members have taken different numbers of steps.
- With other members than before, the exchange is built again with the compressors' states by parameter name.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from threading import RLock
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from dgc.comm.digest import digest_of
from dgc.comm.mesh import MeshTransport
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import as_bytes
from dgc.comm.transport import CrossMachineTransport, Transport
from dgc.core.state import check_mapping, with_tensors
from dgc.engine.agreement import describe
from dgc.engine.state import named_methods
from dgc.gossip.model import FlatModel
from dgc.local.exchange import ERRORS as OWN_ERRORS
from dgc.local.exchange import Flight, Fragment, OuterExchange
from dgc.local.steps import OuterSteps

ERRORS = (*OWN_ERRORS, "server_errors")  # a server loads its chunk, and sends the rest with the pseudo-gradient


class Leads(Protocol):
    """Connects a group with the others, see dgc.groups.connection."""

    weighted: bool

    def begin(self, steps: "GroupSteps", inside: Transport, settings: str) -> None: ...
    def join(self) -> None: ...
    def outer_step(self) -> None: ...
    def before_a_change(self) -> None: ...
    def close(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class GroupSteps(OuterSteps):
    """The outer steps of a group. `dgc.groups.connect(address).method(OuterSteps(...))` makes it.

    Raises:
        ValueError: The outer steps have a base, a delay or alpha; or, by `start`, an outer optimizer that reads
            the inner learning rate, or several ranks that are no group.
    """

    keeps_start = needs_common_start = False  # a group may begin with another model, and loads the one of the run

    def __init__(self, steps: OuterSteps, groups: Leads):
        if type(steps) is not OuterSteps:
            raise ValueError(f"groups need a new dgc.local.OuterSteps, not {type(steps).__name__}")
        vars(self).update(vars(steps))
        if self.base is not None:
            raise ValueError(
                "groups come and go, and gossip between exchanges needs ranks that stay: leave base out"
            )
        if self.delay:
            raise ValueError(
                "a group waits until all of a round have its means, so training cannot go on: use delay=0"
            )
        if self.alpha:
            raise ValueError(
                "alpha keeps steps that a round has counted, and the next one would count them again: use alpha=0"
            )
        self.groups, self.lock = groups, RLock()
        self._has_begun = False
        self._before: dict[str, Any] = {}  # the compressors' states before an exchange
        self._shared: dict[str, Any] = {}  # what of them is common to all members, after the last committed round
        self._digests: dict[int, int] = {}  # of fragments, as far as they have not changed since
        self._epoch: int | None = None
        self._mesh: MeshTransport | None = None
        self._lr = self._round_bytes = 0.0
        self._own_share: float | None = None  # of this group in a round. None: 1
        self._items = self._exchanged = 0  # samples or tokens so far, and when an exchange was prepared
        self._counted: list[int] = []  # those that rounds have counted, or that were dropped, of each fragment

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        if transport.size > 1:
            raise ValueError(
                f"{transport.size} ranks of a group would be workers of their own: use HierarchicalGossip("
                "OuterSteps(...)) with connect(hierarchical=True), or ShardedLocalOptimizer, on one machine"
            )
        super().start(model, transport, meter, name)
        self._alone, self._meter, self._name = transport, meter, f"{name}.outer"
        self.replica_group = None  # the trainer's own restarts are inside a group
        if any("inner_lr" in fragment.optimizer.defaults for fragment in self.fragments):
            raise ValueError("SlowMo reads the learning rate, which differs between groups: use Nesterov()")
        self._outer_factor(0)
        self.s: Tensor | None = None
        inside = transport.inner if isinstance(transport, CrossMachineTransport) else transport
        shapes = [(segment.name, tuple(segment.shape)) for segment in model.segments]
        own = {key: getattr(self, key) for key in ("average_every", "fragment_mb", "warmup_steps", "bucket_mb")}
        own |= {"outer": self.outer, "schedule": self.outer_schedule, "momentum": self.averages_momentum}
        own["weighted"] = self.groups.weighted
        settings = describe(**own, compression=self.compression.rules, shapes=shapes, ranks=inside.size)
        self.groups.begin(self, inside, f"{crc32(repr(settings).encode()):08x}")

    @property
    def fragments(self) -> list[Fragment]:
        return list(self.exchange.fragments)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self._epoch = epoch

    # --- one step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.model.gather()
            for fragment in self.fragments:
                fragment.restart(self.z)
            self._digests.clear()
            self._items, self._counted = 0, [0] * len(self.fragments)
            self.groups.join()
            self.model.scatter()

    def update(self, step: Callable[[], object], lr: float) -> None:
        step()
        self.model.gather()
        self.steps, self._lr = self.steps + 1, lr
        if self._due():
            if self.groups.weighted and not self._items:
                raise ValueError(
                    "the groups are weighted, and this one has counted nothing: before each step, call "
                    "count(number of samples or tokens) of what dgc.groups.connect has returned"
                )
            with torch.no_grad():
                self.groups.outer_step()
                self.model.scatter()

    def plan(self, round: int) -> tuple[list[int], float | None]:
        """The numbers of the fragments of a round, and the factor of the outer learning rate."""
        count, H, warmup = len(self.fragments), self.average_every, self.warmup_steps
        if round <= warmup:
            return list(range(count)), self._outer_factor(round)
        # of all steps after which a fragment is due, the first ones are in the warm-up
        due = warmup // H * count + sum(i * H // count <= warmup % H for i in range(1, count))
        number = due + round - warmup
        return [number % count], self._outer_factor(number // count * H + number % count * H // count)

    # --- the numbers of a member --------------------------------------------------------------------

    def count(self, items: int) -> None:
        """Count samples or tokens of a step, before it."""
        self._items += items

    def weight(self, round: int) -> int:
        """Samples or tokens of the progress that a round would exchange, or 1 if groups are not weighted."""
        if not self.groups.weighted:
            return 1
        return self._items - min(self._counted[number] for number in self.plan(round)[0])

    def prepare(self, round: int, share: float) -> None:
        self._before, self._own_share = self._compression(), None if share == 1 else share
        self._exchanged = self._items

    def exchange_with(self, mesh: MeshTransport, round: int) -> int:
        """The exchange of a round. Returns a digest of the common state and of the means.

        Raises:
            MeshError: It has failed.
            ValueError: Settings differ.
        """
        if mesh is not self._mesh:
            self._build(mesh, self._before)
            self._mesh = mesh
        fragments, factor = self.plan(round)
        lr = None if round <= self.warmup_steps else self._lr
        flight = Flight(fragments, round, lr, outer_factor=factor)
        before, mesh.digest_of_sums = self._meter.wire_bytes, 0
        self.exchange.begin(flight, self.z, 1.0, share=self._own_share)
        self.exchange.arrive()
        self._round_bytes = self._meter.wire_bytes - before
        digest = crc32(str(mesh.digest_of_sums).encode(), self.digest())
        for plan in (plan for number in fragments for plan in self.fragments[number].planned):
            if not plan.compressor.averages_by_sums:
                digest = digest_of(_bytes(plan.bucket.flat), digest)
        return crc32(str(flight.nonfinite).encode(), digest)

    def commit(self, round: int) -> int:
        flight = self.exchange.flight
        assert flight is not None and flight.arrived, "nothing was exchanged"
        parts = [segment for i in flight.fragments for segment, _, _ in self.fragments[i].tensors]
        with self.lock:
            own = None if self.s is None else self.z - self.s
            self.exchange.land(0.0)
            self._take_as_counted(flight.fragments, self._exchanged)
            self._continue(own, parts)
            self._share()
            for number in flight.fragments:
                self._digests.pop(number, None)
            digest = self.digest()
        self.s = None
        return digest

    def void(self) -> None:
        self._mesh, self.s = None, None
        self._build(self._alone, self._before)

    def doubt(self) -> None:
        self.s = self.z.clone()

    def heal(self, state: Any, keeps: bool) -> int:
        check_mapping("the state of another member", state)
        with self.lock:
            own = self.z - self._z0() if keeps else None
            tables = self._compression() if keeps else self._without_errors(self._compression())
            for name, table in state["shared"].items():
                tables[name] = {**tables.get(name, {}), **table}
            self._build(self._alone, tables)
            if not keeps and any(bool(error.any()) for error in self.exchange.errors()):
                raise ValueError(f"a compressor keeps what it has not sent in other tables than {ERRORS}")
            full = {"z0": state["z0"], "outer": state["outer"], "means": {}, "flight": None}
            self.exchange.load_state_dict({**full, "compression": tables, "dropped": self.exchange.dropped})
            for fragment in self.fragments:
                fragment.merge(0.0)
            if not keeps:
                self._take_as_counted(range(len(self.fragments)), self._items)
            self._continue(own, [segment for f in self.fragments for segment, _, _ in f.tensors])
            self._share()
            self._digests.clear()
            digest = self.digest()
        self._mesh = None
        return digest

    def _continue(self, own: Tensor | None, parts: list[Any]) -> None:
        """Add what was trained since the exchange to the new z0 of some tensors."""
        for segment in parts if own is not None else ():
            segment.of(self.z).add_(segment.of(own))

    def _take_as_counted(self, fragments: Iterable[int], items: int) -> None:
        for number in fragments:
            self._counted[number] = items

    def _z0(self) -> Tensor:
        z0 = torch.empty_like(self.z)
        for fragment in self.fragments:
            for segment, own, _ in fragment.tensors:
                segment.of(z0).copy_(own)
        return z0

    # --- states -----------------------------------------------------------------------------------

    def _build(self, transport: Transport, tables: Mapping[str, Any]) -> None:
        """Build the exchange again, over another transport, with these states of the compressors."""
        dropped, fragments = self.exchange.dropped, self.exchange.fragments
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `start` has warned
            self.exchange = OuterExchange(fragments, transport, self._meter, self._name)
        self._senders, self.exchange.dropped = self.exchange.states, dropped
        for name, states in named_methods(self.exchange.states).items():
            if self._epoch is not None:
                states.begin_epoch(self._epoch)
            states.load_state_dict(tables[name])

    def _compression(self) -> dict[str, Any]:
        states = named_methods(self.exchange.states)
        return {name: with_tensors(torch.clone, own.state_dict()) for name, own in states.items()}

    @staticmethod
    def _without_errors(compression: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {
                table: with_tensors(torch.zeros_like, values) if table in ERRORS else values
                for table, values in tables.items()
            }
            for name, tables in compression.items()
        }

    def _share(self) -> None:
        states = named_methods(self.exchange.states)
        shared = {
            name: {table: values for table, values in own.state_dict().items() if table not in ERRORS}
            for name, own in states.items()
        }
        self._shared = with_tensors(torch.clone, shared)

    def digest(self) -> int:
        """A digest of z0 and of the outer optimizer's state. Only fragments that have changed are read."""
        for number, fragment in enumerate(self.fragments):
            if number not in self._digests:
                self._digests[number] = _digest_of_fragment(fragment)
        return crc32(repr(sorted(self._digests.items())).encode())

    def committed_state(self) -> dict[str, Any]:
        """The state of the last committed round, which other members load."""
        tensors = {s.name: (f.optimizer.state.get(z0, {}), z0) for f in self.fragments for s, z0, _ in f.tensors}
        return {
            "z0": {name: _on_host(z0) for name, (_, z0) in tensors.items()},
            "outer": {name: with_tensors(_on_host, dict(state)) for name, (state, _) in tensors.items()},
            "shared": with_tensors(_on_host, self._shared),
        }

    # --- the interface of a method ----------------------------------------------------------------

    def synchronize_messages(self) -> None:
        """Nothing is in flight between outer steps, except what waits for a decision."""

    def flush(self) -> None:
        """As `synchronize_messages`."""

    def join(self) -> None:
        raise ValueError("groups join by themselves, before their first step")

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.groups.metrics(), "round_bytes": self._round_bytes}

    def close(self) -> None:
        self.groups.close()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint. The progress in it may have been exchanged since: the group begins from z0."""
        self.groups.before_a_change()
        with self.lock:
            super()._load(state)
            self.exchange.flight = None
            self._build(self._alone, self._without_errors(self._compression()))
            for fragment in self.fragments:
                fragment.merge(0.0)
            self.model.scatter()
            self._has_begun = False


def _digest_of_fragment(fragment: Fragment) -> int:
    found = 0
    for segment, z0, _ in fragment.tensors:
        found = digest_of(_bytes(z0), found)
        for key, value in sorted(fragment.optimizer.state.get(z0, {}).items()):
            content = _bytes(value) if isinstance(value, Tensor) else repr(value).encode()
            found = digest_of(content, crc32(f"{segment.name} {key}".encode(), found))
    return found


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _bytes(tensor: Tensor) -> Any:
    return as_bytes(tensor.detach().cpu().contiguous()).numpy() if tensor.numel() else b""
