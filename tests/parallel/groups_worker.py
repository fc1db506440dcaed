"""A rank of a group that trains until it is ended: groups_worker.py ADDRESS NUMBER FOLDER KIND [SECONDS]

Prints a line of JSON after each outer step: the committed state, its digest, and how long it has waited.
KIND: plain (one rank), ddp or fsdp; torchrun: local steps of all ranks, without groups, for comparison.
"""

import json
import os
import sys
import time
from itertools import count
from typing import Any

import torch
from optim.nets import net
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dgc.comm.connect import connect as connect_ranks
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import ThresholdCompressor
from dgc.fsdp import ShardedLocalOptimizer, local_mesh
from dgc.gossip import HierarchicalGossip
from dgc.groups import connect
from dgc.local import Nesterov, OuterSteps
from dgc.optim import LocalOptimizer

SLEEP = 0.005  # seconds of a step
RATE = 0.002


def outer() -> OuterSteps:
    return OuterSteps(10, outer=Nesterov(0.7, 0.5), compression=ThresholdCompressor(bits=2, threshold=None))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    """The distance from another model, whose outputs are not small. It falls as long as one trains."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    with torch.no_grad():
        y = 3 * _teacher(x)
    return (model(x) - y).square().mean()


_teacher = net(99)


def made(kind: str, groups: Any) -> tuple[Any, Any, int]:
    """The model, its optimizer, and this rank."""
    model = net()
    if kind == "plain":
        sgd = torch.optim.SGD(model.parameters(), lr=RATE)
        alone = LockstepWorld(1).transports[0]
        named = model.named_parameters()
        return model, LocalOptimizer(sgd, named, outer(), transport=alone, groups=groups), 0
    transport = connect_ranks("torch", hierarchical=True)
    if kind == "fsdp":
        model = fully_shard(model, mesh=local_mesh(transport))
        sgd = torch.optim.SGD(model.parameters(), lr=RATE)
        sharded = ShardedLocalOptimizer(sgd, model, outer(), transport=transport, groups=groups)
        return model, sharded, transport.rank
    wrapped = DistributedDataParallel(model, process_group=local_mesh(transport).get_group())
    sgd = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    method = HierarchicalGossip(outer(), averages_gradients=False)
    named = wrapped.named_parameters()
    return wrapped, LocalOptimizer(sgd, named, method, transport=transport, groups=groups), transport.rank


def main(address: str, number: str, folder: str, kind: str, seconds: str = "1e9") -> None:
    torch.set_num_threads(1)
    tell(pid=os.getpid())
    if kind == "torchrun":
        return together()
    groups = connect(address, name=f"g{number}", folder=folder or None, log=lambda text: tell(log=text))
    model, own, rank = made(kind, groups)
    end, step, last = time.monotonic() + float(seconds), 0, -1
    while time.monotonic() < end:
        own.zero_grad()
        loss = loss_of(model, step, 10 * int(number) + rank)
        loss.backward()
        own.step()
        step += 1
        time.sleep(SLEEP)
        if groups.tag.round != last and rank == 0:
            last = groups.tag.round
            tell(
                round=last,
                attempt=groups.tag.attempt,
                digest=groups.digest,
                members=len(groups.members),
                loss=float(loss.detach()),
                longest=groups.longest,
                healed=groups.healed,
                time=time.time(),
            )
    own.close()


def together() -> None:
    """Local steps of all ranks of a launcher, which starts all of them again if one ends."""
    transport = connect_ranks("torch", timeout=60)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    own = LocalOptimizer(sgd, model.named_parameters(), outer(), transport=transport)
    for step in count():
        own.zero_grad()
        loss_of(model, step, transport.rank).backward()
        own.step()
        time.sleep(SLEEP)
        if step % 10 == 9 and transport.rank == 0:
            tell(round=step // 10, attempt=0, digest=0, members=1, time=time.time())


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
