"""Translation of sentences by `dgc_models.transformer.Transformer`.

The loss of a batch is the mean over its target tokens of train.criterion, CrossEntropyLoss with label smoothing
(Szegedy et al., Rethinking the Inception Architecture, https://arxiv.org/abs/1512.00567, section 7). The gradient
is the mean over ranks and passes of the gradients of these means. Batches have about equally many tokens, so it is
nearly the gradient of the mean over all tokens. fairseq divides by the tokens of all ranks; the published runs of
stochastic gradient push divide by a rank's own, as here.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dgc_datasets.translation import PADDING, ParallelText
from dgc_models.transformer import Transformer
from dgc_training.tasks.protocol import Loss, Setup, Task
from dgc_training.tasks.translation_batches import Batch, TranslationBatches
from dgc_training.tasks.translation_evaluation import TranslationEvaluation


class Translation(Task):
    """The task of a data set of `dgc_datasets.translation`. train.batch_size is the most tokens of a rank's batch.

    Args:
        setup: its data set is a `ParallelText`, its model a `Transformer`.
        beams: beams of the search in evaluations; 1: greedy.
        length_penalty: of the search with several beams.
        num_samples: translations of each split that TensorBoard shows.

    Raises:
        ValueError: if a number is out of range, or if data set, model, criterion and settings do not fit together.

    Example:
        configs.task = Config(Translation, beams=4)
    """

    item = "token"

    def __init__(self, setup: Setup, beams: int = 1, length_penalty: float = 0.6, num_samples: int = 8) -> None:
        if beams < 1:
            raise ValueError(f"task.beams is {beams}; it must be at least 1")
        if not length_penalty >= 0:
            raise ValueError(f"task.length_penalty is {length_penalty}; it must be 0 or more")
        if num_samples < 0:
            raise ValueError(f"task.num_samples is {num_samples}; it must be 0 or more")
        settings, dataset, transport = setup.tree.train, _parallel_text(setup.dataset), setup.transport
        self.criterion = setup.criterion()
        _check(setup, dataset, self.criterion)
        self.size = transport.size
        self.batches = TranslationBatches(
            dataset["train"],
            settings.batch_size,
            settings.num_batches_per_step,
            rank=transport.rank,
            size=transport.size,
            seed=setup.tree.seed,
            device=setup.device,
        )
        self.evaluation = TranslationEvaluation(
            dataset,
            transport,
            setup.device,
            max_tokens=settings.batch_size,
            beams=beams,
            length_penalty=length_penalty,
            num_samples=num_samples,
        )
        self.results = self.evaluation.names
        if settings.metric is not None and settings.metric not in self.results:
            raise ValueError(f"train.metric is {settings.metric!r}; it must be one of {', '.join(self.results)}")
        self.lower_is_better = str(settings.metric).endswith("_nll")

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits, labels = model(batch.source, batch.target[:, :-1]), batch.target[:, 1:]
        # Ranks have nearly equally many tokens. Their mean, rounded down, is the same on every rank.
        return Loss(self.criterion(logits.flatten(0, 1), labels.flatten()), batch.tokens // self.size)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.evaluation(model)

    def texts(self) -> Mapping[str, str]:
        return self.evaluation.texts


def _parallel_text(dataset: Any) -> ParallelText:
    if not isinstance(dataset, ParallelText):
        raise ValueError(
            f"task is Translation, but dataset is a {type(dataset).__name__}; it must be a data set of "
            "dgc_datasets.translation"
        )
    return dataset


def _check(setup: Setup, dataset: ParallelText, criterion: nn.Module) -> None:
    """Raises ValueError if a part of the config does not fit the data set."""
    model, settings, vocabulary = setup.model, setup.tree.train, len(dataset.vocabulary)
    if setup.tree.data.num_workers:
        raise ValueError("data.num_workers must be 0: translation's batches are made by the ranks themselves")
    if settings.meters:
        raise ValueError("train.meters must be null: the task Translation has its own results")
    if not isinstance(model, Transformer):
        raise ValueError(f"task is Translation, but model is a {type(model).__name__}; it must be a Transformer")
    if model.padding != PADDING or model.embedding.num_embeddings < vocabulary:
        raise ValueError(
            f"the model has {model.embedding.num_embeddings} tokens and the padding {model.padding}, the data set "
            f"{vocabulary} and {PADDING}: set model.vocabulary to dataset.vocabulary_size"
        )
    longest = max(int(pairs.lengths.max()) for pairs in dataset.values())
    if model.max_length < longest:
        raise ValueError(
            f"model.max_length is {model.max_length} tokens, fewer than the {longest} of one sentence; raise it, "
            "or lower dataset.max_length"
        )
    if settings.batch_size < (longest := int(dataset["train"].lengths.max())):
        raise ValueError(
            f"train.batch_size is {settings.batch_size} tokens, fewer than the {longest} of one sentence; raise "
            "it, or lower dataset.max_length"
        )
    if getattr(criterion, "ignore_index", None) != PADDING:
        raise ValueError(f"train.criterion.ignore_index must be {PADDING}, or the loss has padding in it")
