"""Gradients that are read in place, without a copy into the bucket."""

from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import ZEROS, alone, assert_same, dgc, dgc_sgd, each_rank, run, through_gradients, train, wrap

from dgc.compression import DGCCompressor
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, NoMemory, ResidualMemory


@each_rank(1)
def test_a_compressed_bucket_has_no_memory_of_its_own(model: Any, transport: Any) -> None:
    def buffers() -> Any:
        """The compressed buckets that have allocated a flat buffer."""
        planned = [p for p in optimizer.planned if isinstance(p.compressor, DGCCompressor)]
        assert planned
        return [p for p in planned if "_flat" in p.bucket.__dict__]

    def finish(model: Any, optimizer: Any) -> None:
        own = model.first.weight.grad
        optimizer.step()
        assert model.first.weight.grad is own and not buffers()

    optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.05))
    train(model, optimizer, range(3), finish=finish)
    optimizer.zero_grad(set_to_none=False)
    assert buffers()


@pytest.mark.parametrize(
    ("passes", "clipping", "ratio"), [(1, None, 0.05), (2, 0.5, 0.05), (1, 0.5, 1.0), (2, None, 1.0)]
)
def test_the_place_of_gradients_does_not_change_the_result(passes: Any, clipping: Any, ratio: Any) -> None:
    def mixed(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 1:
            model.first.weight.grad = None
        if step == 2:
            model.last.weight.grad = torch.zeros_like(model.last.weight)

    def body(model: Any, transport: Any, zero: Any) -> None:
        memory = DGCSGDMemory(0.9, gradient_clipping=clipping and ClipByGlobalNorm(clipping))
        options = {"bucket_mb": 2e-4, "backward_passes_per_step": passes}
        optimizer = wrap(model, transport, dgc_sgd, compression=DGCCompressor(ratio, memory), **options)
        for step in range(4):
            begin = partial(mixed, step=step) if zero is mixed else ZEROS[zero]
            train(model, optimizer, [step], transport.rank, passes=passes, zero=begin)

    pieces, views, either = (run(2, partial(body, zero=zero))[0] for zero in ("own", "zero", mixed))
    assert_same(pieces, views, exactly=True)
    assert_same(pieces, either, exactly=True)


def test_gradients_laid_out_in_another_way_are_copied() -> None:
    """A hook may replace a gradient by a transposed one. Its elements must keep their positions."""

    def body(model: Any, transport: Any, transpose: bool) -> None:
        if transpose:
            model.first.weight.register_hook(lambda g: g.t().contiguous().t())
        train(model, wrap(model, transport, dgc_sgd, compression=dgc(0.05)), range(4), transport.rank)

    first, second = (run(2, partial(body, transpose=transpose))[0] for transpose in (False, True))
    assert_same(first, second, exactly=True)


@pytest.mark.parametrize("memory", [ResidualMemory, NoMemory, lambda: DGCSGDMemory(0.9)])
def test_sparse_steps_equal_steps_through_gradients(memory: Any) -> None:
    """If the memory does not correct momentum, DGCSGD equals SGD, and a sparse mean is treated as dense."""
    corrects = memory().correction is not None

    def body(model: Any, transport: Any, finish: Any) -> None:
        compression = DGCCompressor(0.05, memory())
        optimizer = wrap(model, transport, dgc_sgd, compression=compression, bucket_mb=2e-4)
        train(model, optimizer, range(5), transport.rank, finish=finish)
        assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters()) != corrects

    direct, through = (run(2, partial(body, finish=finish))[0] for finish in (None, through_gradients))
    assert_same(direct, through, exactly=not corrects)


def test_a_memory_format_that_changes_after_wrapping() -> None:
    """The bucket keeps its order of elements, which then differs from that of the parameters."""

    def loss(model: Any, step: int, rank: int) -> Any:
        return model(torch.full((2, 8, 3, 3), 1.0 + step)).square().sum()

    def result(finish: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        optimizer = wrap(model, alone(), dgc_sgd, compression=dgc(0.05))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train(model, optimizer, range(3), loss=loss, finish=finish)
        return model

    assert_same(result(None), result(through_gradients))
