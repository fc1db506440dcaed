"""Compression for torchtitan, between machines: its config with other functions around its model's functions.

torchtitan's Trainer calls `parallelize_fn` while the parameters are on the meta device, and
`post_optimizer_build_fn` when they have values, before it loads a checkpoint. With several replicas the first of
them gives FSDP2 a mesh of two dimensions, on which FSDP2 would average at full precision. Here it gets the mesh of
this machine alone, and `dgc.fsdp.compress` exchanges between machines.

The optimizers' state gets one more entry for each rank, with what the rank has not sent. So it is in torchtitan's
own checkpoints.
"""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dgc.comm.torch_distributed import connect
from dgc.comm.transport import Transport
from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.fsdp import FSDPExchange
from dgc.integrations import rank_files


class OneReplica:
    """torchtitan's ParallelDims, but as if there were this machine alone."""

    dp_replicate_enabled = False

    def __init__(self, dims: Any):
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def compressed(
    config: Any, compression: Compressor | Route, *, nonfinite: str = "skip", steps_per_epoch: int | None = None
) -> Any:
    """Return a config of torchtitan whose Trainer exchanges gradients between machines with compression.

    Call it in a function of your own `config_registry`, which `--module` names. The number of replicas,
    `--parallelism.data_parallel_replicate_degree`, must be the number of machines. The exchange is
    `trainer.optimizers.exchange`.

    Args:
        config: A Trainer.Config. It is changed: `training.disable_cuda_graphs` and
            `parallelism.spmd_backend="partial_dtensor"` are set, which compression needs.
        compression: A compressor of `dgc.compression`, or a Route. torchtitan's optimizers are Adam and AdamW, so
            that its memory must apply no momentum.
        nonfinite, steps_per_epoch: As for `dgc.fsdp.compress`.

    Raises:
        ValueError: When training begins, if compression cannot work with the config: pipeline, tensor, context or
            expert parallelism, CUDA graphs, another `spmd_backend`, or another number of replicas.

    Example:
        >>> def llama3_8b_powersgd():
        ...     return compressed(llama3_8b(), TwoPhaseCompressor(bits=8))
    """
    spec = config.model_spec
    parallelize: Callable[..., Any] = spec.parallelize_fn
    built: Callable[..., None] | None = spec.post_optimizer_build_fn

    def parallelize_machine(
        model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, **others: Any
    ) -> Any:
        check(parallel_dims, training, parallelism)
        dims = OneReplica(parallel_dims)
        return parallelize(model, parallel_dims=dims, training=training, parallelism=parallelism, **others)

    def compress_built(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
        if built is not None:
            built(optimizers, model_parts, parallel_dims)
        (model,) = model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the same sum. Gloo has no other one
        transport = connect(hierarchical=True)
        if (machines := transport.group_size("cross")) != parallel_dims.dp_replicate:
            raise ValueError(
                f"there are {machines} machines and {parallel_dims.dp_replicate} replicas: set "
                f"--parallelism.data_parallel_replicate_degree {machines}"
            )
        exchange = FSDPExchange(
            model, compression, transport=transport, nonfinite=nonfinite, steps_per_epoch=steps_per_epoch
        )
        keep_in_checkpoints(exchange, optimizers, transport)

    config.model_spec = replace(spec, parallelize_fn=parallelize_machine, post_optimizer_build_fn=compress_built)
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def check(dims: Any, training: Any, parallelism: Any) -> None:
    """Raise ValueError for what the exchange cannot work with."""
    refused = {
        "pipeline parallelism": dims.pp_enabled,
        "tensor parallelism": dims.tp_enabled,
        "context parallelism": dims.cp_enabled,
        "expert parallelism": dims.ep_enabled,
        "CUDA graphs, into which no exchange can be recorded (--training.disable_cuda_graphs)": (
            not training.disable_cuda_graphs
        ),
        "--parallelism.spmd_backend other than partial_dtensor, whose meshes have more dimensions": (
            parallelism.spmd_backend != "partial_dtensor"
        ),
    }
    for what, is_on in refused.items():
        if is_on:
            raise ValueError(f"dgc.integrations.torchtitan does not support {what}")


def entry_of(rank: int) -> str:
    """The name of a rank's entry in the state of torchtitan's optimizers."""
    return f"dgc.exchange.rank{rank}"


def keep_in_checkpoints(exchange: FSDPExchange, optimizers: Any, transport: Transport) -> None:
    """Add this rank's state to the state of torchtitan's optimizers: as bytes, whose number may change."""
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
