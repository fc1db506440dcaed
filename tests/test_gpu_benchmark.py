"""`make gpu` where there is no GPU: its refusal, tests without pytest, and a dry run in Triton's interpreter."""

import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import REPOSITORY, python_path
from refusals import refuse

from benchmarks import gpu_steps
from benchmarks.gpu import PAGE
from benchmarks.gpu_steps import MESSAGE, Parts, stress, waits_of, write_table
from benchmarks.stand_ins import ANNOTATIONS, cases, load_tests
from benchmarks.step_overhead import resnet50
from dgc.comm.lockstep import LockstepWorld

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


def run_gpu(words: Any, absent: Any = ()) -> Any:
    return run(BARE.format(absent=absent, words=words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run_gpu([])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "sees no GPU" in done.stderr


def test_a_missing_package_is_named_with_its_cure() -> None:
    done = run_gpu([], absent=("triton",))
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
    for name, case in found:
        with suppress(AssertionError):
            case()
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


def test_waits_are_counted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch warns of each wait, at the line that asked for it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def step() -> None:
        for _ in range(3):
            warnings.warn(MESSAGE, stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    line = step.__code__.co_firstlineno + 2
    assert waits_of(step) == Counter({f"tests/test_gpu_benchmark.py:{line}": 3})


def test_shapes_of_resnet50() -> None:
    import dgc_datasets.torchvision_compat  # noqa: F401

    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    with torch.device("meta"):
        expected = [tuple(p.shape) for p in models.resnet50().parameters() if p.dim() >= 2]
    assert [tuple(t.shape) for t in resnet50().values()] == expected


def test_laws_load_without_pytest_and_training_without_numpy() -> None:
    """They may be missing beside PyTorch for CUDA."""
    laws = """
        import torch, sys
        sys.modules["pytest"] = None
        from benchmarks.gpu_steps import laws
        import dgc.kernels.triton_selection
        assert len(list(laws(torch.device("cpu")))) > 80
    """
    training = """
        import sys, warnings
        sys.modules.update(dict.fromkeys(("numpy", "omegaconf")))
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch
        import benchmarks.ddp_step, benchmarks.launches
        import dgc.kernels as kernels
        from benchmarks.gpu_steps import Training
        kernels.use("reference")
        Training(16, torch.device("cpu")).step()
    """
    for done in (run(laws, TRITON_INTERPRET="1"), run(training)):
        assert done.returncode == 0, done.stderr[-3000:]


def test_what_fails_or_is_late_does_not_stop_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> None:
        raise error

    parts, done = Parts(1), list[str]()
    for name, part, share in (
        ("kernel", partial(fail, ValueError("no such register")), 1),
        ("ranks", partial(fail, SystemExit("a rank ended with status 1")), 1),
        ("late", partial(done.append, "late"), 0),
        ("last", partial(done.append, "last"), 1),
    ):
        parts.run(name, part, share)
    assert (parts.failed, parts.not_run, done) == (["kernel", "ranks"], ["late"], ["last"])
    assert 59 < parts.left() <= 60 and 29 < parts.left(0.5) <= 30
    printed = capsys.readouterr().out
    assert "FAILED kernel\n" in printed and "no such register" in printed and "a rank ended" in printed


def test_the_table_takes_its_place_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    rows: Any = {"top of |v|": {"ms": 1.25, "launches": 3, "where": {}}, "b": {"peak MB": 7.4}}
    page.write_text(PAGE.read_text())
    for title in ("GPU A", "GPU B"):  # the second one replaces the first
        write_table(page, title, rows)
    text = page.read_text()
    assert "GPU B:\n\n| step | ms |" in text and "GPU A" not in text
    assert "| top of v | 1.250 |  |  | 3 |  |  |\n| b |  |  |  |  |  | 7 |\n" in text
    assert all(line in text for line in PAGE.read_text().splitlines() if not line.startswith("Not measured"))
    page.write_text("another page")
    refuse("has no <!-- the table of make gpu -->", write_table, page, "title", rows)


def test_the_exchange_with_checks_compares_the_means_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(transport: Any) -> float:
        return stress(transport, torch.device("cpu"), 2, 1, lambda: False)

    assert min(LockstepWorld(2).run(body)) > 0
    gather = gpu_steps.all_gather_object
    monkeypatch.setattr(gpu_steps, "all_gather_object", lambda t, found: gather(t, [*found, t.rank]))
    with pytest.raises(RuntimeError, match="other means than rank 0 in the last 2 of 2 steps"):
        LockstepWorld(2).run(body)


@pytest.mark.timeout(600)
@pytest.mark.proof
def test_a_dry_run_with_torch_and_triton_alone(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    absent = ("jaxtyping", "pytest", "torchvision", "horovod", "mpi4py")
    page = tmp_path / "gpu.md"
    page.write_text(PAGE.read_text())
    done = run_gpu(["--dry-run", "--write", str(page)], absent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "jaxtyping is not installed" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["laws"]["failed"] == [] and found["laws"]["number"] > 80
    assert found["failed"] == found["not_run"] == []
    ranks = ("DDP, torch's PowerSGD, rank 4", "DDP, our DGC", "DGC, 3 steps with checks")
    rows = {"torch.topk of |v| alone", "PowerSGD, rank 1", *(f"2 ranks, gloo: {name}" for name in ranks)}
    assert rows <= found["rows"].keys() and "| 2 ranks, gloo: DDP, our DGC |" in page.read_text()
