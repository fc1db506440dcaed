"""dgc.fsdp on two machines of two ranks. Two agents of torchrun stand for the machines."""

from pathlib import Path
from typing import Any

import pytest
from parallel import fsdp_worker as worker
from parallel.ranks import Group, over, two_agents

pytestmark = pytest.mark.parametrize("group", [over(two_agents, 4)], indirect=True)


def run(group: Group, scenario: Any, *arguments: Any) -> list[dict[str, Any]]:
    return group.run(scenario, *arguments, hierarchical=True)


def test_ratio_1_equals_hsdp(group: Group) -> None:
    rounding = {"bf16 reduce DenseCompressor": 2e-2, "fp16 parameters DenseCompressor": 5e-3}
    for own in run(group, worker.equal_to_hsdp):
        assert len(own) == 11
        for name, difference in own.items():
            assert difference < rounding.get(name, 2e-6), (name, difference)


def test_muon_steps_on_whole_matrices(group: Group) -> None:
    for own in run(group, worker.muon):
        assert own["fp32"] < 1e-5 and own["over all"] < 1e-5 and own["bf16"] < 2e-2


def test_gradients_that_fsdp2_does_not_average_are_those_of_hsdp(group: Group) -> None:
    for own in run(group, worker.divided):
        assert len(own) == 5
        for name, difference in own.items():
            assert difference < 2e-6, (name, difference)


def test_torchtitans_sums_are_those_of_hsdp_and_its_optimizers_keep_what_is_not_sent(group: Group) -> None:
    for rank, own in enumerate(run(group, worker.torchtitan)):
        assert own["difference"] < 2e-6 and own["error"] > 0 and own["keys"] == [f"dgc.exchange.rank{rank}"]
        assert own["other"].endswith("set --parallelism.data_parallel_replicate_degree 2")


def test_a_method_runs_between_machines_on_local_rows(group: Group) -> None:
    # of the second rows, reduce_scatter would send more bytes than the dense sum, which takes its place
    without_error = {"qsgd"}, {"qsgd", "reduce_scatter"}
    for rank, own in enumerate(run(group, worker.method_between_machines)):
        assert own == {name: name not in without_error[rank % 2] for name in worker.METHODS}


def test_a_nonfinite_gradient_drops_the_step_everywhere(group: Group) -> None:
    reason = "0.weight on rank 1 has NaN or inf, or is 2**64 or more (the rank is the number of a machine)"
    found = run(group, worker.nonfinite)
    assert len({result["model"] for results in found for result in results.values()}) == 1
    for rank, results in enumerate(found):
        assert len(results["raise"]["messages"]) == 1 and reason in results["raise"]["messages"][0]
        assert len(results["skip"]["messages"]) == (rank == 0) and not results["scaler"]["messages"]


def test_a_layer_that_one_machine_uses(group: Group) -> None:
    results = run(group, worker.unused_on_one_machine)
    assert results.count(results[0]) == 4 and results[0]["moved"] > 0.9


def test_bytes_between_machines(group: Group) -> None:
    found = run(group, worker.bytes_between_machines)
    for own, (rows, top_k) in zip(found, [(26, 52), (25, 50)] * 2, strict=True):
        dense, sparse = own["dense"], own["top-k"]
        numel = rows * 201
        assert dense == [2 * 4 * numel, 2 * 4 * numel, numel]
        assert sparse == [2 * (24 + 12 * top_k + 4 * rows), 2 * 4 * numel, numel]


@pytest.mark.parametrize("make", [worker.adam, worker.with_muon])
def test_machines_are_workers_of_outer_steps(group: Group, make: Any) -> None:
    results = run(group, worker.outer_steps, make)
    assert [len(result["warned"]) for result in results] == [0, 0, 0, 1]
    assert "0.weight on rank 3 has NaN or inf: this machine drops its step" in results[3]["warned"][0]
    assert [result["dropped"] for result in results] == [0, 0, 1, 1]
    for key in ("mean", "sparse"):
        assert len({result[key] for result in results}) == 1
    where = ("the gradient of 0.weight on rank 0 has", "a gradient on another rank of this machine has", "", "")
    for rank, result in enumerate(results):
        assert where[rank] in result["raised"] and bool(result["raised"]) == (rank < 2)


@pytest.mark.parametrize("name", worker.GO_ON)
def test_a_loaded_run_continues_bit_for_bit_with_the_error_state_of_this_shard_and_machine_only(
    group: Group, tmp_path: Path, name: str
) -> None:
    found = run(group, worker.saved_and_loaded, tmp_path, name)
    for rank, result in enumerate(found):
        assert result["loaded"] == result["saved"] == found[0]["saved"] != result["at save"]
        assert result["loaded error"] == result["error"] > 0
        machine, shard = divmod(rank, 2)
        whose, other_machine = result["whose"], (rank + 2) % 4
        loads = f"of 2 on machine {1 - machine} of 2, and shard {shard} of 2 on machine {machine} of 2 loads it"
        assert whose[rank] == "" and f"that of shard {shard} {loads}. What is not sent" in whose[other_machine]
        assert all("shards are different parts" in whose[i] for i in range(4) if i % 2 != shard)
        told = result["one machine"]
        assert "different steps (ranks 0, 1: step 4; ranks 2, 3: step 0)" in told


@pytest.mark.parametrize("scenario", [worker.refused_models, worker.refused_steps])
def test_what_cannot_work_is_refused(group: Group, scenario: Any) -> None:
    run(group, scenario)
