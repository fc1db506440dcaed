"""Compression for torchtitan, between replicas: its config with other functions around its model's functions.

torchtitan's Trainer calls `parallelize_fn` while the parameters are on the meta device, and
`post_optimizer_build_fn` when they have values, before it loads a checkpoint. With several replicas the first of
them gives FSDP2 meshes with a dimension of replicas, and experts a mesh of their own. `dgc.fsdp.compress` takes
the place of FSDP2's all-reduce on these meshes.

A step may have several backward passes, and all of its gradients are exchanged in the last one:

    for each microbatch
        forward of the model    from then on FSDP2 reduces no gradients
        chunked loss            forward and backward of the output layer alone, for each chunk of the sequence.
                                torchtitan lets FSDP2 reduce this layer in the last of them
        backward                FSDP2 reduces again, and in the last microbatch it all-reduces

Otherwise each pass of the chunked loss would end with an exchange of the whole model: FSDP2 reduces zeros for
layers that a pass does not use, which `dgc.fsdp.compress` asks for.

The optimizers' state gets one more entry for each rank, with what the rank has not sent. So it is in torchtitan's
own checkpoints.
"""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.fsdp import FSDPExchange
from dgc.integrations import rank_files


def compressed(
    config: Any, compression: Compressor | Route, *, nonfinite: str = "skip", steps_per_epoch: int | None = None
) -> Any:
    """Return a config of torchtitan whose Trainer exchanges gradients between replicas with compression.

    Call it in a function of your own `config_registry`, which `--module` names. With as many replicas as machines,
    `--parallelism.data_parallel_replicate_degree`, gradients are compressed between machines. The exchange is
    `trainer.optimizers.exchange`.

    Args:
        config: A Trainer.Config. It is changed: `training.disable_cuda_graphs` is set, which compression needs.
        compression: A compressor of `dgc.compression`, or a Route. torchtitan's optimizers are Adam and AdamW, so
            that its memory must apply no momentum.
        nonfinite, steps_per_epoch: As for `dgc.fsdp.compress`.

    Raises:
        ValueError: When training begins, if compression cannot work with the config: one replica, pipeline or
            context parallelism, or CUDA graphs.

    Example:
        >>> def llama3_8b_powersgd():
        ...     return compressed(llama3_8b(), TwoPhaseCompressor(bits=8))
    """
    spec = config.model_spec
    parallelize: Callable[..., Any] = spec.parallelize_fn
    built: Callable[..., None] | None = spec.post_optimizer_build_fn

    def parallelize_checked(model: Any, *, parallel_dims: Any, training: Any, **others: Any) -> Any:
        check(parallel_dims, training)
        model = parallelize(model, parallel_dims=parallel_dims, training=training, **others)
        reduce_once(model, microbatches(parallel_dims, training))
        return model

    def compress_built(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
        if built is not None:
            built(optimizers, model_parts, parallel_dims)
        (model,) = model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the same sum. Gloo has no other one
        exchange = FSDPExchange(model, compression, nonfinite=nonfinite, steps_per_epoch=steps_per_epoch)
        keep_in_checkpoints(exchange, optimizers)

    config.model_spec = replace(spec, parallelize_fn=parallelize_checked, post_optimizer_build_fn=compress_built)
    config.training.disable_cuda_graphs = True
    return config


def check(dims: Any, training: Any) -> None:
    """Raise ValueError for what the exchange cannot work with."""
    refused = {
        "pipeline parallelism": dims.pp_enabled,
        "context parallelism": dims.cp_enabled,
        "CUDA graphs, into which no exchange can be recorded (--training.disable_cuda_graphs)": (
            not training.disable_cuda_graphs
        ),
        "one replica (--parallelism.data_parallel_replicate_degree)": not dims.dp_replicate_enabled,
    }
    for what, is_on in refused.items():
        if is_on:
            raise ValueError(f"dgc.integrations.torchtitan does not support {what}")


def microbatches(dims: Any, training: Any) -> int:
    """Return how many there are on each rank in a step."""
    if training.global_batch_size < 0:  # the default: as many sequences as the ranks take at once
        return 1
    return int(training.global_batch_size // (training.local_batch_size * dims.dp_replicate * dims.dp_shard))


def reduce_once(model: Any, microbatches: int) -> None:
    """Let FSDP2 reduce in backward passes from the model's output, and all-reduce in the last of a step alone."""
    started, is_in_loss = 0, False

    def begin_backward(is_last: bool, _: Tensor) -> None:
        nonlocal is_in_loss
        is_in_loss = False
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(is_last)

    def end_forward(_model: Any, _inputs: Any, outputs: Any) -> None:
        nonlocal started, is_in_loss
        trained = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if not trained:  # validation
            return
        started, is_in_loss = started % microbatches + 1, True
        model.set_requires_gradient_sync(False)
        for output in trained:
            output.register_hook(partial(begin_backward, started == microbatches))

    def begin_in_loss(module: Any, _inputs: Any) -> None:
        if is_in_loss:  # the chunked loss calls set_requires_gradient_sync(True), which also lets FSDP2 all-reduce
            module.set_requires_all_reduce(False, recurse=False)

    model.register_forward_hook(end_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own: Any = module
            own.register_forward_pre_hook(begin_in_loss)


def entry_of(rank: int) -> str:
    """The name of a rank's entry in the state of torchtitan's optimizers."""
    return f"dgc.exchange.rank{rank}"


def keep_in_checkpoints(exchange: FSDPExchange, optimizers: Any) -> None:
    """Add this rank's state to the state of torchtitan's optimizers: as bytes, whose number may change."""
    transport = exchange.transport
    own, load, key = optimizers.state_dict, optimizers.load_state_dict, entry_of(transport.rank)

    def state_dict() -> dict[str, Any]:
        state = own()
        torch.save(exchange.compression_state_dict(), file := io.BytesIO())
        return {**state, key: file.getvalue()}

    def load_state_dict(state: dict[str, Any]) -> None:
        def read() -> Any:
            return rank_files.read_state(io.BytesIO(state[key]))

        rank_files.load_on_every_rank(exchange, transport, read, lambda rank: f"the entry {entry_of(rank)}")
        load({name: value for name, value in state.items() if name != key})

    optimizers.exchange, optimizers.state_dict, optimizers.load_state_dict = exchange, state_dict, load_state_dict
