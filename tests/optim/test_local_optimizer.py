"""LocalOptimizer with gradients that are sparse, empty or not finite."""

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from optim.nets import alone, momentum_sgd, net, train
from torch.nn.utils import parameters_to_vector

from dgc.comm import all_gather_object
from dgc.compression.protocol import NonFiniteGradientError
from dgc.gossip import SGP
from dgc.optim import LocalOptimizer


def optimizer_of(model: Any, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LocalOptimizer(inner, model.named_parameters(), SGP(), transport=alone(), **options)
    optimizer.zero_grad()
    return optimizer


def test_a_sparse_gradient_that_is_not_finite_is_dropped_and_named() -> None:
    for value in (float("nan"), float("inf")):
        model = torch.nn.Embedding(10, 4, sparse=True)
        before = model.weight.detach().clone()
        optimizer = optimizer_of(model)
        (model(torch.tensor([1, 2, 1])) * value).sum().backward()
        with pytest.warns(UserWarning, match="the gradient of weight on rank 0 has NaN or inf"):
            optimizer.step()
        assert optimizer.dropped_steps == 1 and torch.equal(model.weight, before)
        strict = optimizer_of(model, nonfinite="raise")
        (model(torch.tensor([3])) * value).sum().backward()
        with pytest.raises(NonFiniteGradientError, match="the gradient of weight on rank 0"):
            strict.step()


def test_no_rows_no_elements_and_gradients_whose_sum_overflows_are_finite() -> None:
    linear, embedding = torch.nn.Linear(4, 2, bias=False), torch.nn.Embedding(10, 4, sparse=True)
    empty = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(3))])
    before = linear.weight.detach().clone()
    optimizers = [optimizer_of(linear), optimizer_of(embedding), optimizer_of(empty)]
    linear.weight.grad = torch.full((2, 4), 3e38)
    embedding(torch.empty(0, dtype=torch.long)).sum().backward()
    (empty[0].sum() + empty[1].sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.dropped_steps == 0
    assert not torch.equal(linear.weight, before) and empty[1].tolist() == pytest.approx([0.9] * 3)
    optimizers[2].zero_grad()
    (empty[0].sum() + empty[1].sum() * float("nan")).backward()
    with pytest.warns(UserWarning, match="the gradient of 1 on rank 0"):
        optimizers[2].step()


def test_a_parameter_that_is_unfrozen_after_wrapping_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = optimizer_of(model)
    model[0].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="requires a gradient now but did not when LocalOptimizer was built"):
        optimizer.step()


@on_ranks(3)
def test_consensus_is_the_mean_of_all_models_for_a_while(transport: Any) -> None:
    model = net()
    optimizer = LocalOptimizer(momentum_sgd(model), model.named_parameters(), SGP(), transport=transport)
    train(model, optimizer, range(3), transport.rank)
    optimizer.method.flush()  # consensus() would receive what is in flight
    own = parameters_to_vector(model.parameters()).detach()
    mean = torch.stack(all_gather_object(transport, own)).mean(0)
    with optimizer.consensus():
        torch.testing.assert_close(parameters_to_vector(model.parameters()).detach(), mean)
    assert torch.equal(parameters_to_vector(model.parameters()), own) and not torch.equal(own, mean)
    assert optimizer.metrics()["consensus_distance"] == pytest.approx(float((own - mean).norm()))
