"""dgc.fsdp.quantize on ranks that shard one model."""

from pathlib import Path

import pytest
from parallel import quantized_worker as worker
from parallel.ranks import Group, over, torchrun

ON_RANKS = [over(torchrun, 3), *(over(torchrun, ranks, pytest.mark.proof) for ranks in (2, 4))]
pytestmark = pytest.mark.parametrize("group", ON_RANKS, indirect=True)


def test_what_is_sent_and_the_error_are_the_gradients(group: Group) -> None:
    for own in group.run(worker.conserves):
        assert len(own) == 2 * len(worker.MODELS) + 1
        for name, difference in own.items():
            half = 2e-2 if "reduce" in name else 2e-6
            least = 0.0 if "None" in name else max(half, 5e-3) if "int8" in name else half
            assert difference <= least, (name, difference)


def test_collectives_overlap_unless_gradients_are_read_during_backward(group: Group) -> None:
    waits = "gGgsSGsSsS"  # the second gather is prefetched
    for own in group.run(worker.order):
        assert own == {"nothing": "gGgsGsSsSS", "parameters": waits, "all-reduce": waits}


def test_forward_and_backward_use_the_same_rounded_weights(group: Group) -> None:
    found = group.run(worker.weights_in_use)
    assert found == [found[0]] * group.size


def test_bytes_are_those_of_the_formula(group: Group) -> None:
    for own in group.run(worker.bytes_sent):
        assert own == dict.fromkeys(own, 0) and len(own) == 3


def test_a_nonfinite_gradient_drops_the_step_everywhere(group: Group) -> None:
    found = group.run(worker.nonfinite)
    reason = f"the gradient of 0.weight on rank {group.size - 1} has NaN or inf, or is 2**64 or more"
    for rank, own in enumerate(found):
        assert own["raise"]["model"] == own["skip"]["model"] == found[0]["skip"]["model"]
        assert len(own["raise"]["messages"]) == 1 and own["raise"]["messages"][0].startswith(reason)
        assert len(own["skip"]["messages"]) == (rank == 0) and not own["scaler"]["messages"]


def test_an_exception_in_backward_leaves_nothing_behind(group: Group) -> None:
    for own in group.run(worker.interrupted):
        assert own["True"] == own["False"]


def test_a_loaded_run_continues_bit_for_bit(group: Group, tmp_path: Path) -> None:
    assert group.run(worker.saved_and_loaded, tmp_path) == [{"int8": True, "float32": True}] * group.size


def test_what_cannot_work_is_refused(group: Group) -> None:
    group.run(worker.refused)
