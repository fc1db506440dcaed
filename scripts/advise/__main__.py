"""The advisor: predicts the time of a training step for each method of compression, and recommends one or none.

    python -m scripts.advise --configs configs/digits/cnn.py --hosts 4 --rate 1gbit     on paper
    horovodrun -np 4 -H a:2,b:2 python -m scripts.advise --configs configs/digits/cnn.py   on these machines

docs/advise.md describes what is measured and what is predicted.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from dgc.comm import Transport
from dgc.comm.connect import choose_transport, connect
from dgc.cost import AlikeRanks
from dgc.launch import LaunchError
from dgc_training.config import ConfigError, load
from dgc_training.faults.failure import UsageError, end_process, ending_all_ranks
from dgc_training.launcher import launched_size, print_error
from dgc_training.logging.formatting import plural
from dgc_training.startup.agreement import check_agreement
from dgc_training.startup.build import config_errors
from dgc_training.startup.setup import choose_kernels, prepare_device, require_complete
from scripts.advise.advice import Advice, Row, Work, advise, as_fast, as_json, format_table, tabulate
from scripts.advise.arguments import check_arguments, parse_arguments
from scripts.advise.candidates import measure_all
from scripts.advise.cluster import (
    Cluster,
    cluster_on_paper,
    describe,
    describe_load,
    load_average,
)
from scripts.advise.collectives import measure_network
from scripts.advise.drawing import describe_crossings, draw
from scripts.advise.methods import METHODS, UNCOMPRESSED, Method, unfit
from scripts.advise.verification import chosen, format_verification, verify
from scripts.advise.workload import Progress, measure_workload

WARNING = "Not predicted: accuracy, and how many steps a method needs. See docs/methods.md and docs/results.md."


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
    except (ConfigError, LaunchError, UsageError) as error:
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
    report: Progress = print_progress if cluster.prints else lambda *of: None
    workload = measure_workload(tree, device, alone, args.input_shape, args.repeats, report).slowest(transport)

    def load_tree(method: Method | Row) -> DictConfig:
        return load([*args.configs, *method.files], overrides)

    asked = [method for method in METHODS if args.methods is None or method.name in args.methods]
    reasons = {method.name: unfit(method, tree.train.optimizer._target_) for method in asked}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    candidates, unbuilt = measure_all(
        [method for method in asked if method.name not in refused],
        load_tree,
        workload,
        transport,
        args.repeats,
        report,
    )
    if not any(candidate.method.name in UNCOMPRESSED for candidate in candidates):
        raise UsageError(f"the experiment cannot be built: {'; '.join(unbuilt.values())}")
    refused |= unbuilt
    work = Work(workload.forward, workload.backward)
    rows = tabulate(candidates, network, work)
    advice = advise(rows, work)
    compared = chosen(rows, args.verify_all)
    measured: dict[str, float] = {}
    if args.verify is not None:
        measured = verify(compared, load_tree, workload, transport, device, args.verify)
    parameters = sum(p.numel() for p in workload.model.parameters())
    if cluster.prints:
        for line in describe_load(busy):
            print(line)
        print(f"model      {parameters:,} parameters on {device.type}, {kernels}; inputs: {workload.inputs}")
        print(f"work       forward {1e3 * work.forward:.1f} ms, backward {1e3 * work.backward:.1f} ms, measured")
        print(f"network    {describe(cluster)}\n\n{format_table(rows)}")
        for name, reason in refused.items():
            print(f"{name:<19} left out: {reason}")
        print(f"\n{sentence(advice, rows, args.configs)}\n{WARNING}")
        by_name = {of.method.name: of for of in candidates}
        plain = by_name.get("fp16", by_name[compared[0].name])
        best = [by_name[row.name] for row in chosen(rows)[1:]]
        if best:
            print(describe_crossings(best, plain, network, work))
        if measured:
            print(f"\n{format_verification(compared, work, measured)}")
        if args.plot is not None:
            title = f"{', '.join(args.configs)}, {plural(transport.size, 'rank')}"
            draw(best, plain, network, work, title, args.plot)
        if args.json is not None:
            result = {"configs": args.configs, "ranks": transport.size, "left_out": refused, "measured": measured}
            text = json.dumps(result | as_json(rows, advice, network, work), indent=1)
            args.json.write_text(text + "\n")


def print_progress(name: str, number: int, count: int) -> None:
    print(f"advise: measuring {name} ({number} of {count})", file=sys.stderr, flush=True)


def sentence(advice: Advice, rows: Sequence[Row], configs: Sequence[str]) -> str:
    """The recommendation with the config files to stack, and the methods that are as fast."""
    stack = f"  --configs {' '.join([*configs, *advice.files])}"
    if not advice.compress:
        return f"Do not compress: {advice.reason}.\n{stack}"
    others = as_fast(rows, advice)
    alike = f"\n  As fast within the error of the prediction: {', '.join(others)}" if others else ""
    return f"Recommended: {advice.method}, {advice.reason}.\n{stack}{alike}"


if __name__ == "__main__":
    sys.exit(main())
