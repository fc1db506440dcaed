"""Residual: what enters it, what leaves it, how it is saved and loaded."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import case
from refusals import refuse
from sparse.held import SHAPES, Held, bucket_of

from dgc.core.bucket import make_bucket
from dgc.core.momentum import MomentumCorrection
from dgc.kernels import PassInputs
from dgc.kernels.selection import SelectionKernels, as_selection
from dgc.memory import ClipByValue, DGCSGDMemory, NoMemory, ResidualMemory

DGC = partial(DGCSGDMemory, 0.9)
REFERENCE = SelectionKernels()
MEMORIES = {
    "residual": ResidualMemory,
    "decay": lambda: ResidualMemory(decay=0.5),  # of the rest, and not of what was sent
    "dgc": DGC,
    "nesterov": lambda: DGCSGDMemory(0.9, nesterov=True),
    "no masking": lambda: DGCSGDMemory(0.9, momentum_masking=False),
    "nesterov, no masking": lambda: DGCSGDMemory(0.5, True, momentum_masking=False),
}
every_memory = pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)


def held(make: Any, *buckets: Any) -> Any:
    memory = Held(make())
    for bucket in buckets:
        memory.plan(bucket)
    return memory


def compensate(memory: Any, bucket: Any) -> Any:
    """Take in the gradient; all that is due."""
    inputs = memory.pass_inputs(bucket)
    assert int(REFERENCE.accumulate_(inputs)) == bucket.numel
    return inputs.v


def sent_(memory: Any, bucket: Any, indices: Any, values: Any) -> None:
    zeros = torch.zeros(bucket.numel)
    zeros[indices] = values
    memory.sent_(bucket, as_selection(torch.as_tensor(indices), zeros, len(indices) + 2))


def bits(memory: Any) -> Any:
    """Copies of the tensors. Beside them there are numbers of steps."""
    tables = {kind: part for kind, part in memory.state_dict().items() if kind != "method"}
    named = {f"{kind}.{name}": x for kind, part in tables.items() for name, x in part.items()}
    return {name: x.clone() for name, x in named.items() if isinstance(x, torch.Tensor)}


def equal(a: Any, b: Any) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_the_memory_clips_before_it_accumulates() -> None:
    bucket = bucket_of()
    memory = held(lambda: DGCSGDMemory(0.5, gradient_clipping=ClipByValue(0.1)), bucket)
    expected = bucket.flat.clamp(-0.1, 0.1)
    assert list(memory.memory.clip(bucket)) == []
    torch.testing.assert_close(compensate(memory, bucket), expected)


def test_no_memory_forgets() -> None:
    bucket = bucket_of()
    memory = held(NoMemory, bucket)
    for _ in range(2):
        assert torch.equal(compensate(memory, bucket), bucket.flat)
        sent_(memory, bucket, [0], bucket.flat[:1])
    assert list(memory.errors()) == [] and bits(memory) == {} and memory.memory.correction is None


def test_a_memory_tells_its_momentum_correction() -> None:
    memory = DGCSGDMemory(0.8, True)
    assert memory.correction == MomentumCorrection(0.8, True) and memory.momentum_masking


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_out_of_range_is_refused(momentum: float) -> None:
    refuse("momentum", DGCSGDMemory, momentum)


def test_a_decay_that_keeps_nothing_is_refused() -> None:
    refuse(r"decay must be in \(0, 1\]", ResidualMemory, decay=0.0)


@every_memory
@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
def test_what_was_sent_is_taken_back_bit_for_bit(make: Any, whole: bool) -> None:
    """Where subtracting and adding again would not do: values cut to fp16's range, far below v."""
    bucket = bucket_of()
    memory = held(make, bucket)
    for scale in (1.0, 1e9, 1e-9):
        with case(scale):
            bucket.flat.mul_(scale)
            v = compensate(memory, bucket)
            before, rounded = bits(memory), v.clamp(-65504, 65504).half().float()
            if whole:
                memory.sent_all_(bucket, rounded)
            else:
                sent_(memory, bucket, [0, 3, 20], rounded[[0, 3, 20]])
            assert not equal(bits(memory), before)
            for _ in range(2):
                memory.rollback(bucket)
                assert equal(bits(memory), before)


@every_memory
def test_whoever_looks_between_steps_sees_what_was_sent_gone(make: Any) -> None:
    bucket = bucket_of()
    memory = held(make, bucket)
    momentum, nesterov = vars(memory.memory.correction or MomentumCorrection(None, False)).values()
    u, v = None if momentum is None else torch.zeros(bucket.numel), torch.zeros(bucket.numel)
    options, decay = (momentum or 0.0, bool(nesterov)), getattr(memory.memory, "decay", 1.0)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        bucket.flat.normal_(generator=generator)
        REFERENCE.accumulate_(PassInputs((bucket.flat.clone(),), u, v, *options, decay=decay))
        due = compensate(memory, bucket).clone()
        assert torch.equal(due, v)
        where = torch.randperm(bucket.numel, generator=generator)[: step % 5].sort().values
        values = due[where].half().float()
        if step % 4 == 2:
            memory.sent_all_(bucket, due.half().float())
            v -= v.half().float()
        else:
            sent_(memory, bucket, where, values)
            if step % 4 == 3:
                memory.rollback(bucket)
            else:
                v[where] -= values
                if u is not None and getattr(memory.memory, "momentum_masking", False):
                    u[where] = 0
        (error,) = memory.errors()
        assert torch.equal(error, v)
        state = memory.state_dict()
        for s in bucket.segments:
            for own, table in ((v, "residuals" if u is None else "velocities"), (u, "momentums")):
                assert own is None or torch.equal(state[table][s.name], s.of(own).reshape(s.shape))


def loading(memory: Any, bucket: Any, saved: Any) -> None:
    memory.load_state_dict(saved)


def planning(memory: Any, bucket: Any, saved: Any) -> None:
    memory.plan(bucket)


@every_memory
@pytest.mark.parametrize("forget", [loading, planning])
def test_what_was_sent_is_forgotten(make: Any, forget: Any) -> None:
    bucket = bucket_of()
    memory = held(make, bucket)
    saved = memory.state_dict()
    v = compensate(memory, bucket)
    sent_(memory, bucket, [1, 4], v[[1, 4]].clone())
    forget(memory, bucket, saved)
    assert not any(tensor.any() for tensor in bits(memory).values())
    assert torch.equal(compensate(memory, bucket), compensate(held(make, bucket), bucket))


@every_memory
def test_a_step_that_another_has_followed_is_not_taken_back(make: Any) -> None:
    bucket = bucket_of()
    memory = held(make, bucket)
    sent_(memory, bucket, [0], compensate(memory, bucket)[:1].clone())
    compensate(memory, bucket)
    before = bits(memory)
    memory.rollback(bucket)
    assert equal(bits(memory), before)


def filled(make: Any, bucket: Any) -> Any:
    memory = held(make, bucket)
    compensate(memory, bucket)
    return memory


@pytest.mark.parametrize("make", [DGC, ResidualMemory], ids=["dgc", "residual"])
def test_a_state_is_loaded_in_buckets_with_other_strides(make: Any, tmp_path: Path) -> None:
    memory = filled(make, bucket_of("b0"))
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    one = make_bucket("x", [("c", torch.zeros(SHAPES["c"]).to(memory_format=torch.channels_last))])
    two = make_bucket("y", [("b", torch.zeros(5)), ("a", torch.zeros(3, 4).t())])
    other = held(make, one, two)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert equal(bits(memory), bits(other))
    (flat, _) = other.errors()
    error = bits(other)["velocities.c" if make is DGC else "residuals.c"]
    assert torch.equal(flat.view(2, 2, 2, 3).permute(0, 3, 1, 2), error)


@pytest.mark.parametrize("make", [DGC, ResidualMemory], ids=["dgc", "residual"])
def test_a_saved_state_is_a_copy(make: Any) -> None:
    bucket = bucket_of()
    memory = filled(make, bucket)
    saved, before = memory.state_dict(), bits(memory)
    compensate(memory, bucket)
    assert equal(bits(SimpleNamespace(state_dict=lambda: saved)), before)


@pytest.mark.parametrize("third", [{}, {"other": (2, 3, 2, 2)}, {"c": (2, 3, 4)}], ids=str)
@pytest.mark.parametrize("make", [DGC, ResidualMemory], ids=["dgc", "residual"])
def test_the_state_of_another_model_names_the_parameter(make: Any, third: dict[str, Any]) -> None:
    saved = filled(make, bucket_of()).state_dict()
    with pytest.raises(ValueError, match=r"\bc\b"):
        filled(make, bucket_of(a=(4, 3), b=(5,), **third)).load_state_dict(saved)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(DGC, ResidualMemory, id="residual to dgc"),
        pytest.param(DGC, NoMemory, id="none to dgc"),
        pytest.param(ResidualMemory, DGC, id="dgc to residual"),
        pytest.param(ResidualMemory, NoMemory, id="none to residual"),
        pytest.param(NoMemory, DGC, id="dgc to none"),
        pytest.param(NoMemory, ResidualMemory, id="residual to none"),
    ],
)
def test_the_state_of_another_memory_is_refused(one: Any, other: Any) -> None:
    with pytest.raises(ValueError):
        filled(one, bucket_of()).load_state_dict(filled(other, bucket_of()).state_dict())
