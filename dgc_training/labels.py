"""Labels that the model has no output for: one message, where torch has a traceback or an assertion on the GPU."""

from torch import Tensor, nn

from dgc_training.config import ConfigError

INDEXING = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


class LabelCheck:
    """criterion: the loss. Only one that takes labels as indices of the model's outputs [n, classes, ...] has them
    checked: every batch on the CPU, the first one on a GPU, where a look at the values waits for the device.
    """

    def __init__(self, criterion: nn.Module) -> None:
        self._is_on = isinstance(criterion, INDEXING)
        self._ignored = getattr(criterion, "ignore_index", None)

    def __call__(self, outputs: Tensor, labels: Tensor) -> None:
        """ConfigError where a label is no index of an output."""
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
                f"0 to {classes - 1}: set model.num_classes (or what the model calls it) to the number of classes"
            )
