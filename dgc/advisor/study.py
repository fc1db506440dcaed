"""The advisor's report: predictions for all methods, the recommendation, and measured steps beside them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    faster_but_behind,
    format_table,
    tabulate,
)
from dgc.advisor.candidates import Candidate
from dgc.advisor.cluster import Cluster, describe, describe_load
from dgc.advisor.methods import UNCOMPRESSED, Build
from dgc.advisor.verification import chosen, format_verification, verify
from dgc.advisor.workload import Workload
from dgc.units import human_time

WARNING = (
    "Not predicted: accuracy, and how many steps a method needs on your task. What was measured: pages Methods, "
    "Results and Language of the documentation."
)
Draw = Callable[[Sequence[Candidate], Candidate, Work], None]


@dataclass(frozen=True)
class Options:
    """What a report is asked for.

    Attributes:
        verify: Steps of the best methods that are measured on the ranks. None: none.
        verify_all: Whether these are steps of all methods.
        json: File for all numbers.
        draw: Draws step times against bandwidth, given the best methods, the one without compression and the work.
        alike: As in `advise`.
        family: As in `tabulate`.
    """

    verify: int | None = None
    verify_all: bool = False
    json: Path | None = None
    draw: Draw | None = None
    alike: float = 1.0
    family: str = "sgd"


def report(
    candidates: Sequence[Candidate],
    refused: dict[str, str],
    build_of: Callable[[str], Build],
    workload: Workload,
    cluster: Cluster,
    device: torch.device,
    heading: Sequence[str],
    usage: Callable[[Sequence[str]], str],
    options: Options,
    busy: float,
    labels: dict[str, Any],
) -> None:
    """Predicts, verifies and prints. Collective.

    Args:
        candidates: The methods, with what they send and compute.
        refused: Those that are left out, each with its reason.
        build_of: Makes the optimizer of a method, by its name.
        workload: The model, its gradients and the seconds of a step without communication.
        cluster: The ranks.
        device: Device of the model.
        heading: Lines about the model.
        usage: How to ask for a method, given its `usage`.
        options: What else is asked for.
        busy: Load average of this machine before the measurements.
        labels: What else the JSON file has.

    Raises:
        ValueError: No method without compression could be built.
    """
    transport, network = cluster.transport, cluster.network
    if not any(candidate.method.name in UNCOMPRESSED for candidate in candidates):
        raise ValueError(f"the experiment cannot be built: {'; '.join(refused.values())}")
    work = Work(workload.forward, workload.backward)
    rows = tabulate(candidates, network, work, options.family)
    advice = advise(rows, work, options.alike)
    compared = chosen(rows, options.verify_all)
    measured: dict[str, float] = {}
    if options.verify is not None:
        measured = verify(compared, lambda row: build_of(row.name), workload, transport, device, options.verify)
    if not cluster.prints:
        return
    for line in [*describe_load(busy), *heading]:
        print(line)
    print(f"network    {describe(cluster)}\n\n{format_table(rows)}")
    for name, reason in refused.items():
        print(f"{name:<19} left out: {reason}")
    print(f"\n{sentence(advice, rows, usage)}\n{WARNING}")
    by_name = {of.method.name: of for of in candidates}
    plain = by_name.get("fp16", by_name[compared[0].name])
    names = [row.name for row in chosen(rows)[1:]]
    if advice.compress and advice.method not in names:
        names.insert(0, advice.method)
    if best := [by_name[name] for name in names]:
        print(describe_crossings(best, plain, network, work))
    if measured:
        print(f"\n{format_verification(compared, work, measured)}")
    if options.draw is not None:
        options.draw(best, plain, work)
    if options.json is not None:
        result = {**labels, "ranks": transport.size, "left_out": refused, "measured": measured}
        options.json.write_text(json.dumps(result | as_json(rows, advice, network, work), indent=1) + "\n")


def sentence(advice: Advice, rows: Sequence[Row], usage: Callable[[Sequence[str]], str]) -> str:
    """The recommendation with the words to write, and the methods that are as fast."""
    if not advice.compress:
        return f"Do not compress: {advice.reason}.\n  {usage(advice.usage)}"
    others = as_fast(rows, advice)
    alike = f"\n  As fast within the error of the prediction: {', '.join(others)}" if others else ""
    behind = "".join(
        f"\n  Faster, but {loss}: {', '.join(f'{row.name} {human_time(row.step)}' for row in found)}"
        for loss, found in faster_but_behind(rows, advice).items()
    )
    return f"Recommended: {advice.method}, {advice.reason}.\n  {usage(advice.usage)}{alike}{behind}"
