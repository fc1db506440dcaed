"""DDP with the compression hook, on 2 and 3 ranks of torch.distributed."""

from pathlib import Path
from typing import Any

import pytest
from environment import patient
from parallel import ddp_worker as worker
from parallel.ranks import Group, over, torchrun

ON_RANKS = [over(torchrun, 2, pytest.mark.proof), over(torchrun, 3)]
pytestmark = pytest.mark.parametrize("group", ON_RANKS, indirect=True)
THREE = ("dgc", "powersgd", "2-bit")


def weights(part: Any) -> Any:
    """The weights, wherever they are among what a rank has found."""
    if not isinstance(part, dict):
        return None
    return {key: value if key == "weights" else weights(value) for key, value in part.items()}


def on_replicas(group: Group, scenario: Any, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank has found, with equal weights on all ranks."""
    found = group.run(scenario, *arguments)
    assert all(weights(own) == weights(found[0]) for own in found)
    return found


@pytest.mark.parametrize(
    ("scenario", "method"),
    [
        *((worker.every_mode, method) for method in worker.METHODS),
        *((worker.kinds_of_parameters, method) for method in THREE),
        *((worker.accumulation, method) for method in ("dgc", "powersgd")),
    ],
)
def test_a_run_is_that_of_distributed_optimizer(group: Group, scenario: Any, method: str) -> None:
    for own in on_replicas(group, scenario, method):
        for mode in own.keys() - {"expected"}:
            # buckets change after the first step, unless unused parameters may differ from step to step
            assert own[mode] == {**own["expected"], "rebuilt": mode != "unused"}, mode


def test_a_parameter_without_a_gradient_counts_as_zero_and_its_error_state_is_delivered(group: Group) -> None:
    for own in on_replicas(group, worker.unused_parameters):
        for case, result in own.items():
            assert result["ddp"] == result["expected"], case
            assert all(result["sent"]), case
    for own in group.run(worker.conservation):
        for method, result in own.items():
            assert result["difference"] < 1e-6 and result["kept"] > 0.1, method


def test_an_overflow_on_one_rank_makes_every_scaler_skip_and_leaves_the_error_state_unscaled(group: Group) -> None:
    for results in on_replicas(group, worker.loss_scaling):
        for method in THREE:
            small, large = results[f"{method}, 1.0"], results[f"{method}, 4096.0"]
            assert small == large, method
            assert (small["dropped"], small["unmoved"]) == (1, [2]), method
            assert small["scales"] == [1, 1, 0.5, 0.5, 0.5] and 0 < small["error"] < 100, method


def test_a_nan_on_one_rank_drops_the_step_or_raises_on_every_rank_and_training_goes_on(group: Group) -> None:
    where = f"on rank {group.size - 1} has NaN or inf"
    for rank, own in enumerate(on_replicas(group, worker.nonfinite)):
        for case, result in own.items():
            method, policy, _ = case.split(", ")
            assert result["unmoved"] == [2], case
            assert result["error"] < 100, case
            assert result["dropped"] == (policy == "skip"), case
            told = policy == "raise" or rank == 0
            assert len(result["messages"]) == told and all(where in m for m in result["messages"]), case
            same = own[f"{method}, skip, default"]
            assert all(result[key] == same[key] for key in ("weights", "error", "bytes")), case


def test_epochs_are_counted_or_set(group: Group) -> None:
    for own in on_replicas(group, worker.epochs):
        assert own["counted"] == own["set"]
        ratios = own["counted"]["ratios"]
        assert ratios[0] == ratios[1] > ratios[2] == ratios[3] > ratios[4] == ratios[-1] == 0.02


def test_ranks_without_further_data_take_part_in_join(group: Group) -> None:
    for own in on_replicas(group, worker.uneven_data):
        assert all(result["dropped"] == 1 for result in own.values())


def test_a_later_backward_pass_exchanges_the_earlier_mean_again(group: Group) -> None:
    """As the documentation says: exact without compression, and other sums with it."""
    for own in group.run(worker.several_exchanges):
        assert own["dense"] < 1e-6
        assert own["sign values"] > 0.01


def test_buffers_and_models_are_freed(group: Group) -> None:
    for own in group.run(worker.memory):
        # threads of the transport may hold a few tensors of the last step; a leak would add some in every step
        assert own["alive"][-1] < own["alive"][5] + 12, own["alive"]
        assert own["freed"]


def test_a_state_continues_bit_for_bit_also_in_other_buckets_optimizers_and_processes_even_after_an_error(
    group: Group, tmp_path: Path
) -> None:
    """An error of one rank ends the others, so that the next ranks are other processes."""
    found = on_replicas(group, worker.checkpoints, tmp_path)
    for own in found:
        for method, ends in own.items():
            for name in ("loaded", "from optimizer", "into optimizer"):
                assert ends[name] == ends["end"], (method, name)
            assert ends["other buckets"] == ends["other buckets, optimizer"], method
        assert own["2-bit"]["other buckets"]["weights"] == own["2-bit"]["end"]["weights"]
    for rank, failure in enumerate(group.run(worker.failure, last=True)):
        assert failure["seconds"] < patient(60)
        if rank == group.size - 1:
            assert (failure["error"], failure["message"]) == ("KeyError", '"the compressor\'s own"')
        else:
            assert failure["error"] == "RuntimeError" and "closed" in failure["message"].lower()
        assert "afterwards" in failure, "DDP cannot continue after an exception"
    for own, before in zip(group.run(worker.resumed, tmp_path), found, strict=True):
        assert own == {method: ends["end"] for method, ends in before.items()}
