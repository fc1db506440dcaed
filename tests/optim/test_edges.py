"""Uses of parameters and optimizers in training scripts besides stepping, on two ranks."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import (
    alone,
    assert_same,
    check_that_a_saved_state_goes_on,
    dgc,
    dgc_sgd,
    loss_of,
    momentum_sgd,
    net,
    run,
    through_gradients,
    train,
    trained,
    wrap,
)
from torch import nn

from dgc.compression import DenseCompressor, DGCCompressor, Route, Rule
from dgc.engine.options import as_route
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer

KINDS = {"dense": DenseCompressor, "dgc": lambda: dgc(0.2), "dgc dense": lambda: dgc(1.0)}
every_kind = pytest.mark.parametrize("compression", KINDS.values(), ids=KINDS)


@every_kind
def test_unfrozen_parameters_are_refused_on_every_rank_until_wrapped_again(compression: Any) -> None:
    errors = []

    def body(model: Any, transport: Any) -> None:
        model.first.requires_grad_(False)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        train(model, optimizer, [0], transport.rank)
        model.first.requires_grad_(True)
        with pytest.raises(ValueError, match=r"requires a gradient now.*close\(\) it and wrap") as error:
            train(model, optimizer, [1], transport.rank)
        errors.append(str(error.value))
        optimizer.synchronize()  # completes the exchange, whose gradients are dropped
        optimizer.close()
        train(model, wrap(model, transport, dgc_sgd, compression=compression()), range(2, 5), transport.rank)

    (model, _) = run(2, body)
    assert len(errors) == 2 and errors[0] == errors[1]
    assert not torch.equal(model.first.weight, net().first.weight)


@every_kind
def test_parameters_that_are_frozen_later_stay_and_may_be_unfrozen(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, partial(dgc_sgd, weight_decay=0.1), compression=compression())
        train(model, optimizer, range(3), transport.rank)
        model.first.requires_grad_(False)
        before = model.first.weight.detach().clone()
        train(model, optimizer, range(3, 6), transport.rank)
        assert torch.equal(model.first.weight, before)
        model.first.requires_grad_(True)
        train(model, optimizer, [6], transport.rank)
        assert not torch.equal(model.first.weight, before)

    run(2, body)


@every_kind
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_embedding_gradients(compression: Any, passes: Any) -> None:
    """sparse=True gives the same result as sparse=False, through the same buckets."""
    words = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]

    def embedding(sparse: Any) -> Any:
        model = nn.EmbeddingBag(20, 4, sparse=sparse)
        nn.init.ones_(model.weight)
        return model

    def loss(model: Any, number: Any, rank: Any) -> Any:
        return model(words[rank]).square().sum().mul(0.01)

    sparse, dense = (
        trained(
            2,
            range(3),
            dgc_sgd,
            compression,
            [embedding(sparse) for _ in range(2)],
            {"loss": loss, "passes": passes},
        )
        for sparse in (True, False)
    )
    assert_same(sparse, dense)


def test_a_group_is_added_by_wrapping_again() -> None:
    def body(model: Any, transport: Any) -> None:
        inner = torch.optim.SGD(model.first.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), transport=transport)
        with pytest.raises(ValueError, match=r"cannot be added here: close\(\) this optimizer, add the group"):
            optimizer.add_param_group({"params": model.last.parameters()})
        optimizer.close()
        optimizer.inner.add_param_group({"params": model.last.parameters()})
        optimizer = DistributedOptimizer(inner, model.named_parameters(), transport=transport)
        train(model, optimizer, [0], transport.rank)

    (model, _) = run(2, body)
    assert not torch.equal(model.last.weight, net().last.weight)


@every_kind
def test_synchronizing_twice_is_synchronizing_once(compression: Any) -> None:
    def twice(model: Any, optimizer: Any) -> None:
        optimizer.synchronize()
        through_gradients(model, optimizer)

    first, second = (
        trained(2, range(3), dgc_sgd, compression, training={"finish": finish})
        for finish in (twice, through_gradients)
    )
    assert_same(first, second, exactly=True)


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
        train(model, optimizer, [0], transport.rank)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_same(twin, model, exactly=True)
            loss_of(twin, 0).backward()
            assert not optimizer._engine.in_flight
        train(model, optimizer, [1], transport.rank)

    run(2, body)


@every_kind
def test_state_moves_to_a_new_optimizer(compression: Any) -> None:
    """The replacement for a copy: training continues bit for bit."""
    check_that_a_saved_state_goes_on(lambda m, t: wrap(m, t, dgc_sgd, compression=compression()), saved=3)


def test_the_same_parameters_twice() -> None:
    transport, model = alone(), net()
    optimizer = wrap(model, transport)
    for again in (momentum_sgd, lambda m: optimizer):
        with pytest.raises(ValueError, match=r"first.weight belongs to another DistributedOptimizer.*close\(\)"):
            wrap(model, transport, again)
    optimizer.close()
    train(model, wrap(model, transport), [0])


def test_one_compressor_for_two_optimizers() -> None:
    shared = DGCCompressor(0.1, ResidualMemory())
    wrap(net(), alone(), compression=shared)
    with pytest.raises(ValueError, match="this DGCCompressor has the residual of another"):
        wrap(net(), alone(), compression=Route([Rule(shared)]))
    stateless = DenseCompressor()
    for _ in range(2):
        wrap(net(), alone(), compression=stateless)


@pytest.mark.parametrize("kind", [DenseCompressor, DGCCompressor, Route])
def test_a_class_in_place_of_a_compressor(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"compression={kind.__name__} is a class: pass an instance"):
        as_route(kind)
