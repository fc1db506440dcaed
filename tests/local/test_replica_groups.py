"""Ranks that are lost, join and return: the others keep their residual, and nothing of it is lost."""

import re
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gossip.networks import IN_TWO_PARTS, Trained, momentum, muon, on, same, top_k
from local import test_outer_steps as outer_steps
from optim.nets import alone
from refusals import refuse
from simulated import rewind, summary_of, train_in

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, Route, Rule, TwoPhaseCompressor
from dgc.contrib import DoubleSqueezeCompressor
from dgc.gossip import SGP, HierarchicalGossip
from dgc.local import Nesterov, OuterSteps
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.checkpoint.replica_groups import ReplicaGroups, assign
from dgc_training.faults.failure import UsageError
from dgc_training.synchronization import Synchronization

pytestmark = pytest.mark.usefixtures("no_type_checks")
# two phases keep an error state for their part of the mean, which no other replica group has
WITH_ERRORS = sorted(set(outer_steps.COMPRESSIONS) - {"dense", "4 bits"})


def save(own: Trained, transport: Any, directory: Path) -> None:
    part = {"compression": own.state(), "random": transport.rank}
    Checkpoints(directory, transport).save("e0001", {}, part, replica_group=own.optimizer.replica_group)


def resume(own: Trained, transport: Any, directory: Path) -> Any:
    """As `RunState` does. Returns what was loaded."""
    loaded = Checkpoints(directory, transport).load("e0001", replica_group=own.optimizer.replica_group)
    own.optimizer.load_compression_state_dict(loaded.own["compression"], allow_other_rank=True)
    assert loaded.replica_groups is not None
    if transport.rank in loaded.replica_groups.joined:
        own.optimizer.join()
    return loaded


def trained(transport: Any, algorithm: Any = None, steps: int = 0, optimizer: Any = momentum) -> Trained:
    own = Trained(transport, algorithm or OuterSteps(2, compression=top_k()), optimizer)
    own.steps(steps)
    return own


def seen(own: Trained) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Errors, model, and what this rank exchanges of the model and of the last common one."""
    outer = getattr(own.algorithm, "base", None) or own.algorithm
    z0 = torch.cat([outer.exchange.state_dict()["z0"][s.name].view(-1) for s in outer.model.segments])
    return [error.clone() for error in own.algorithm.errors()], own.z.clone(), outer.z.clone(), z0


def check_who_continues(found: Any, old: Any, continues: Any) -> None:
    """Who goes on from an old rank has its model and error. Who joins has the common model and no error."""
    for own, (unsent, z, part, z0) in zip(continues, found, strict=True):
        assert any(bool(error.any()) for error in unsent) == (own is not None)
        if own is None:
            assert torch.equal(part, z0)
        else:
            assert same(unsent, old[own][0]) and torch.equal(z, old[own][1])


@pytest.mark.parametrize("name", WITH_ERRORS)
@pytest.mark.parametrize("new", [3, 6])
def test_ranks_that_stay_keep_their_state_beside_those_that_join(tmp_path: Path, name: str, new: int) -> None:
    """In the middle of local steps, with an exchange in flight. Who joins has the common model."""

    def make(transport: Any, steps: int = 0) -> Trained:
        outer = OuterSteps(6, None, Nesterov(), outer_steps.COMPRESSIONS[name](), **IN_TWO_PARTS, delay=2)
        return trained(transport, outer, steps)

    def before(transport: Any) -> Any:
        save(own := make(transport, 10), transport, tmp_path)
        return seen(own)

    def resumed(transport: Any) -> Any:
        own = make(transport)
        groups, found = resume(own, transport, tmp_path).replica_groups, seen(own)
        own.steps(4)
        return groups, found, own.z.clone()[:63]

    old, (groups, found, ends) = on(4, before), zip(*on(new, resumed), strict=True)
    continues = (0, 1, 2, 3, None, None)[:new]
    assert list(groups) == [ReplicaGroups(continues, 4)] * new
    check_who_continues(found, old, continues)
    assert all(torch.equal(z0, old[0][3]) for *_, z0 in found) and same(ends, [ends[0]] * new)


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_nothing_of_those_that_stay_is_lost(tmp_path: Path, name: str) -> None:
    def make() -> OuterSteps:
        return OuterSteps(2, compression=outer_steps.COMPRESSIONS[name]())

    def body(transport: Any) -> Any:
        own = trained(transport, make())
        resume(own, transport, tmp_path)
        z0, unsent, local = outer_steps.z0_of(own), outer_steps.errors(own), outer_steps.recorded(own)
        own.step()
        return z0, outer_steps.named(own, local[0]), unsent, outer_steps.named(own, own.z), outer_steps.errors(own)

    on(4, lambda transport: save(trained(transport, make(), 3), transport, tmp_path))
    for new in (3, 5):
        outer_steps.check_that_nothing_is_lost(on(new, body))


def test_a_rank_that_has_lost_its_disk_returns_without_errors(tmp_path: Path) -> None:
    """No disk is in common: the state comes from another rank."""

    def body(transport: Any, resumes: bool) -> Any:
        own, disk = trained(transport, steps=0 if resumes else 3), tmp_path / f"disk{transport.rank}"
        loaded = (resume if resumes else save)(own, transport, disk)
        return seen(own), loaded and "random" in loaded.own

    old, _ = zip(*on(3, partial(body, resumes=False)), strict=True)
    (tmp_path / "disk1/e0001/rank1.pt").unlink()
    found, have_a_state = zip(*on(3, partial(body, resumes=True)), strict=True)
    assert have_a_state == (True, False, True)
    check_who_continues(found, old, (0, None, 2))


@pytest.fixture
def resumed(tmp_path: Path) -> Any:
    """A function that resumes the checkpoint of two ranks on so many."""
    on(2, lambda transport: save(trained(transport), transport, tmp_path))
    return partial(on, body=lambda transport: resume(trained(transport), transport, tmp_path))


@pytest.mark.parametrize("size", [2, 3])
def test_a_damaged_file_is_named(tmp_path: Path, resumed: Any, size: int) -> None:
    (tmp_path / "e0001/rank0.pt").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"is damaged: .*rank0.pt is not the file"):
        resumed(size)


def test_a_checkpoint_without_the_file_of_any_rank_is_incomplete(tmp_path: Path, resumed: Any) -> None:
    for rank in range(2):
        (tmp_path / f"e0001/rank{rank}.pt").unlink()
    with pytest.raises(UsageError, match="is incomplete: no machine has the file of a rank"):
        resumed(2)


def of_machines(transport: Any, optimizer: Any = momentum, steps: int = 0) -> Trained:
    outer = OuterSteps(4, None, Nesterov(), top_k(), **IN_TWO_PARTS)
    return trained(transport, HierarchicalGossip(outer), steps, optimizer)


@pytest.mark.parametrize(("new", "optimizer"), [(2, momentum), (3, momentum), (2, muon), (3, muon)])
def test_machines_that_stay_keep_their_state(tmp_path: Path, new: int, optimizer: Any) -> None:
    """Replica groups of two ranks. On 3 machines again, machine 1 has lost one of its two files, and returns."""

    def momenta(own: Trained) -> list[torch.Tensor]:
        return [tensor.clone() for state in own.optimizer.inner.state.values() for tensor in state.values()]

    def before(transport: Any) -> Any:
        save(own := of_machines(transport, optimizer, 6), transport, tmp_path)
        return seen(own), momenta(own)

    def resumed(transport: Any) -> Any:
        own = of_machines(transport, optimizer)
        groups = resume(own, transport, tmp_path).replica_groups
        own.optimizer.zero_grad()
        found = groups, seen(own), momenta(own)
        own.steps(2)
        return *found, own.finish()

    old, old_momenta = zip(*on(6, before, 2), strict=True)
    if new == 3:
        (tmp_path / "e0001/rank3.pt").unlink()
    groups, found, found_momenta, ends = zip(*on(2 * new, resumed, 2), strict=True)
    continues = (0, 1, 2, 3) if new == 2 else (0, 1, None, None, 4, 5)
    assert list(groups) == [ReplicaGroups(continues, 6)] * (2 * new)
    check_who_continues(found, old, continues)
    assert same(ends, [ends[0]] * (2 * new))
    for rank, own in enumerate(continues):
        assert same(found_momenta[rank], old_momenta[rank % 2 if own is None else own])
        assert torch.equal(found[rank][1], found[rank // 2 * 2][1])


def test_groups_of_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    on(6, lambda transport: save(of_machines(transport), transport, tmp_path), 2)
    with pytest.raises(UsageError, match="groups of 2, 2, 2 ranks and cannot be resumed by groups of 1, 1"):
        on(2, lambda transport: resume(of_machines(transport), transport, tmp_path), 1)


@pytest.mark.parametrize(
    ("readable", "old", "continues", "lost", "says"),
    [
        ([{0, 1, 2}] * 3, "012", (0, 1, 2), [], "all others keep their own model and residual"),
        ([{0, 1, 2, 3}] * 3, "0123", (0, 1, 2), [3], "old ranks 3 are lost"),
        ([{0, 1}] * 4, "01", (0, 1, None, None), [], "ranks 2, 3 join"),
        # machines with disks of their own: the disk of rank 1 is lost, and the ranks after it have new numbers
        ([{0}, {2}, {3}], "0123", (0, 2, 3), [1], "old ranks 1 are lost"),
        ([set(), {1}, {0, 1}], "012", (None, 1, 0), [2], "ranks 0 join .* old ranks 2 are lost"),
        # machines of two ranks: the first is lost, the second has another number, and one joins
        ([{2, 3}, {2, 3}, set(), set()], "0011", (2, 3, None, None), [0, 1], "ranks 2, 3 join .* ranks 0, 1 are"),
        # one of two files is not enough; ranks were numbered across the machines
        ([{0, 1}, {0, 1}, {1, 3}, {1, 3}], "0101", (None, None, 1, 3), [0, 2], "ranks 0, 1 join"),
    ],
)
def test_a_rank_continues_an_old_one_whose_file_it_has(
    readable: Sequence[set[int]], old: str, continues: tuple[int | None, ...], lost: list[int], says: str
) -> None:
    of_two = len(set(old)) < len(old)
    groups = assign(readable, [int(group) for group in old], [0, 0, 1, 1] if of_two else None)
    assert (groups.continues, groups.lost) == (continues, lost) and re.search(says, str(groups))


@pytest.mark.parametrize(
    "make", [lambda: OuterSteps(2, SGP()), SGP, lambda: HierarchicalGossip(SGP())], ids=["base", "SGP", "machines"]
)
def test_ranks_that_gossip_cannot_join(make: Any) -> None:
    own = Trained(alone(), make())
    assert own.optimizer.replica_group is None
    refuse("use `dgc.local.OuterSteps` without a base", own.optimizer.join)


@pytest.mark.parametrize("make", [DoubleSqueezeCompressor, lambda: TwoPhaseCompressor(4)])
def test_ranks_with_errors_of_a_server_cannot_join(make: Any) -> None:
    assert Trained(alone(), OuterSteps(2, compression=make())).optimizer.replica_group is None


def test_no_rank_can_join_if_one_has_errors_of_a_server() -> None:
    def on_machines(transport: Any) -> Any:
        """Only the first slice has tensors of the rule."""
        route = Route([Rule(DoubleSqueezeCompressor(), name="0.weight"), Rule(DenseCompressor())])
        own = Trained(transport, HierarchicalGossip(OuterSteps(2, compression=route)))
        kinds = [type(states.compressor) for states in own.algorithm.base.exchange.states]
        return own.optimizer.replica_group, kinds

    none, kinds = zip(*on(4, on_machines, 2), strict=True)
    assert none == (None,) * 4 and kinds[0] != kinds[1]


def test_a_rank_returns_with_an_old_disk_whose_file_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    """Rank 1 was lost, rank 2 came to the same step as rank 1, and rank 1 returns."""
    old_disk, others = tmp_path / "old", tmp_path / "others"

    def before(transport: Any, steps: int, disk: Path) -> Any:
        save(own := trained(transport, steps=steps), transport, disk)
        return seen(own)

    on(3, partial(before, steps=1, disk=old_disk))
    old = on(2, partial(before, steps=3, disk=others))

    def resumed(transport: Any) -> Any:
        disk = tmp_path / f"disk{transport.rank}"
        shutil.copytree(old_disk if transport.rank == 1 else others, disk)
        for rank in {0, 1} - {{0: 0, 2: 1}.get(transport.rank, 1)}:
            (disk / f"e0001/rank{rank}.pt").unlink()
        own = trained(transport)
        return resume(own, transport, disk).replica_groups.continues, seen(own)

    continues, found = zip(*on(3, resumed), strict=True)
    assert continues == ((0, None, 1),) * 3
    check_who_continues(found, old, (0, None, 1))


def test_machines_with_disks_of_their_own_keep_the_checkpoint_that_was_just_written(tmp_path: Path) -> None:
    """After a run has grown, its steps have lower numbers. Only rank 0 has names and manifests."""

    def body(transport: Any, names: Sequence[str]) -> None:
        for name in names:
            Checkpoints(tmp_path / f"disk{transport.rank}", transport).save(name, {}, {"compression": {}})

    LockstepWorld(2, 1).run(partial(body, names=["e0000s00500", "e0000s00550", "e0000s00600"]))
    LockstepWorld(3, 1).run(partial(body, names=["e0000s00410"]))
    assert all((tmp_path / f"disk{rank}/e0000s00410/rank{rank}.pt").exists() for rank in range(3))


def run_trainer(tmp_path: Path, ranks: int, *words: str) -> Any:
    """Returns the summary, if the run has ended."""
    quick = "model.width=8 train.batch_size=180 train.num_epochs=1 data.num_threads_per_worker=1".split()
    files = ["configs/digits/cnn.py", *(word for word in words if word.endswith(".py"))]
    settings = [*quick, "train.checkpoint_every=3", *(word for word in words if not word.endswith(".py"))]
    train_in(tmp_path / "run", files, settings, ranks)
    return summary_of(tmp_path / "run") if (tmp_path / "run/summary.json").exists() else None


def test_a_rank_that_joins_after_the_last_step_of_an_epoch_takes_none(tmp_path: Path, monkeypatch: Any) -> None:
    words, steps = ["configs/local/local_sgd.py", "train.num_epochs=2"], {"taken": 0}

    def end_step(own: Any) -> None:
        steps["taken"] += 1
        own.stop_signal = signal.SIGTERM if steps["taken"] > 2 * 3 else None  # both ranks, after the fourth step

    with monkeypatch.context() as patched:
        patched.setattr(Synchronization, "end_step", end_step)
        run_trainer(tmp_path, 2, *words)
    (tmp_path / "run/checkpoints/e0000s00004/rank1.pt").unlink()
    with pytest.warns(UserWarning, match="ranks 1 join"):
        assert run_trainer(tmp_path, 2, *words)["epochs"] == 2


MULOCO = ("configs/local/sign.py", "configs/muon/muloco.py", "train.optimizer.ns_precision=fp32")


@pytest.mark.parametrize("method", [("configs/local/sparseloco.py",), MULOCO])
def test_a_run_of_the_trainer_goes_on(tmp_path: Path, method: Any) -> None:
    """On more ranks, with one file lost."""
    words = [*method, "train.local.average_every=2"]
    assert 0 < run_trainer(tmp_path, 2, *words)["wire_over_dense"] < 0.05
    rewind(tmp_path / "run", "e0000s00003")
    (tmp_path / "run/checkpoints/e0000s00003/rank1.pt").unlink()
    with pytest.warns(UserWarning, match="ranks 1, 2 join .*; the models and residuals .* 1 are lost"):
        summary = run_trainer(tmp_path, 3, *words)
    assert summary["ranks"] == 3 and summary["epochs"] == 1
