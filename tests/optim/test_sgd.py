"""DGCSGD against torch.optim.SGD."""

from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from refusals import refuse

from dgc.core.bucket import make_bucket
from dgc.engine.buckets import SparseUpdate
from dgc.optim import DGCSGD


def random(*shape: Any, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layouts() -> Any:
    return {
        "contiguous": random(4, 5, seed=2),
        "transposed": random(5, 4, seed=3).t(),
        "channels_last": random(2, 3, 4, 5, seed=4).to(memory_format=torch.channels_last),
        "skipping": random(6, 8, seed=1)[:, ::2],
        "offset": random(40, seed=5)[7:27].view(4, 5),
        "scalar": random(1, seed=6)[0],
    }


def pair(**options: Any) -> Any:
    own, others = ([torch.nn.Parameter(t) for t in layouts().values()] for _ in range(2))
    return own, others, DGCSGD(own, **options)


def give(step: Any, *of_optimizers: Any) -> None:
    for parameters in of_optimizers:
        for i, p in enumerate(parameters):
            p.grad = random(*p.shape, seed=100 * step + i)


def assert_close(own: Any, others: Any, rtol: float = 1e-6) -> None:
    for p, q in zip(own, others, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=1e-6)


def test_equals_torchs_sgd() -> None:
    momentum, decay = {"momentum": 0.9}, {"weight_decay": 0.1}
    ways: list[dict[str, Any]] = [{}, momentum, {**momentum, "dampening": 0.3}, {**momentum, "nesterov": True}]
    for options in (*ways, *(decay | way for way in ways)):
        own, others, optimizer = pair(lr=0.1, **options)
        reference = torch.optim.SGD(others, lr=0.1, **options)
        for step in range(5):
            for group in (*optimizer.param_groups, *reference.param_groups):
                group["lr"] = 0.1 / (step + 1)
            give(step, own, others)
            if step == 2:
                own[0].grad = others[0].grad = None
            optimizer.step()
            reference.step()
        with case(options):
            assert_close(own, others)


def test_corrected_gradients_with_weight_decay_are_momentum_sgd() -> None:
    """Momentum is linear: momentum of the gradient, applied before, plus momentum of the weight decay."""
    for nesterov in (False, True):
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
        own, others, optimizer = pair(**options)
        optimizer.skip_momentum_of(own)
        reference, momenta = torch.optim.SGD(others, **options), [torch.zeros_like(p) for p in own]
        for step in range(6):
            give(step, own, others)
            for p, u in zip(own, momenta, strict=True):
                u.mul_(0.9).add_(p.grad)
                p.grad = p.grad + 0.9 * u if nesterov else u.clone()
            optimizer.step()
            reference.step()
        assert_close(own, others, rtol=1e-5)


def test_corrected_gradients_without_decay_keep_no_state() -> None:
    own, others, optimizer = pair(lr=0.1, momentum=0.9)
    optimizer.skip_momentum_of(own[:3])
    give(0, own)
    for _ in range(2):
        optimizer.step()
    for p, old in zip(own[:3], others[:3], strict=True):
        torch.testing.assert_close(p.detach(), old.detach() - 0.2 * p.grad, rtol=1e-6, atol=1e-6)
        assert not optimizer.state[p]
    assert all("momentum_buffer" in optimizer.state[p] for p in own[3:])


def test_decoupled_decay() -> None:
    for corrected in (False, True):
        own, others, optimizer = pair(lr=0.1, momentum=0.9, weight_decay=0.2, decoupled_weight_decay=True)
        if corrected:
            optimizer.skip_momentum_of(own)
        reference = torch.optim.SGD(others, lr=0.1, momentum=0.0 if corrected else 0.9)
        for step in range(4):
            give(step, own, others)
            for q in others:
                q.data.mul_(1 - 0.1 * 0.2)
            optimizer.step()
            reference.step()
        assert_close(own, others)


def update_of(p: Any, indices: Any, values: Any) -> Any:
    return SparseUpdate((p,), torch.tensor([0, p.numel()]), indices, values)


def test_sparse_updates_equal_dense_ones() -> None:
    decays: Any = ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True})
    for decay, layout in product(decays, layouts()):
        p, q = (torch.nn.Parameter(layouts()[layout]) for _ in range(2))
        first, second = (DGCSGD([x], lr=0.1, momentum=0.9, **decay) for x in (p, q))
        first.skip_momentum_of([p])
        second.skip_momentum_of([q])
        with case(decay, layout):
            for step in range(3):
                bucket, count = make_bucket("b", [("p", p)]), max(1, p.numel() // 3)
                indices = random(bucket.numel, seed=step).argsort()[:count].sort().values
                bucket.flat[indices] = values = random(count, seed=step)
                q.grad = bucket.segments[0].of(bucket.flat)
                first.step(sparse=[update_of(p, indices, values)])
                second.step()
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
            # memory around the parameter does not change
            whole = [torch.empty(0).set_(x.detach().untyped_storage()) for x in (p, q)]
            torch.testing.assert_close(*whole, rtol=1e-6, atol=1e-7)


def test_a_sparse_update_takes_the_rate_of_each_parameters_group() -> None:
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = DGCSGD([{"params": [p]}, {"params": [q], "lr": 0.5}], lr=0.25)
    optimizer.skip_momentum_of([p, q])
    update = SparseUpdate((p, q), torch.tensor([0, 3, 6]), torch.tensor([1, 5]), torch.tensor([1.0, 2.0]))
    optimizer.step(sparse=[update])
    assert p.tolist() == [0.0, -0.25, 0.0] and q.tolist() == [0.0, 0.0, -1.0]


def test_an_empty_sparse_update_decays() -> None:
    ones = torch.nn.Parameter(torch.ones(3))
    optimizer = DGCSGD([ones], lr=0.1, weight_decay=0.5)
    optimizer.skip_momentum_of([ones])
    optimizer.step(sparse=[update_of(ones, torch.empty(0, dtype=torch.int64), torch.empty(0))])
    torch.testing.assert_close(ones.detach(), torch.full((3,), 0.95))


def test_decay_with_a_buffer_of_another_memory_format() -> None:
    """torch.optim loads the buffers of a checkpoint with their saved strides."""

    def end(memory_format: Any, nesterov: bool) -> Any:
        p = torch.nn.Parameter(random(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
        optimizer = DGCSGD([p], lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=nesterov)
        optimizer.skip_momentum_of([p])
        optimizer.state[p]["momentum_buffer"] = random(4, 3, 5, 5, seed=1).contiguous(memory_format=memory_format)
        for _ in range(2):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        return p.detach()

    for nesterov in (False, True):
        assert torch.equal(*(end(form, nesterov) for form in (torch.contiguous_format, torch.channels_last)))


def test_a_closure_computes_the_loss() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = DGCSGD([p], lr=0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0 and not p.detach().any()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        *(({name: -0.1}, name) for name in ("lr", "momentum", "weight_decay")),
        ({"nesterov": True}, "nesterov"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], word: str) -> None:
    refuse(word, DGCSGD, [torch.nn.Parameter(torch.ones(2))], **options)
