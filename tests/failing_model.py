"""A model that fails in one step on one rank, for runs of train.py."""

from pathlib import Path

MODEL = """
import os, signal, time
from dgc.launch import started_by
from dgc_models import DigitsCNN

STARTED = started_by(os.environ)

class Failing(DigitsCNN):
    steps = 0

    def forward(self, images):
        Failing.steps += self.training
        if Failing.steps == {step} and {rank} in (None, STARTED.rank):
            self.fail_here()
        return super().forward(images)

    def fail_here(self):
        {statement}
"""


def failing_model(directory: Path, step: int, statement: str, rank: int | None = None) -> Path:
    """Write the model and a config file that selects it. The directory must be in PYTHONPATH.

    Args:
        directory: Directory of both files.
        step: The forward pass of training that fails, from 1.
        statement: Python code that is run in that step, in the method `fail_here`. It may use os, signal and time.
        rank: The rank that fails. None: all ranks.

    Returns:
        The config file.
    """
    (directory / "failing.py").write_text(MODEL.format(step=step, rank=rank, statement=statement))
    config = directory / "failing.yaml"
    config.write_text("model: {_target_: failing.Failing}\n")
    return config
