"""Gradients that are read in place, without a copy into the bucket."""

from typing import Any

import pytest
import torch
from optim.nets import alone, assert_same, dgc_sgd, loss_of, net, run, wrap

from dgc.compression import DGCCompressor
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, NoMemory, ResidualMemory


def buffers(optimizer: Any) -> Any:
    """The compressed buckets that have allocated a flat buffer."""
    planned = [p for p in optimizer.planned if isinstance(p.compressor, DGCCompressor)]
    assert planned
    return [p for p in planned if "_flat" in p.bucket.__dict__]


def test_a_compressed_bucket_has_no_memory_of_its_own() -> None:
    model = net()
    optimizer = wrap(model, alone(), dgc_sgd, compression=DGCCompressor(0.05, DGCSGDMemory(0.9)))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        own = model.first.weight.grad
        optimizer.step()
        assert model.first.weight.grad is own and not buffers(optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert buffers(optimizer)


@pytest.mark.parametrize(
    ("passes", "clipping", "ratio"), [(1, None, 0.05), (2, 0.5, 0.05), (1, 0.5, 1.0), (2, None, 1.0)]
)
def test_the_place_of_gradients_does_not_change_the_result(passes: Any, clipping: Any, ratio: Any) -> None:
    """In place, in the buckets, or mixed: the same parameters bit for bit."""

    def train(prepare: Any) -> Any:
        def body(model: Any, transport: Any) -> None:
            memory = DGCSGDMemory(0.9, gradient_clipping=clipping and ClipByGlobalNorm(clipping))
            compression = DGCCompressor(ratio, memory)
            optimizer = wrap(
                model,
                transport,
                dgc_sgd,
                compression=compression,
                bucket_mb=2e-4,
                backward_passes_per_step=passes,
            )
            for step in range(4):
                prepare(optimizer, model, step)
                for part in range(passes):
                    loss_of(model, 10 * step + part, transport.rank).backward()
                optimizer.step()

        return run(2, body)[0]

    def mixed(optimizer: Any, model: Any, step: Any) -> None:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 1:
            model.first.weight.grad = None
        if step == 2:
            model.last.weight.grad = torch.zeros_like(model.last.weight)

    pieces = train(lambda optimizer, model, step: optimizer.zero_grad())
    views = train(lambda optimizer, model, step: optimizer.zero_grad(set_to_none=False))
    assert_same(pieces, views, exactly=True)
    assert_same(pieces, train(mixed), exactly=True)


def test_gradients_laid_out_in_another_way_are_copied() -> None:
    """A hook may replace a gradient by a transposed one. Its elements must keep their positions."""
    results = []
    for transpose in (False, True):

        def body(model: Any, transport: Any, transpose: Any = transpose) -> None:
            if transpose:
                model.first.weight.register_hook(lambda g: g.t().contiguous().t())
            compression = DGCCompressor(0.05, DGCSGDMemory(0.9))
            optimizer = wrap(model, transport, dgc_sgd, compression=compression)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step, transport.rank).backward()
                optimizer.step()

        results.append(run(2, body)[0])
    assert_same(*results, exactly=True)


def by_step_and_by_synchronize(body: Any) -> Any:
    """The models after `body(optimizer, model, rank, step)`, which calls step(), alone or after synchronize()."""

    def direct(optimizer: Any) -> None:
        optimizer.step()

    def through_gradients(optimizer: Any) -> None:
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    return [body(step) for step in (direct, through_gradients)]


@pytest.mark.parametrize("memory", [ResidualMemory, NoMemory])
def test_momentum_of_the_optimizers_own_applies_to_sparse_means(memory: Any) -> None:
    """If the memory does not correct momentum, DGCSGD equals SGD, and a sparse mean is treated as dense."""

    def train(finish: Any) -> Any:
        def body(model: Any, transport: Any) -> None:
            compression = DGCCompressor(0.05, memory())
            optimizer = wrap(model, transport, dgc_sgd, compression=compression)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, step, transport.rank).backward()
                finish(optimizer)
            assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())

        return run(2, body)[0]

    assert_same(*by_step_and_by_synchronize(train), exactly=True)


def test_a_memory_format_that_changes_after_wrapping() -> None:
    """The bucket keeps its order of elements, which then differs from that of the parameters."""

    def train(finish: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        optimizer = wrap(model, alone(), dgc_sgd, compression=DGCCompressor(0.05, DGCSGDMemory(0.9)))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 8, 3, 3), 1.0 + step)).square().sum().backward()
            finish(optimizer)
        return model

    assert_same(*by_step_and_by_synchronize(train))
