"""The summary of a run: a printed table and summary.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dgc_training.atomic_write import write_json
from dgc_training.checkpoint.progress import TrainingProgress
from dgc_training.logging.formatting import against_dense, human_bytes, result_text


def summarize(
    name: str,
    progress: TrainingProgress,
    *,
    ranks: int,
    metric: str | None,
    item: str = "sample",
    lower_is_better: bool = False,
    rounds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The contents of summary.json. item: what was counted: "sample" or "token". lower_is_better: of the metric.
    rounds: number of `rounds` with other groups, and bytes of the last one, `round_bytes`. None: there are none.

    Bytes are counted for one rank over the whole run, as defined in docs/bytes.md. wire_over_dense is
    wire_bytes / dense_wire_bytes, or None if a single process sends nothing.
    """
    dense = progress.dense_wire_bytes
    return {
        "name": name,
        "ranks": ranks,
        "epochs": progress.epoch,
        f"{item}s": progress.samples,
        "seconds": progress.seconds,
        "training_seconds": progress.training_seconds,
        f"{item}s_per_second": progress.samples / progress.seconds if progress.seconds else None,
        "metric": metric,
        "lower_is_better": lower_is_better,
        "best": progress.best,
        "best_epoch": progress.best_epoch,
        "final": progress.latest,
        "payload_bytes": progress.payload_bytes,
        "wire_bytes": round(progress.wire_bytes),
        "cross_wire_bytes": round(progress.cross_wire_bytes),
        "dense_wire_bytes": round(dense),
        "dense_cross_wire_bytes": round(progress.dense_cross_wire_bytes),
        "wire_over_dense": progress.wire_bytes / dense if dense else None,
        "dropped_steps": progress.dropped_steps,
        **({} if rounds is None else {name: round(rounds[name]) for name in ("rounds", "round_bytes")}),
    }


def table(summary: dict[str, Any]) -> str:
    """The summary as aligned lines."""
    rows = [("run", summary["name"]), ("ranks", str(summary["ranks"])), ("epochs", str(summary["epochs"]))]
    metric = summary["metric"]
    if summary["best"] and metric is not None:
        rows.append((f"best {metric}", f"{result_text(summary['best'][metric])} (epoch {summary['best_epoch']})"))
    rows += [(f"final {name}", result_text(value)) for name, value in summary["final"].items()]
    items = "tokens" if "tokens" in summary else "samples"
    rate = summary[f"{items}_per_second"]
    rows.append(("time", f"{summary['seconds']:.1f} s" + (f", {rate:.0f} {items}/s" if rate else "")))
    wire, dense = summary["wire_bytes"], summary["dense_wire_bytes"]
    if dense:
        rows.append(("payload per rank", human_bytes(summary["payload_bytes"])))
        rows.append(("wire bytes per rank", f"{human_bytes(wire)}, {against_dense(wire, dense)}"))
        rows.append(("dense wire bytes", human_bytes(dense)))
        cross, dense_cross = summary["cross_wire_bytes"], summary["dense_cross_wire_bytes"]
        if 0 < dense_cross < dense:  # several machines of several ranks
            rows.append(("between machines", f"{human_bytes(cross)}, {against_dense(cross, dense_cross)}"))
    elif "rounds" not in summary and summary["ranks"] == 1:
        rows.append(("wire bytes per rank", "0 B (1 process: nothing is sent)"))
    if "rounds" in summary:
        rows.append(
            ("rounds of groups", f"{summary['rounds']}, {human_bytes(summary['round_bytes'])} in the last one")
        )
    if summary["dropped_steps"]:
        rows.append(("dropped steps", f"{summary['dropped_steps']} (gradients that were not finite)"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Prints the table and writes summary.json (rank 0 only)."""
    write_json(directory / "summary.json", summary)
    print(table(summary), f"  {directory / 'summary.json'}", sep="\n", flush=True)
