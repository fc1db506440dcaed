"""What a gossip method sends and computes in a step: models to a few neighbours, in place of gradients to all.

The optimizer is built as for a run and takes steps on `AlikeRanks`, with a copy of the model. A message is sent
after the update of the parameters and awaited before the next forward pass, so it does not overlap with backward.

All ranks send messages of one size. Which of them leave the machine depends on the rank and on the round of the
graph: a message has the mean over the ranks of the machine and over the rounds.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from dgc.advisor.cost.computing import AlikeRanks, evict_caches, message_of
from dgc.advisor.cost.model import RecordedMessage, Traffic
from dgc.advisor.methods import Build
from dgc.advisor.workload import Workload
from dgc.comm import Request
from dgc.optim import LocalOptimizer, Wrapper


class RecordingRanks(AlikeRanks):
    """Alike ranks that keep the messages of all requests since the last `clear`."""

    def __init__(self, size: int, local_size: int):
        super().__init__(size, local_size)
        self.messages: list[RecordedMessage] = []

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> Any:
        replies = super().launch(name, requests, communicator)
        self.messages += [message_of(request, self, self.awaited) for request in requests]
        return replies


def record_gossip(
    build: Build, workload: Workload, size: int, local_size: int, steps: int, is_timed: bool = True
) -> list[Traffic]:
    """The exchange of models in each of several steps.

    Args:
        build: Makes the optimizer of a synchronous gossip method.
        workload: Model and gradients.
        size: Number of ranks.
        local_size: Ranks of each machine.
        steps: Number of steps.
        is_timed: Whether their seconds matter. Each step then begins without what it needs in a cache.

    Raises:
        ValueError: The optimizer cannot be built, or the replies of the neighbours cannot be made by one rank.
    """
    model, ranks, found = deepcopy(workload.model), RecordingRanks(size, local_size), []
    optimizer = build(model, ranks)
    share = leaving_share(optimizer, size, local_size)
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for step in range(steps):
        gradients = workload.gradients[step % len(workload.gradients)]
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone() if name in gradients else None
        if is_timed:
            evict_caches()
        ranks.messages.clear()
        before = dict(optimizer.meter.seconds)
        optimizer.step()
        optimizer.zero_grad()  # receives what the step has sent for
        spent = {phase: seconds - before[phase] for phase, seconds in optimizer.meter.seconds.items()}
        encode, decode = spent["compress"], spent["decode"] + spent["wait"]
        sent = tuple(of if share is None else replace(of, cross=share * of.wire) for of in ranks.messages)
        found.append(Traffic(size, local_size, (sent,), encode, decode, (elements,)))
    optimizer.close()
    return found


def leaving_share(optimizer: Wrapper, size: int, local_size: int) -> float | None:
    """The share of a machine's messages that leave it, over all rounds of the graph. None: there is no graph."""
    topology = getattr(optimizer.method, "topology", None) if isinstance(optimizer, LocalOptimizer) else None
    if topology is None:
        return None
    ranks = range(size - local_size, size)
    peers = [peer for t in range(topology.period) for rank in ranks for peer in topology.out_peers(rank, t)]
    return sum(peer not in ranks for peer in peers) / len(peers)
