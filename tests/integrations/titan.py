"""The parts of torchtitan 0.3.0 that its adapter reads, and its backward passes."""

from collections.abc import Sequence
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Spec: Any = make_dataclass("Spec", ["parallelize_fn", ("post_optimizer_build_fn", Any, None)])  # of ModelSpec


def config_of(parallelize: Any, batch: int = -1) -> Any:
    """batch: The sequences of a step, of which a rank takes two at once. -1: one microbatch."""
    training = SimpleNamespace(disable_cuda_graphs=False, local_batch_size=2, global_batch_size=batch)
    return SimpleNamespace(model_spec=Spec(parallelize), training=training)


def dims_of(**dims: Any) -> Any:
    off = dict.fromkeys(("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled"), False)
    return SimpleNamespace(**{"dp_replicate_enabled": True, "dp_replicate": 2, "dp_shard": 2, **off, **dims})


def parallelized(config: Any, model: Any, dims: Any, **options: Any) -> Any:
    return config.model_spec.parallelize_fn(model, parallel_dims=dims, training=config.training, **options)


class Decoder(nn.Sequential):
    """Its last layer is called by the loss."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


def chunked_backward(model: Any, batch: Tensor, chunks: int = 2) -> None:
    """Compute gradients as ChunkedLossWrapper does: those of the last layer for each chunk, then the others."""
    hidden, head, gradients = model(batch), model[-1], list[Tensor]()
    head.set_requires_gradient_sync(False, recurse=False)
    parts: Sequence[Tensor] = [part.detach().requires_grad_() for part in hidden.chunk(chunks)]
    for part in parts:
        if part is parts[-1]:
            head.set_requires_gradient_sync(True, recurse=False)
        (head(part) - 1).square().sum().backward()
        assert part.grad is not None
        gradients.append(part.grad)
    hidden.backward(torch.cat(gradients))
