"""The advisor for experiments of train.py: `dgc.advise` with the model, the data and the optimizer of a config.

    python -m scripts.advise --configs configs/digits/cnn.py --hosts 4 --rate 1gbit     on paper
    horovodrun -np 4 -H a:2,b:2 python -m scripts.advise --configs configs/digits/cnn.py   on these machines

docs/advise.md describes what is measured and what is predicted. The methods of `dgc.advisor.methods` have config
files to stack here. To add a method, add its row there and one of `scripts.methods` that has files alone: they set
`train.compression`, or a synchronous `train.gossip` or `train.local`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from dgc.advisor import methods, workload
from dgc.advisor.advice import BANDWIDTHS, Work, crossing, step_at
from dgc.advisor.arguments import add_network, check_loss, check_network, check_output
from dgc.advisor.candidates import Candidate
from dgc.advisor.cluster import Cluster, cluster_on_paper, load_average
from dgc.advisor.cost import AlikeRanks, Network
from dgc.advisor.cost.collectives import measure_network
from dgc.advisor.methods import Build, Method, after_dense_steps
from dgc.advisor.study import Subject, compare, progress_of
from dgc.advisor.workload import LossOf, Passes, Progress, Workload
from dgc.comm import Transport
from dgc.comm.connect import choose_transport, connect
from dgc.optim import Wrapper
from dgc.terminal import escape_unprintable
from dgc.units import human_rate, plural
from dgc_training.config import ConfigError, load
from dgc_training.faults.failure import UsageError, end_process, ending_all_ranks
from dgc_training.launcher import launched_size, print_error
from dgc_training.startup.agreement import check_agreement
from dgc_training.startup.arguments import ConfigsParser
from dgc_training.startup.build import build_as, config_errors, parameter_groups, wrap_optimizer
from dgc_training.startup.setup import choose_kernels, prepare_device, require_complete
from dgc_training.stepping import AUTOCAST
from dgc_training.tasks.protocol import Batches, Setup, Task
from scripts.methods import files_of
from scripts.plot_figures import STYLE

EPILOG = """\
examples:
  python -m scripts.advise --configs configs/digits/cnn.py --hosts 4 --rate 1gbit
  horovodrun -np 4 -H a:2,b:2 python -m scripts.advise --configs configs/cifar/resnet20.py --verify 30
  torchrun --nproc-per-node 4 -m scripts.advise --configs configs/imagenet/resnet50.py --input-shape 3 224 224

docs/advise.md describes what is measured and what is predicted.
"""
METHODS = tuple(replace(method, usage=files_of(method.name)) for method in methods.METHODS)
NAMES = methods.NAMES
FAMILIES = {"torch.optim.Adam": "adam", "torch.optim.AdamW": "adam", "dgc.optim.MuonWithAdamW": "muon"}
POINTS = 61


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the remaining words, which are config overrides, in order."""
    parser = ConfigsParser(
        "python -m scripts.advise",
        "advise",
        "Predicts which method of compression makes a step fastest on a network, if any does.",
        EPILOG,
        files="the experiment, without files of a method",
    )
    add_network(parser, NAMES)
    parser.add_argument(
        "--input-shape",
        nargs="+",
        type=int,
        metavar="N",
        help="of one sample, such as 3 224 224: random inputs where the data set is missing",
    )
    parser.add_argument("--devices", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw step times against bandwidth, as PNG or SVG"
    )
    args, overrides = parser.parse_known_args(argv)
    return args, overrides


def check_arguments(args: argparse.Namespace, ranks: int) -> None:
    """Raises ValueError if the options contradict each other or the launcher, or name no network.

    Args:
        args: the options.
        ranks: number of ranks that the launcher started; 1 without a launcher.
    """
    check_network(args, ranks)
    if args.input_shape is not None and not all(1 <= length < 2**31 for length in args.input_shape):
        raise ValueError(f"--input-shape is {args.input_shape}; every length must be at least 1 and below 2**31")
    check_output(args.plot, "--plot")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot: {args.plot} must end in .png or .svg")


def main(
    argv: Sequence[str] | None = None,
    connect: Callable[..., Transport] = connect,
    leave: Callable[[int], None] = end_process,
) -> int:
    """Runs the advisor and returns the exit status: 2 for what cannot be done, with one message.

    Args:
        argv: the command line without the program's name. None: the command line of this process.
        connect: creates the transport. It takes the arguments of `dgc.comm.connect.connect`.
        leave: ends this process with an exit status after an error under a launcher. All ranks end with it.
    """
    args, overrides = parse_arguments(argv)
    busy = load_average()
    try:
        tree = load(args.configs, overrides)
        check_arguments(args, launched_size())
        check_experiment(tree)
        check_loss(args, family_of(optimizer := tree.train.optimizer._target_), optimizer)
        require_complete(tree, args.devices)
        if launched_size() == 1:
            study(args, tree, overrides, cluster_on_paper(args), busy)
            return 0
        with config_errors():
            choice = choose_transport(tree.train.transport)
    except ValueError as error:
        return print_error(f"advise: {error}")
    with ending_all_ranks(leave):
        with config_errors():
            transport = connect(choice.transport, hierarchical="auto", timeout=tree.train.timeout)
        device = prepare_device(tree, args.devices, transport)
        check_agreement(tree, device, transport)
        network, factor = measure_network(transport, device, args.repeats)
        study(args, tree, overrides, Cluster(transport, network, factor), busy)
    return 0


def check_experiment(tree: DictConfig) -> None:
    """Raises UsageError if the config compresses already: a method's files could not be stacked after it."""
    compression = tree.train.compression._target_
    models = [f"train.{key} is set" for key in ("local", "gossip") if tree.train[key] is not None]
    if models or compression != "dgc.compression.DenseCompressor":
        what = models[0] if models else f"train.compression is {compression}"
        raise UsageError(f"--configs is the experiment alone, without files of a method, but {what}")


def study(
    args: argparse.Namespace, tree: DictConfig, overrides: Sequence[str], cluster: Cluster, busy: float
) -> None:
    """Measures what one rank does, predicts all methods, and prints the result. Collective.

    Args:
        args: The options.
        tree: The config of the experiment.
        overrides: Words of the command line that changed it.
        cluster: The ranks.
        busy: Load average of this machine before the measurements.
    """
    transport = cluster.transport
    device = prepare_device(tree, args.devices, transport)
    with config_errors():
        kernels = choose_kernels(tree.train.kernels, device)
    alone = AlikeRanks(1) if cluster.on_paper else transport  # on paper this rank has all of the data
    work = measure_workload(tree, device, alone, args.input_shape, args.repeats, progress_of(cluster)).slowest(
        transport
    )
    optimizer = tree.train.optimizer._target_

    def draw_figure(best: Sequence[Candidate], plain: Candidate, seconds: Work) -> None:
        title = f"{', '.join(args.configs)}, {plural(transport.size, 'rank')}"
        draw(best, plain, cluster.network, seconds, title, args.plot)

    parameters = sum(p.numel() for p in work.model.parameters())
    subject = Subject(
        workload=work,
        methods=METHODS,
        unfit=lambda method: unfit(method, optimizer),
        build_of=lambda method: builder(load([*args.configs, *method.usage], overrides), work.gradients[0]),
        heading=[
            f"model      {parameters:,} parameters on {device.type}, {kernels}; inputs: {work.inputs}",
            work.described,
        ],
        usage=lambda files: f"--configs {' '.join([*args.configs, *files])}",
        family=family_of(optimizer),
        labels={"configs": args.configs},
        draw=None if args.plot is None else draw_figure,
    )
    compare(subject, args, cluster, device, busy)


def family_of(optimizer: str) -> str:
    """The family of an experiment's optimizer, by its `_target_`."""
    return FAMILIES.get(optimizer, "sgd")


def unfit(method: Method, optimizer: str) -> str | None:
    """Why a method does not go with an experiment's optimizer, by its `_target_`. None: it does."""
    if method.corrects_momentum:
        return None  # its config files refuse an optimizer that it does not fit
    return methods.unfit(method, optimizer, family_of(optimizer))


def builder(tree: DictConfig, gradients: Mapping[str, Tensor]) -> Build:
    """The optimizer of a method as train.py makes it, in the phase of training that is predicted.

    Args:
        tree: The config of the experiment with the method's files.
        gradients: By parameter's name.
    """

    def build_wrapper(model: nn.Module, transport: Transport) -> Wrapper:
        settings = tree.train
        with config_errors():
            groups = parameter_groups(model, settings.optimize_bn_separately, settings.parameter_groups)
            inner = build_as(Optimizer, settings.optimizer, groups)
            after_dense_steps(inner, model, gradients)
            optimizer = wrap_optimizer(inner, model, settings, transport)
            optimizer.begin_epoch(settings.num_epochs - 1)  # after a warm-up of the ratio
        return optimizer

    return build_wrapper


def measure_workload(
    tree: DictConfig,
    device: torch.device,
    transport: Transport,
    shape: Sequence[int] | None,
    repeats: int,
    progress: Progress = lambda *of: None,
) -> Workload:
    """Measures forward and backward of an experiment.

    Args:
        tree: The config of the experiment.
        device: Device of the model.
        transport: Its rank takes its share of the data.
        shape: Of one sample, for random inputs where the data set is missing.
        repeats: Number of measured steps.
        progress: Called before the model is built and before each step: a step of a large model takes minutes.

    Raises:
        UsageError: The data set cannot be read, and `shape` is None or does not fit the model.
        ConfigError: A part cannot be built.
    """
    progress("the model", 0, workload.steps_of(repeats))
    model: nn.Module = build_as(nn.Module, tree.model).to(device).train()
    batches, loss_of, inputs = open_batches(tree, model, device, transport, shape)
    loss_of = under_autocast(loss_of, device, tree.train.precision)
    return workload.measure_workload(model, batches, loss_of, inputs, device, repeats, progress)


def open_batches(
    tree: DictConfig, model: nn.Module, device: torch.device, transport: Transport, shape: Sequence[int] | None
) -> tuple[Iterator[Passes], LossOf, str]:
    """Steps of the training data without end, or of random inputs, their loss, and which of both in words."""
    try:
        dataset = build_as(Mapping, tree.dataset)
    except ConfigError as error:
        if shape is None:
            raise UsageError(
                f"{error}. To measure the model with random inputs: --input-shape, such as 3 224 224"
            ) from error
        criterion = build_as(nn.Module, tree.train.criterion).to(device)
        steps = random_steps(tree, model, device, shape)
        words = f"random inputs of shape {tuple(shape)}, no data set"
        return steps, lambda model, batch: criterion(model(batch[0]), batch[1]), words
    task: Task = build_as(Task, tree.task, Setup(tree, dataset, model, transport, device))
    words = f"the data set, batches of {tree.train.batch_size}"
    return endless(task.batches), lambda model, batch: task.loss(model, batch).mean, words


def under_autocast(loss_of: LossOf, device: torch.device, precision: str) -> LossOf:
    """The loss with train.precision. A loss scale, which fp16 has, is left out: it costs next to nothing."""
    dtype = AUTOCAST[precision]

    def cast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype):
            return loss_of(model, batch)

    return loss_of if dtype is None else cast


def endless(batches: Batches) -> Iterator[Passes]:
    """All steps of epoch 0, 1, ..."""
    epoch = 0
    while True:
        for _, passes in batches.epoch(epoch):
            yield passes
        epoch += 1


def random_steps(
    tree: DictConfig, model: nn.Module, device: torch.device, shape: Sequence[int]
) -> Iterator[Passes]:
    """Normally distributed inputs, and classes of a classifier drawn uniformly."""
    batch = tree.train.batch_size
    try:
        with torch.no_grad():
            outputs = model(torch.randn(batch, *shape, device=device))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--input-shape {' '.join(map(str, shape))} does not fit the model: {reason}") from error
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        raise UsageError("--input-shape: random targets can be made for a classifier only; prepare the data set")

    def steps() -> Iterator[Passes]:
        while True:
            inputs = [torch.randn(batch, *shape, device=device) for _ in range(tree.train.num_batches_per_step)]
            yield [(x, torch.randint(outputs.shape[1], (batch,), device=device)) for x in inputs]

    return steps()


def draw(
    methods: Sequence[Candidate], plain: Candidate, network: Network, work: Work, title: str, file: Path
) -> None:
    """Draws the methods and the reference without compression, with the points where they cross.

    Args:
        methods: The best methods.
        plain: The reference, such as fp16.
        network: Its bandwidth is varied; a dotted line shows the present one.
        work: Seconds without communication.
        title: Title of the figure.
        file: PNG or SVG, by its suffix.
    """
    bits = np.geomspace(*BANDWIDTHS, POINTS) * 8
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "advise", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        against = step_at(plain, network, work)
        axes.plot(bits, [1e3 * against(b / 8) for b in bits], "k--", label=plain.method.name)
        for number, candidate in enumerate(methods):
            step = step_at(candidate, network, work)
            axes.plot(bits, [1e3 * step(b / 8) for b in bits], color=f"C{number}", label=candidate.method.name)
            if (at := crossing(step, against)) is not None:
                axes.plot([8 * at], [1e3 * step(at)], "o", color=f"C{number}")
                axes.annotate(human_rate(at), (8 * at, 1e3 * step(at)), (0, 6), textcoords="offset points")
        axes.axvline(8 * network.bandwidth, color="0.5", linestyle=":", label="this network")
        axes.set(xscale="log", yscale="log", title=title, ylabel="step, ms")
        axes.set_xlabel("bandwidth of a machine, bit/s")
        axes.legend(frameon=False)
        metadata = {"Date": None} if file.suffix == ".svg" else {}
        figure.savefig(file, metadata=metadata)


if __name__ == "__main__":
    escape_unprintable()
    sys.exit(main())
