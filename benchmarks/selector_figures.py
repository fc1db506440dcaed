"""Draws the figures of the study from the measurements of `benchmarks.selectors`, as PNG files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.selector_curves import Curve
from benchmarks.selector_fit import most_likely, thinned
from benchmarks.selector_methods import SELECTORS, published
from benchmarks.selector_sizes import KNOWN
from benchmarks.selector_timing import FLOOR, TOPK, Compared


def plots() -> Any:
    """Import matplotlib, for output to files. Only the figures need it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def styles() -> dict[str, dict[str, Any]]:
    """One colour and line for each method in all figures."""
    colours = plots().get_cmap("tab20").colors
    found = {name: {"color": colours[i], "marker": "osv^Dx"[i % 6]} for i, name in enumerate(SELECTORS)}
    found[KNOWN] = found["predicted"]
    for name in (TOPK, "dense"):
        found[name] = {"color": "black", "linestyle": "--"}
    return found


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots().close(figure)


def draw_distributions(model: str, gradient: Tensor, accumulated: Tensor, path: Path) -> None:
    """Figure 1: the values of one tensor and the two fitted distributions."""
    figure, axes = plots().subplots(1, 2, figsize=(11, 4))
    for axis, x, title in zip(axes, (gradient, accumulated), ("gradient", "accumulated v"), strict=True):
        x = thinned(x)
        (middle, width), (mean, deviation) = most_likely(x)
        edge = float(x.abs().quantile(0.9995))
        axis.hist(x.numpy(), bins=200, range=(-edge, edge), density=True, color="lightgrey")
        at = np.linspace(-edge, edge, 500)
        axis.plot(at, np.exp(-np.abs(at - middle) / width) / (2 * width), label="Laplace")
        axis.plot(
            at, np.exp(-(((at - mean) / deviation) ** 2) / 2) / (deviation * np.sqrt(2 * np.pi)), label="Gauss"
        )
        axis.set(yscale="log", title=f"{model}, largest tensor: {title}", ylabel="density")
        axis.set_ylim(bottom=1 / (edge * x.numel()))
        axis.legend()
    save(figure, path)


def draw_sizes(times: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Figure 5."""
    figure, axis = plots().subplots(figsize=(8, 6))
    looks = styles()
    for name, row in times.items():
        axis.plot(list(row), list(row.values()), label=name, **looks[name])
    axis.set(xscale="log", yscale="log", xlabel="elements", ylabel="milliseconds of a choice alone")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)


def draw_curves(curves: Mapping[str, Curve], path: Path) -> None:
    """Figure 6."""
    figure, axes = plots().subplots(1, 2, figsize=(12, 5))
    looks = styles()
    for name, curve in curves.items():
        epochs = range(1, len(curve.loss) + 1)
        axes[0].plot(epochs, curve.loss, label=name, **looks[name])
        axes[1].plot(epochs, curve.accuracy, label=name, **looks[name])
    axes[0].set(xlabel="epoch", ylabel="loss", yscale="log")
    axes[1].set(xlabel="epoch", ylabel="test accuracy, %")
    axes[1].legend(fontsize=8)
    save(figure, path)


def draw_steps(found: Mapping[str, Compared], path: Path) -> None:
    """Table 3: speed of a DGC step relative to `exact`, by method, and the published values."""
    figure, axis = plots().subplots(figsize=(12, 5))
    looks, width = styles(), 0.9 / len(SELECTORS)
    for i, name in enumerate(SELECTORS):
        at = np.arange(len(found)) + (i - len(SELECTORS) / 2 + 0.5) * width
        heights = [compared.over("exact", name) for compared in found.values()]
        axis.bar(at, heights, width, label=name, color=looks[name]["color"])
        known = [published(model, name) for model in found]
        points = [(x, y) for x, y in zip(at, known, strict=True) if y is not None]
        if points:
            axis.scatter(*zip(*points, strict=True), marker="_", s=120, color="black", zorder=3)
    limits = [c.over("exact", FLOOR) for c in found.values()]
    axis.scatter(range(len(found)), limits, marker="*", color="red", label="update of u, v alone", zorder=3)
    axis.set_xticks(range(len(found)), list(found))
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylabel("times as fast as exact (dashes: published)")
    # for small models the floor is so far above the rest that it would hide all differences
    axis.set_ylim(0, min(axis.get_ylim()[1], 4))
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def largest_tensor(buckets: list[Tensor], sizes: list[list[int]]) -> Tensor:
    parts = [part for bucket, numels in zip(buckets, sizes, strict=True) for part in bucket.split(numels)]
    return max(parts, key=Tensor.numel).clone()
