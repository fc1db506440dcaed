"""Uses of parameters and optimizers in training scripts besides stepping, on two ranks."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optim.nets import alone, assert_same, dgc, dgc_sgd, joint_loss, loss_of, momentum_sgd, net, run, wrap
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, DGCCompressor, Route, Rule
from dgc.engine.options import as_route
from dgc.memory import ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer

KINDS = {"dense": DenseCompressor, "dgc": lambda: dgc(0.2), "dgc dense": lambda: dgc(1.0)}
every_kind = pytest.mark.parametrize("compression", KINDS.values(), ids=KINDS)


def step(model: Any, optimizer: Any, number: Any, rank: Any, **options: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, number, rank, **options).backward()
    optimizer.step()


# --- freezing and unfreezing -----------------------------------------------------------------------


@every_kind
def test_unfrozen_parameters_are_refused_on_every_rank_until_wrapped_again(compression: Any) -> None:
    errors = []

    def body(model: Any, transport: Any) -> None:
        model.first.requires_grad_(False)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        step(model, optimizer, 0, transport.rank)
        model.first.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, 1, transport.rank).backward()
        with pytest.raises(ValueError, match=r"requires a gradient now.*close\(\) it and wrap") as error:
            optimizer.step()
        errors.append(str(error.value))
        optimizer.synchronize()  # completes the exchange, whose gradients are dropped
        optimizer.close()
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        for number in range(2, 5):
            step(model, optimizer, number, transport.rank)

    (model, _) = run(2, body)
    assert len(errors) == 2 and errors[0] == errors[1]
    assert not torch.equal(model.first.weight, net().first.weight)


@every_kind
def test_parameters_that_are_frozen_later_stay_and_may_be_unfrozen(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        make = lambda m: dgc_sgd(m, weight_decay=0.1)  # noqa: E731
        optimizer = wrap(model, transport, make, compression=compression())
        for number in range(3):
            step(model, optimizer, number, transport.rank)
        model.first.requires_grad_(False)
        before = model.first.weight.detach().clone()
        for number in range(3, 6):
            step(model, optimizer, number, transport.rank)
        assert torch.equal(model.first.weight, before)
        model.first.requires_grad_(True)
        step(model, optimizer, 6, transport.rank)
        assert not torch.equal(model.first.weight, before)

    run(2, body)


# --- unused, shared, sparse ------------------------------------------------------------------------


@every_kind
def test_parameters_unused_in_some_steps_on_some_ranks(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression(), bucket_mb=2e-4)
        for number in range(6):
            step(model, optimizer, number, transport.rank, spare=(number + transport.rank) % 3 == 0)

    (model, _) = run(2, body)
    assert not torch.equal(model.spare.weight, net().spare.weight)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 6)
        self.out = nn.Linear(6, 30, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Any) -> Any:
        return self.out(torch.tanh(self.words(words)))


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_shared_parameters_compressed(ratio: Any) -> None:
    """One gradient, exchanged once. At ratio 1 this equals one process with the data of both ranks."""
    torch.manual_seed(0)
    reference = Shared()
    models = [copy.deepcopy(reference) for _ in range(2)]
    words = [torch.arange(10) + 7 * rank for rank in range(2)]

    def loss(model: Any, rank: Any) -> Any:
        return nn.functional.cross_entropy(model(words[rank]), words[rank])

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(ratio))
        assert [s.name for p in optimizer.planned for s in p.bucket.segments] == ["words.weight"]
        for _ in range(5):
            optimizer.zero_grad()
            loss(model, transport.rank).backward()
            optimizer.step()

    (model, _) = run(2, body, models)
    optimizer = momentum_sgd(reference)
    for _ in range(5):
        optimizer.zero_grad()
        ((loss(reference, 0) + loss(reference, 1)) / 2).backward()
        optimizer.step()
    if ratio == 1.0:
        assert_same(model, reference)
    assert not torch.equal(model.out.weight, reference.out.weight) or ratio == 1.0


@every_kind
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_embedding_gradients(compression: Any, passes: Any) -> None:
    """sparse=True gives the same result as sparse=False, through the same buckets."""
    words = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]

    def train(sparse: Any) -> Any:
        models = [nn.EmbeddingBag(20, 4, sparse=sparse) for _ in range(2)]

        def body(model: Any, transport: Any) -> None:
            nn.init.ones_(model.weight)
            optimizer = wrap(model, transport, dgc_sgd, compression=compression(), backward_passes_per_step=passes)
            for _ in range(3):
                optimizer.zero_grad()
                for part in range(passes):
                    model(words[transport.rank] + part % 1).square().sum().mul(0.01).backward()
                optimizer.step()

        return run(2, body, models)[0]

    assert_same(train(True), train(False))


# --- groups, closures, clipping --------------------------------------------------------------------


def groups(model: Any) -> Any:
    first = {"params": list(model.first.parameters()), "lr": 0.02}
    rest = {"params": [*model.spare.parameters(), *model.last.parameters()], "weight_decay": 0.1}
    return DGCSGD([first, rest], lr=0.05, momentum=0.9)


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_groups_of_a_compressed_optimizer(ratio: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, groups, compression=dgc(ratio))
        for number in range(4):
            step(model, optimizer, number, transport.rank)

    (model, _) = run(2, body)
    if ratio == 1.0:
        reference = net()
        optimizer = groups(reference)
        for number in range(4):
            optimizer.zero_grad()
            joint_loss(reference, number, 2).backward()
            optimizer.step()
        assert_same(model, reference)


def test_a_group_is_added_by_wrapping_again() -> None:
    def body(model: Any, transport: Any) -> None:
        inner = torch.optim.SGD(model.first.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), transport=transport)
        with pytest.raises(ValueError, match=r"close\(\) this optimizer, add the group to the wrapped one"):
            optimizer.add_param_group({"params": model.last.parameters()})
        optimizer.close()
        optimizer.inner.add_param_group({"params": model.last.parameters()})
        optimizer = DistributedOptimizer(inner, model.named_parameters(), transport=transport)
        step(model, optimizer, 0, transport.rank)

    (model, _) = run(2, body)
    assert not torch.equal(model.last.weight, net().last.weight)


@every_kind
def test_synchronizing_twice_is_synchronizing_once(compression: Any) -> None:
    def train(times: Any) -> Any:
        def body(model: Any, transport: Any) -> None:
            optimizer = wrap(model, transport, dgc_sgd, compression=compression())
            for number in range(3):
                optimizer.zero_grad()
                loss_of(model, number, transport.rank).backward()
                for _ in range(times):
                    optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()

        return run(2, body)[0]

    assert_same(train(2), train(1), exactly=True)


# --- copies ----------------------------------------------------------------------------------------


@every_kind
def test_copying_the_optimizer_is_an_error_with_a_cure(compression: Any) -> None:
    optimizer = wrap(net(), alone(), dgc_sgd, compression=compression())
    for copied in (copy.deepcopy, copy.copy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be copied or pickled: save state_dict"):
            copied(optimizer)


@every_kind
def test_copies_of_the_model_are_free_of_hooks(compression: Any) -> None:
    """A model with hooks can be deep-copied, for an average of weights, and saved whole."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        step(model, optimizer, 0, transport.rank)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_same(twin, model, exactly=True)
            loss_of(twin, 0).backward()
            assert not optimizer._engine.in_flight
        step(model, optimizer, 1, transport.rank)

    run(2, body)


@every_kind
def test_state_moves_to_a_new_optimizer(compression: Any) -> None:
    """The replacement for a copy: training continues bit for bit."""

    def body(model: Any, transport: Any) -> None:
        def build(owner: Any) -> Any:
            return wrap(owner, transport, dgc_sgd, compression=compression())

        optimizer = build(model)
        for number in range(3):
            step(model, optimizer, number, transport.rank)
        twin = copy.deepcopy(model)
        other = build(twin)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_compression_state_dict(optimizer.compression_state_dict())
        for number in range(3, 6):
            step(model, optimizer, number, transport.rank)
            step(twin, other, number, transport.rank)
        assert_same(model, twin, exactly=True)

    run(2, body)


# --- what only one optimizer may use ---------------------------------------------------------------


def test_the_same_parameters_twice() -> None:
    world = LockstepWorld(1)
    model = net()
    optimizer = wrap(model, world.transports[0])
    for again in (momentum_sgd, lambda m: optimizer):
        with pytest.raises(ValueError, match=r"first.weight belongs to another DistributedOptimizer.*close\(\)"):
            wrap(model, world.transports[0], again)
    optimizer.close()
    optimizer = wrap(model, world.transports[0])
    step(model, optimizer, 0, 0)


def test_one_compressor_for_two_optimizers() -> None:
    shared = DGCCompressor(0.1, ResidualMemory())
    wrap(net(), alone(), compression=shared)
    with pytest.raises(ValueError, match="this DGCCompressor has the residual of another"):
        wrap(net(), alone(), compression=Route([Rule(shared)]))
    stateless = DenseCompressor()
    wrap(net(), alone(), compression=stateless)
    wrap(net(), alone(), compression=stateless)


@pytest.mark.parametrize("kind", [DenseCompressor, DGCCompressor, Route])
def test_a_class_in_place_of_a_compressor(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"compression={kind.__name__} is a class: pass an instance"):
        as_route(kind)
