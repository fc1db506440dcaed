"""Classification, and any other task with items (input, target): the default task."""

from typing import Any

from torch import Tensor, nn

from dgc_training.config import instantiate
from dgc_training.data import TrainBatches
from dgc_training.evaluation import Evaluation, evaluation_loaders
from dgc_training.tasks.labels import LabelCheck
from dgc_training.tasks.protocol import Loss, Setup, Task


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
        self.criterion: nn.Module = instantiate(settings.criterion).to(device)
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
