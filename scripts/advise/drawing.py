"""The figure of `--plot`: seconds of a step against the bandwidth between machines, everything else equal."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dgc.advisor.advice import BANDWIDTHS, Work, crossing, step_at
from dgc.advisor.candidates import Candidate
from dgc.advisor.cost import Network
from dgc.units import human_rate
from scripts.plot_figures import STYLE

POINTS = 61


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
