"""What a gossip method sends and computes in a step: models to a few neighbours, in place of gradients to all.

The optimizer is built as by train.py and takes steps on `AlikeRanks`, with a copy of the model. A message is sent
after the update of the parameters and awaited before the next forward pass, so it does not overlap with backward.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from omegaconf import DictConfig

from dgc.comm import Request
from dgc.cost import AlikeRanks, Message, Traffic, message_of
from dgc.cost.caches import cache_evictor
from dgc_training.startup.build import build, config_errors, wrap_optimizer
from dgc_training.startup.parameters import parameter_groups
from scripts.advise.workload import Workload


class RecordingRanks(AlikeRanks):
    """Alike ranks that keep the messages of all requests since the last `clear`."""

    def __init__(self, size: int, local_size: int):
        super().__init__(size, local_size)
        self.messages: list[Message] = []

    def launch(self, name: str, requests: Sequence[Request], lane: str = "") -> Any:
        replies = super().launch(name, requests, lane)
        self.messages += [message_of(request, self, self.awaited) for request in requests]
        return replies


def record_gossip(tree: DictConfig, workload: Workload, size: int, local_size: int, steps: int) -> list[Traffic]:
    """The exchange of models in each of several steps.

    Args:
        tree: The config of the experiment with a synchronous gossip method.
        workload: Model and gradients.
        size: Number of ranks.
        local_size: Ranks of each machine.
        steps: Number of steps.

    Raises:
        ConfigError: The optimizer cannot be built, or the replies of the neighbours cannot be made by one rank.
    """
    model, ranks, found = deepcopy(workload.model), RecordingRanks(size, local_size), []
    evict = cache_evictor()
    with config_errors():
        inner = build(tree.train.optimizer, parameter_groups(model, tree.train.optimize_bn_separately))
        optimizer = wrap_optimizer(inner, model, tree.train, ranks)
        optimizer.begin_epoch(tree.train.num_epochs - 1)
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for step in range(steps):
            gradients = workload.gradients[step % len(workload.gradients)]
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                p.grad = gradients[name].clone() if name in gradients else None
            evict()
            ranks.messages.clear()
            before = dict(optimizer.meter.seconds)
            optimizer.step()
            optimizer.zero_grad()  # receives what the step has sent for
            spent = {phase: seconds - before[phase] for phase, seconds in optimizer.meter.seconds.items()}
            encode, decode = spent["compress"], spent["decode"] + spent["wait"]
            found.append(Traffic(size, local_size, (tuple(ranks.messages),), encode, decode, (elements,)))
        optimizer.close()
    return found
