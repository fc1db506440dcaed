"""CUDA graphs (DGC_CUDA_GRAPHS=1): the launches of a bucket's encoding are recorded, and then replayed together.

A graph repeats launches with the arguments and addresses that they had. Its work must therefore be a function of
tensors whose addresses stay. Momentum and ratio are constants: if they change, a new graph is captured.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgc.core.bucket import Bucket
from dgc.kernels.launch import holding_tables
from dgc.warn import warn

SWITCH = "DGC_CUDA_GRAPHS"
WARM_UP = 3  # steps that run without a graph, in which kernels are compiled and tables are made
R = TypeVar("R")


def graph_of(bucket: Bucket) -> "StepGraph | None":
    """Return the graph of a bucket on a GPU. None: the switch is off, or the bucket is elsewhere.

    Raises:
        ValueError: The switch is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, not {switch!r}")
    return StepGraph(bucket.name, bucket.device) if switch == "1" and bucket.device.type == "cuda" else None


class StepGraph:
    """Runs the same work in every step: the first WARM_UP times as it is, and then as a CUDA graph.

    Args:
        name: Name of the bucket, for messages.
        device: The GPU.

    Attributes:
        captures: Number of graphs so far.
    """

    def __init__(self, name: str, device: torch.device):
        self._name, self._device, self.captures = name, device, 0
        self._addresses: tuple[tuple[int, int], ...] | None = None
        self._moves = 0
        self._key: list[Any] = []
        self._given: list[Tensor] = []
        self._steps = 0
        self._tables: list[Tensor] = []
        self._captured: tuple[Any, Any] | None = None  # the graph, and the result of the work

    def settle(self, bucket: Bucket) -> None:
        """Give the gradients of this step addresses that stay.

        They are copied into the bucket, which moves 8 more bytes per element, once their addresses have changed
        more than WARM_UP times. To refuse them would end the training of a model whose backward allocates its
        gradients anew, which is the default of PyTorch.
        """
        before, here = self._addresses, addresses_of(bucket.gradients)
        if self._moves <= WARM_UP and before is not None and here != before:
            self._moves += 1
            if self._moves > WARM_UP:
                warn(
                    f"{SWITCH}=1: the addresses of the gradients change in each step, so gradients are copied to "
                    "where they can stay. zero_grad(set_to_none=False) avoids the copy"
                )
        # reading `flat` copies them
        self._addresses = here if self._moves <= WARM_UP else addresses_of([bucket.flat])

    def run(
        self, constants: Sequence[Any], given: Sequence[Tensor], work: Callable[..., tuple[R, Sequence[Tensor]]]
    ) -> tuple[R, list[Tensor]]:
        """Do the work of one step.

        Args:
            constants: All that the work depends on, besides `given` and the content of tensors at the addresses of
                `settle`: objects, numbers, and further addresses. If one differs from the last step, the
                warm-up begins anew, and a new graph replaces the old one.
            given: Tensors of the same sizes in every step.
            work: A function of `given`. It returns a result, and tensors with which the next step replaces the
                first ones of `given`.

        Returns:
            The result, whose tensors the next step overwrites, and `given` of the next step.

        Raises:
            RuntimeError: CUDA cannot capture the work, because a part of it waits for the device, for example.
        """
        key = [*constants, self._addresses]
        if key != self._key:
            self._key, self._given = key, [t.clone() for t in given]
            self._captured, self._steps = None, 0
        else:
            copy_all(self._given, given)
        self._steps += 1
        if self._steps <= WARM_UP:
            return self._once(work), self._given
        if self._captured is None:
            self._captured = self._capture(work)
        graph, result = self._captured
        graph.replay()
        return result, self._given

    def _once(self, work: Callable[..., tuple[R, Sequence[Tensor]]]) -> R:
        result, following = work(*self._given)
        copy_all(self._given, following)
        return result

    def _capture(self, work: Callable[..., tuple[Any, Sequence[Tensor]]]) -> tuple[Any, Any]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # of this thread alone: others call CUDA meanwhile, such as the one that watches over NCCL
            with (
                holding_tables() as self._tables,
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                result = self._once(work)
        except RuntimeError as error:
            raise RuntimeError(
                f"the encoding of bucket {self._name} cannot be a CUDA graph: {error}. Unset {SWITCH}"
            ) from error
        self.captures += 1
        return graph, result


def addresses_of(tensors: Sequence[Tensor | None]) -> tuple[tuple[int, int], ...]:
    """Return the address and the number of elements of each tensor; zeros for None."""
    return tuple((0, 0) if t is None else (t.data_ptr(), t.numel()) for t in tensors)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor to its target. A source may be its own target, or the target of another source."""
    kept = {id(t) for t in targets}
    pairs = [(t, s) for t, s in zip(targets, sources, strict=False) if t is not s]
    copies = [(t, s.clone() if id(s) in kept else s) for t, s in pairs]
    for target, source in copies:
        target.copy_(source)
