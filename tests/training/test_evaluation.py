"""Evaluation over ranks: counts, uneven shards, batch norm's statistics."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

from dgc.comm.lockstep import LockstepWorld
from dgc_training.data import evaluation_loader
from dgc_training.evaluation import Evaluation, averaged_batch_norm, batch_norm_buffers, evaluate
from dgc_training.meters import TopKClassMeter

CPU = torch.device("cpu")


def make_meters(split: Any) -> Any:
    return {f"acc/{split}_top1": TopKClassMeter(1), f"acc/{split}_top5": TopKClassMeter(5)}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [1, 7, 20])
def test_the_result_does_not_depend_on_the_ranks(samples: Any, size: Any) -> None:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 10, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)
    model = nn.Identity()

    def body(transport: Any) -> Any:
        dataset = TensorDataset(inputs, targets)
        loaders = {
            split: evaluation_loader(dataset, 2, rank=transport.rank, size=transport.size)
            for split in ("test", "val")
        }
        return evaluate(model, loaders, make_meters, transport, CPU)

    top1 = 100.0 * (inputs.argmax(1) == targets).sum().item() / samples
    for results in LockstepWorld(size).run(body):
        assert list(results) == ["acc/test_top1", "acc/test_top5", "acc/val_top1", "acc/val_top5"]
        assert results["acc/test_top1"] == results["acc/val_top1"] == top1
        assert results["acc/test_top5"] >= top1


def test_batch_norm_is_averaged_only_inside_the_context() -> None:
    def body(transport: Any) -> Any:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
        for buffer in batch_norm_buffers(model).values():
            buffer.fill_(float(transport.rank))
        with averaged_batch_norm(model, transport):
            inside = torch.cat([b.clone() for b in batch_norm_buffers(model).values()])
        outside = torch.cat(list(batch_norm_buffers(model).values()))
        return inside, outside

    for rank, (inside, outside) in enumerate(LockstepWorld(3).run(body)):
        assert inside.shape == (10,) and bool((inside == 1).all()) and bool((outside == rank).all())


def test_names_of_batch_norm_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2, track_running_stats=False))
    assert list(batch_norm_buffers(model)) == ["0.running_mean", "0.running_var"]
    assert set(batch_norm_buffers(nn.BatchNorm1d(3))) == {"running_mean", "running_var"}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training: Any) -> None:
    model = nn.BatchNorm1d(2).train(training)
    loader = evaluation_loader(TensorDataset(torch.randn(1, 2), torch.zeros(1).long()), 1, rank=0, size=1)

    def body(transport: Any) -> Any:
        return evaluate(model, {"test": loader}, make_meters, transport, CPU)

    LockstepWorld(1).run(body)
    assert model.training is training


@pytest.mark.parametrize(("metric", "lower"), [("acc/test", False), ("perplexity/test", True), (None, False)])
def test_the_metric_says_whether_lower_is_better(metric: str | None, lower: bool) -> None:
    accuracy = {"_target_": "dgc_training.meters.TopKClassMeter", "k": 1}
    perplexity = {"_target_": "dgc_training.meters.Perplexity"}
    settings = OmegaConf.create({"metric": metric, "meters": {"acc/{}": accuracy, "perplexity/{}": perplexity}})
    transport = LockstepWorld(1).transports[0]
    assert Evaluation({"test": []}, settings, transport, CPU).lower_is_better is lower


def test_no_meters_give_no_results() -> None:
    def body(transport: Any) -> Any:
        return evaluate(nn.Identity(), {}, make_meters, transport, CPU)

    assert LockstepWorld(2).run(body) == [{}, {}]
