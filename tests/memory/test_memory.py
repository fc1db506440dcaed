"""Residual: what enters it, what leaves it, how it is clipped, saved and loaded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from memory.held import Held

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.kernels import PassInputs
from dgc.kernels.selection import SelectionKernels, as_selection
from dgc.memory import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DGCSGDMemory,
    MomentumCorrection,
    NoMemory,
    ResidualMemory,
)

DGC = partial(DGCSGDMemory, 0.9)
REFERENCE = SelectionKernels()


def rng(seed: Any) -> Any:
    return torch.Generator().manual_seed(seed)


def bucket_of(name: str = "b", seed: int = 0, dtype: Any = torch.float32, **shapes: Any) -> Any:
    """A bucket with random gradients; by default of three tensors."""
    shapes = shapes or {"a": (4, 3), "b": (5,), "c": (2, 3, 2, 2)}
    bucket = make_bucket(name, [(n, torch.zeros(s, dtype=dtype)) for n, s in shapes.items()])
    bucket.flat.copy_(torch.randn(bucket.numel, generator=rng(seed)))
    return bucket


def finish(conversation: Any) -> None:
    """Drive a conversation that asks for nothing."""
    assert list(conversation) == []


# --- clipping --------------------------------------------------------------------------------------


def test_clip_by_value() -> None:
    bucket = bucket_of()
    before = bucket.flat.clone()
    finish(ClipByValue(0.5).clip(bucket))
    assert torch.equal(bucket.flat, before.clamp(-0.5, 0.5)) and not torch.equal(bucket.flat, before)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_clip_by_norm_clips_each_tensor_as_torch_does(max_norm: Any) -> None:
    bucket = bucket_of()
    expected = []
    for segment in bucket.segments:
        p = torch.nn.Parameter(torch.zeros(segment.shape))
        p.grad = segment.of(bucket.flat).clone()
        torch.nn.utils.clip_grad_norm_([p], max_norm)
        expected.append(p.grad.reshape(-1))
    finish(ClipByNorm(max_norm).clip(bucket))
    torch.testing.assert_close(bucket.flat, torch.cat(expected))


def compensate(memory: Any, bucket: Any) -> Any:
    """Take in the gradient; all that is due."""
    inputs = memory.pass_inputs(bucket)
    assert int(REFERENCE.accumulate_(inputs)) == bucket.numel
    return inputs.v


def sent_(memory: Any, bucket: Any, indices: Any, values: Any) -> None:
    zeros = torch.zeros(bucket.numel)
    zeros[indices] = values
    memory.sent_(bucket, as_selection(indices, zeros, indices.numel() + 2))


@pytest.mark.parametrize("clipping", [ClipByNorm(1.0), ClipByValue(1.0)])
def test_clipping_zeros_gives_zeros(clipping: Any) -> None:
    bucket = bucket_of()
    bucket.flat.zero_()
    finish(clipping.clip(bucket))
    assert not bucket.flat.any()


def test_clip_by_norm_in_half_precision_does_not_overflow() -> None:
    """The squares of 400 are beyond fp16."""
    bucket = bucket_of(dtype=torch.float16, a=(100,))
    bucket.flat.fill_(400.0)
    finish(ClipByNorm(10.0).clip(bucket))
    assert bucket.flat.dtype == torch.float16
    torch.testing.assert_close(bucket.flat.float(), torch.ones(100), rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_clip_by_global_norm_scales_every_rank_alike(size: Any) -> None:
    """The norm is the root of the mean over ranks of the squared norm, tensor by tensor."""
    world = LockstepWorld(size)
    buckets = [bucket_of(seed=rank) for rank in range(size)]
    before = [bucket.flat.clone() for bucket in buckets]
    world.converse("clip", [ClipByGlobalNorm(1.5).clip(bucket) for bucket in buckets])
    for segment in buckets[0].segments:
        own = slice(segment.offset, segment.offset + segment.numel)
        norm = (sum(float(b[own].double().square().sum()) for b in before) / size) ** 0.5
        for bucket, old in zip(buckets, before, strict=True):
            torch.testing.assert_close(bucket.flat[own], old[own] * min(1.0, 1.5 / norm))
    assert [meter.rounds for meter in world.meters] == [1] * size
    assert [meter.payload_bytes for meter in world.meters] == [4 * 3] * size


def test_the_memory_clips_before_it_accumulates() -> None:
    memory, bucket = Held(DGCSGDMemory(0.5, gradient_clipping=ClipByValue(0.1))), bucket_of()
    expected = bucket.flat.clamp(-0.1, 0.1)
    memory.plan(bucket)
    finish(memory.memory.clip(bucket))
    torch.testing.assert_close(compensate(memory, bucket), expected)


# --- momentum correction ---------------------------------------------------------------------------


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_masking_by_hand(masking: Any, nesterov: Any) -> None:
    memory = Held(DGCSGDMemory(0.5, nesterov, momentum_masking=masking))
    bucket = bucket_of(a=(3,))
    memory.plan(bucket)
    u, v, m = [0.0] * 3, [0.0] * 3, 0.5
    for gradient, sent in [([1.0, 2.0, 3.0], [2]), ([4.0, -5.0, 6.0], [0, 1]), ([1.0, 1.0, 1.0], [])]:
        bucket.flat.copy_(torch.tensor(gradient))
        for i, g in enumerate(gradient):
            u[i] = m * (u[i] + g) if nesterov else m * u[i] + g
            v[i] += u[i] + g if nesterov else u[i]
        now = compensate(memory, bucket)
        assert now.tolist() == v
        sent_(memory, bucket, torch.tensor(sent, dtype=torch.int64), now[sent])
        for i in sent:
            v[i] = 0.0
            u[i] = 0.0 if masking else u[i]
        state = memory.state_dict()
        assert state["momentums"]["a"].tolist() == u and state["velocities"]["a"].tolist() == v


MEMORIES = {
    "residual": ResidualMemory,
    "dgc": DGC,
    "nesterov": lambda: DGCSGDMemory(0.9, nesterov=True),
    "no masking": lambda: DGCSGDMemory(0.9, momentum_masking=False),
}


def bits(memory: Any) -> Any:
    return {name: tensor.clone() for name, tensor in leaves(memory.state_dict()).items()}


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("whole", [False, True])
def test_what_was_sent_is_taken_back_bit_for_bit(make: Any, whole: Any) -> None:
    """Where subtracting and adding again would not do: values cut to fp16's range, far below v."""
    memory, bucket = Held(make()), bucket_of(**SHAPES)
    memory.plan(bucket)
    for scale in (1.0, 1e9, 1e-9):
        bucket.flat.mul_(scale)
        v = compensate(memory, bucket)
        before = bits(memory)
        indices = torch.tensor([0, 3, 20])
        if whole:
            memory.sent_all_(bucket, v.clamp(-65504, 65504).half().float())
        else:
            sent_(memory, bucket, indices, v[indices].clamp(-65504, 65504).half().float())
        sent = bits(memory)
        assert any(not torch.equal(sent[name], before[name]) for name in before)
        memory.rollback(bucket)
        assert all(torch.equal(tensor, before[name]) for name, tensor in bits(memory).items())
        memory.rollback(bucket)
        assert all(torch.equal(tensor, before[name]) for name, tensor in bits(memory).items())


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("looked_at", [False, True])
def test_after_a_dropped_step_the_next_is_as_if_nothing_had_been_sent(make: Any, looked_at: Any) -> None:
    """Also where someone read the state before the step's fate was known."""
    memory, twin, bucket = Held(make()), Held(make()), bucket_of(**SHAPES)
    for one in (memory, twin):
        one.plan(bucket)
        v = compensate(one, bucket)
    sent_(memory, bucket, torch.tensor([0, 3, 28]), v[[0, 3, 28]].half().float())
    if looked_at:
        assert not all(torch.equal(a, b) for a, b in zip(bits(memory).values(), bits(twin).values(), strict=True))
        assert len(list(memory.errors())) == 1
    memory.rollback(bucket)
    for one in (memory, twin):
        compensate(one, bucket)
    assert all(torch.equal(a, b) for a, b in zip(bits(memory).values(), bits(twin).values(), strict=True))


class Eager:
    """u and v by hand, which lose what is sent at once."""

    def __init__(self, memory: Any, n: Any) -> None:
        correction = memory.correction or MomentumCorrection(None, False)
        self.momentum, self.nesterov = correction.momentum, bool(correction.nesterov)
        self.masking = getattr(memory, "momentum_masking", False)
        self.u = None if self.momentum is None else torch.zeros(n)
        self.v = torch.zeros(n)

    def accumulate(self, g: Any) -> None:
        REFERENCE.accumulate_(PassInputs((g.clone(),), self.u, self.v, self.momentum or 0.0, self.nesterov))

    def sent(self, indices: Any, values: Any) -> None:
        self.v[indices] -= values
        if self.masking:
            assert self.u is not None
            self.u[indices] = 0


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
def test_whoever_looks_between_steps_sees_what_was_sent_gone(make: Any) -> None:
    """Step for step the state of an implementation that takes it out at once: sparse, dense and dropped steps."""
    memory, bucket = Held(make()), bucket_of(**SHAPES)
    memory.plan(bucket)
    eager = Eager(memory.memory, bucket.numel)
    for step in range(12):
        bucket.flat.copy_(torch.randn(bucket.numel, generator=rng(step)))
        eager.accumulate(bucket.flat)
        v = compensate(memory, bucket)
        assert torch.equal(v, eager.v)
        indices = torch.randperm(bucket.numel, generator=rng(step))[: step % 5].sort().values
        if step % 4 == 2:
            memory.sent_all_(bucket, v.half().float())
            eager.v = eager.v - eager.v.half().float()
        else:
            sent_(memory, bucket, indices, v[indices].half().float())
            if step % 4 == 3:
                memory.rollback(bucket)
            else:
                eager.sent(indices, v[indices].half().float())
        (error,) = memory.errors()
        assert torch.equal(error, eager.v)
        state = memory.state_dict()
        for segment in bucket.segments:
            where = slice(segment.offset, segment.offset + segment.numel)
            name, u = segment.name, eager.u
            assert torch.equal(state["residuals" if u is None else "velocities"][name].flatten(), eager.v[where])
            assert u is None or torch.equal(state["momentums"][name].flatten(), u[where])


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
def test_loading_and_planning_forget_what_was_sent(make: Any) -> None:
    memory, bucket = Held(make()), bucket_of(**SHAPES)
    memory.plan(bucket)
    saved = memory.state_dict()
    for forget in (lambda: memory.load_state_dict(saved), lambda: memory.plan(bucket)):
        v = compensate(memory, bucket)
        sent_(memory, bucket, torch.tensor([1, 4]), v[[1, 4]].clone())
        forget()
        assert not any(tensor.any() for tensor in bits(memory).values())
        first = compensate(memory, bucket).clone()
        fresh = Held(make())
        fresh.plan(bucket)
        assert torch.equal(first, compensate(fresh, bucket))
        memory.load_state_dict(saved)


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
def test_a_step_that_another_has_followed_is_not_taken_back(make: Any) -> None:
    memory, bucket = Held(make()), bucket_of(**SHAPES)
    memory.plan(bucket)
    v = compensate(memory, bucket)
    sent_(memory, bucket, torch.tensor([0]), v[:1].clone())
    compensate(memory, bucket)
    before = bits(memory)
    memory.rollback(bucket)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(memory).items())


def test_no_memory_forgets() -> None:
    memory, bucket = Held(NoMemory()), bucket_of(a=(3,))
    memory.plan(bucket)
    assert torch.equal(compensate(memory, bucket), bucket.flat)
    sent_(memory, bucket, torch.tensor([0]), bucket.flat[:1])
    assert torch.equal(compensate(memory, bucket), bucket.flat)
    assert list(memory.errors()) == [] and leaves(memory.state_dict()) == {} and memory.memory.correction is None


def test_the_correction_tells_momentum_and_nesterov() -> None:
    assert DGCSGDMemory(0.8, True).correction == MomentumCorrection(0.8, True)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_bad_momentum(momentum: Any) -> None:
    with pytest.raises(ValueError, match="momentum"):
        DGCSGDMemory(momentum)


# --- saving and loading ----------------------------------------------------------------------------

SHAPES: dict[str, Any] = {"a": (4, 3), "b": (5,), "c": (2, 3, 2, 2)}


def filled(make: Any, *buckets: Any) -> Any:
    memory = Held(make())
    for seed, bucket in enumerate(buckets):
        memory.plan(bucket)
        bucket.flat.copy_(torch.randn(bucket.numel, generator=rng(seed)))
        compensate(memory, bucket)
    return memory


def leaves(state: Any) -> Any:
    """The tensors. Beside them there are numbers of steps."""
    named = {f"{kind}.{name}": value for kind, part in state.items() for name, value in part.items()}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("make", [DGC, ResidualMemory])
def test_state_survives_other_buckets_and_strides(make: Any, tmp_path: Path) -> None:
    saved = filled(make, bucket_of("b0", **SHAPES)).state_dict()
    torch.save(saved, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    other = Held(make())
    one = make_bucket("x", [("c", torch.zeros(SHAPES["c"]).to(memory_format=torch.channels_last))])
    two = make_bucket("y", [("b", torch.zeros(5)), ("a", torch.zeros(3, 4).t())])
    other.plan(one)
    other.plan(two)
    other.load_state_dict(loaded)
    expected, got = leaves(saved), leaves(other.state_dict())
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    (flat, _) = other.errors()
    error = got["velocities.c" if make is DGC else "residuals.c"]
    assert torch.equal(flat.view(2, 2, 2, 3).permute(0, 3, 1, 2), error)


@pytest.mark.parametrize("make", [DGC, ResidualMemory])
def test_a_saved_state_is_a_copy(make: Any) -> None:
    bucket = bucket_of(**SHAPES)
    memory = filled(make, bucket)
    saved = memory.state_dict()
    before = {name: tensor.clone() for name, tensor in leaves(saved).items()}
    compensate(memory, bucket)
    assert all(torch.equal(before[name], tensor) for name, tensor in leaves(saved).items())


@pytest.mark.parametrize("make", [DGC, ResidualMemory])
@pytest.mark.parametrize(
    "shapes",
    [
        {"a": (4, 3), "b": (5,)},
        {"a": (4, 3), "b": (5,), "other": (2, 3, 2, 2)},
        {"a": (4, 3), "b": (5,), "c": (2, 3, 4)},
    ],
    ids=["unknown", "missing", "shape"],
)
def test_another_models_state_names_the_parameter(make: Any, shapes: Any) -> None:
    saved = filled(make, bucket_of(**SHAPES)).state_dict()
    with pytest.raises(ValueError, match=r"\bc\b"):
        filled(make, bucket_of(**shapes)).load_state_dict(saved)


@pytest.mark.parametrize("make", [DGC, ResidualMemory, NoMemory])
@pytest.mark.parametrize("other", [DGC, ResidualMemory, NoMemory])
def test_another_memorys_state_is_a_value_error(make: Any, other: Any) -> None:
    if make is not other:
        saved = filled(other, bucket_of(**SHAPES)).state_dict()
        with pytest.raises(ValueError):
            filled(make, bucket_of(**SHAPES)).load_state_dict(saved)


@pytest.mark.usefixtures("no_type_checks")
def test_clipping_that_cannot_clip_is_refused_at_once() -> None:
    """Without the checked annotations, which would answer first."""
    with pytest.raises(ValueError, match="^gradient_clipping must be None or one of"):
        DGCSGDMemory(0.9, gradient_clipping=True)  # type: ignore[arg-type]
