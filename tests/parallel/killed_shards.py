"""Trains models that FSDP2 shards or replicates, compressed to 16, 8 and 4 bits, to the end or until it is killed.

torchrun --nproc-per-node 4 tests/parallel/killed_shards.py FOLDER whole    # without a break
torchrun --nproc-per-node 4 tests/parallel/killed_shards.py FOLDER killed   # saves a checkpoint, and goes on
torchrun --nproc-per-node 4 tests/parallel/killed_shards.py FOLDER resumed  # from this checkpoint to the end

On 4 ranks: HSDP and a mixture of experts, each 2 x 2. On 2 ranks: `replicate`.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from parallel import sharded
from parallel.mixture import mixture
from parallel.sharded import EXCHANGED, QUANTIZED, batches, build, replicated, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dgc.comm.connect import connect
from dgc.core.bucket import local_part
from dgc.fsdp import load_state, quantize, save_state

SAVED, STEPS = 3, 6
Start = Callable[[Any], Any]
INSIDE: dict[str, Start] = {
    **QUANTIZED,
    "16 bits at random": partial(quantize, gradients=16, random=True),
    "16 bits, weights in 4": partial(quantize, gradients=16, weights=4),
    "8 bits, weights in 4": partial(quantize, gradients=8, weights=4),
}
MODELS: dict[int, dict[str, tuple[Callable[[], Any], dict[str, Start]]]] = {
    2: {"replicate": (replicated, EXCHANGED)},
    4: {
        "HSDP": (lambda: build(sharded.of_hsdp()), EXCHANGED),
        "HSDP, inside": (lambda: build(sharded.of_hsdp()), INSIDE),
        "experts with replicas": (partial(mixture, "replicas"), EXCHANGED),
        "experts with shards": (partial(mixture, "sharded"), INSIDE),
    },
}


class Run:
    def __init__(self, make: Callable[[], Any], start: Start):
        self.model = make()
        self.exchange = start(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        parts: dict[str, Any] = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def end(self) -> dict[str, Any]:
        """What this rank has of the parameters, the optimizer and what is not sent."""
        found: dict[str, Any] = local({**self.state(), "exchange": self.exchange.state_dict()})
        return found


def local(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [local(value) for value in state]
    return local_part(state).detach().clone() if isinstance(state, torch.Tensor) else state


def main(folder: Path, part: str) -> None:
    transport = connect()
    runs = {
        f"{name}, {kind}": Run(make, start)
        for name, (make, starts) in MODELS[transport.size].items()
        for kind, start in starts.items()
    }
    if part == "resumed":
        states = {name: run.state() for name, run in runs.items()}
        checkpoint.load(states, checkpoint_id=folder / "models")
        for name, run in runs.items():
            run.load(states[name])
            load_state(run.exchange, folder / name)
    inputs = batches(1000, transport.rank)
    for step in count(SAVED if part == "resumed" else 0):
        if step == STEPS and part != "killed":
            break
        if step == SAVED and part == "killed":
            checkpoint.save({name: run.state() for name, run in runs.items()}, checkpoint_id=folder / "models")
            for name, run in runs.items():
                save_state(run.exchange, folder / name)
            (folder / f"rank{transport.rank}").write_text(str(os.getpid()))
        for run in runs.values():
            train(run.model, run.optimizer, inputs[step : step + 1])
    torch.save({name: run.end() for name, run in runs.items()}, folder / f"{part}{transport.rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]), sys.argv[2])
