"""The advisor: predicts the time of a training step for each method of compression, and recommends one or none.

    python -m scripts.advise --configs configs/digits/cnn.py --hosts 4 --rate 1gbit     on paper
    horovodrun -np 4 -H a:2,b:2 python -m scripts.advise --configs configs/digits/cnn.py   on these machines

docs/advise.md describes what is measured and what is predicted.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from dgc.advisor.advice import Work
from dgc.advisor.arguments import asked
from dgc.advisor.candidates import Candidate, measure_all
from dgc.advisor.cluster import Cluster, cluster_on_paper, load_average
from dgc.advisor.cost import AlikeRanks
from dgc.advisor.cost.collectives import measure_network
from dgc.advisor.methods import Build
from dgc.advisor.study import Options, report
from dgc.advisor.workload import Progress
from dgc.comm import Transport
from dgc.comm.connect import choose_transport, connect
from dgc.terminal import escape_unprintable
from dgc.units import plural
from dgc_training.config import load
from dgc_training.faults.failure import UsageError, end_process, ending_all_ranks
from dgc_training.launcher import launched_size, print_error
from dgc_training.startup.agreement import check_agreement
from dgc_training.startup.build import config_errors
from dgc_training.startup.setup import choose_kernels, prepare_device, require_complete
from scripts.advise.arguments import check_arguments, parse_arguments
from scripts.advise.drawing import draw
from scripts.advise.methods import METHODS, builder, family_of, unfit
from scripts.advise.workload import measure_workload


def main(
    argv: Sequence[str] | None = None,
    connect: Callable[..., Transport] = connect,
    leave: Callable[[int], None] = end_process,
) -> int:
    """Runs the advisor and returns the exit status: 2 for what cannot be done, with one message.

    Args:
        argv: the command line without the program's name. None: that of this process.
        connect: creates the transport. It takes the arguments of `dgc.comm.connect.connect`.
        leave: ends this process with an exit status after an error under a launcher. All ranks end with it.
    """
    args, overrides = parse_arguments(argv)
    busy = load_average()
    try:
        tree = load(args.configs, overrides)
        check_arguments(args, launched_size())
        check_experiment(tree)
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


def study(args: Namespace, tree: DictConfig, overrides: Sequence[str], cluster: Cluster, busy: float) -> None:
    """Measures what one rank does, predicts all methods, and prints the result. Collective.

    Args:
        args: The options.
        tree: The config of the experiment.
        overrides: Words of the command line that changed it.
        cluster: The ranks.
        busy: Load average of this machine before the measurements.
    """
    transport, network = cluster.transport, cluster.network
    device = prepare_device(tree, args.devices, transport)
    with config_errors():
        kernels = choose_kernels(tree.train.kernels, device)
    alone = AlikeRanks(1) if cluster.on_paper else transport  # on paper this rank has all of the data
    report_progress: Progress = print_progress if cluster.prints else lambda *of: None
    workload = measure_workload(tree, device, alone, args.input_shape, args.repeats, report_progress).slowest(
        transport
    )

    def build_of(name: str) -> Build:
        files = next(method.usage for method in METHODS if method.name == name)
        return builder(load([*args.configs, *files], overrides), workload.gradients[0])

    def draw_figure(methods: Sequence[Candidate], plain: Candidate, work: Work) -> None:
        title = f"{', '.join(args.configs)}, {plural(transport.size, 'rank')}"
        draw(methods, plain, network, work, title, args.plot)

    methods = asked(args, METHODS)
    reasons = {method.name: unfit(method, tree.train.optimizer._target_) for method in methods}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    candidates, unbuilt = measure_all(
        [method for method in methods if method.name not in refused],
        lambda method: build_of(method.name),
        workload,
        transport,
        args.repeats,
        report_progress,
    )
    parameters = sum(p.numel() for p in workload.model.parameters())
    report(
        candidates,
        refused | unbuilt,
        build_of,
        workload,
        cluster,
        device,
        [
            f"model      {parameters:,} parameters on {device.type}, {kernels}; inputs: {workload.inputs}",
            workload.described,
        ],
        lambda files: f"--configs {' '.join([*args.configs, *files])}",
        Options(
            *(args.verify, args.verify_all, args.json, None if args.plot is None else draw_figure),
            family=family_of(tree.train.optimizer._target_),
        ),
        busy,
        {"configs": args.configs},
    )


def print_progress(name: str, number: int, count: int) -> None:
    print(f"advise: measuring {name} ({number} of {count})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    escape_unprintable()
    sys.exit(main())
