"""The advisor's report: predictions for all methods, the recommendation, and measured steps beside them."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dgc.advisor.advice import (
    Advice,
    Row,
    Work,
    advise,
    as_fast,
    as_json,
    describe_crossings,
    format_losses,
    format_table,
    over_the_limit,
    row_of,
    tabulate,
)
from dgc.advisor.arguments import asked, limit_of
from dgc.advisor.candidates import Candidate, measure_all
from dgc.advisor.cluster import Cluster, describe, describe_load
from dgc.advisor.methods import UNCOMPRESSED, Build, Method
from dgc.advisor.verification import chosen, format_verification, verify
from dgc.advisor.workload import Progress, Workload
from dgc.units import human_bytes, human_time

WARNING = (
    "Not predicted: accuracy, and how many steps a method needs on your task. What was measured: pages Methods, "
    "Results and Language of the documentation."
)
Draw = Callable[[Sequence[Candidate], Candidate, Work], None]


@dataclass(frozen=True)
class Subject:
    """What the advisor is asked about.

    Attributes:
        workload: The model, its gradients and the seconds of a step without communication.
        methods: What can be compared.
        unfit: Why a method does not go with the optimizer. None: it does.
        build_of: Makes the optimizer of a method.
        heading: Lines about the model.
        usage: How to ask for a method, given its `usage`.
        family: As in `tabulate`.
        labels: What else the JSON file has.
        draw: Draws step times against bandwidth, given the best methods, the one without compression and the work.
        on_paper: Makes the candidate of a method without a measurement. None: it is measured.
        alike: As in `advise`.
    """

    workload: Workload
    methods: Sequence[Method]
    unfit: Callable[[Method], str | None]
    build_of: Callable[[Method], Build]
    heading: Sequence[str]
    usage: Callable[[Sequence[str]], str]
    family: str
    labels: dict[str, Any]
    draw: Draw | None = None
    on_paper: Callable[[Method], Candidate] | None = None
    alike: float = 1.0


def progress_of(cluster: Cluster) -> Progress:
    """Prints what is measured, on the rank that prints the result."""

    def progress(name: str, number: int, count: int) -> None:
        if cluster.prints:
            print(f"advise: measuring {name} ({number} of {count})", file=sys.stderr, flush=True)

    return progress


def compare(subject: Subject, args: Namespace, cluster: Cluster, device: torch.device, busy: float) -> None:
    """Measures or predicts what each method does, and prints the report. Collective.

    Args:
        subject: What the advisor is asked about.
        args: The options of `add_network`.
        cluster: The ranks.
        device: Device of the model.
        busy: Load average of this machine before the measurements.
    """
    methods = asked(args, subject.methods)
    refused = {method.name: reason for method in methods if (reason := subject.unfit(method)) is not None}
    fit = [method for method in methods if method.name not in refused]
    if subject.on_paper is None:
        progress = progress_of(cluster)
        candidates, unbuilt = measure_all(
            fit, subject.build_of, subject.workload, cluster.transport, args.repeats, progress
        )
        refused |= unbuilt
    else:
        candidates = []
        for method in fit:
            try:
                candidates.append(subject.on_paper(method))
            except ValueError as error:
                refused[method.name] = str(error)
    report(subject, candidates, refused, args, cluster, device, busy)


def report(
    subject: Subject,
    candidates: Sequence[Candidate],
    refused: dict[str, str],
    args: Namespace,
    cluster: Cluster,
    device: torch.device,
    busy: float,
) -> None:
    """Predicts, verifies and prints. Collective.

    Args:
        subject: What the advisor is asked about.
        candidates: The methods, with what they send and compute.
        refused: Those that are left out, each with its reason.
        args: The options of `add_network`: steps to verify with, and the file for all numbers.
        cluster: The ranks.
        device: Device of the model.
        busy: Load average of this machine before the measurements.

    Raises:
        ValueError: No method without compression could be built.
    """
    workload, usage = subject.workload, subject.usage
    transport, network = cluster.transport, cluster.network
    if not any(candidate.method.name in UNCOMPRESSED for candidate in candidates):
        raise ValueError(f"the experiment cannot be built: {'; '.join(refused.values())}")
    by_name = {of.method.name: of for of in candidates}
    work = Work(workload.forward, workload.backward)
    limit = limit_of(args)
    rows = tabulate(candidates, network, work, subject.family, limit)
    advice = advise(rows, work, subject.alike)
    compared = chosen(rows, args.verify_all)
    measured: dict[str, float] = {}
    if args.verify is not None:

        def build_of(row: Row) -> Build:
            return subject.build_of(by_name[row.name].method)

        measured = verify(compared, build_of, workload, transport, device, args.verify)
    if not cluster.prints:
        return
    for line in [*describe_load(busy), *subject.heading]:
        print(line)
    print(f"network    {describe(cluster)}\n\n{format_table(rows)}")
    for name, reason in refused.items():
        print(f"{name:<19} left out: {reason}")
    if losses := format_losses(rows, limit):
        print(f"\n{losses}")
    print(f"\n{sentence(advice, rows, usage, limit)}\n{WARNING}")
    plain = by_name.get("fp16", by_name[compared[0].name])
    names = [row.name for row in chosen(rows)[1:]]
    if advice.compress and advice.method not in names:
        names.insert(0, advice.method)
    if best := [by_name[name] for name in names]:
        print(describe_crossings(best, plain, network, work))
    if measured:
        print(f"\n{format_verification(compared, work, measured)}")
    if subject.draw is not None:
        subject.draw(best, plain, work)
    if describe_load(busy):
        print("\nUNRELIABLE: other programs ran (first line). Repeat it on an idle machine before you act on it.")
    if args.json is not None:
        result = {**subject.labels, "ranks": transport.size, "left_out": refused, "measured": measured}
        args.json.write_text(json.dumps(result | as_json(rows, advice, network, work), indent=1) + "\n")


def sentence(
    advice: Advice, rows: Sequence[Row], usage: Callable[[Sequence[str]], str], limit: float = 0.0
) -> str:
    """The recommendation with the words to write, the methods that are as fast, and faster ones over the limit."""
    if advice.compress:
        others = as_fast(rows, advice)
        alike = f"\n  As fast within the error of the prediction: {', '.join(others)}" if others else ""
        said = f"Recommended: {advice.method}, {advice.reason}.\n  {usage(advice.usage)}{alike}"
    else:
        said = f"Do not compress: {advice.reason}.\n  {usage(advice.usage)}"
    best, over = row_of(rows, advice), over_the_limit(rows, advice)
    if not over:
        return said
    first, *rest = over
    saved = best.wire_bytes - first.wire_bytes
    said += (
        f"\nNext choice: {first.name}, a step takes {human_time(first.step)}, {best.step / first.step:.2f} times "
        f"faster than with {best.name}, and sends {human_bytes(abs(saved))} {'fewer' if saved >= 0 else 'more'}.\n"
        f"  {exceeding(first, limit)}\n  {usage(first.usage)}"
    )
    named = [f"{row.name} {human_time(row.step)} ({lost(row)})" for row in rest]
    return f"{said}\n  Also faster, with the most that they lost: {', '.join(named)}" if rest else said


def exceeding(row: Row, limit: float) -> str:
    """Why a method is over the limit."""
    over = [loss for loss in row.losses if loss.at_most > limit]
    if not over:
        return "It was not measured with this optimizer."
    worst = max(over, key=lambda loss: loss.percent)
    errors = f": with two standard errors {worst.at_most:.2f} %" if worst.error else ""
    return f"It lost {worst}{errors}, over the limit of {limit:g} %."


def lost(row: Row) -> str:
    """The most that a method lost."""
    return row.losses[0].amount if row.losses else "not measured"
