"""The network laboratory and `make gpu` where there is no GPU: refusals, a dry run, and what benchmarks compute.

tests/parallel/test_netlab.py makes hosts.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from cases import case
from environment import REPOSITORY, python_path
from refusals import refuse

from benchmarks import _gpu_steps as gpu_steps
from benchmarks import _laboratory as module
from benchmarks import time_to_accuracy
from benchmarks._gpu_steps import BEGIN, END, MESSAGE, Parts, stress, waits_of, write_table
from benchmarks._laboratory import Laboratory, LaboratoryError, RaisedSigterm, cores_of, parse_latency, parse_rate
from benchmarks._launches import AS_RANK, KEEP_TO_ONE_CORE, begin, measure, portions, ranks_per_host
from benchmarks._runs import TASKS
from benchmarks._stand_ins import ANNOTATIONS, cases, load_tests
from benchmarks._step_times import add_network, row_of
from benchmarks.exchange import GOSSIP, GRADIENTS
from benchmarks.figures import crossing, draw_exchange, read_lines, speed_ups
from benchmarks.gpu import PAGE
from benchmarks.step_overhead import resnet50
from benchmarks.time_to_accuracy import reached
from benchmarks.train_step import MODELS, Work, make, make_work
from dgc.advisor.cost import AlikeRanks
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import PHASES
from dgc.compression import TwoPhaseCompressor

Patch = pytest.MonkeyPatch


def test_rates_are_parsed() -> None:
    assert [parse_rate(text) for text in ("100mbit", "2.5gbit", "5000kbit")] == [1e8, 2.5e9, 5e6]


def test_delays_are_parsed() -> None:
    assert [parse_latency(text) for text in ("500us", "10ms", "1s")] == pytest.approx([5e-4, 1e-2, 1.0])


@pytest.mark.parametrize("rate", ["", "fast", "100", "100 mbit", "-1gbit", "100MB", "1kbit", "101gbit"])
def test_a_wrong_rate_is_refused(rate: str) -> None:
    refuse("rate", Laboratory, 2, rate)


def test_a_rate_without_a_unit_is_refused_with_an_example() -> None:
    refuse("^the rate must be from 1mbit to 100gbit, such as 2.5gbit, not 100", Laboratory, 2, 100)


@pytest.mark.parametrize("delay", ["", "1", "0ms", "2s", "1min"])
def test_a_wrong_delay_is_refused(delay: str) -> None:
    refuse("delay|latency", Laboratory, 2, "1gbit", delay)


def test_hosts_share_the_cores() -> None:
    assert [cores_of(host, 2, [3, 4, 5, 6, 7]) for host in range(2)] == [[3, 4], [5, 6]]
    assert [cores_of(host, 4, [0, 1, 2, 3]) for host in range(4)] == [[0], [1], [2], [3]]
    assert [cores_of(host, 4, [5, 7]) for host in range(4)] == [[5], [7], [5], [7]]


def test_hosts_share_the_ranks() -> None:
    assert ranks_per_host(8, 4) == 2
    for ranks in (0, 3, 6, -4):
        refuse("a multiple of the 4 hosts", ranks_per_host, ranks, 4)


def test_a_wrong_number_of_hosts_is_refused() -> None:
    for hosts in (-1, 0, 1, 65):
        refuse("^the number of hosts must be 2 to 64", Laboratory, hosts, "1gbit")
    for wrong in ("2", 2.5, True, None):
        refuse("^(the )?hosts must be a whole number from 2 to 64, not", Laboratory, wrong, "1gbit")


def test_what_is_missing_is_one_message(monkeypatch: Patch) -> None:
    missing: Any = [
        ("os.geteuid", lambda: 1000, "need root"),
        ("shutil.which", lambda tool: None if tool == "tc" else tool, "tc is missing.*iproute2"),
        ("sys.platform", "darwin", "need Linux"),
    ]
    for what, value, message in missing:
        with case(what), monkeypatch.context() as patch, pytest.raises(LaboratoryError, match=message):
            patch.setattr(module, "_run", lambda command: pytest.fail(f"{command} was run"))
            patch.setattr(f"{module.__name__}.{what}", value)
            Laboratory(2, "1gbit").__enter__()
    command = [sys.executable, "-m", "benchmarks.netlab", "--hosts", "2", "--rate", "fast", "--", "train.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("netlab: the rate must be from")
    assert done.stderr.count("\n") == 1 and not done.stdout
    # so is a link on which nothing arrives
    laboratory = Laboratory(2, "1gbit")
    monkeypatch.setattr(laboratory, "inside", lambda host, command: ["true"])
    traceback = "Traceback (most recent call last):\n  ...\nOSError: [Errno 113] No route to host\n"
    failed = subprocess.CompletedProcess("send", 1, "", traceback), "No route to host"
    for outcome, reason in (failed, (subprocess.TimeoutExpired("send", 70.0), "no answer in 70 s")):
        monkeypatch.setattr(laboratory, "run", Mock(side_effect=[outcome]))
        with pytest.raises(LaboratoryError, match=f"could not be measured: .*{reason}\nFrames probably") as caught:
            measure(laboratory)
        assert "Traceback" not in str(caught.value)


@pytest.fixture
def removed(monkeypatch: Patch, tmp_path: Path) -> list[int]:
    """The numbers of the laboratories that are removed, of which number 7 is left over."""
    removed: list[int] = []
    monkeypatch.setattr(module, "LOCKS", tmp_path)
    monkeypatch.setattr(module, "remove", removed.append)
    (tmp_path / "7").write_text("")
    return removed


def test_a_left_over_laboratory_is_removed(removed: list[int], tmp_path: Path) -> None:
    (tmp_path / "8").symlink_to(tmp_path / "vanished")  # as if removed before it is opened
    module.remove_leftovers()
    assert removed == [7]


def test_a_laboratory_in_use_is_not_removed(removed: list[int], monkeypatch: Patch, tmp_path: Path) -> None:
    """Its process ends the old one and makes another one before the old file is locked here."""
    real = fcntl.flock

    def flock(file: Any, how: int) -> None:
        (tmp_path / "7").unlink()
        (tmp_path / "7").write_text("")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    module.remove_leftovers()
    assert removed == []


def test_a_file_that_another_process_removes_is_made_again(monkeypatch: Patch, tmp_path: Path) -> None:
    """The other process looks at the file for a moment, or removes it."""
    path = tmp_path / "9"
    other = module.lock(path)
    assert other is not None

    def let_go() -> None:
        path.unlink()
        other.close()

    thread = threading.Timer(0.2, let_go)
    thread.start()
    own = module.lock(path)
    thread.join()
    assert own is not None and os.path.samestat(os.fstat(own.fileno()), path.stat())
    monkeypatch.setattr(module, "PAUSE", 0.001)
    assert module.lock(path) is None and module.try_lock(path) is None
    own.close()


@pytest.fixture
def default_handler() -> Iterator[None]:
    """SIGTERM has its default handler before and after the test."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.usefixtures("default_handler")
def test_sigterm_waits_while_hosts_are_removed() -> None:
    raised = RaisedSigterm()
    raised.install()
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)
    raised.hold()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        raised.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_another_thread_installs_no_handler_of_sigterm() -> None:
    thread = threading.Thread(target=RaisedSigterm().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_the_users_own_handler_of_sigterm_is_kept() -> None:
    raised = RaisedSigterm()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raised.install()
    raised.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def step(whole: float, update: float, wire: float, link: float) -> dict[str, float]:
    phases = {f"phase {phase}": update if phase == "step" else 0.0 for phase in PHASES}
    sent = dict.fromkeys(("payload", "wire", "machine"), wire)
    return {"exchange": whole - update, "whole": whole, "until": whole, **sent, "link": link, **phases}


def test_the_command_knows_an_lstm_with_its_methods() -> None:
    assert {"lstm", "vgg16"} <= set(MODELS) and {"dense", "fp16", "2bit"} <= set(GRADIENTS)


def test_the_work_of_an_lstm_has_its_loss() -> None:
    work = make_work("lstm", batch=1, image=0, rank=0)  # without a step, which takes long
    assert sum(p.numel() for p in work.model.parameters()) == 28869 * 651 + 3 * 8 * 650 * 651
    loss = work.loss(work.model)
    assert loss.isfinite() and loss.ndim == 0


def test_a_row_has_the_median_step_of_the_slowest_rank() -> None:
    fast = [step(1.0, 0.25, 100, 110), step(2.0, 0.25, 100, 110), step(9.0, 0.25, 100, 110)]
    slow = [step(3.0, 0.75, 300, 310), step(1.5, 0.75, 300, 310), step(4.0, 0.75, 300, 310)]
    row: dict[str, Any] = row_of([fast, slow])
    assert (row["step_ms"], row["exchange_ms"]) == (3000.0, 2250.0)
    assert (row["wire_bytes"], row["link_bytes"]) == (200, 210) and row["phases_ms"]["step"] == 500.0


def rows_of_a_link() -> dict[str, Any]:
    return {
        "noop": {"step_ms": 10.0, "until_ms": 10.0, "link_bytes": 50.0, "machine_bytes": 0.0},
        "fp16": {"step_ms": 90.0, "until_ms": 100.0, "link_bytes": 1500.0, "machine_bytes": 1000.0},
        "dgc": {"step_ms": 30.0, "until_ms": 20.0, "link_bytes": 200.0, "machine_bytes": 125.0},
    }


def test_the_bytes_that_a_link_carries_all_the_time_do_not_count() -> None:
    rows = rows_of_a_link()
    add_network(rows, {"bits_per_second": 8e6}, "step_ms", lambda name: "noop", ("fp16", "absent"))
    assert [rows[name]["link_bytes"] for name in rows] == [0.0, 1000.0, 100.0]
    assert [rows[name]["link_over_meter"] for name in rows] == [None, 1.0, 0.8]
    assert [rows[name]["bound_ms"] for name in rows] == [0.0, 1.0, 0.125]
    assert (rows["dgc"]["faster"], rows["dgc"]["fewer"], rows["noop"]["fewer"]) == (3.0, 10.0, None)


def test_a_link_with_bytes_in_each_step() -> None:
    rows = rows_of_a_link()
    add_network(rows, {"bits_per_second": 8e6}, "step_ms", lambda name: "noop", (), per_step=("noop",))
    assert [row["link_bytes"] for row in rows.values()] == [0.0, 1450.0, 150.0]


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK"])
def test_ranks_beyond_the_cores_keep_to_one_each(variable: str, tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "4")
    kept, main = Mock(), Mock(side_effect=AssertionError("a rank has no command line"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", kept)
    (tmp_path / "settings").write_text('{"a": 1}')
    for words, then in (((), []), ((KEEP_TO_ONE_CORE,), [call(0, {5})])):
        words = (AS_RANK, str(tmp_path / "settings"), str(tmp_path / "result"), *words)
        monkeypatch.setattr(sys, "argv", ["module", *words])
        given = Mock()
        begin(given, main)
        assert given.mock_calls == [call({"a": 1})] and kept.mock_calls == then
    assert not (tmp_path / "result").exists()  # rank 4 writes nothing
    monkeypatch.setenv(variable, "0")
    begin(lambda settings: settings["a"] + 1, main)
    assert (tmp_path / "result").read_text() == "2"
    # methods are divided into launches
    assert portions(["a", "h", "b", "c", "i"], 2, alone=("h", "i")) == [["a", "b"], ["c"], ["h", "i"]]
    assert portions([], 2) == []


def measured(mbit: float, fp16: float, dgc: float) -> str:
    phases = dict.fromkeys(PHASES, 1.0)
    times = {"noop": 1.0, "fp16": fp16, "horovod-fp16": 2 * fp16, "dgc": dgc}
    rows = {name: {"exchange_ms": ms, "step_ms": ms + 9, "phases_ms": phases} for name, ms in times.items()}
    network = {"hosts": 4, "rate": f"{mbit}mbit", "bits_per_second": 1e6 * mbit}
    settings = {"benchmark": "exchange", "model": "resnet50", "ranks": 4}
    return json.dumps({**settings, "network": network, "methods": rows})


def test_the_figure_shows_where_a_method_stops_to_pay(tmp_path: Path) -> None:
    file = tmp_path / "measured.txt"
    file.write_text("\n".join(["a table", measured(10_000, 10.0, 40.0), measured(100, 1600.0, 100.0)]))
    lines = read_lines(file)
    dgc, fp16 = (speed_ups(lines)[name] for name in ("dgc", "horovod-fp16"))
    assert dgc == [(100.0, 16.0), (10_000.0, 0.25)] and fp16 == [(100.0, 0.5), (10_000.0, 0.5)]
    # 16 times falls to a quarter in six halvings over two decades: 1 is reached after four of the six
    assert crossing(dgc) == pytest.approx(100 * 100 ** (4 / 6)) and crossing(fp16) is None
    draw_exchange(lines, tmp_path / "figure.svg")
    assert "pays" not in (text := (tmp_path / "figure.svg").read_text()) and "horovod-fp16" in text
    file.write_text("no JSON\n")
    refuse("no line of a benchmark with --hosts", read_lines, file)


def test_time_to_accuracy_is_that_of_the_first_epoch_that_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    dense = [(10.0, 100.0, 50.0), (20.0, 200.0, 99.0), (30.0, 300.0, 98.0)]
    fast = [(1.0, 10.0, 97.5), (2.0, 20.0, 97.4), (3.0, 30.0, 97.6)]
    never, bits = [(1.0, 1.0, 10.0), (2.0, 2.0, 97.49)], [(1.0, 10.0, 2.1), (2.0, 20.0, 2.03), (3.0, 30.0, 2.0)]
    digits, pysource = TASKS["digits"], TASKS["pysource"]
    found = [reached(dense, 98.5, digits, target) for target in (None, 50.0, 99.5)]
    assert found == [(20.0, 200.0), (10.0, 100.0), None]
    assert reached(bits, 2.0, pysource) == (2.0, 20.0) and reached(bits, 1.9, pysource) is None
    row = time_to_accuracy.row_of([fast], [dense], digits)
    assert (row["seconds_to_reach"], row["mb_to_reach"], row["quality"], row["seconds"]) == (1.0, 1e-5, 97.6, 3.0)
    both = time_to_accuracy.row_of([fast, never], [dense, dense], digits)
    assert "seconds_to_reach" not in both and both["reached"] == "1 of 2"
    both = time_to_accuracy.row_of([fast, dense], [dense, dense], digits, target=97.6)
    assert (both["seconds_to_reach"], both["reached"]) == (11.5, "2 of 2")
    # simulated seconds follow from the bytes
    words = "--simulate --hosts 2 --rate 8mbit --epochs 1 --target 1 --methods fp16 -- --configs.model.width=4"
    assert time_to_accuracy.main(words.split()) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]["fp16"]
    assert row["mb_to_reach"] == row["wire_mb"] == pytest.approx(row["seconds"]) and row["seconds"] > 0


def test_a_step_of_gossip_ends_when_its_messages_have_arrived() -> None:
    """Otherwise they arrive while the next method is measured, and the wait for them is not timed."""
    for name in GOSSIP:
        transport: Any = AlikeRanks(4)
        model, launched, arrived = torch.nn.Linear(8, 8), Mock(wraps=transport.launch), Mock(wraps=transport.wait)
        # messages of neighbours arrive only when they are waited for
        transport.launch, transport.wait, transport.poll = launched, arrived, lambda work: False
        method = make(name, Work(model, lambda wrapped: wrapped(torch.ones(1, 8)).sum()), 0.1, transport)
        for _ in range(3):
            sent = method.meter.wire_bytes
            method.step()
            assert launched.call_count == arrived.call_count and method.meter.wire_bytes > sent, name


# A machine with PyTorch and Triton, of the packages that this one has.
BARE = """
    import runpy, sys
    sys.modules.update(dict.fromkeys({absent}))
    sys.argv = ["gpu", *{words}]
    runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def run(code: str, **variables: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": python_path(), **variables}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run(BARE.format(absent=(), words=[]))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "sees no GPU" in done.stderr


def test_a_missing_package_is_named_with_its_cure() -> None:
    done = run(BARE.format(absent=("triton",), words=[]))
    assert done.returncode == 2 and "-m pip install triton" in done.stderr


TESTS = """
    import pytest
    from a_helper import successor
    @pytest.fixture(autouse=True)
    def always(monkeypatch):
        monkeypatch.setenv("GPU_TEST", "set")
    @pytest.fixture(scope="module")
    def once():
        made.append(1)
        return made
    made = []
    @pytest.mark.parametrize("a, b", [(1, 2), pytest.param(3, 4, marks=pytest.mark.proof)])
    @pytest.mark.parametrize(("c", "d"), [(5, 6), (6, 7)])
    def test_parameters(a, b, c, d, once):
        import os
        assert b == successor(a) and d == successor(c) and os.environ["GPU_TEST"] == "set" and len(once) == 1
    @pytest.mark.proof
    def test_raises(monkeypatch):
        monkeypatch.setattr("os.absent", 1, raising=False)
        with pytest.raises(ValueError, match="bad") as refused:
            raise ValueError("bad")
        assert str(refused.value) == "bad"
    @pytest.mark.skipif(True, reason="it is not for this machine")
    def test_skipped():
        assert False
    @pytest.mark.skipif(False, reason="it is for this machine")
    @pytest.mark.parametrize("x", [1, 2])
    def test_fails_for_two(x):
        assert x == 1
    def test_raises_nothing():
        with pytest.raises(ValueError):
            pass
"""


def test_tests_run_without_pytest(tmp_path: Path) -> None:
    (tmp_path / "a_helper.py").write_text("successor = 1 .__add__")
    file = tmp_path / "folder" / "test_some.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(TESTS))
    found, passed = list(cases(load_tests(file), {})), []
    for name, test in found:
        with suppress(AssertionError):
            test()
            passed.append(name)
    failed = [name for name, _ in found if name not in passed]
    assert failed == ["test_fails_for_two(x=2)", "test_raises_nothing()"]
    assert len(found) == 4 + 1 + 2 + 1 and "GPU_TEST" not in os.environ
    with pytest.raises(AssertionError, match="no tests of these names"):
        list(cases(load_tests(file), {"test_unknown": "it is not there"}))
    # every annotation has its stand-in too
    files = (REPOSITORY / "dgc").rglob("*.py")
    imported = [line for file in files for line in re.findall(r"from jaxtyping import (.*)", file.read_text())]
    assert {name.strip() for line in imported for name in line.split(",")} == set(ANNOTATIONS)


def test_waits_are_counted_by_place(monkeypatch: Patch) -> None:
    """PyTorch warns of each wait, at the line that asked for it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def step() -> None:
        for _ in range(3):
            warnings.warn(MESSAGE, stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    line = step.__code__.co_firstlineno + 2
    assert waits_of(step) == Counter({f"tests/test_networks_and_gpus.py:{line}": 3})


def test_shapes_of_resnet50() -> None:
    import dgc_datasets.torchvision_compat  # noqa: F401

    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    with torch.device("meta"):
        expected = [tuple(p.shape) for p in models.resnet50().parameters() if p.dim() >= 2]
    assert [tuple(t.shape) for t in resnet50().values()] == expected


# Their fixtures have parameters, use others, and change modules of kernels.
LAWS_ALONE = """
    import torch, sys
    sys.modules["pytest"] = None
    from benchmarks._gpu_steps import laws
    import dgc.kernels.selection.triton
    found = dict(laws(torch.device("cpu")))
    assert len(found) > 60
    for name in (
        "test_codes_of_many_parts(indices=rice, order=reversed)",
        "test_coded_indices_of_many_parts(indices=packed, divided=in parts)",
        "test_coded_indices_of_many_parts(indices=packed, divided=alone)",
        "test_statistics_are_right_in_any_order_of_programs(order=shuffled)",
    ):
        found[name]()
"""
TRAINING_ALONE = """
    import sys, warnings
    sys.modules.update(dict.fromkeys(("numpy", "omegaconf")))
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch
    import benchmarks.ddp_step, benchmarks._launches
    import dgc.kernels as kernels
    from benchmarks._gpu_steps import Training
    kernels.use("reference")
    Training(16, torch.device("cpu")).step()
"""


def test_laws_hold_without_pytest() -> None:
    """It may be missing beside PyTorch for CUDA."""
    done = run(LAWS_ALONE, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]


def test_training_needs_no_numpy() -> None:
    """It may be missing beside PyTorch for CUDA."""
    done = run(TRAINING_ALONE)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_fails_or_is_late_does_not_stop_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, done = Parts(1), list[str]()
    for name, part, share in (
        ("kernel", Mock(side_effect=ValueError("no such register")), 1),
        ("ranks", Mock(side_effect=SystemExit("a rank ended with status 1")), 1),
        ("late", partial(done.append, "late"), 0),
        ("last", partial(done.append, "last"), 1),
    ):
        parts.run(name, part, share)
    assert (parts.failed, parts.not_run, done) == (["kernel", "ranks"], ["late"], ["last"])
    assert 59 < parts.left() <= 60 and 29 < parts.left(0.5) <= 30
    printed = capsys.readouterr().out
    assert "FAILED kernel\n" in printed and "no such register" in printed and "a rank ended" in printed
    # the table takes its place on the page
    page = tmp_path / "gpu.md"
    rows: Any = {"top of |v|": {"ms": 1.25, "launches": 3, "where": {}}, "b": {"peak MB": 7.4}}
    page.write_text(PAGE.read_text())
    for title in ("GPU A", "GPU B"):  # the second one replaces the first
        write_table(page, title, rows)
    text = page.read_text()
    assert "GPU B:\n\n| step | ms |" in text and "GPU A" not in text
    assert "| top of v | 1.250 |  |  |  |  |  | 3 |  |  |\n| b |  |  |  |  |  |  |  |  | 7 |\n" in text
    before, rest = PAGE.read_text().split(BEGIN)
    assert text.startswith(before) and text.endswith(rest.split(END)[1])
    page.write_text("another page")
    refuse("has no <!-- the table of make gpu -->", write_table, page, "title", rows)


@pytest.fixture
def few_laws(monkeypatch: Patch) -> list[str]:
    """Laws of which the third fails. Their processes are calls here. Returns what has run."""
    ran: list[str] = []

    def law(name: str) -> None:
        ran.append(name)
        assert name != "c", "c does not hold"

    class Process:
        def __init__(self, command: Any, **options: Any) -> None:
            assert command[1:4] == ["-m", "the.module", gpu_steps.AS_LAWS]
            k, processes, seconds, device, file = command[4:]
            gpu_steps.work_on_laws(int(k), int(processes), float(seconds), torch.device(device), Path(file))
            self.returncode = 0

        def wait(self, timeout: float | None = None) -> int:
            return self.returncode

        def kill(self) -> None:
            pass

    monkeypatch.setattr(gpu_steps, "laws", lambda device: [(name, partial(law, name)) for name in "abcde"])
    monkeypatch.setattr(subprocess, "Popen", Process)
    return ran


def test_each_law_runs_in_one_of_several_processes(few_laws: list[str]) -> None:
    parts = Parts(1)
    assert gpu_steps.run_laws("the.module", parts, torch.device("cpu"), 1.0, 2) == 5
    assert few_laws == ["a", "c", "e", "b", "d"] and (parts.failed, parts.not_run) == (["c"], [])


def test_laws_that_are_too_late_are_listed_as_not_run(few_laws: list[str], monkeypatch: Patch) -> None:
    clock = Mock(side_effect=range(0, 1000, 20))  # each look at it takes 20 seconds
    monkeypatch.setattr("time.monotonic", clock)
    parts = Parts(3)
    ran = gpu_steps.run_laws("the.module", parts, torch.device("cpu"), 0.5, 1)
    assert 0 < ran < 5 and len(parts.not_run) == 5 - ran and few_laws == list("abcde"[:ran])


def test_the_table_is_kept_after_each_row() -> None:
    kept: list[list[str]] = []
    table = gpu_steps.Rows(Parts(1), torch.device("cpu"), 2, lambda rows: kept.append(list(rows)))
    changes, steps = Mock(), Mock()
    table.measure("first", lambda: steps, before=changes)
    table.measure("second", lambda: steps)
    assert kept == [["first"], ["first", "second"]]
    assert changes.call_count == 2 and steps.call_count > 4
    row = table.rows["first"]
    assert row["worst"] >= row["ms"] >= row["host"] > 0


def test_a_step_alone_answers_all_requests_of_two_phases() -> None:
    shapes: list[Any] = [[(8, 30)], [(20,)]]
    whole = gpu_steps.Whole(TwoPhaseCompressor(), shapes, torch.device("cpu"))
    given = gpu_steps.random_gradients(shapes, 0, torch.device("cpu"))
    whole.step(given)
    for bucket, gradient in zip(whole.buckets, given, strict=True):
        assert torch.allclose(bucket.flat, gradient, atol=0.1)


def test_the_exchange_with_checks_compares_the_means_of_all_ranks(monkeypatch: Patch) -> None:
    body = partial(stress, device=torch.device("cpu"), steps=2, scale=1, is_over=lambda: False)
    assert min(LockstepWorld(2).run(body)) > 0
    gather = gpu_steps.all_gather_object
    monkeypatch.setattr(gpu_steps, "all_gather_object", lambda t, found: gather(t, [*found, t.rank]))
    with pytest.raises(RuntimeError, match="other means than rank 0 in the last 2 of 2 steps"):
        LockstepWorld(2).run(body)


@pytest.mark.timeout(600)
@pytest.mark.proof
def test_a_dry_run_without_other_packages_than_torch(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    absent = ("jaxtyping", "pytest", "torchvision", "horovod", "mpi4py")
    page = tmp_path / "gpu.md"
    page.write_text(PAGE.read_text())
    done = run(BARE.format(absent=absent, words=["--dry-run", "--write", str(page)]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "jaxtyping is not installed" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["laws"]["failed"] == [] and found["laws"]["number"] > 60
    assert found["failed"] == found["not_run"] == []
    ranks = ("DDP, torch's PowerSGD, rank 4", "DDP, our DGC", "DGC, 3 steps with checks")
    rows = {"torch.topk of |v| alone", "PowerSGD, rank 1", *(f"2 ranks, gloo: {name}" for name in ranks)}
    rows |= {
        f"2 ranks, gloo: GPT-2, {name}" for name in ("no hook", "torch, PowerSGD, rank 4", "two phases, 8 bits")
    }
    rows |= {"two phases, 8 bits", "the same, gradients that jump by 30"}
    assert rows <= found["rows"].keys() and "| 2 ranks, gloo: DDP, our DGC |" in page.read_text()
