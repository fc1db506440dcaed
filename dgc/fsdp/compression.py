"""Compression of a model that is sharded with FSDP2.

transport = connect(hierarchical=True)
mesh = local_mesh(transport)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
compression = DGCCompressor(0.01, DGCSGDMemory(momentum=0.9), warmup_epochs=5)
exchange = compress(model, compression, transport=transport)
optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
exchange.begin_epoch(0)
for inputs, targets in batches:  # the usual loop
    optimizer.zero_grad()
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
"""

from typing import Any

from torch import nn

from dgc.comm.collectives import barrier
from dgc.comm.transport import CrossMachineTransport, Transport
from dgc.compression.dense import HorovodCompression
from dgc.compression.protocol import Compressor, ExchangesMomentum
from dgc.compression.route import Route
from dgc.engine.agreement import check_settings
from dgc.engine.buckets import keep_states
from dgc.engine.loop import LossScale, is_used
from dgc.engine.options import as_route, check_nonfinite, register_compressors, unique_prefix
from dgc.engine.state import check_steps_per_epoch
from dgc.fsdp.exchange import FSDPExchange, check_agreement, plan_groups
from dgc.fsdp.shards import check_ranks, machines, parameter_groups


def compress(
    model: nn.Module,
    compression: Compressor | Route | HorovodCompression | None = None,
    *,
    transport: Transport,
    nonfinite: str = "skip",
    grad_scaler: Any = None,
    steps_per_epoch: int | None = None,
) -> FSDPExchange:
    """Compress the exchange of a sharded model's gradients between machines. Collective.

    Call it after `fully_shard` with `local_mesh(transport)`, and before training. The training loop does not
    change. All machines must begin with the same parameters. Parameters that are frozen now take no part. The
    gradient of a trainable parameter that a backward pass does not use counts as zero.

    Args:
        model: The model, on which `fully_shard` was called last.
        compression: A compressor of `dgc.compression`, a Route, or Horovod's Compression.none or .fp16. None: no
            compression. A compressor that needs a matrix gets this rank's rows of the parameter.
        transport: Connects all ranks. It needs groups inside and between machines: `connect(hierarchical=True)`.
        nonfinite: Response of all ranks to NaN or inf in a gradient of any rank, and to magnitudes of 2**64 or
            more if a method keeps error state: sent elements return to the error state. "skip" sets every .grad
            to None, so that `optimizer.step()` changes nothing, and counts the step in `dropped_steps`. "raise"
            also raises NonFiniteGradientError from `backward()`.
        grad_scaler: The GradScaler or ShardedGradScaler that scales the loss, if any. In a dropped step every
            .grad becomes NaN instead of None, so that the scaler skips the step and lowers its scale.
        steps_per_epoch: Optimizer steps per epoch, to count epochs for compressors that warm up. None: call
            begin_epoch() before each epoch.

    Returns:
        The exchange, with `begin_epoch`, `compression_state_dict` and `meter`.

    Raises:
        ValueError: An argument is invalid, a setting differs between ranks, machines have different numbers of
            ranks, the model is sharded in another way, or its gradients are exchanged already.
    """
    check_nonfinite(nonfinite, grad_scaler)
    check_steps_per_epoch(steps_per_epoch)
    check_ranks(transport)
    route = as_route(compression)
    for rule in route.rules:
        if isinstance(rule.compressor, ExchangesMomentum):
            raise ValueError(
                f"{type(rule.compressor).__name__} exchanges the momentum of an optimizer, which dgc.fsdp does "
                "not pass to it: use a compressor of gradients"
            )
    check_settings(
        transport,
        "settings",
        nonfinite=nonfinite,
        steps_per_epoch=steps_per_epoch,
        uses_grad_scaler=is_used(grad_scaler),
        compression=route if isinstance(compression, Route) else route.rules[0].compressor,
    )
    groups = parameter_groups(model, machines(transport)[transport.group_rank("cross")])
    for group in groups:
        group.check_no_hook()
    name = unique_prefix(transport)
    plans = plan_groups(groups, route, name)
    planned = [bucket for plan in plans for bucket in plan.buckets]
    cross = CrossMachineTransport(transport)
    barrier(cross, "groups")  # raises ValueError if the transport has none
    loss_scale = LossScale(grad_scaler, planned)
    check_agreement(plans, transport)
    # in model order: positions name the saved states
    compressors = list(dict.fromkeys(c for plan in reversed(plans) for c in plan.compressors))
    register_compressors(compressors, cross)
    states = keep_states(planned, cross.size, cross.rank, compressors)
    return FSDPExchange(model, plans, states, transport, name, nonfinite, loss_scale, steps_per_epoch)
