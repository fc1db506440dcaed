"""What each rank of `benchmarks.train_step` does. `benchmarks.launches` starts it."""

import os
import warnings

import torch

from benchmarks.exchange.methods import HOROVOD
from benchmarks.launches import settings_of_rank, write_result
from benchmarks.step_times import Row, measured, merged
from benchmarks.train_step.methods import OVER_DDP, make
from benchmarks.train_step.models import make as make_work
from dgc.comm import Transport, all_gather_object


def connected(names: list[str]) -> Transport:
    """The transport of the methods of this launch."""
    if set(names) <= set(OVER_DDP):
        from dgc.comm import torch_distributed

        return torch_distributed.connect(point_to_point=True)
    if set(names) & set(HOROVOD):
        # before Horovod is loaded by the transport, which has other defaults
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "1")
        warnings.filterwarnings("ignore", "Horovod's fusion is on")
    from dgc.comm import horovod

    return horovod.connect(point_to_point=True)


def main() -> None:
    settings = settings_of_rank()
    names = settings["methods"]
    torch.set_num_threads(settings["threads"])
    torch.set_flush_denormal(True)  # a batch that is learned by heart has denormal gradients, which are slow
    transport = connected(names)
    methods = {}
    for name in names:
        work = make_work(settings["model"], settings["batch"], settings["image"], transport.rank)
        methods[name] = make(name, work, settings["ratio"], transport)
    found: dict[str, list[Row]] = {name: [] for name in methods}
    for repeat in range(settings["warmup"] + settings["repeats"]):
        for name, method in methods.items():
            row = measured(method.step, method.meter, transport)
            if repeat >= settings["warmup"]:
                found[name].append(row)
    everyone = all_gather_object(transport, found)
    parameters = sum(p.numel() for p in work.model.parameters())
    for method in methods.values():
        close = getattr(method.optimizer, "close", None)
        if close is not None:
            close()
    if transport.rank == 0:
        rows = {name: merged([rank[name] for rank in everyone]) for name in methods}
        write_result({"parameters": parameters, "methods": rows})


if __name__ == "__main__":
    main()
