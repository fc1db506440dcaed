"""The advisor: predicts the time of a training step for each method of compression, and recommends one or none.

On paper, from a number of parameters and the time of a step without communication, in seconds:

    python -m dgc.advise --parameters 350M --step 1.2s --hosts 8 --rate 1gbit --optimizer adamw

For a model of your own. `make` returns the model and a batch, and a third value, loss(model, batch), unless
model(*batch) or model(**batch) returns the loss or has an attribute `loss`:

    python -m dgc.advise --model my_package.my_module:make --hosts 8 --rate 1gbit --optimizer adamw
    torchrun --nproc-per-node 2 ... -m dgc.advise --model my_package.my_module:make --verify 30

Under a launcher the network is measured. The page "Does it pay?" of the documentation says what is measured and
what is predicted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

import dgc.kernels as kernels
from dgc.advisor.arguments import add_network, check_loss, check_network
from dgc.advisor.candidates import Candidate
from dgc.advisor.cluster import Cluster, cluster_on_paper, load_average
from dgc.advisor.cost.collectives import measure_network
from dgc.advisor.methods import FAMILIES, METHODS, NAMES, Method, builder, unfit
from dgc.advisor.paper import (
    VALID_PARAMETERS,
    VALID_STEP,
    Shape,
    candidate_on_paper,
    shape_of,
    workload_on_paper,
)
from dgc.advisor.study import Subject, compare, progress_of
from dgc.advisor.workload import LossOf, Passes, Workload, WorkloadError, measure_workload
from dgc.comm import Transport
from dgc.comm.connect import connect
from dgc.launch import started_by
from dgc.units import COUNTS, TIMES, quantity

ALIKE_ON_PAPER = 1.05  # computing, which is left out, takes more than such a difference


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    what, _, examples = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m dgc.advise",
        description=what,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--parameters", metavar="N", help="on paper: of the model, such as 350M")
    parser.add_argument("--step", metavar="TIME", help="on paper: a step on one rank without communication: 1.2s")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="a function that returns a model and a batch")
    parser.add_argument("--optimizer", choices=tuple(FAMILIES), default="sgd")
    parser.add_argument("--device", default="auto", help="such as cuda or cpu; auto: a GPU if there is one")
    add_network(parser, NAMES)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, connect: Callable[..., Transport] = connect) -> int:
    """Runs the advisor and returns the exit status: 2 for what cannot be done, with one message."""
    args = parse_arguments(argv)
    busy = load_average()
    started = started_by(os.environ)
    ranks = 1 if started is None else started.size
    try:
        check_arguments(args, ranks)
        on_paper = None if args.parameters is None else described_work(args)
        make = None if args.model is None else function_of(args.model)
        if ranks == 1:
            cluster = cluster_on_paper(args)
            device = device_of(args.device, 0)
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (args.ranks_per_host or 1)))
        else:
            transport = connect(hierarchical="auto")
            device = device_of(args.device, transport.rank % transport.local_size)
            cluster = Cluster(transport, *measure_network(transport, device, args.repeats))
        advise(args, on_paper, make, cluster, device, busy)
    except ValueError as error:
        where = "" if started is None or started.rank == 0 else f"rank {started.rank}: "
        print(f"advise: {where}{error}", file=sys.stderr)
        return 2
    return 0


def check_arguments(args: argparse.Namespace, ranks: int) -> None:
    """Raises ValueError if the options contradict each other or the launcher."""
    if (args.parameters is None) == (args.model is None):
        raise ValueError(
            "give --parameters and --step for a prediction on paper, or --model for a model of your own"
        )
    if (args.parameters is None) != (args.step is None):
        raise ValueError("--parameters and --step go together: --parameters 350M --step 1.2s")
    if args.parameters is not None and ranks > 1:
        raise ValueError("under a launcher the work is measured: --model in place of --parameters")
    check_network(args, ranks)
    check_loss(args, FAMILIES[args.optimizer], args.optimizer)


def described_work(args: argparse.Namespace) -> tuple[Shape, float]:
    """The model and the seconds of a step that --parameters and --step describe."""
    parameters = quantity(args.parameters, COUNTS, "--parameters", VALID_PARAMETERS)
    return shape_of(round(parameters)), quantity(args.step, TIMES, "--step", VALID_STEP)


def device_of(name: str, local_rank: int) -> torch.device:
    """The device of a rank, which it makes the current one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            device = torch.device("cuda", local_rank if device.index is None else device.index)
            torch.cuda.set_device(device)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


def function_of(path: str) -> Callable[[], Any]:
    """The function that MODULE:FUNCTION names, searched in the working directory as well."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"--model is {path!r}; write MODULE:FUNCTION, such as my_package.my_module:make")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(
            f"--model is {path!r}, but {module!r} is no name of a module, as in an import; start in the folder of "
            "the file, or add the folder to PYTHONPATH"
        )
    sys.path.insert(0, os.getcwd())
    with errors_of(path):
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise WorkloadError(str(error)) from error
        if not callable(found):
            raise WorkloadError(f"{name} is not a function")
    return found


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Any error of the code of --model is a ValueError with the line that raised it."""
    try:
        yield
    except WorkloadError as error:
        raise ValueError(f"--model {path}: {error}") from error
    except Exception as error:
        ours = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
        places = [of for of in extract_tb(error.__traceback__) if not of.filename.startswith((*ours, "<frozen"))]
        at = f" ({places[-1].filename}, line {places[-1].lineno}, in {places[-1].name})" if places else ""
        raise ValueError(f"--model {path}: {type(error).__name__}: {error}{at}") from error


def own_workload(make: Callable[[], Any], device: torch.device, repeats: int, progress: Any) -> Workload:
    """The measured work of a function's model on its batch, at every step."""
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise WorkloadError("the function must return (model, batch) or (model, batch, loss)")
    model, batch = made[0].to(device).train(), moved(made[1], device)
    loss: LossOf = made[2] if len(made) == 3 else loss_of_model
    if not callable(loss):
        raise WorkloadError(
            f"the third value of the function is a {type(loss).__name__}, not a loss(model, batch)"
        )

    def steps() -> Iterator[Passes]:
        while True:
            yield [batch]

    return measure_workload(model, steps(), loss, "one batch of the function", device, repeats, progress)


def loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model itself returns."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise WorkloadError("the model returns no loss; return (model, batch, loss) with loss(model, batch)")
    return loss


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # a named tuple, or not
    return batch


def advise(
    args: argparse.Namespace,
    on_paper: tuple[Shape, float] | None,
    make: Callable[[], Any] | None,
    cluster: Cluster,
    device: torch.device,
    busy: float,
) -> None:
    """Measures what is not given, predicts all methods, and prints the result. Collective."""

    transport = cluster.transport
    if on_paper is not None:
        shape, seconds = on_paper
        workload = workload_on_paper(shape, seconds, device)
        heading = [
            f"model      {shape.parameters:,} parameters, taken for a Transformer of {shape.layers} layers of "
            f"width {shape.width}, with {args.optimizer}",
            f"work       {args.step} per step, as given; computing of the methods: left out (--model measures it)",
        ]
    else:
        assert make is not None
        with errors_of(args.model):
            workload = own_workload(make, device, args.repeats, progress_of(cluster))
        workload = workload.slowest(transport)
        count = sum(p.numel() for p in workload.model.parameters())
        heading = [
            f"model      {count:,} parameters on {device.type}, {kernels.describe(device)}, with {args.optimizer}",
            workload.described,
        ]

    def predicted(method: Method) -> Candidate:
        ranks = transport.size, transport.local_size
        return candidate_on_paper(method, args.optimizer, shape, workload, *ranks)

    family = FAMILIES[args.optimizer]
    subject = Subject(
        workload=workload,
        methods=METHODS,
        unfit=lambda method: unfit(method, args.optimizer, family),
        build_of=lambda method: builder(method, args.optimizer, workload.gradients[0]),
        heading=heading,
        usage=lambda words: words[0],
        family=family,
        labels={"parameters": args.parameters, "model": args.model, "optimizer": args.optimizer},
        on_paper=None if on_paper is None else predicted,
        alike=1.0 if on_paper is None else ALIKE_ON_PAPER,
    )
    compare(subject, args, cluster, device, 0.0 if on_paper is not None else busy)  # on paper nothing is measured
