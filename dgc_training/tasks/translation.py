"""Translation of sentences by `dgc_models.transformer.Transformer`.

The loss of a batch is the mean over its target tokens of train.criterion, CrossEntropyLoss with label smoothing
(Szegedy et al., Rethinking the Inception Architecture, https://arxiv.org/abs/1512.00567, section 7). The gradient
is the mean over ranks and passes of the gradients of these means. Batches have about equally many tokens, so it is
nearly that of the mean over all tokens. fairseq divides by the tokens of all ranks; the published runs of
stochastic gradient push divide by a rank's own, as here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from dgc.comm import Transport
from dgc_datasets.translation import PADDING, ParallelText
from dgc_models.transformer import Transformer
from dgc_training.config import ConfigError
from dgc_training.tasks.protocol import Pass
from dgc_training.tasks.translation_batches import Batch, TranslationBatches
from dgc_training.tasks.translation_evaluation import TranslationEvaluation


class Translation:
    """The task of a data set of `dgc_datasets.translation`. train.batch_size is the most tokens of a rank's batch.

    Implements `dgc_training.tasks.protocol.Task`.

    Args:
        beams: beams of the search in evaluations; 1: greedy.
        length_penalty: of the search with several beams.
        num_samples: translations of each split that TensorBoard shows.

    Raises:
        ValueError: if a number is out of range.
    """

    def __init__(self, beams: int = 1, length_penalty: float = 0.6, num_samples: int = 8) -> None:
        if beams < 1:
            raise ValueError(f"task.beams is {beams}; it must be at least 1")
        if not length_penalty >= 0:
            raise ValueError(f"task.length_penalty is {length_penalty}; it must be 0 or more")
        if num_samples < 0:
            raise ValueError(f"task.num_samples is {num_samples}; it must be 0 or more")
        self.beams = beams
        self.length_penalty = length_penalty
        self.num_samples = num_samples
        self._vocabulary = 0  # of the data set
        self._is_checked = False

    def batches(
        self, dataset: Mapping[str, Any], tree: DictConfig, transport: Transport, device: torch.device
    ) -> TranslationBatches:
        if tree.data.num_workers:
            raise ValueError("data.num_workers must be 0: translation's batches are made by the ranks themselves")
        text = _parallel_text(dataset)
        if tree.train.batch_size < (longest := int(text["train"].lengths.max())):
            raise ValueError(
                f"train.batch_size is {tree.train.batch_size} tokens, fewer than the {longest} of one sentence; "
                "raise it, or lower dataset.max_length"
            )
        self._vocabulary = len(text.vocabulary)
        return TranslationBatches(
            text["train"],
            tree.train.batch_size,
            tree.train.num_batches_per_step,
            rank=transport.rank,
            size=transport.size,
            seed=tree.seed,
            device=device,
        )

    def evaluation(
        self, dataset: Mapping[str, Any], tree: DictConfig, transport: Transport, device: torch.device
    ) -> TranslationEvaluation:
        if tree.train.meters:
            raise ValueError("train.meters must be null: the task Translation has its own results")
        evaluation = TranslationEvaluation(
            _parallel_text(dataset),
            transport,
            device,
            max_tokens=tree.train.batch_size,
            beams=self.beams,
            length_penalty=self.length_penalty,
            num_samples=self.num_samples,
        )
        # The best checkpoint is the one with the largest result.
        metrics = [name for name in evaluation.names if not name.endswith("_nll")]
        if tree.train.metric is not None and tree.train.metric not in metrics:
            raise ConfigError(f"train.metric is {tree.train.metric!r}; it must be one of {', '.join(metrics)}")
        return evaluation

    def forward(self, model: nn.Module, criterion: nn.Module, batch: Batch) -> Pass:
        if not self._is_checked:
            _check(model, criterion, self._vocabulary)
            self._is_checked = True
        logits, labels = model(batch.source, batch.target[:, :-1]), batch.target[:, 1:]
        return Pass(criterion(logits.flatten(0, 1), labels.flatten()), logits, labels)

    def counts(self, passes: list[Batch], size: int) -> dict[str, int]:
        return {"samples": sum(p.samples for p in passes), "tokens": sum(p.tokens for p in passes)}


def _parallel_text(dataset: Mapping[str, Any]) -> ParallelText:
    if not isinstance(dataset, ParallelText):
        raise ValueError(
            f"task is Translation, but dataset is a {type(dataset).__name__}; it must be a data set of "
            "dgc_datasets.translation"
        )
    return dataset


def _check(model: nn.Module, criterion: nn.Module, vocabulary: int) -> None:
    """Raises ConfigError if model or criterion do not fit. vocabulary: number of tokens of the data set."""
    if not isinstance(model, Transformer):
        raise ConfigError(f"task is Translation, but model is a {type(model).__name__}; it must be a Transformer")
    if model.padding != PADDING or model.embedding.num_embeddings < vocabulary:
        raise ConfigError(
            f"the model has {model.embedding.num_embeddings} tokens and the padding {model.padding}, the data set "
            f"{vocabulary} and {PADDING}: set model.vocabulary to dataset.vocabulary_size"
        )
    if getattr(criterion, "ignore_index", None) != PADDING:
        raise ConfigError(f"train.criterion.ignore_index must be {PADDING}, or the loss has padding in it")
