"""What each method sends and computes, with the model's own gradients and the optimizer that a run would use.

The optimizer is built as for a run, on `AlikeRanks`: with its buckets, its fallbacks and, where the machines have
two levels, with these. Several exchanges come first, so that the residual is as in
training. Before each measured one, other data pushes everything out of the caches, as forward and backward do.
On two levels, every rank of a machine has another share of the model: the slowest counts, and the bytes of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dgc.advisor.cost.computing import AlikeRanks, Planned, evict_caches, fit_computing, record_steps, typical
from dgc.advisor.cost.model import Compute, Network, Prediction, Traffic, predict
from dgc.advisor.gossip import record_gossip
from dgc.advisor.methods import Build, Method, before_compression
from dgc.advisor.workload import Workload
from dgc.comm import Transport, all_gather_object, barrier
from dgc.optim import DistributedOptimizer

MEASURED = (2, 4, 8)  # machines whose replies are decoded to measure computing
WARMUP = 4  # exchanges that fill the residual


@dataclass(frozen=True)
class Candidate:
    """A method with what it does in one step of the model.

    Attributes:
        method: The row of the table.
        traffic: Its messages.
        compute: Its computing.
        ready: By bucket, the share of backward after which its gradients are complete.
        dense: The same of its dense steps, which come first. None: it has none.
    """

    method: Method
    traffic: Traffic
    compute: Compute
    ready: tuple[float, ...]
    dense: "Candidate | None" = None

    def predict(self, network: Network) -> Prediction:
        return predict(self.traffic, network, self.compute, self.ready)


def measure_candidate(
    method: Method, build: Build, workload: Workload, size: int, local_size: int, repeats: int
) -> Candidate:
    """Records and measures a method as the ranks of the last machine, one after another if they differ.

    Args:
        method: The row of the table.
        build: Makes its optimizer, in the phase of training that is predicted.
        workload: Model and gradients.
        size: Number of ranks.
        local_size: Ranks of each machine.
        repeats: Number of measured exchanges.

    Raises:
        ValueError: The optimizer cannot be built with the method, or its replies cannot be made by one rank.
    """
    found = measure_steps(Recorder(method, build, workload, local_size), size, repeats)
    if not method.dense_share:
        return found
    first = Recorder(method, build, workload, local_size, dense=True)
    return replace(found, dense=measure_steps(first, size, repeats))


def measure_steps(recorder: "Recorder", size: int, repeats: int) -> Candidate:
    """What a recorder's method does in one of the steps that it records."""
    method, local_size = recorder.method, recorder.local_size
    if method.averages_models or size <= max(MEASURED) * local_size:
        steps = recorder.record(size, WARMUP + repeats)
        traffic, compute = steps[-1], compute_of(steps)
    else:
        fewer = [recorder.record(n * local_size, WARMUP + repeats) for n in MEASURED]
        compute = fit_computing([typical(steps[WARMUP:]) for steps in fewer])
        traffic = recorder.record(size, 2)[-1]
    return Candidate(method, traffic, compute, recorder.ready)


class Recorder:
    """Exchanges of a method, with the workload's gradients in turns.

    Args:
        method, build, workload, local_size: As in `measure_candidate`.
        dense: Whether to record the dense steps that come first, in place of those that compress.
        is_timed: Whether the seconds of the steps matter. Each step then begins without what it needs in a cache.

    Attributes:
        ready: After a recording, by bucket, the share of backward after which its gradients are complete.
    """

    def __init__(
        self,
        method: Method,
        build: Build,
        workload: Workload,
        local_size: int,
        dense: bool = False,
        is_timed: bool = True,
    ):
        self.dense, self.is_timed = dense, is_timed
        self.method, self.build, self.workload, self.local_size = method, build, workload, local_size
        self.ready: tuple[float, ...] = (1.0,)
        self._fill: Callable[[int], None]

    def record(self, size: int, steps: int) -> list[Traffic]:
        """The exchanges of several steps of `size` ranks. Raises the errors of `measure_candidate`."""
        if self.method.averages_models:
            return record_gossip(self.build, self.workload, size, self.local_size, steps, self.is_timed)
        with torch.no_grad():
            found = record_steps(self._plan, size, self.local_size, steps, self._refill)
        self.workload.model.zero_grad()
        return found

    def _plan(self, ranks: int, rank: int) -> Planned:
        optimizer = self.build(self.workload.model, AlikeRanks(ranks, self.local_size, rank % self.local_size))
        assert isinstance(optimizer, DistributedOptimizer)
        if self.dense:
            before_compression(optimizer)
        planned = optimizer.planned
        optimizer.close()
        self.ready = tuple(max(self.workload.ready[s.name] for s in of.bucket.segments) for of in planned)

        def set_gradients(step: int) -> None:
            gradients = self.workload.gradients[step % len(self.workload.gradients)]
            for of in planned:
                for i, segment in enumerate(of.bucket.segments):
                    found = gradients.get(segment.name)
                    of.parameters[i].grad = None if found is None else found.clone()
                    of.collect(i)

        self._fill = set_gradients
        return [(of.bucket, of.states) for of in planned]

    def _refill(self, planned: Planned, step: int) -> None:
        self._fill(step)
        if self.is_timed:
            evict_caches()


def compute_of(steps: Sequence[Traffic]) -> Compute:
    """Median seconds of the steps after the warm-up, all decoded."""
    found = typical(steps[WARMUP:])
    return Compute(found.encode, found.decode or 0.0)


def measure_all(
    methods: Sequence[Method],
    build_of: Callable[[Method], Build],
    workload: Workload,
    transport: Transport,
    repeats: int,
    progress: Callable[[str, int, int], None],
) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates, and for each method that cannot be built the reason. Collective.

    The ranks measure at the same time, since they share cores and memory. The slowest one counts. `progress` is
    called before each method, with its name and number, and the number of all.
    """
    found, refused = [], {}
    for number, method in enumerate(methods, 1):
        progress(method.name, number, len(methods))
        try:
            build = build_of(method)
            barrier(transport, f"advise.{method.name}")
            candidate = measure_candidate(method, build, workload, transport.size, transport.local_size, repeats)
        except ValueError as error:
            refused[method.name] = "; ".join(str(error).splitlines())
            continue
        found.append(slowest(candidate, transport))
    return found, refused


def slowest(candidate: Candidate, transport: Transport) -> Candidate:
    """The candidate with the computing of the slowest rank. Collective."""
    own = candidate.compute
    seconds = (own.encode, own.decode, own.per_rank)
    everyone = all_gather_object(transport, seconds, f"advise.{candidate.method.name}")
    compute = max((Compute(*of) for of in everyone), key=lambda c: c.seconds(transport.size))
    dense = None if candidate.dense is None else slowest(candidate.dense, transport)
    return replace(candidate, compute=compute, dense=dense)
