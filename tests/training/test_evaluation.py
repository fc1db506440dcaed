"""Evaluation over ranks: counts, uneven shards, batch norm's statistics; top-k accuracy."""

import math
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
    assert LockstepWorld(2).run(lambda transport: evaluate(model, {}, make_meters, transport, CPU)) == [{}, {}]


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


def test_the_mode_of_the_model_is_restored() -> None:
    loader = evaluation_loader(TensorDataset(torch.randn(1, 2), torch.zeros(1).long()), 1, rank=0, size=1)
    for training in (True, False):
        model = nn.BatchNorm1d(2).train(training)
        evaluate(model, {"test": loader}, make_meters, LockstepWorld(1).transports[0], CPU)
        assert model.training is training


def test_the_metric_says_whether_lower_is_better() -> None:
    accuracy = {"_target_": "dgc_training.meters.TopKClassMeter", "k": 1}
    meters = {"acc/{}": accuracy, "perplexity/{}": {"_target_": "dgc_training.meters.Perplexity"}}
    for metric, lower in (("acc/test", False), ("perplexity/test", True), (None, False)):
        settings = OmegaConf.create({"metric": metric, "meters": meters})
        evaluation = Evaluation({"test": []}, settings, LockstepWorld(1).transports[0], CPU)
        assert evaluation.lower_is_better is lower


def test_top_k_accuracy() -> None:
    outputs = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.4, 0.35, 0.25]])
    targets = torch.tensor([1, 1, 0, 0])
    for k, correct in ((1, 2), (2, 3), (3, 4), (5, 4)):
        meter = TopKClassMeter(k)
        assert meter.data() == {"num_examples": 0, "num_correct": 0} and math.isnan(meter.compute())
        meter.update(outputs[:3], targets[:3])
        meter.update(outputs[3:], targets[3:])
        assert meter.compute() == 25.0 * correct
        assert meter.data() == {"num_examples": 4, "num_correct": correct}
    meter.set({"num_examples": 8.0, "num_correct": 2.0})  # the sums of all ranks
    assert meter.compute() == 25.0
    with pytest.raises(ValueError, match="at least 1"):
        TopKClassMeter(0)
