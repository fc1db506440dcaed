"""Classification, and any other task with items (input, target): the default task."""

from typing import Any

from torch import Tensor, nn

from dgc_training.config import ConfigError
from dgc_training.data import TrainBatches
from dgc_training.evaluation import Evaluation, evaluation_loaders
from dgc_training.tasks.protocol import Loss, Setup, Task

INDEXING = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


class LabelCheck:
    """One clear error for labels outside of the model's outputs, instead of torch's traceback or GPU assertion.

    Checks the labels of each batch on the CPU, and of the first batch on a GPU, where reading values blocks.

    Args:
        criterion: the loss. Labels are checked only if it uses them as indices of the outputs [n, classes, ...].
    """

    def __init__(self, criterion: nn.Module) -> None:
        self._is_on = isinstance(criterion, INDEXING)
        self._ignored = getattr(criterion, "ignore_index", None)

    def __call__(self, outputs: Tensor, labels: Tensor) -> None:
        """Raises ConfigError if a label is not the index of an output."""
        if not self._is_on or labels.is_floating_point() or outputs.dim() < 2:
            return
        self._is_on = not labels.is_cuda
        classes = outputs.size(1)
        wrong = (labels < 0) | (labels >= classes)
        if self._ignored is not None:
            wrong &= labels != self._ignored
        if bool(wrong.any()):
            raise ConfigError(
                f"dataset has the label {int(labels[wrong][0])}, but model has {classes} outputs, for labels from "
                f"0 to {classes - 1}: set model.num_classes (or its equivalent) to the number of classes"
            )


class Classification(Task):
    """Trains on the split 'train' by `train.criterion`, and evaluates all other splits by `train.meters`.

    Args:
        setup: its data set is a mapping from split to a map-style data set of (input, target).

    Raises:
        ValueError: if the data set is too small for one step, or `train.metric` is not a result.

    Example:
        configs.task = Config(Classification)
    """

    def __init__(self, setup: Setup) -> None:
        settings, transport, device = setup.tree.train, setup.transport, setup.device
        num_workers = setup.tree.data.num_workers
        self.criterion = setup.criterion()
        self.check_labels = LabelCheck(self.criterion)
        self.batches = TrainBatches(
            setup.dataset["train"],
            settings.batch_size,
            settings.num_batches_per_step,
            rank=transport.rank,
            size=transport.size,
            seed=setup.tree.seed,
            device=device,
            num_workers=num_workers,
        )
        loaders = evaluation_loaders(setup.dataset, settings.batch_size, transport, device, num_workers)
        self.evaluation = Evaluation(loaders, settings, transport, device)
        self.results, self.lower_is_better = self.evaluation.names, self.evaluation.lower_is_better

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        outputs = model(inputs)
        self.check_labels(outputs, targets)
        return Loss(self.criterion(outputs, targets), targets.size(0), outputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        return self.evaluation(model)
