"""Language modelling: the target of each token of a stream is the next one."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dgc_training.data import TrainBatches
from dgc_training.evaluation import Evaluation
from dgc_training.tasks.protocol import Batches, Loss, Setup, Task
from dgc_training.tasks.tokens import EvaluationRows, TokenBatch, TokenStreams, Windows

State = tuple[Tensor, ...]


class LanguageModel(Task):
    """Trains on the split 'train' of a data set of token streams, and evaluates all others by `train.meters`.

    Without `carry_state` the stream is cut into windows of `context` tokens, which are shuffled as the samples of
    `Classification` are. With it, batches are contiguous (truncated back-propagation through time): the model
    takes (tokens, state) and returns (logits, state), and its state is carried from batch to batch and saved in
    checkpoints. It is zero again where the text does not go on, as `TokenStreams` says. Evaluation continues rows
    in the same way; a model without state sees no token before its window.

    Args:
        setup: its data set is a mapping from split to token ids [n]. `train.batch_size` counts rows.
        context: tokens of a row in one backward pass.
        carry_state: whether the model has a state that is carried.
        steps_per_epoch: optimizer steps of an epoch, after which the model is evaluated; None: one pass over the
            data. Without `carry_state` it is at most that.
        evaluation_rows: rows that a test stream is divided into, over all ranks.

    Raises:
        ValueError: if a number is out of range, the data is too small for one step, a token is outside of the
            model's vocabulary, or `train.metric` is not a result.

    Example:
        configs.task = Config(LanguageModel, context=64, carry_state=True)
    """

    item: ClassVar[str] = "token"

    def __init__(
        self,
        setup: Setup,
        context: int = 64,
        carry_state: bool = False,
        steps_per_epoch: int | None = None,
        evaluation_rows: int = 32,
    ) -> None:
        numbers = {"context": context, "steps_per_epoch": steps_per_epoch, "evaluation_rows": evaluation_rows}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"task.{name} is {value}; it must be at least 1")
        check_vocabulary(setup.dataset, setup.model)
        self.context, self.carry_state, self.model, self.device = context, carry_state, setup.model, setup.device
        self.rows = setup.tree.train.batch_size
        settings, transport = setup.tree.train, setup.transport
        self.criterion = setup.criterion()
        self.batches = self._batches(setup, steps_per_epoch)
        loaders = {
            split: EvaluationRows(
                tokens, context, evaluation_rows, rank=transport.rank, size=transport.size, device=setup.device
            )
            for split, tokens in setup.dataset.items()
            if split != "train"
        }
        self.evaluation = Evaluation(loaders, settings, transport, setup.device, self._evaluation_forward)
        self.results, self.lower_is_better = self.evaluation.names, self.evaluation.lower_is_better
        self.state: State | None = None
        self.evaluation_state: State | None = None

    def _batches(self, setup: Setup, steps_per_epoch: int | None) -> Batches:
        settings, tokens = setup.tree.train, setup.dataset["train"]
        rank, size = setup.transport.rank, setup.transport.size
        if self.carry_state:
            return TokenStreams(
                tokens,
                self.context,
                settings.batch_size,
                settings.num_batches_per_step,
                rank=rank,
                size=size,
                device=setup.device,
                steps_per_epoch=steps_per_epoch,
            )
        windows = TrainBatches(
            Windows(tokens, self.context),
            settings.batch_size,
            settings.num_batches_per_step,
            rank=rank,
            size=size,
            seed=setup.tree.seed,
            device=setup.device,
            num_workers=setup.tree.data.num_workers,
        )
        if steps_per_epoch is not None:
            if steps_per_epoch > windows.steps_per_epoch:
                raise ValueError(
                    f"task.steps_per_epoch is {steps_per_epoch}, but one pass over the data has "
                    f"{windows.steps_per_epoch} steps: lower it, or set it to null"
                )
            windows.steps_per_epoch = steps_per_epoch
        return windows

    def _forward(self, model: nn.Module, inputs: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """Logits [rows * context, vocabulary], and the state after the last token."""
        if not self.carry_state:
            return model(inputs).flatten(0, 1), None
        logits, state = model(inputs, state)
        return logits.flatten(0, 1), state

    def _evaluation_forward(self, model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        state = None if batch.begins else self.evaluation_state
        logits, self.evaluation_state = self._forward(model, batch.inputs, state)
        return logits, batch.targets.flatten()

    def loss(self, model: nn.Module, batch: TokenBatch | tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch[0], batch[1].flatten()
        if isinstance(batch, TokenBatch) and batch.begins:
            self.state = None
        logits, state = self._forward(model, inputs, self.state)
        if state is not None:
            # A dropped step must not leave NaN in the state of all further ones.
            self.state = tuple(part.detach().nan_to_num(0.0, 0.0, 0.0) for part in state)
        return Loss(self.criterion(logits, targets), targets.numel(), logits, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        results = self.evaluation(model)
        self.evaluation_state = None
        return results

    def state_dict(self) -> dict[str, Any]:
        if self.state is None or not isinstance(self.batches, TokenStreams):
            return {}
        return {"state": [part.cpu() for part in self.state], "chunk": self.batches.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = None
        if not state:
            return
        if not isinstance(self.batches, TokenStreams) or state.keys() - {"chunk"} != {"state"}:
            raise ValueError(f"the checkpoint has a state of another task: {', '.join(state)}")
        saved, shapes = state["state"], [tuple(part.shape) for part in self._example_state()]
        if not all(isinstance(part, Tensor) and bool(part.isfinite().all()) for part in saved):
            raise ValueError("task.state is not a list of finite tensors")
        if (found := [tuple(part.shape) for part in saved]) != shapes:
            raise ValueError(f"task.state has the shapes {found}, and the model's state {shapes}")
        if not isinstance(chunk := state.get("chunk"), int | None):
            raise ValueError(f"task.chunk is {chunk!r}, not the number of a chunk")
        self.state, self.batches.last = tuple(part.to(self.device) for part in saved), chunk

    def _example_state(self) -> State:
        """A state of the model for this rank's rows. It draws no random numbers."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            _, state = self.model(torch.zeros(self.rows, 1, dtype=torch.int64, device=self.device), None)
        self.model.train(training)
        return tuple(state)


def check_vocabulary(dataset: Any, model: nn.Module) -> None:
    """Raises ValueError if a token is not in the vocabulary of a model that has one."""
    size = getattr(model, "vocabulary_size", None)
    for split, tokens in dataset.items():
        if size is not None and len(tokens) and int(tokens.max()) >= size:
            raise ValueError(
                f"the split {split!r} has the token {int(tokens.max())}, but the model's vocabulary has {size}: "
                "set model.vocabulary_size to dataset.vocabulary_size"
            )
