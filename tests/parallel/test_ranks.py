"""What only real ranks can show: Horovod over MPI at 1 to 4 ranks, and over Gloo."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from parallel.ranks import alone, findings, horovodrun, mpirun, torchrun

from dgc.kernels.library import supported_isas

QUICK = (
    "requests",
    "every_compressor",
    "one_rank_differs",
    "unused_on_one_rank",
    "nonfinite",
    "loss_scaling",
)
HOROVOD = ("horovods_compressions", "state_initialisation")


REQUESTS = {"same": True, "bytes": True, "objects": True, "told": True}


def check_quick(found: list[dict]) -> None:
    size = len(found)
    for rank, own in enumerate(found):
        assert own["requests"] == REQUESTS
        assert own["every_compressor"] == found[0]["every_compressor"], f"rank {rank} has another model"
        assert own["unused_on_one_rank"] == found[0]["unused_on_one_rank"]
        assert own["nonfinite"] == found[0]["nonfinite"]
        for name, result in own["nonfinite"].items():
            raised, wrong = name.endswith("raise"), f"on rank {size - 1} has NaN or inf"
            assert result["finite"] and result["dropped"] == (not raised), name
            assert len(result["messages"]) == raised and all(wrong in m for m in result["messages"]), name
        assert own["loss_scaling"] == found[0]["loss_scaling"]
        assert all(recipe[:3] == [1, 2.0**15, True] for recipe in own["loss_scaling"].values())
        message = own["one_rank_differs"]["message"]
        assert (f"rank {size - 1}" in message and "bias" in message) or size == 1


def check_horovod(found: list[dict]) -> None:
    for own in found:
        assert own["state_initialisation"]["unmoved"]
        assert own["horovods_compressions"] == found[0]["horovods_compressions"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the scenarios found on two ranks of mpirun, in one start of the ranks."""
    names = [*QUICK, "other_settings", "clipped_in_flight", "every_backend_briefly"]
    if find_spec("horovod"):
        names += [*HOROVOD, "ratios_of_a_step"]  # the last one ends Horovod
    return findings(2, tmp_path_factory.mktemp("two_ranks"), *names)


def test_two_ranks(two_ranks: list[dict]) -> None:
    check_quick(two_ranks)


@pytest.mark.horovod
def test_two_ranks_with_horovods_functions(two_ranks: list[dict]) -> None:
    check_horovod(two_ranks)


@pytest.mark.horovod
@pytest.mark.proof
@pytest.mark.parametrize("ranks", [3, 4])
def test_mpirun(ranks: int, tmp_path: Path) -> None:
    found = findings(ranks, tmp_path, *QUICK, *HOROVOD)
    check_quick(found)
    check_horovod(found)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.proof) for n in (2, 4))])
def test_torchrun(ranks: int, tmp_path: Path) -> None:
    found = findings(ranks, tmp_path, *QUICK, "forty_steps_twice", launch=torchrun)
    check_quick(found)
    # 40 steps repeat bit for bit, on equal replicas
    assert len({model for own in found for model in own["forty_steps_twice"]["models"]}) == 1


def test_ranks_that_disagree_are_told_so(two_ranks: list[dict]) -> None:
    """Settings, and gradients that one's own clipping changes in flight."""
    for own in two_ranks:
        setting = "compression.threshold is 0.5 on rank 0 and 0.25 on rank 1: every rank needs the same settings"
        assert own["other_settings"]["message"] == setting
        assert "call optimizer.synchronize() first, then clip" in own["clipped_in_flight"]["message"]
        assert own["clipped_in_flight"]["weights"] == two_ranks[0]["clipped_in_flight"]["weights"]


@pytest.mark.horovod
def test_ratios_that_differ_are_told(two_ranks: list[dict]) -> None:
    """Horovod checks the sizes of messages. With Gloo, a message of another size ends the process."""
    for rank, own in enumerate(two_ranks):
        told = own["ratios_of_a_step"]
        for name, ratios in {"sizes": (0.25, 0.125), "one size": (0.006, 0.01)}.items():
            theirs = rf"rank {1 - rank} encoded bucket \S+ at compress_ratio {ratios[1 - rank]}"
            here = rf"this rank at {ratios[rank]}: call begin_epoch\(epoch\) on every rank"
            assert re.match(f"{theirs}, {here}", told[name]), told
    sparse, dense = (two_ranks[rank]["ratios_of_a_step"]["dense"] for rank in (1, 0))
    assert re.match(r"rank 0 encoded bucket \S+ at compress_ratio 1, this rank at 0.125: call begin_epoch", sparse)
    assert "Horovod has been shut down" in dense, "it waits for an all-reduce until the other ranks have left"


@pytest.mark.horovod
def test_requests_of_horovodrun_with_gloo(tmp_path: Path) -> None:
    found = findings(2, tmp_path, "requests", "unused_on_one_rank", launch=horovodrun)
    assert [own["requests"] for own in found] == [REQUESTS] * 2
    assert found[0]["unused_on_one_rank"] == found[1]["unused_on_one_rank"]


@pytest.mark.horovod
@pytest.mark.proof
def test_horovodrun_with_gloo(tmp_path: Path) -> None:
    """Gloo's threads take most of two cores while they wait."""
    check_quick(findings(2, tmp_path, *QUICK, launch=horovodrun))


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_200_steps_repeat_bit_for_bit_on_equal_replicas(ranks: int, tmp_path: Path) -> None:
    runs = [findings(ranks, tmp_path / str(i), "two_hundred_steps") for i in range(2)]
    assert len({own["two_hundred_steps"]["model"] for run in runs for own in run}) == 1


def one_model(found: list[dict]) -> set[str]:
    """The models of all ranks and backends, of which there must be one."""
    return {result["model"] for own in found for result in own.values()}


def check_backends(found: list[dict]) -> None:
    assert len(one_model(found)) == 1
    assert all(own[backend]["kernels"].startswith(backend) for own in found for backend in ("native", "reference"))
    isas = [own["mixed"]["kernels"] for own in found]
    assert isas[1] == "native (portable)" and (isas[0] == "native (avx2)" or "avx2" not in supported_isas())


def test_every_tier_and_a_tier_of_each_ranks_own(two_ranks: list[dict]) -> None:
    check_backends([own["every_backend_briefly"] for own in two_ranks])


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_200_steps_on_every_backend(ranks: int, tmp_path: Path) -> None:
    check_backends([own["every_backend"] for own in findings(ranks, tmp_path, "every_backend")])


@pytest.mark.proof
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_200_steps_on_the_gpus_kernels_interpreted(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is optional")
    patient = partial(mpirun, timeout=1900)
    found = [own["interpreted"] for own in findings(ranks, tmp_path, "interpreted", launch=patient)]
    assert len(one_model(found)) == 1


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    check_quick(findings(1, tmp_path, *QUICK, launch=alone))


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    program = """
import sys
from dgc.comm import barrier
from dgc.comm.horovod import HorovodTransport
transport = HorovodTransport()
sys.exit(7) if transport.rank == 2 else barrier(transport)
"""
    assert mpirun(3, ["-c", program], timeout=60).returncode != 0
