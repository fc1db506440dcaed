"""Signals that stop a run: any rank may receive one, and all ranks stop after the same step."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from environment import patient, python_path
from simulated import CNN, assert_same_end, train_in
from warm import python

from dgc.comm.lockstep import LockstepWorld
from dgc_training.faults.failure import Terminated
from dgc_training.faults.interruption import EXIT_SAVED, Interruption


def test_all_ranks_stop_after_the_same_step() -> None:
    """received: the step in which each rank receives the signal; 0: never."""

    def body(transport: Any, received: Any) -> Any:
        with Interruption(transport) as interruption:
            for step in range(1, 10):
                interruption.begin_step()
                if step == received[transport.rank]:
                    interruption.received = signal.SIGUSR1
                if interruption.end_step() is not None:
                    return step
            return interruption.check()

    for received, last in (((3, 0, 0), 4), ((0, 0, 5), 6), ((2, 4, 3), 3), ((0, 0, 0), None)):
        assert LockstepWorld(3).run(partial(body, received=received)) == [last] * 3


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_stopped_after_the_last_step_of_an_epoch_resumes_with_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["train.batch_size=1437", "train.num_epochs=2", "model.width=8"]  # an epoch is one step
    with monkeypatch.context() as patch:
        patch.setattr(Interruption, "end_step", lambda self: signal.SIGUSR1)
        assert train_in(tmp_path, [CNN], quick, size=1) == [EXIT_SAVED]
    capsys.readouterr()
    assert train_in(tmp_path, [CNN], quick, size=1) == [0]
    output = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = [words for words in output if words[:2] == ["epoch", "loss"]]
    assert [len(head) for head in heads] == [3, 6], "no step of the first epoch was measured"
    assert any(words[:2] == ["1/2", "nan"] for words in output)


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_that_stops_after_its_minutes_has_the_bits_of_one_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no time at all, every start takes one step: also the last one of an epoch, before its evaluation."""
    dgc, quick = "configs/dgc/wm5.py", ["train.batch_size=300", "train.num_epochs=2", "model.width=8"]
    assert train_in(tmp_path / "whole", [CNN, dgc], quick) == [0, 0]
    starts = 0
    while 0 not in (ended := train_in(tmp_path / "pieces", [CNN, dgc], quick, options=["--minutes", "0"])):
        starts += 1
        assert ended == [EXIT_SAVED] * 2 and starts < 10
    assert starts >= 4 and capsys.readouterr().out.count("Stopped by SIGALRM: saved e000") == starts
    assert_same_end(tmp_path / "whole", tmp_path / "pieces")


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
    environment = {**os.environ, **torchrun, "PYTHONPATH": python_path()}
    words, limit = [python(), "-c", program], patient(100)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit)
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
    environment, pipe = {**os.environ, "PYTHONPATH": python_path()}, subprocess.PIPE
    words = [python(), "-c", program]
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
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
