"""What each method sends and computes, with the model's own gradients and the optimizer that a run would use.

The optimizer is built as by train.py, on `AlikeRanks`: with its buckets, its fallbacks and, where the config and
the machines have two levels, with these. Several exchanges come first, so that the residual is that of
training. Before each measured one, other data pushes everything out of the caches, as forward and backward do.
On two levels, every rank of a machine has another share of the model: the slowest counts, and the bytes of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig

from dgc.comm import Transport, all_gather_object, barrier
from dgc.compression import Compressor
from dgc.cost import (
    AlikeRanks,
    Compute,
    Network,
    Prediction,
    Traffic,
    fit_computing,
    predict,
    record_steps,
    typical,
)
from dgc.cost.computing import Planned, cache_evictor
from dgc_training.config import ConfigError
from dgc_training.startup.build import config_errors, wrap_optimizer
from scripts.advise.gossip import record_gossip
from scripts.advise.methods import Method
from scripts.advise.optimizers import build_inner
from scripts.advise.workload import Workload

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
    """

    method: Method
    traffic: Traffic
    compute: Compute
    ready: tuple[float, ...]

    def predict(self, network: Network) -> Prediction:
        return predict(self.traffic, network, self.compute, self.ready)


def measure_candidate(
    method: Method, tree: DictConfig, workload: Workload, size: int, local_size: int, repeats: int
) -> Candidate:
    """Records and measures a method as the ranks of the last machine, one after another if they differ.

    Args:
        method: The row of the table.
        tree: The config of the experiment with the method's files.
        workload: Model and gradients.
        size: Number of ranks.
        local_size: Ranks of each machine.
        repeats: Number of measured exchanges.

    Raises:
        ConfigError: The optimizer cannot be built with the method, or its replies cannot be made by one rank.
    """
    if tree.train.local or tree.train.gossip:
        steps = record_gossip(tree, workload, size, local_size, WARMUP + repeats)
        return Candidate(method, steps[-1], compute_of(steps), (1.0,))
    model, settings = workload.model, tree.train
    ready: tuple[float, ...] = ()
    fill: Callable[[int], None]

    def plan(ranks: int, rank: int) -> Planned:
        nonlocal ready, fill
        inner = build_inner(settings, model, workload.gradients[0])
        alike = AlikeRanks(ranks, local_size, rank % local_size)
        optimizer = wrap_optimizer(inner, model, settings, alike)
        optimizer.begin_epoch(settings.num_epochs - 1)  # after a warm-up of the ratio
        planned = optimizer.planned
        optimizer.close()
        ready = tuple(max(workload.ready[s.name] for s in of.bucket.segments) for of in planned)

        def set_gradients(step: int) -> None:
            gradients = workload.gradients[step % len(workload.gradients)]
            for of in planned:
                for i, segment in enumerate(of.bucket.segments):
                    found = gradients.get(segment.name)
                    of.parameters[i].grad = None if found is None else found.clone()
                    of.collect(i)

        fill = set_gradients
        return [(of.bucket, of.compressor) for of in planned]

    evict = cache_evictor()

    def refill(planned: Sequence[tuple[object, Compressor]], step: int) -> None:
        fill(step)
        evict()

    def steps_of(ranks: int) -> list[Traffic]:
        return record_steps(plan, ranks, local_size, WARMUP + repeats, refill)

    with config_errors(), torch.no_grad():
        if size <= max(MEASURED) * local_size:
            steps = steps_of(size)
            traffic, compute = steps[-1], compute_of(steps)
        else:
            compute = fit_computing([typical(steps_of(n * local_size)[WARMUP:]) for n in MEASURED])
            traffic = record_steps(plan, size, local_size, 2, refill)[-1]
    model.zero_grad()
    return Candidate(method, traffic, compute, ready)


def compute_of(steps: Sequence[Traffic]) -> Compute:
    """Median seconds of the steps after the warm-up, all decoded."""
    found = typical(steps[WARMUP:])
    return Compute(found.encode, found.decode or 0.0)


def measure_all(
    methods: Sequence[Method],
    load_tree: Callable[[Method], DictConfig],
    workload: Workload,
    transport: Transport,
    repeats: int,
    progress: Callable[[str, int, int], None],
) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates, and for each method that does not fit the experiment the reason. Collective.

    The ranks measure at the same time, since they share cores and memory. The slowest one counts. `progress` is
    called before each method, with its name and number, and the number of all.
    """
    found, refused = [], {}
    for number, method in enumerate(methods, 1):
        progress(method.name, number, len(methods))
        try:
            tree = load_tree(method)
            barrier(transport, f"advise.{method.name}")
            candidate = measure_candidate(method, tree, workload, transport.size, transport.local_size, repeats)
        except ConfigError as error:
            refused[method.name] = "; ".join(str(error).splitlines())
            continue
        own = candidate.compute
        everyone = all_gather_object(transport, (own.encode, own.decode, own.per_rank), f"advise.{method.name}")
        slowest = max((Compute(*seconds) for seconds in everyone), key=lambda c: c.seconds(transport.size))
        found.append(replace(candidate, compute=slowest))
    return found, refused
