"""The progress of a run: its position, its totals and its results."""

from dataclasses import asdict, dataclass, field
from math import inf, isnan, nan
from typing import Any

from dgc.comm.meter import BYTES as BYTES
from dgc_training.checkpoint.validation import check_structure

MAX_COUNT = 2**62


@dataclass
class TrainingProgress:
    """Epochs completed, steps done in the next epoch, and totals since the run's first start.

    samples (tokens, in a task that counts them) and seconds cover the whole run; training_seconds leaves out
    evaluation and checkpoints. Bytes are counted for one rank.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    cross_wire_bytes: float = 0.0
    dense_wire_bytes: float = 0.0
    dense_cross_wire_bytes: float = 0.0
    dropped_steps: int = 0
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)

    def add_results(self, results: dict[str, float], metric: str | None, *, lower_is_better: bool = False) -> bool:
        """Stores the results of an evaluation after `epoch` epochs. Returns whether they are the best so far."""
        self.latest = dict(results)
        # A meter that has counted nothing gives NaN. Any later result counts as better than NaN.
        best = self.best.get(metric, nan) if metric is not None else nan
        if metric is None:
            return False
        is_better = results[metric] < best if lower_is_better else results[metric] > best
        if self.best and not isnan(best) and not is_better:
            return False
        self.best, self.best_epoch = dict(results), self.epoch
        return True


def check_progress(saved: Any) -> None:
    """Raises ValueError unless `saved` is `asdict` of a TrainingProgress."""
    fresh = asdict(TrainingProgress())
    expected = {key: None if key in ("best", "latest") else fresh[key] for key in fresh}
    check_structure(saved, expected, "progress")
    for key, value in saved.items():
        if isinstance(fresh[key], dict):
            if not isinstance(value, dict) or not all(isinstance(v, float) for v in value.values()):
                raise ValueError(f"progress.{key} is not a mapping of results")
        elif type(value) is not type(fresh[key]) or not 0 <= value < (MAX_COUNT if type(value) is int else inf):
            raise ValueError(f"progress.{key} is {value!r}")
