"""Sharded models whose ranks are killed with SIGKILL resume from their checkpoint, and end with the same bits."""

import random
import signal
import time
from pathlib import Path

import pytest
import torch
from environment import REPOSITORY, patient
from groups.sites import until
from parallel.killed_shards import MODELS
from parallel.processes import send, start
from parallel.ranks import environment, torchrun
from states import assert_equal

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1200)]
WORKER = str(REPOSITORY / "tests/parallel/killed_shards.py")


def finish(ranks: int, folder: Path, part: str) -> list[dict[str, dict[str, object]]]:
    """What its ranks end with, by run."""
    done = torchrun(ranks, [WORKER, str(folder), part])
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{part}{rank}.pt") for rank in range(ranks)]


def kill(ranks: int, folder: Path, killed: slice, seconds: float) -> None:
    """So many seconds after all ranks have saved the checkpoint."""
    (command,) = torchrun.commands(ranks, [WORKER, str(folder), "killed"])
    process = start(command, folder / "output", environment(ranks))
    files = [folder / f"rank{rank}" for rank in range(ranks)]
    try:
        until(lambda: process.poll() is not None or all(file.is_file() and file.read_text() for file in files))
        time.sleep(seconds)
        assert process.poll() is None
        for file in files[killed]:
            send(int(file.read_text()), signal.SIGKILL)
        assert process.wait(patient(60)) != 0
    finally:
        process.kill()
    text = (folder / "output").read_text()
    assert "SIGKILL" in text and not list(folder.glob("killed*.pt")), text[-3000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, object]]]]:
    folder = tmp_path_factory.mktemp("whole")
    return {ranks: finish(ranks, folder, "whole") for ranks in MODELS}


@pytest.mark.parametrize("killed", [slice(None), slice(1, 2)], ids=["all ranks", "rank 1"])
@pytest.mark.parametrize("ranks", MODELS)
def test_killed_ranks_resume_with_the_bits_of_an_unbroken_run(
    whole: dict[int, list[dict[str, dict[str, object]]]], tmp_path: Path, ranks: int, killed: slice
) -> None:
    kill(ranks, tmp_path, killed, random.Random(ranks).uniform(0.2, 1.5))
    for rank, (resumed, unbroken) in enumerate(zip(finish(ranks, tmp_path, "resumed"), whole[ranks], strict=True)):
        for name, end in unbroken.items():
            assert_equal(resumed[name], end, f"rank {rank}, {name}")
