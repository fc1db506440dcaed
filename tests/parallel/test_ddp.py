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


ALIKE = {
    "a parameter without a gradient counts as zero, and its error state is delivered": worker.unused_parameters,
    "an overflow on one rank makes every scaler skip, and leaves the error state unscaled": worker.loss_scaling,
    "a NaN on one rank drops the step or raises on every rank, and training goes on": worker.nonfinite,
    "epochs are counted or set": worker.epochs,
    "ranks without further data take part in join": worker.uneven_data,
}
OF_EACH = {
    "a later backward pass exchanges the earlier mean again": worker.several_exchanges,
    "means of blocks are written into DDP's buckets": worker.delivered,
    "buffers and models are freed": worker.memory,
}


@pytest.mark.parametrize("law", [*ALIKE, *OF_EACH])
def test_law(group: Group, law: str) -> None:
    if law in ALIKE:
        on_replicas(group, ALIKE[law])
    else:
        group.run(OF_EACH[law])


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
