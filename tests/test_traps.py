"""The traps that the original DGC trainer holds for its users.

`STATED` names the tests of the laws that close them, and the last tests are those of traps that no law closes.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from optim.nets import alone, dgc, dgc_sgd, wrap
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.config import load
from dgc_training.startup.setup import prepare_device

TESTS = Path(__file__).parent
# what the original does: file and test that fail on it
STATED = {
    "the command line changes no derived value": "test_experiments::test_what_is_derived_follows_the_command_line",
    "configs lack optimize_bn_separately": "training/test_config::test_every_shipped_file_stacks_and_builds",
    "on one rank, momentum is nobody's": "optim/test_distributed::test_dgc_at_ratio_one_is_momentum_sgd",
    "the memory has no nesterov": "training/test_config::test_derived_values_follow_overrides_and_later_files",
    "the memory's Nesterov differs from the optimizer's": "optim/test_refused::test_momentum_has_one_owner",
    "a NaN stays in the memory, unreported": "optim/test_nonfinite::test_a_step_is_dropped_on_every_rank",
    "an over-full selection is cut in order": "selection/test_selectors::test_no_positional_bias",
    "fp16 overflows": "optim/test_nonfinite::test_large_gradients_stay_in_range_and_arrive_in_the_end",
    "channels_last raises": "optim/test_kinds_of_parameters::test_channels_last",
    "a gradient of None raises": "optim/test_kinds_of_parameters::test_a_parameter_that_no_rank_uses_stays",
    "zero_grad(set_to_none=True) raises": "optim/test_distributed::test_every_way_to_zero_gradients",
    "clipping raises": "optim/test_distributed::test_a_bias_moves_no_further_than_the_limit_nor_a_matrix_at_first",
    "broadcasting shrinks the weights": "optim/test_state::test_horovods_broadcast_of_optimizer_state",
    "a resumed MultiStepLR decays twice": "training/test_data_and_schedule::test_a_resumed_schedule_continues",
    "padding counts samples twice": "training/test_data_and_schedule::test_results_do_not_depend_on_the_ranks",
    "ranks evaluate their own batch norm": "training/test_train::test_evaluate_gives_the_reported_accuracy",
    "`latest` on some ranks": "training/test_checkpoint::test_machines_that_see_different_checkpoints_are_refused",
    "no scheduler is a crash": "training/test_train::test_optional_parts_are_optional",
    "a key that does not exist is taken": "training/test_config_errors::test_unknown_keys",
    "a checkpoint runs code": "training/test_checkpoint::test_code_in_a_checkpoint_is_not_run",
    "gathered data go unchecked": "wire/test_corruption::test_any_bytes_at_all_give_an_error_or_a_sound_selection",
    "replicas are not compared": "training/test_faults::test_the_rank_with_other_weights_is_reported",
}


def test_the_tests_that_close_the_other_traps_and_the_configs_of_scripts_exist() -> None:
    for trap, place in STATED.items():
        file, name = place.split("::")
        assert f"\ndef {name}(" in (TESTS / f"{file}.py").read_text(), (trap, place)
    root = TESTS.parent
    for script in (root / "scripts").rglob("*.sh"):
        for name in re.findall(r"\bconfigs/[\w/]+\.\w*", script.read_text()):
            assert (root / name).exists(), f"{script} names {name}"


def test_a_checkpoint_that_lost_a_file_is_removed_like_the_others(tmp_path: Path) -> None:
    """The original raises where an old file is not there."""

    def save(transport: Any) -> str | None:
        checkpoints = Checkpoints(tmp_path, transport)
        for name in (f"e000{epoch}" for epoch in range(1, 6)):
            checkpoints.save(name, {"name": name}, {"rank": transport.rank})
            if transport.rank == 0 and name == "e0003":
                (tmp_path / "e0002" / "rank0.pt").unlink()
        return checkpoints.find("latest")

    assert LockstepWorld(2).run(save) == ["e0005"] * 2 and not (tmp_path / "e0002").exists()


def test_determinism_that_makes_kernels_slow_is_not_forced() -> None:
    tree, threads = load(["configs/cifar/resnet20.py"]), torch.get_num_threads()
    assert tree.seed == 42 and tree.deterministic is False
    with torch.random.fork_rng():
        assert prepare_device(tree, "cpu", alone()) == torch.device("cpu")
    torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()


@on_ranks(3)
def test_gathered_data_have_a_planned_size(transport: Any) -> None:
    """The original sends as many elements as differ from zero, here fewer and fewer."""
    model, sent = nn.Linear(30, 20), [0]
    optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.05))
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 30) * (torch.arange(30) < 30 >> step)).sum().backward()
        optimizer.step()
        sent.append(optimizer.meter.payload_bytes)
    assert sent == pytest.approx([step * sent[1] for step in range(7)]) and sent[1] > 0
