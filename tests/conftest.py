"""Order and environment for all tests."""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jaxtyping
import pytest
import pytest_timeout
from environment import patient, slowness

PARALLEL = Path(__file__).parent / "parallel"
WITHOUT_HOROVOD = "needs Horovod, which is not installed" if find_spec("horovod") is None else ""

# searching for garbage takes a quarter of the time in which thousands of tests are collected
gc.disable()
# before torch is imported: more threads than cores make small tests slower, not faster
os.environ.setdefault("OMP_NUM_THREADS", "1")
# where a test asks for several threads, those that have nothing to do leave the cores to other processes
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# ranks of a test share the cores with the ranks of another test: without this, waiting takes a core
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
# Open MPI's part for one-sided messages over libfabric, which nothing uses, sleeps for a second when a rank ends
os.environ.setdefault("OMPI_MCA_btl", "^ofi")
# Horovod's thread takes a third of a core when it looks for messages every 0.2 ms, the default here
os.environ.setdefault("HOROVOD_CYCLE_TIME", "1")

slowness()  # before xdist starts its workers, which find it in their environment


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """For long loops in `make proof`: checking shapes takes longer than what small tensors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure times with what is in the caches: to replace it takes longer than what is tested."""
    import torch

    monkeypatch.setattr("dgc.advisor.cost.computing._larger_than_caches", lambda: torch.zeros(1))


def pytest_collection_finish() -> None:
    """Search for garbage again, but not in what the collection of the tests has made."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets objects that are frozen end with the process: Triton's library prints a list of its own that do not."""
    gc.unfreeze()


def pytest_report_header() -> str:
    horovod = f"tests marked horovod are skipped: {WITHOUT_HOROVOD}" if WITHOUT_HOROVOD else "Horovod: installed"
    return f"{horovod}; time limits: {slowness():.1f} times the limits of a quiet machine"


@pytest.hookimpl(tryfirst=True)  # in place of the plugin's own
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    """Marks and pyproject.toml have the seconds of a quiet machine."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=patient(settings.timeout)))


def ranks_of(item: pytest.Item) -> str:
    """The launcher and the number of the ranks that a test shares with others, if it does."""
    is_parallel = PARALLEL in item.path.parents
    shared = item.callspec.params.get("group") if is_parallel and hasattr(item, "callspec") else None
    return f"{shared[0].__name__}{shared[1]}" if shared else ""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start ranks run last: a fault that one process shows is found before them.

    Under xdist they run first, since all of them together take longest. Those that share a group of ranks, or a
    file, run one after another, and one group or file at a time for every 2 cores: on 2 cores, the ranks of two
    take 4 times as long as of one.
    Tests with the marker `horovod` are skipped where it is not installed. pytest's summary has their number.
    """
    if WITHOUT_HOROVOD:
        for item in items:
            if item.get_closest_marker("horovod"):
                item.add_marker(pytest.mark.skip(reason=WITHOUT_HOROVOD))
    spread = hasattr(config, "workerinput")
    items.sort(key=lambda item: ((PARALLEL in item.path.parents) != spread, ranks_of(item)))
    subjects = sorted({ranks_of(item) or item.path.stem for item in items if PARALLEL in item.path.parents})
    at_a_time = max(1, len(os.sched_getaffinity(0)) // 2)
    for item in items:
        if PARALLEL in item.path.parents:
            number = subjects.index(ranks_of(item) or item.path.stem) % at_a_time
            item.add_marker(pytest.mark.xdist_group(f"ranks{number}"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(400))
