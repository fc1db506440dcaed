"""How much of the library one step runs: files and functions of `dgc`, without the simulator."""

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from optim.nets import alone, dgc_sgd, momentum_sgd, wrap
from torch.nn.parallel import DistributedDataParallel

import dgc
from dgc.compression import DenseCompressor, DGCCompressor, PowerSGDCompressor
from dgc.ddp import compress

ROOT = Path(dgc.__file__).parent


def run_by_one_step(make: Any, sgd: Any, with_ddp: bool = False) -> set[tuple[str, str]]:
    """(file, function) of all functions that the fourth step of a small network calls."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    if with_ddp:
        model, optimizer = DistributedDataParallel(model), sgd(model)
        compress(model, make(), optimizer, transport=alone())
    else:
        optimizer = wrap(model, alone(), sgd, compression=make())
    seen: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in file.parents:
            seen.add((file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    gc.collect()  # exchanges of other tests, which see the steps of all optimizers
    before = sys.getprofile()
    for step in range(4):
        sys.setprofile(profile if step == 3 else before)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    sys.setprofile(before)
    seen.discard(("engine/steps.py", "_Observers._call"))  # the hook that stays, for which no exchange may be left
    return {(file, function) for file, function in seen if file != "comm/lockstep.py"}


@pytest.mark.usefixtures("no_type_checks")
def test_a_step_runs_few_files_and_functions() -> None:
    for make, sgd, files, functions in (
        (DenseCompressor, momentum_sgd, 10, 45),
        (lambda: DGCCompressor(0.01), dgc_sgd, 22, 100),
        (lambda: PowerSGDCompressor(2), momentum_sgd, 16, 75),
    ):
        seen = run_by_one_step(make, sgd)
        found = sorted({file for file, _ in seen})
        assert len(found) <= files, found
        assert len(seen) <= functions, sorted(seen)
        through_ddp = {file for file, _ in run_by_one_step(make, sgd, with_ddp=True)}
        assert "ddp.py" in through_ddp
        assert len(through_ddp) <= len(found) + 3, sorted(through_ddp ^ set(found))
