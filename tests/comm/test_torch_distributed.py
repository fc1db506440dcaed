"""TorchTransport in one process. tests/parallel has what needs several ranks."""

import subprocess
import sys
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch.distributed as dist
from environment import patient

from dgc.comm.torch_distributed.groups import destroy

# The function that is registered first is called last.
PROGRAM = """
import atexit, time
from pathlib import Path

def threads():
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_runloop" in name for name in names)

atexit.register(lambda: print("at exit", threads()))

import torch
import torch.distributed as dist
from dgc.comm import all_reduce
from dgc.comm.requests import AllReduce
from dgc.comm.torch_distributed import connect

if {initialised}:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    time.sleep({seconds})  # a new thread has no name yet
print("program", threads())


def main():
    transport = connect(hierarchical=True)
    transport.open_lane("lane")
    all_reduce(transport, torch.ones(3), "sum")
    if {unfinished}:
        transport.launch("unfinished", (AllReduce(torch.ones(3)),))


main()
if {destroyed}:
    dist.destroy_process_group()
time.sleep({seconds})
print("before", threads())
"""


@pytest.mark.parametrize(
    ("initialised", "unfinished", "destroyed", "left"),
    [
        (False, False, False, "none"),
        (True, False, False, "those of the program"),
        (False, True, False, "all"),
        (False, False, True, "none"),
    ],
)
def test_no_thread_of_a_process_group_outlives_the_program(
    initialised: bool, unfinished: bool, destroyed: bool, left: str
) -> None:
    settings = {"initialised": initialised, "unfinished": unfinished, "destroyed": destroyed}
    program = PROGRAM.format(**settings, seconds=patient(0.5))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    program_s, before, after = (int(line.split()[-1]) for line in done.stdout.splitlines())
    assert not done.stderr
    assert before > program_s and (program_s > 0) == initialised
    assert after == {"none": 0, "those of the program": program_s, "all": before}[left]


def test_the_threads_of_all_groups_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, a program with 100 groups would end 10 s late."""
    barrier, met = Barrier(3), []

    class Group:
        def __del__(self) -> None:
            with suppress(BrokenBarrierError):
                barrier.wait(timeout=patient(30))
                met.append(True)

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    groups: list[Any] = [Group() for _ in range(3)]
    destroy(groups)
    assert not groups and met == [True] * 3
