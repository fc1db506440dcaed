"""Signals that stop a run: any rank may receive one, and all ranks stop after the same step."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from environment import patient
from warm import python

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.faults.failure import Terminated
from dgc_training.faults.interruption import EXIT_SAVED, Interruption
from dgc_training.startup.arguments import parse_arguments


@pytest.mark.parametrize("received", [(3, 0, 0), (0, 0, 5), (2, 4, 3)])
def test_all_ranks_stop_after_the_same_step(received: Any) -> None:
    """received: the step in which each rank receives the signal; 0: never."""

    def body(transport: Any) -> Any:
        with Interruption(transport) as interruption:
            for step in range(1, 10):
                interruption.begin_step()
                if step == received[transport.rank]:
                    interruption.received = signal.SIGUSR1
                if interruption.end_step() is not None:
                    return step
        return None

    first = min(step for step in received if step)
    assert LockstepWorld(3).run(body) == [first + 1] * 3


def test_without_a_signal() -> None:
    def body(transport: Any) -> Any:
        with Interruption(transport) as interruption:
            return interruption.check()

    assert LockstepWorld(2).run(body) == [None, None]


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_stopped_after_the_last_step_of_an_epoch_resumes_with_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--configs", "configs/digits/cnn.py", "--devices", "cpu", "--run-dir", str(tmp_path / "run")]
    quick = ["--configs.train.batch_size=1437", "--configs.train.num_epochs=2", "--configs.model.width=8"]
    args, overrides = parse_arguments([*words, *quick])  # an epoch is one step

    def status() -> Any:
        return LockstepWorld(1).run(lambda transport: train.run(args, load(args.configs, overrides), transport))

    with monkeypatch.context() as patch:
        patch.setattr(Interruption, "end_step", lambda self: signal.SIGUSR1)
        assert status() == [EXIT_SAVED]
    capsys.readouterr()
    assert status() == [0]
    output = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in output if line.split()[:2] == ["epoch", "loss"]]
    assert [len(head) for head in heads] == [3, 6], "no step of the first epoch was measured"
    assert any(line.split()[:2] == ["1/2", "nan"] for line in output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_real_signal_sets_the_flag_and_the_handlers_are_restored(number: Any) -> None:
    before = signal.getsignal(number)
    with Interruption(LockstepWorld(1).transports[0]) as interruption:
        assert interruption.check() is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the launcher forwards the signal that the batch system sends to all
        limit = time.monotonic() + patient(30)
        while interruption.check() is None and time.monotonic() < limit:
            time.sleep(0.01)
        assert interruption.check() == number
    assert signal.getsignal(number) == before


def test_a_collective_that_fails_after_a_signal_is_not_reported() -> None:
    """Another rank has died, and the launcher ends this one for it."""
    for received, expected in ((0, RuntimeError), (signal.SIGTERM, Terminated)):
        with pytest.raises(expected), Interruption(LockstepWorld(1).transports[0]) as interruption:
            interruption.received = received
            raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")


def test_under_torchrun_ranks_that_do_not_agree_to_stop_end_without_saving() -> None:
    seconds = patient(1)
    program = f"""
import os, signal, time
from dgc.comm.lockstep import LockstepWorld
from dgc_training.faults.interruption import Interruption
for agree in (True, False):
    with Interruption(LockstepWorld(1).transports[0]) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        while not interruption.received:
            time.sleep(0.01)
        if agree:
            interruption.check()
        time.sleep({1.5 * seconds} if agree else 1000)
    print("saved", flush=True)
"""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}
    torchrun["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(2 * seconds)
    done = subprocess.run(
        [python(), "-c", program],
        env={**os.environ, **torchrun, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert (done.returncode, done.stdout) == (143, "saved\n"), done.stderr
    assert done.stderr == f"No common stop within {seconds:g} s after SIGTERM: ended without saving.\n"


def test_a_second_sigterm_ends_at_once_even_inside_a_blocking_call() -> None:
    program = """
import ctypes, os, threading, time
from dgc.comm.lockstep import LockstepWorld
from dgc_training.faults.interruption import Interruption
with Interruption(LockstepWorld(1).transports[0]):
    print("ready", flush=True)
    libc = ctypes.CDLL(None)
    while True:
        libc.pause()
        lock = threading.Lock(); lock.acquire()
        libc.sleep(60); libc.sleep(60); libc.sleep(60)
"""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [python(), "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(1.3)
        assert process.poll() is None
        for _ in range(20):  # two within a second count as one, and a busy machine may deliver the first one late
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patient(1.3))
                break
        process.kill()
        errors = process.communicate()[1]
    assert process.returncode == 143 and errors == "A second SIGTERM: ended without saving.\n"
