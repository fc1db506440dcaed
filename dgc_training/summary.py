"""The end of a run: one table for people, summary.json for programs."""

from pathlib import Path
from typing import Any

from dgc_training.checkpoint import write_json
from dgc_training.state import Progress


def summarize(name: str, progress: Progress, *, ranks: int, metric: str | None) -> dict[str, Any]:
    """All that is known at the end; bytes are those of one rank, over the whole run."""
    sent = progress.payload_bytes
    return {
        "name": name,
        "ranks": ranks,
        "epochs": progress.epoch,
        "samples": progress.samples,
        "seconds": progress.seconds,
        "samples_per_second": progress.samples / progress.seconds if progress.seconds else None,
        "metric": metric,
        "best": progress.best,
        "best_epoch": progress.best_epoch,
        "final": progress.latest,
        "payload_bytes": sent,
        "wire_bytes": round(progress.wire_bytes),
        "dense_bytes": progress.dense_bytes,
        "dropped_steps": progress.dropped_steps,
        "dense_over_payload": progress.dense_bytes / sent if sent else None,
    }


def table(summary: dict[str, Any]) -> str:
    """The summary as aligned lines."""
    rows = [("run", summary["name"]), ("ranks", str(summary["ranks"])), ("epochs", str(summary["epochs"]))]
    metric = summary["metric"]
    if summary["best"] and metric is not None:
        rows.append((f"best {metric}", f"{summary['best'][metric]:.2f} (epoch {summary['best_epoch']})"))
    rows += [(f"final {name}", f"{value:.2f}") for name, value in summary["final"].items()]
    rate = summary["samples_per_second"]
    rows.append(("time", f"{summary['seconds']:.1f} s" + (f", {rate:.0f} samples/s" if rate else "")))
    rows.append(("sent per rank", human_bytes(summary["payload_bytes"])))
    rows.append(("dense would send", human_bytes(summary["dense_bytes"])))
    if summary["dense_over_payload"]:
        rows.append(("fewer bytes by", f"{summary['dense_over_payload']:.1f} x"))
    if summary["dropped_steps"]:
        rows.append(("dropped steps", f"{summary['dropped_steps']} (gradients that were not finite)"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def human_bytes(count: float) -> str:
    """12_300_000 -> '12.3 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def finish(directory: Path, summary: dict[str, Any]) -> None:
    """Prints the table and writes summary.json (rank 0 only)."""
    write_json(directory / "summary.json", summary)
    print(table(summary), f"  {directory / 'summary.json'}", sep="\n", flush=True)
