"""What goes wrong: other weights, code or waits of a rank, signals that stop a run, and growing residuals."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from environment import patient, python_path
from omegaconf import OmegaConf
from on_ranks import on_ranks
from optim.nets import alone, wrap
from pytest import CaptureFixture, MonkeyPatch
from simulated import CNN, assert_same_end, train_in
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from warm import python

from dgc.comm import barrier
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor
from dgc.contrib import AtomoCompressor, SVDCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc_training.faults.error_growth import ErrorGrowthMonitor
from dgc_training.faults.failure import RESTART, Terminated, UsageError
from dgc_training.faults.interruption import EXIT_SAVED, Interruption
from dgc_training.faults.watchdog import Heartbeat, WatchedTransport, find_stuck_rank
from dgc_training.launcher import print_error
from dgc_training.startup import agreement
from dgc_training.startup.agreement import check_agreement, code_difference, code_hashes
from dgc_training.synchronization import check_replicas, minority_ranks

SAID = f"SIGTERM: the run saves and stops at the next step. If it cannot: {RESTART}\n"
INTERRUPTION = """
import ctypes, os, signal, threading, time
from dgc.comm.lockstep import LockstepWorld
from dgc_training.faults.interruption import Interruption
"""


@on_ranks(4)
def test_a_rank_that_sends_no_more_datagrams_is_missing(transport: Any) -> None:
    """Rank 2 takes no part in the second exchange. Rank 3, which has never sent one, is not listed."""
    heartbeat = Heartbeat(transport)
    for exchange in range(2):
        if transport.rank < 3 and (transport.rank, exchange) != (2, 1):
            heartbeat.send()
        barrier(transport)
    deadline = time.monotonic() + patient(10)
    while (missing := heartbeat.missing()) != [2] and transport.rank == 0 and time.monotonic() < deadline:
        pass  # datagrams take a moment
    barrier(transport)
    heartbeat.close()
    assert transport.rank or missing == [2]


def test_the_rank_with_other_weights_is_reported() -> None:
    rows: Any = (([1, 1], []), ([1, 2, 1], [1]), ([2, 1, 1], [0]), ([1, 2], [1]), ([1, 2, 2, 1], [1, 2]))
    for sums, odd in (*rows, ([1, None, 1], [1])):
        assert minority_ranks(sums) == odd

    def body(transport: Any, changed: int) -> None:
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).requires_grad_(False)
        # Simulated ranks are threads of one process and share its random generator.
        model[0].weight.fill_(0.5)
        model[0].bias.fill_(0.5)
        model[1].running_mean.fill_(transport.rank)
        check_replicas(model, transport)
        if transport.rank == changed:
            model[0].bias[2] = torch.nextafter(model[0].bias[2], torch.tensor(9.0))
        message = rf"parameter 0\.bias of rank {changed} differs from the other"
        if transport.size == 2:
            message = r"rank 1 differs .*\(no majority: rank 0's value"
        with pytest.raises(RuntimeError, match=message):
            check_replicas(model, transport)

    for size, changed in ((3, 0), (3, 1), (3, 2), (2, 1)):
        LockstepWorld(size).run(partial(body, changed=changed))


def test_the_rank_with_other_code_is_reported(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    some = {"train.py", "dgc_training/startup/agreement.py", "dgc_models/__init__.py", "dgc/core/bucket.py"}
    assert some <= code_hashes().keys()
    file = tmp_path / "dgc_models" / "a.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    monkeypatch.setattr(agreement, "FOLDERS", (file.parent,))
    before = code_hashes()
    file.write_text("a = 2\n")
    assert code_difference(before, code_hashes()) == "dgc_models/a.py" and code_difference(before, before) is None
    assert code_difference({}, {"x.py": "1"}) == "x.py (one of them has no such file)"
    own = threading.local()
    monkeypatch.setattr(agreement, "code_hashes", lambda: own.hashes)

    def body(transport: Any) -> None:
        own.hashes = {"dgc/a.py": "1", "train.py": "2" if transport.rank == 2 else "1"}
        with pytest.raises(UsageError, match=r"rank 2 runs other code than rank 0: train\.py differs"):
            check_agreement(OmegaConf.create({"seed": 1}), torch.device("cpu"), transport)

    LockstepWorld(3).run(body)


def test_the_rank_that_does_not_wait_is_stuck() -> None:
    joined = "rank 1 did not join dgc0.1.0, for which the others have waited 6 s$"
    rows: Any = (
        ([None, (3.0, "loss"), None], None, ""),
        ([None, None], None, ""),
        ([(6.0, "dgc0.1.0"), None, (5.5, "dgc0.1.0")], 1, joined),
        ([(6.0, "a"), None, None], 1, r"ranks \[1, 2\] did not join a"),
        ([(9.0, "loss"), (9.0, "replicas"), (8.0, "loss")], 1, ".*rank 0 for loss; rank 1 for replicas"),
    )
    for waits, stuck, why in rows:
        found = find_stuck_rank(waits, 5.0)
        assert (found and found[0]) == stuck and (found is None or re.match(why, found[1]))
    # a watched transport records its waits
    slow: Any = Mock(rank=0, size=1, local_rank=0, local_size=1, point_to_point=False)
    watched, seen = WatchedTransport(slow), list[Any]()
    slow.wait.side_effect = lambda work: seen.append(watched.waiting)
    watched.wait(watched.launch("a", ()))
    slow.wait.assert_called_once_with(slow.launch.return_value)
    assert seen[0][1] == "a" and watched.waiting is None


def test_torchrun_ends_with_the_message_of_the_first_rank(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    file = str(tmp_path / "error.json")
    started = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": file}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert print_error("wrong setting") == 2
    assert ProcessFailure(0, 1, 2, file).message["message"] == "wrong setting"  # type: ignore[index]
    monkeypatch.setenv("RANK", "1")
    program = "import time; from dgc_training.launcher import print_error; sleep = time.sleep; "
    program += "time.sleep = lambda seconds: (print('waits', flush=True), sleep(60)); print_error('wrong')"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "waits\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(patient(60)) == 0


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
def test_a_run_resumes_with_an_evaluation(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    quick = ["train.batch_size=1437", "train.num_epochs=2", "model.width=8"]  # an epoch is one step
    with MonkeyPatch.context() as patch:
        patch.setattr(Interruption, "end_step", lambda self: signal.SIGUSR1)
        assert train_in(tmp_path, [CNN], quick, size=1) == [EXIT_SAVED]
    capsys.readouterr()
    assert train_in(tmp_path, [CNN], quick, size=1) == [0]
    output = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = [words for words in output if words[:2] == ["epoch", "loss"]]
    assert [len(head) for head in heads] == [3, 6], "no step of the first epoch was measured"
    assert any(words[:2] == ["1/2", "nan"] for words in output)


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_in_minutes_has_the_bits_of_one_without_stops(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    """With no time at all, every start takes one step, or those until ranks that train alone agree to stop."""
    quick = ["train.batch_size=300", "train.num_epochs=2", "model.width=8"]
    local = ["train.local.average_every=2", "train.num_epochs=4"]
    for method, more, least in (("dgc/wm5", [], 4), ("local/diloco", local, 2)):
        whole, pieces, starts = tmp_path / method / "whole", tmp_path / method / "pieces", 0
        stack, settings = [CNN, f"configs/{method}.py"], [*quick, *more]
        assert train_in(whole, stack, settings) == [0, 0]
        while 0 not in (ended := train_in(pieces, stack, settings, options=["--minutes", "0"])):
            starts += 1
            assert ended == [EXIT_SAVED] * 2 and starts < 10
        assert starts >= least and capsys.readouterr().out.count("Stopped by SIGALRM: saved e000") == starts
        assert_same_end(whole, pieces)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_real_signal_sets_the_flag(number: signal.Signals) -> None:
    """The handler of before returns at the end."""
    before = signal.getsignal(number)
    with Interruption(alone()) as interruption:
        assert interruption.check() is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the launcher forwards the signal that the batch system sends to all
        limit = time.monotonic() + patient(30)
        while interruption.check() is None and time.monotonic() < limit:
            time.sleep(0.01)
        assert interruption.check() == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("received", "expected"), [(0, RuntimeError), (signal.SIGTERM, Terminated)])
def test_a_collective_that_fails_after_a_signal_is_not_reported(received: int, expected: Any) -> None:
    """Another rank has died."""
    with pytest.raises(expected), Interruption(alone()) as interruption:
        interruption.received = received
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")


def test_rank_0_says_at_once_what_a_sigterm_does(capsys: CaptureFixture[str]) -> None:
    """mpirun sends it when a rank has died, and kills the others a second later."""
    with Interruption(alone()) as interruption:
        interruption._receive(signal.SIGTERM)
    assert capsys.readouterr().err == SAID and "the same command resumes" in SAID


def test_under_torchrun_ranks_that_do_not_agree_to_stop_end_without_saving() -> None:
    seconds = patient(1)
    program = f"""{INTERRUPTION}
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
    last = f"No common stop within {seconds:g} s after SIGTERM: ended without saving.\n"
    assert done.stderr == f"{SAID}{SAID}{last}"


def test_a_second_sigterm_ends_at_once_even_inside_a_blocking_call() -> None:
    program = f"""{INTERRUPTION}
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
    assert process.returncode == 143 and errors == f"{SAID}A second SIGTERM: ended without saving.\n"


def warnings_of(norms: Any, ratio: float = 0.01) -> Any:
    monitor = ErrorGrowthMonitor()
    return [text for norm in norms if (text := monitor.update(norm, ratio, 10))]


def test_only_unbounded_growth_gives_a_warning() -> None:
    linear = [float(i) for i in range(1, 600)]
    for time_constant in (20, 100, 300):
        assert warnings_of([10 * (1 - math.exp(-10 * i / time_constant)) for i in range(1, 400)]) == []
    walk = [math.sqrt(min(10 * i, 1000)) for i in range(1, 500)]  # random, until coordinates are sent
    assert warnings_of(walk, ratio=0.001) == []
    assert warnings_of([1.0] * 40 + [50.0] * 9 + [49.0] * 200) == [], "a high plateau"
    assert warnings_of(linear, ratio=1.0) == [], "dense training"
    # a new ratio starts a new reference
    monitor = ErrorGrowthMonitor()
    for ratio, norm in ((0.25, 1.0), (0.063, 8.0), (0.016, 60.0), (0.001, 500.0)):
        assert not any(monitor.update(norm * (1 + i / 1000), ratio, 10) for i in range(200))
    for norms in ([1.02**i for i in range(1, 600)], linear):
        (text,) = warnings_of(norms)
        assert "residual's norm has grown from" in text and "compress_ratio 0.01" in text
    for norm in (math.nan, math.inf):
        (text,) = warnings_of([1.0, norm, norm])
        assert "not finite" in text
    # Low-rank methods have a compress_ratio below 1. A ratio of 1 would turn the monitor off.
    for make in (SVDCompressor, AtomoCompressor):
        optimizer = wrap(torch.nn.Linear(40, 60), alone(), compression=make(2))
        assert optimizer.compress_ratio == 2 * (40 + 60) / (40 * 60)
        (text,) = warnings_of(linear, ratio=optimizer.compress_ratio)
        assert "compress_ratio 0.0833" in text


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("lr", [pytest.param(0.05, marks=pytest.mark.proof), 1.5])
@on_ranks(2)
def test_real_training(transport: Any, lr: float) -> None:
    """A diverging learning rate gives a warning in 1000 steps of DGC, and a stable one none."""
    torch.manual_seed(1)
    model, compression = torch.nn.Linear(50, 40, bias=False), DGCCompressor(0.01, DGCSGDMemory(momentum=0.9))
    sgd = DGCSGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression, transport=transport)
    generator = torch.Generator().manual_seed(transport.rank)
    weights = torch.randn(40, 50, generator=torch.Generator().manual_seed(9))
    monitor, warned, step = ErrorGrowthMonitor(), False, 0
    while not warned and step < 1000:
        inputs, step = torch.randn(16, 50, generator=generator), step + 1
        optimizer.zero_grad()
        (model(inputs) - inputs @ weights.T).square().mean().backward()
        optimizer.step()
        warned = step % 10 == 0 and bool(monitor.update(optimizer.error_norm(), 0.01, 10))
    assert warned == (lr > 1)
