"""One clear error for labels outside of the model's outputs, instead of torch's traceback or GPU assertion."""

from torch import Tensor, nn

from dgc_training.config import ConfigError

INDEXING = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


class LabelCheck:
    """Checks the labels of each batch on the CPU, and of the first batch on a GPU, where reading values blocks.

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
