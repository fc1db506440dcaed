"""Samples with one target each, such as images with a class: any criterion and meters of outputs and targets."""

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from dgc.comm import Transport
from dgc_training.data import Passes, TrainBatches
from dgc_training.evaluation import Evaluation
from dgc_training.labels import LabelCheck
from dgc_training.tasks.protocol import Pass


class Classification:
    """The default task: items of a data set are (input, target), and the model maps a batch of inputs to outputs.

    `train.meters` measure the outputs. Implements `dgc_training.tasks.protocol.Task`.
    """

    def __init__(self) -> None:
        self._check_labels: LabelCheck | None = None

    def batches(
        self, dataset: Mapping[str, Any], tree: DictConfig, transport: Transport, device: torch.device
    ) -> TrainBatches:
        return TrainBatches(
            dataset["train"],
            tree.train.batch_size,
            tree.train.num_batches_per_step,
            rank=transport.rank,
            size=transport.size,
            seed=tree.seed,
            device=device,
            num_workers=tree.data.num_workers,
        )

    def evaluation(
        self, dataset: Mapping[str, Any], tree: DictConfig, transport: Transport, device: torch.device
    ) -> Evaluation:
        return Evaluation(dataset, tree.train, transport, device, tree.data.num_workers)

    def forward(self, model: nn.Module, criterion: nn.Module, batch: Any) -> Pass:
        inputs, targets = batch
        outputs = model(inputs)
        if self._check_labels is None:
            self._check_labels = LabelCheck(criterion)
        self._check_labels(outputs, targets)
        return Pass(criterion(outputs, targets), outputs, targets)

    def counts(self, passes: Passes, size: int) -> dict[str, int]:
        return {"samples": size * sum(targets.size(0) for _, targets in passes)}
