"""The scalars of a run in TensorBoard, and the loss averaged over the ranks.

Ranks may be several steps apart. The all-reduce of a point's loss is therefore read that many steps later, so that
no rank waits for a slower one, and the point is written at that time.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgc.comm import AllReduce, Transport
from dgc_training.startup.agreement import flatten

X_AXIS = "Horizontal axis: training samples seen by all ranks together (tokens in language tasks)."
OF_MODELS = {
    "weight": "Push-sum weight of rank 0's model; 1 in algorithms without one.",
    "staleness": "Rounds by which the newest message that rank 0 has is late.",
    "averagings": "Averagings that rank 0 has taken part in.",
    "consensus_distance": "L2 distance of rank 0's model to the mean of all ranks' models.",
}
TAGS = {
    "train/loss": "Training loss, mean over all ranks and over the steps since the last point (train.log_every).",
    "train/lr": "Learning rate of the first parameter group.",
    "train/steps": "Optimizer steps since the run's first start.",
    "train/dropped_steps": "Steps dropped since the run's first start because a gradient was not finite.",
    "compression/compress_ratio": "Share of the elements (or of the bytes) of a compressed tensor that is sent.",
    "compression/dense_share": "Share of the elements of sparse compressors that is sent dense, with fewer bytes.",
    "compression/error_norm": "L2 norm of rank 0's residual: the unsent part of its gradients.",
    "bytes/payload_per_step": "Bytes per step that one rank contributes to collectives and messages.",
    "bytes/wire_per_step": "Bytes per step that one rank sends to carry its payload.",
    "bytes/cross_wire_per_step": "Bytes of wire_per_step that go to other machines.",
    "bytes/dense_wire_per_step": "Bytes per step that one rank would send in a dense fp32 all-reduce.",
    "bytes/wire_over_dense": "wire_per_step / dense_wire_per_step.",
    "bytes/wire": "Bytes that one rank has sent since the run's first start.",
    "bytes/dense_wire": "Bytes that one rank would have sent since then in dense fp32 all-reduces.",
    **{f"{key}/{name}": text for key in ("gossip", "local") for name, text in OF_MODELS.items()},
    "time/samples_per_second": "Training samples per second of all ranks, without evaluation and checkpoints.",
    "time/tokens_per_second": "Training tokens per second of all ranks, without evaluation and checkpoints.",
    "time/elapsed": "Seconds of training since the run's first start, without evaluation and checkpoints.",
    "time/data": "Seconds per step of rank 0: waiting for data.",
    "time/forward_backward": "Seconds per step of rank 0: forward and backward, with compression during backward.",
    "time/compress": "Seconds per step of rank 0: work that ends in a message.",
    "time/launch": "Seconds per step of rank 0: handing messages to the transport.",
    "time/wait": "Seconds per step of rank 0: waiting for other ranks.",
    "time/decode": "Seconds per step of rank 0: work after the last reply.",
    "time/step": "Seconds per step of rank 0: the optimizer's own work.",
}
# Always 0 in some configurations: one rank sends nothing, the ranks of one machine send nothing to another one, a
# method may have no residual. Such a tag is written from its first other value on, with the zeros before.
OFTEN_ZERO = {
    *("compression/dense_share", "compression/error_norm", "gossip/staleness", "local/staleness"),
    *("bytes/wire_per_step", "bytes/cross_wire_per_step", "bytes/dense_wire_per_step", "bytes/dense_wire"),
    *(f"time/{phase}" for phase in ("compress", "launch", "wait", "decode", "step")),
}
# Charts of TensorBoard's page "Custom Scalars".
LAYOUT = {
    "bytes": {"wire and dense, per step": ["Multiline", ["bytes/wire_per_step", "bytes/dense_wire_per_step"]]},
    "time": {"seconds per step": ["Multiline", ["time/(data|forward_backward|compress|launch|wait|decode|step)"]]},
}


def describe(tag: str) -> str:
    """The description that TensorBoard shows for a tag."""
    meaning = TAGS.get(tag, "Result of the evaluation after an epoch, by the meter of this name (train.meters).")
    return f"{meaning} {X_AXIS}"


@dataclass
class Point:
    """The values of all tags at one time. The averaged loss arrives later. steps: since the previous point."""

    values: dict[str, float]
    samples: int
    steps: int
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    work: Any = None


class ScalarLog:
    """Writes the scalars, on rank 0 only.

    `add`, `end_epoch` and `close` are collective: every rank calls them in the same order.

    Args:
        samples: samples seen at the checkpoint that the run resumes from. Later points of a killed run are purged.
        lag: points by which one rank may be ahead of another. None: ranks have no common steps, and the loss is
            the loss of rank 0.
    """

    def __init__(self, directory: Path, transport: Transport, samples: int, lag: int | None) -> None:
        self.transport, self.lag = transport, lag
        self.loss = float("nan")  # of the last point that was read
        self.epoch_loss, self.epoch_steps = 0.0, 0
        self.launched = 0
        self.points: deque[Point] = deque()
        self.described: set[str] = set()
        self.zeros: dict[str, list[int]] = {}  # the positions of a tag that has only been 0 and is not written yet
        self.last: dict[str, float] = {}  # the last value of every tag
        self.writer: Any = None
        if transport.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and needed on rank 0 only

            self.writer = SummaryWriter(str(directory), purge_step=samples + 1)

    def write_config(self, config: dict[str, Any], text: str, results: Iterable[str]) -> None:
        """Writes the run's settings as text and as hyperparameters.

        Args:
            config: the settings as nested plain values.
            text: the settings as YAML.
            results: tags that TensorBoard shows beside the hyperparameters.
        """
        if self.writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        self.writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()))
        self.writer.add_custom_scalars(LAYOUT)
        settings = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in flatten(config).items()
        }
        metrics = [*results, "train/loss", "bytes/wire", "bytes/wire_over_dense", "time/elapsed"]
        for summary in hparams(settings, dict.fromkeys(metrics, 0.0)):
            self.writer.file_writer.add_summary(summary)

    def add(self, loss: Tensor, values: dict[str, float], samples: int, steps: int) -> None:
        """Adds a point.

        Args:
            loss: this rank's mean loss since the last point (scalar, on the device).
            values: value of each tag.
            samples: position on the x axis.
            steps: steps since the last point.
        """
        point = Point(values, samples, steps)
        if self.lag is None:
            point.loss = loss
        else:
            name = f"dgc.control.loss.{self.launched % (self.lag + 1)}"
            point.work = self.transport.launch(name, (AllReduce(loss.view(1)),))
            self.launched += 1
        self.points.append(point)
        self._write_points(self.lag or 0)

    def _write_points(self, left: int) -> None:
        """Writes all points except the newest `left`."""
        while len(self.points) > left:
            point = self.points.popleft()
            (loss,) = (point.loss,) if point.work is None else self.transport.wait(point.work)
            self.loss = float(loss)
            self.epoch_loss += self.loss * point.steps
            self.epoch_steps += point.steps
            self.write({"train/loss": self.loss, **point.values}, point.samples)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Writes values by tag. samples: position on the x axis."""
        self.last |= values
        if self.writer is None:
            return
        for tag, value in values.items():
            if tag in OFTEN_ZERO and tag not in self.described and value == 0:
                self.zeros.setdefault(tag, []).append(samples)
                continue
            for earlier in self.zeros.pop(tag, ()):
                self._write(tag, 0.0, earlier)
            self._write(tag, value, samples)

    def _write(self, tag: str, value: float, samples: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        summary = scalar(tag, value)
        if tag not in self.described:  # TensorBoard reads the description from a tag's first point
            self.described.add(tag)
            metadata = summary.value[0].metadata
            metadata.plugin_data.plugin_name, metadata.summary_description = "scalars", describe(tag)
        self.writer.file_writer.add_summary(summary, samples)

    def write_texts(self, texts: Mapping[str, str], samples: int) -> None:
        """Writes texts by tag. samples: position on the x axis."""
        if self.writer is not None:
            for tag, text in texts.items():
                self.writer.add_text(tag, text, samples)

    def end_epoch(self) -> float:
        """The epoch's mean loss; NaN if the epoch had no step, as in a run resumed after the epoch's last step."""
        self._write_points(0)
        loss = self.epoch_loss / self.epoch_steps if self.epoch_steps else float("nan")
        self.epoch_loss, self.epoch_steps = 0.0, 0
        if self.writer is not None:
            self.writer.flush()
        return loss

    def close(self) -> None:
        self._write_points(0)
        if self.writer is not None:
            self.writer.close()
