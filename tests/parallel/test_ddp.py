"""DDP with the compression hook, on 2 and 3 ranks of torch.distributed."""

from pathlib import Path
from typing import Any

import pytest
from environment import patient
from parallel import ddp_worker as worker
from parallel.ranks import Group, over, torchrun

ON_RANKS = [over(torchrun, 2, pytest.mark.proof), over(torchrun, 3)]
pytestmark = pytest.mark.parametrize("group", ON_RANKS, indirect=True)


def on_replicas(group: Group, scenario: Any, *arguments: Any) -> None:
    found = group.run(scenario, *arguments)
    assert found == [found[0]] * group.size


@pytest.mark.parametrize("method", worker.METHODS)
def test_a_run_is_that_of_distributed_optimizer(group: Group, method: str) -> None:
    modes = tuple(worker.OPTIONS) if method in ("dgc", "powersgd", "8 bits") else ("default",)
    on_replicas(group, worker.beside_optimizer, method, modes)


@pytest.mark.parametrize("method", worker.SOME)
def test_a_run_with_other_kinds_of_parameters_is_that_of_distributed_optimizer(group: Group, method: str) -> None:
    on_replicas(group, worker.beside_optimizer, method, ("default", "view", "static"), worker.Convolutions)


@pytest.mark.parametrize("method", ["dgc", "powersgd", "8 bits"])
def test_accumulated_gradients_are_those_of_distributed_optimizer(group: Group, method: str) -> None:
    # DDP's static_graph does not allow no_sync in the first step
    on_replicas(group, worker.beside_optimizer, method, ("default", "unused", "view"), worker.Net, 3)


def test_a_parameter_without_a_gradient_counts_as_zero_and_its_error_state_is_delivered(group: Group) -> None:
    on_replicas(group, worker.unused_parameters)


def test_an_overflow_on_one_rank_makes_every_scaler_skip_and_leaves_the_error_state_unscaled(group: Group) -> None:
    on_replicas(group, worker.loss_scaling)


def test_a_nan_on_one_rank_drops_the_step_or_raises_on_every_rank_and_training_goes_on(group: Group) -> None:
    on_replicas(group, worker.nonfinite)


def test_epochs_are_counted_or_set(group: Group) -> None:
    on_replicas(group, worker.epochs)


def test_ranks_without_further_data_take_part_in_join(group: Group) -> None:
    on_replicas(group, worker.uneven_data)


def test_a_later_backward_pass_exchanges_the_earlier_mean_again(group: Group) -> None:
    group.run(worker.several_exchanges)


def test_means_of_blocks_are_written_into_ddps_buckets(group: Group) -> None:
    group.run(worker.delivered)


def test_buffers_and_models_are_freed(group: Group) -> None:
    group.run(worker.memory)


def test_a_state_continues_bit_for_bit_also_in_other_buckets_optimizers_and_processes_even_after_an_error(
    group: Group, tmp_path: Path
) -> None:
    """An error of one rank ends the others, so that the next ranks are other processes."""
    found = group.run(worker.checkpoints, tmp_path)
    for own in found:
        assert all(end["weights"] == found[0][method]["weights"] for method, end in own.items())
    for rank, failure in enumerate(group.run(worker.failure, last=True)):
        assert failure["seconds"] < patient(60)
        if rank == group.size - 1:
            assert (failure["error"], failure["message"]) == ("KeyError", '"the compressor\'s own"')
        else:
            assert failure["error"] == "RuntimeError" and "closed" in failure["message"].lower()
        assert "afterwards" in failure, "DDP cannot continue after an exception"
    assert group.run(worker.resumed, tmp_path) == found
