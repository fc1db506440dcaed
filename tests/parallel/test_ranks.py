"""What only real ranks can show: Horovod over MPI at 1 to 4 ranks, and over Gloo."""

import re
from pathlib import Path
from typing import Any

import pytest
from parallel import worker
from parallel.ranks import Group, alone, horovodrun, mpirun, over, torchrun

from dgc.kernels.library import supported_isas

PROOF = pytest.mark.proof
TWO = pytest.mark.parametrize("group", [pytest.param((mpirun, 2), id="mpirun-2")], indirect=True)


def check_quick(group: Group) -> None:
    group.run(worker.requests, hierarchical=True)
    group.run(worker.gathered)
    found = group.run(worker.every_compressor)
    assert found == [found[0]] * group.size, "a rank has another model"
    for name, result in found[0].items():
        raised, wrong = name.endswith("raise"), f"on rank {group.size - 1} has NaN or inf"
        assert result["finite"] and result["dropped"] == (not raised), name
        assert len(result["messages"]) == raised and all(wrong in m for m in result["messages"]), name


def check_horovod(group: Group) -> None:
    assert all(group.run(worker.state_initialisation, hierarchical=True))
    found = group.run(worker.horovods_compressions)
    assert found == [found[0]] * group.size


@TWO
def test_two_ranks(group: Group) -> None:
    check_quick(group)


@pytest.mark.horovod
@TWO
def test_two_ranks_with_horovods_functions(group: Group) -> None:
    check_horovod(group)


@pytest.mark.parametrize("group", [over(mpirun, 3, PROOF), over(mpirun, 4, PROOF)], indirect=True)
def test_mpirun(group: Group) -> None:
    check_quick(group)
    check_horovod(group)


@pytest.mark.parametrize(
    "group", [over(torchrun, 3), over(torchrun, 2, PROOF), over(torchrun, 4, PROOF)], indirect=True
)
def test_torchrun(group: Group) -> None:
    check_quick(group)
    # 40 steps repeat bit for bit, on equal replicas
    models = [group.run(worker.train_with_dgc, 40) for _ in range(2)]
    assert models == [[models[0][0]] * group.size] * 2


@TWO
def test_ranks_that_disagree_are_told_so(group: Group) -> None:
    setting = "compression.threshold is 0.5 on rank 0 and 0.25 on rank 1: every rank needs the same settings"
    assert group.run(worker.other_settings) == [setting] * 2


@pytest.mark.horovod
@TWO
def test_ratios_that_differ_are_told(group: Group) -> None:
    """Horovod checks the sizes of messages. With Gloo, a message of another size ends the process."""
    found = group.run(worker.ratios_of_a_step, last=True)
    for rank, told in enumerate(found):
        for name, ratios in {"sizes": (0.25, 0.125), "one size": (0.006, 0.01)}.items():
            theirs = rf"rank {1 - rank} encoded bucket \S+ at compress_ratio {ratios[1 - rank]}"
            here = rf"this rank at {ratios[rank]}: call begin_epoch\(epoch\) on every rank"
            assert re.match(f"{theirs}, {here}", told[name]), told
    sparse, dense = (found[rank]["dense"] for rank in (1, 0))
    assert re.match(r"rank 0 encoded bucket \S+ at compress_ratio 1, this rank at 0.125: call begin_epoch", sparse)
    assert "Horovod has been shut down" in dense, "it waits for an all-reduce until the other ranks have left"


@pytest.mark.parametrize("group", [over(horovodrun, 2)], indirect=True)
def test_requests_of_horovodrun_with_gloo(group: Group) -> None:
    group.run(worker.requests, hierarchical=True)
    found = group.run(worker.train_with_dgc, 4)
    assert found[0] == found[1]


@pytest.mark.parametrize("group", [over(horovodrun, 2, PROOF)], indirect=True)
def test_horovodrun_with_gloo(group: Group) -> None:
    """Gloo's threads take most of two cores while they wait."""
    check_quick(group)


@pytest.mark.parametrize("group", [over(mpirun, ranks, PROOF) for ranks in (2, 3, 4)], indirect=True)
def test_200_steps_repeat_bit_for_bit_on_equal_replicas(group: Group) -> None:
    first = group.run(worker.train_with_dgc, 200, last=True)
    assert first == [first[0]] * group.size == group.run(worker.train_with_dgc, 200)


def check_backends(found: list[dict[str, Any]]) -> None:
    assert len({result["model"] for own in found for result in own.values()}) == 1
    assert all(own[backend]["kernels"].startswith(backend) for own in found for backend in ("native", "reference"))
    isas = [own["mixed"]["kernels"] for own in found]
    assert isas[1] == "native (portable)" and (isas[0] == "native (avx2)" or "avx2" not in supported_isas())


@TWO
def test_every_backend_and_a_backend_of_each_ranks_own(group: Group) -> None:
    check_backends(group.run(worker.on_backends, 70, 300, "native", "mixed", "reference"))


@pytest.mark.parametrize("group", [over(mpirun, ranks, PROOF) for ranks in (2, 3, 4)], indirect=True)
def test_200_steps_on_every_backend(group: Group) -> None:
    check_backends(group.run(worker.on_backends, 200, 300, "native", "mixed", "reference"))


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("group", [over(mpirun, ranks, PROOF) for ranks in (2, 3, 4)], indirect=True)
def test_200_steps_on_the_gpus_kernels_interpreted(group: Group) -> None:
    pytest.importorskip("triton", reason="triton is optional")
    found = group.run(worker.interpreted, within=1900, last=True)
    assert len({result["model"] for own in found for result in own.values()}) == 1


@pytest.mark.parametrize("group", [over(alone, 1)], indirect=True)
def test_one_process_without_a_launcher(group: Group) -> None:
    """A group of one rank sends nothing."""
    check_quick(group)
    for transport in ("auto", "torch"):
        group.run(worker.requests, hierarchical=True, transport=transport)
        assert group.run(worker.started, hierarchical=True, transport=transport) == [[]], transport


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    program = """
import sys
from dgc.comm import barrier
from dgc.comm.horovod import HorovodTransport
transport = HorovodTransport()
sys.exit(7) if transport.rank == 2 else barrier(transport)
"""
    assert mpirun(3, ["-c", program], timeout=60).returncode != 0
