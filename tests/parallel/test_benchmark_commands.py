"""The smallest run of each benchmark ends with its table and a line of JSON."""

import json
import os
import sys

import pytest
from environment import REPOSITORY
from parallel.processes import run_together

HERE = {
    "consensus": "--ranks 4",
    "convergence": "--simulate --ranks 2 --folds 1 --epochs 1 --batch-size 90 --methods dense fp16",
    "decoding": "--ranks 2 --formats sign-rice --rounds 1",
    "methods": "--elements 0.1 --tensors 3 --ranks 2 --methods onebit dgc powersgd-1 fp16 --rounds 1",
    "payload_bytes": "--values sign --indices rice",
    "scale": "--model resnet18 --methods fp16 --ranks 2 4 --work 0.1",
    "selectors": "--models resnet20 --fit-models resnet20 --steps 2 --settle 1 --rounds 1",
    "step_overhead": "--rounds 1 --warm-up 1",
    "wire": "--steps 5 --densities 0.01",
}
OVER_GLOO = {
    "ddp_step": "--ranks 2 --factors 1 --rounds 1 --warmup 3",
    "outer_speed": "--launcher torchrun --steps 1 --every 2 --delay 0 --batch 1 --methods fp16 diloco",
    "step_cost": "--ranks 1 --over gloo --sizes mlp --rounds 1 --warmup 2",
    "train_step": "--ranks 2 --model lm --batch 1 --repeats 1 --methods fsdp-noop fsdp-bf16-rows 4-8@fsdp",
}
UNDER_MPIRUN = {
    "exchange": "--ranks 2 --model resnet18 --warmup 1 --repeats 1 --methods noop dgc sgp horovod",
    "step_cost": "--ranks 1 --over horovod --sizes mlp --rounds 1 --warmup 2",
    "straggler": "--ranks 2 --compute 1 --numel 100 --repeats 2 --warmup 1 --methods ar sgp",
    "train_step": "--ranks 2 --model resnet18 --image 32 --batch 2 --repeats 1 --methods noop dgc ddp-fp16",
}
COMMANDS = [*HERE.items(), *OVER_GLOO.items()]
COMMANDS_OF_HOROVOD = [pytest.param(*row, marks=pytest.mark.horovod) for row in UNDER_MPIRUN.items()]


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "words"), [*COMMANDS, *COMMANDS_OF_HOROVOD])
def test_the_smallest_run(name: str, words: str) -> None:
    module, *options = name.split()
    given = [word.replace("sign-rice", "sign rice") for word in words.split()]
    command = [sys.executable, "-m", f"benchmarks.{module}", *options, *given]
    (done,) = run_together([command], REPOSITORY, os.environ, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert json.loads(last)["benchmark"] == module and len(lines) >= 3, done.stdout
