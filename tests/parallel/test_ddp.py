"""DDP with the compression hook on 2 and 3 ranks of torch.distributed, beside DistributedOptimizer."""

import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from environment import patient
from parallel.ddp_trainer import METHODS, OPTIONS, SAVED, SOME, Branches, Convolutions, Net, Trainer, data_of
from parallel.found import Finding
from parallel.ranks import Group, each_rank_of, mpirun, over, torchrun
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc.comm import all_gather_object, barrier, meeting
from dgc.compression import DenseCompressor, DGCCompressor, NonFiniteGradientError
from dgc.ddp import compress
from dgc.memory import DGCSGDMemory

ON_RANKS = [over(torchrun, 2, pytest.mark.proof), over(torchrun, 3)]


def beside_optimizer(transport: Any, method: str, modes: Iterable[str], net: Any = Net, passes: int = 1) -> str:
    """DDP in these modes trains as DistributedOptimizer does. Returns the weights."""
    options: Any = {"net": net, "passes": passes}
    expected = Trainer(transport, method, "optimizer", **options).train().findings
    for mode in modes:
        trainer = Trainer(transport, method, **options, **OPTIONS[mode]).train()
        assert trainer.findings == expected, mode
        # buckets change after the first step, unless unused parameters may differ from step to step
        assert trainer.rebuilt == (mode != "unused"), mode
    return str(expected["weights"])


@pytest.mark.parametrize("method", METHODS)
@each_rank_of(*ON_RANKS)
def test_a_run_is_that_of_distributed_optimizer_with_accumulated_gradients_too(transport: Any, method: str) -> Any:
    modes = OPTIONS if method in ("dgc", "powersgd", "8 bits") else ("default",)
    # DDP's static_graph does not allow no_sync in the first step
    accumulates = ("default", "unused", "view") if modes is OPTIONS else ()
    once = beside_optimizer(transport, method, modes)
    return once, accumulates and beside_optimizer(transport, method, accumulates, passes=3)


@pytest.mark.parametrize("method", SOME)
@each_rank_of(*ON_RANKS)
def test_a_run_with_other_kinds_of_parameters_is_that_of_distributed_optimizer(transport: Any, method: str) -> str:
    return beside_optimizer(transport, method, ("default", "view", "static"), Convolutions)


@pytest.mark.parametrize("method", SOME)
@each_rank_of(*ON_RANKS)
def test_a_parameter_without_a_gradient_is_exchanged_as_zeros(transport: Any, method: str) -> Any:
    """Branch 1 is used by the last rank only, branch 2 by every rank in the first step and by none later.

    DistributedOptimizer has zeros in the place of None.
    """
    last = transport.rank == transport.size - 1
    other = Trainer(transport, method, "optimizer", net=Branches)
    options: Any = {"find_unused_parameters": True, "net": Branches}
    both = [Trainer(transport, method, gradient_as_bucket_view=view, **options) for view in (False, True)]
    for step in range(4):
        for trainer in (other, *both):
            trainer.model.used = {2} if step == 0 else {1} if last else set()
        other.step(step)
        for ddp in both:
            ddp.backward(step)
            for p in ddp.model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            ddp.inner.step()
        assert all(ddp.model.branches[2].weight.grad.any() for ddp in both), step
    assert all(ddp.findings == other.findings for ddp in both)
    return other.weights


@pytest.mark.parametrize("method", ["dense", *SOME])
@each_rank_of(*ON_RANKS)
def test_ranks_agree_which_parameters_have_a_gradient(transport: Any, method: str) -> Any:
    """Branch 1 is used by the last rank only, where its gradient is zero, and branch 2 by no rank."""
    last, found = transport.rank == transport.size - 1, []
    for view in (False, True):
        options: Any = {"find_unused_parameters": True, "net": Branches, "gradient_as_bucket_view": view}
        trainer = Trainer(transport, method, **options)
        for step in range(2):
            trainer.model.used = {1} if last else set()
            trainer.backward(step, 0.0)
            _, few, none = (branch.weight.grad for branch in trainer.model.branches)
            assert few is not None and not few.any() and none is None, (view, step)
            trainer.inner.step()
        found.append(trainer.weights)
    return found


def with_a_bad_step(trainer: Trainer, train: Callable[[int, bool], None]) -> Finding:
    """Findings after five steps `train(number, bad)`, of which one, bad on the last rank, has moved nothing."""
    for step in range(5):
        before = trainer.weights
        train(step, step == 2 and trainer.transport.rank == trainer.transport.size - 1)
        assert (trainer.weights == before) == (step == 2), step
    assert trainer.findings["error"] < 100
    return trainer.findings


@pytest.mark.parametrize("method", SOME)
@each_rank_of(*ON_RANKS)
def test_an_overflow_on_one_rank_makes_all_scalers_skip(transport: Any, method: str) -> Any:
    found = []
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer = Trainer(transport, method, grad_scaler=scaler)

        def train(step: int, bad: bool, scaler: Any = scaler, trainer: Any = trainer, scale: Any = scale) -> None:
            trainer.backward(step, 1e30 if bad else 1.0, scaler)
            scaler.step(trainer.inner)
            scaler.update()
            assert scaler.get_scale() == (scale if step < 2 else scale / 2)

        found.append(with_a_bad_step(trainer, train))
        assert trainer.exchange.dropped_steps == 1 and found[-1]["error"] > 0
    assert found[0] == found[1]
    return found[0]["weights"]


@pytest.mark.parametrize("method", ["dgc", "powersgd", "dense", "4 bits"])
@each_rank_of(*ON_RANKS)
def test_nan_on_one_rank_drops_the_step_on_all(transport: Any, method: str) -> str:
    def run(policy: str, mode: str) -> Finding:
        trainer, messages = Trainer(transport, method, nonfinite=policy, **OPTIONS[mode]), list[str]()

        def train(step: int, bad: bool) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    trainer.backward(step, math.nan if bad else 1.0)
                except NonFiniteGradientError as error:
                    messages.append(str(error))
            trainer.inner.step()
            messages.extend(str(warning.message) for warning in caught)

        found = with_a_bad_step(trainer, train)
        assert trainer.exchange.dropped_steps == 1
        assert len(messages) == (policy == "raise" or transport.rank == 0)
        assert all(f"on rank {transport.size - 1} has NaN or inf" in message for message in messages)
        return found

    modes = OPTIONS if method == "dgc" else ("default",)
    found = {(policy, mode): run(policy, mode) for policy in ("skip", "raise") for mode in modes}
    assert all(own == found["skip", "default"] for own in found.values()), found
    return str(found["skip", "default"]["weights"])


@each_rank_of(*ON_RANKS)
def test_epochs_of_a_warm_up_are_counted_or_set(transport: Any) -> Any:
    found = []
    for steps_per_epoch in (2, None):
        compression = DGCCompressor(0.02, DGCSGDMemory(momentum=0.9), warmup_epochs=3)
        trainer = Trainer(transport, compression, steps_per_epoch=steps_per_epoch)
        ratios = []
        for step in range(8):
            if steps_per_epoch is None and step % 2 == 0:
                trainer.exchange.begin_epoch(step // 2)
            trainer.step(step)
            ratios.append(trainer.exchange.compress_ratio)
        assert ratios[0] == ratios[1] > ratios[2] == ratios[3] > ratios[4] == ratios[-1] == 0.02
        found.append(trainer.findings)
    assert found[0] == found[1]
    return found[0]["weights"]


@each_rank_of(*ON_RANKS)
def test_ranks_without_further_data_take_part_in_join(transport: Any) -> list[str]:
    """The last rank has data for two more steps, with NaN in the last but one."""
    last = transport.rank == transport.size - 1
    found = []
    for mode in ("default", "unused"):
        trainer = Trainer(transport, "dgc", **OPTIONS[mode])
        with trainer.forward.join():
            for step in range(5 if last else 3):
                trainer.backward(step, math.nan if step == 3 else 1.0)
                trainer.inner.step()
        assert trainer.exchange.dropped_steps == 1, mode
        found.append(trainer.weights)
    return found


@each_rank_of(*ON_RANKS)
def test_means_of_blocks_are_written_into_ddps_buckets(transport: Any) -> None:
    """Ours get no memory, unless parameters may be unused."""
    table = (("8 bits", "default"), ("4 bits", "view"), ("8 bits", "unused"), ("hadamard", "default"))
    for (method, mode), uses_flat in zip(table, (False, False, True, True), strict=True):
        buckets = [plan.bucket for plan in Trainer(transport, method, **OPTIONS[mode]).train().exchange.planned]
        assert buckets and all(("_flat" in vars(bucket)) == uses_flat for bucket in buckets), (method, mode)
        assert all(bucket.destinations is None for bucket in buckets), (method, mode)


@each_rank_of(*ON_RANKS)
def test_a_later_backward_pass_exchanges_the_earlier_mean_again(transport: Any) -> None:
    """As the documentation says, that is exact without compression, and gives other sums with it."""
    for method in ("dense", "sign values"):
        trainer, once = Trainer(transport, method), Trainer(transport, method, passes=2)
        for part in range(2):
            x, y = data_of(transport.rank, 0, part)
            cross_entropy(trainer.forward(x), y).backward()
        once.backward(0)
        pairs = zip(trainer.model.parameters(), once.model.parameters(), strict=True)
        difference = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
        assert difference < 1e-6 if method == "dense" else difference > 0.01, (method, difference)


@each_rank_of(*ON_RANKS)
def test_buffers_are_freed(transport: Any) -> None:
    gc.freeze()  # leave out what other tests made
    trainer = Trainer(transport, "powersgd")
    alive = []  # tensors and futures
    for step in range(24):
        trainer.step(step)
        gc.collect()
        alive.append(sum(issubclass(type(o), Tensor | torch.futures.Future) for o in gc.get_objects()))
    gc.unfreeze()
    # threads of the transport may hold a few tensors of the last step; a leak would add some in every step
    assert alive[-1] < alive[5] + 12, alive


@each_rank_of(*ON_RANKS)
def test_a_discarded_model_is_freed(transport: Any) -> None:
    ddp = DistributedDataParallel(Net())
    compress(ddp, METHODS["2-bit"](), transport=transport)
    ddp(data_of(transport.rank, 0)[0]).sum().backward()
    discarded = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert discarded() is None


def end_of(trainer: Trainer, state: bytes = b"") -> Finding:
    if state:
        trainer.load(state)
    findings = trainer.train(range(3, 6)).findings
    return {key: findings[key] for key in ("weights", "error")}


def checkpoints(transport: Any, folder: Path) -> Finding:
    """Ends of runs from states of three steps, which DDP and DistributedOptimizer save and the other loads."""
    found: Finding = {}
    for method in SAVED:
        ddp, other = (Trainer(transport, method, through).train(range(3)) for through in ("ddp", "optimizer"))
        of_ddp, of_other = ddp.state(), other.state()
        Path(folder, f"{method}.{transport.rank}.pt").write_bytes(of_ddp)
        expected = end_of(ddp)
        for through, state in (("ddp", of_ddp), ("ddp", of_other), ("optimizer", of_ddp)):
            assert end_of(Trainer(transport, method, through), state) == expected, method
        others = [Trainer(transport, method, through, bucket_mb=1) for through in ("ddp", "optimizer")]
        in_other_buckets = [end_of(trainer, of_ddp) for trainer in others]
        assert in_other_buckets[0] == in_other_buckets[1], method
        assert method != "2-bit" or in_other_buckets[0]["weights"] == expected["weights"]
        weights = all_gather_object(transport, expected["weights"])
        assert weights == [expected["weights"]] * transport.size, method
        found[method] = expected
    return found


class Failing(DenseCompressor):
    steps = 0

    def reduce(self, bucket: Any, state: Any) -> Any:
        self.steps += bucket.name.endswith(".0")
        if self.steps == 3 and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("the compressor's own")
        return (yield from super().reduce(bucket, state))


def failure(transport: Any) -> None:
    """The error of one rank ends backward there. The others fail when that rank has ended."""
    trainer, start = Trainer(transport, Failing()), perf_counter()
    with pytest.raises(KeyError if transport.rank == transport.size - 1 else RuntimeError) as raised:
        trainer.train()
    told, last = str(raised.value), transport.size - 1
    names_it = re.match(rf"ranks? .*\b{last} \(.*(has ended: its output|have ended: the first error)", told)
    assert told == '"the compressor\'s own"' if transport.rank == last else names_it, told
    with pytest.raises(RuntimeError):  # DDP cannot continue after an exception
        trainer.step(5)
    assert perf_counter() - start < patient(60)


def resumed(transport: Any, folder: Path) -> Finding:
    states = {method: (folder / f"{method}.{transport.rank}.pt").read_bytes() for method in SAVED}
    return {method: end_of(Trainer(transport, method), state) for method, state in states.items()}


@pytest.mark.parametrize("group", ON_RANKS, indirect=True)
def test_a_state_continues_bit_for_bit_wherever_it_is_loaded(group: Group, tmp_path: Path) -> None:
    """In other buckets, another optimizer, or other processes: an error of one rank ends the first ones."""
    found = group.run(checkpoints, tmp_path)
    group.run(failure, last=True)
    assert group.run(resumed, tmp_path) == found


STEPS, BAD = 10, 4  # the number of steps of a run, and of its step that is dropped


def go_on(trainer: Trainer, steps: Iterable[int]) -> tuple[str, float]:
    last = trainer.transport.rank == trainer.transport.size - 1
    warnings.filterwarnings("ignore", message=".*every rank drops this step")
    for step in steps:
        trainer.step(step, math.nan if last and step == BAD else 1.0)
    return trainer.weights, trainer.exchange.error_norm()


def saved_before_every_step(transport: Any, folder: Path, method: str, through: str) -> tuple[str, float]:
    trainer = Trainer(transport, method, through)
    for step in range(STEPS):
        Path(folder, f"{step}.{transport.rank}").write_bytes(trainer.state())
        end = go_on(trainer, [step])
    return end


def resumed_before_every_step(transport: Any, folder: Path, method: str, through: str) -> list[tuple[str, float]]:
    ends = []
    for step in range(STEPS):
        trainer = Trainer(transport, method, through)
        trainer.load(Path(folder, f"{step}.{transport.rank}").read_bytes())
        ends.append(go_on(trainer, range(step, STEPS)))
    return ends


@pytest.mark.proof
@pytest.mark.parametrize("through", ["ddp", "optimizer"])
@pytest.mark.parametrize("method", ["dgc", "powersgd", "4 bits"])
@pytest.mark.parametrize("group", [over(torchrun, 2), over(torchrun, 3)], indirect=True)
def test_new_processes_resume_bit_for_bit_before_every_step(
    group: Group, method: str, through: str, tmp_path: Path
) -> None:
    ends = group.run(saved_before_every_step, tmp_path, method, through, last=True)
    found = group.run(resumed_before_every_step, tmp_path, method, through)
    assert found == [[end] * STEPS for end in ends] and ends[0][1] > 0


@pytest.mark.parametrize("call", ["gather_state", "load_gathered"])
@each_rank_of(over(torchrun, 3), over(mpirun, 2))
def test_a_call_of_rank_0_alone_is_an_error_that_names_the_others(transport: Any, call: str) -> bool:
    trainer = Trainer(transport, "4 bits", "optimizer").train()
    exchange, others = trainer.exchange, "rank 1" if transport.size == 2 else "ranks 1, 2"
    given = () if call == "gather_state" else (exchange.gather_state(),)
    if transport.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meeting, "LIMIT", 0.5)
            message = (
                rf"called {call}\(\) and waited for [01] seconds, without an answer from {others}: every rank"
            )
            with pytest.raises(RuntimeError, match=message):
                getattr(exchange, call)(*given)
    barrier(transport)
    found = getattr(exchange, call)(*given)
    return (found is None) == (transport.rank > 0 or call == "load_gathered")
