"""What only real ranks can show: Horovod over MPI at 1 to 4 ranks, and over Gloo. And how their groups fail."""

import atexit
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from environment import patient
from optim.nets import dgc, dgc_sgd, wrap
from parallel.found import digest, told
from parallel.ranks import Group, alone, each_rank_of, horovodrun, mpirun, over, torchrun
from torch import Tensor

from dgc import comm, contrib, kernels, paper
from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.kernels.library import supported_isas
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer, broadcast_parameters
from dgc.sparse.payloads import CastValues, Int8Values, RiceIndices

PROOF = pytest.mark.proof
TWO = pytest.param((mpirun, 2), id="mpirun-2")  # torchrun where Horovod is not installed
PROOFS_OF_MPIRUN = [over(mpirun, ranks, PROOF) for ranks in (2, 3, 4)]
TORCHRUN = [over(torchrun, 3), over(torchrun, 2, PROOF), over(torchrun, 4, PROOF)]
ALL = [TWO, *PROOFS_OF_MPIRUN[1:], *TORCHRUN, over(alone, 1)]
WITH_GLOO = over(horovodrun, 2, PROOF)  # Gloo's threads take most of two cores while they wait
OF_HOROVOD = [over(mpirun, 2), *PROOFS_OF_MPIRUN[1:]]


@each_rank_of(*ALL, over(horovodrun, 2), hierarchical=True)
def test_requests_are_answered_as_on_simulated_ranks(transport: Any) -> None:
    check_requests(transport)


@each_rank_of(over(torchrun, 3))
def test_what_an_all_to_all_has_sent_may_be_overwritten_after_wait(transport: Any) -> None:
    """Rank 0 sends far more than the buffers of a connection hold, and receives little, which is there at once."""
    rank, size = transport.rank, transport.size
    much, little = 1 << 24, 3
    splits = (little,) + (much if rank == 0 else little,) * (size - 1)
    receives = (much if rank else little,) + (little,) * (size - 1)
    for number in range(2):
        sent = torch.full((sum(splits),), 10 * number + rank, dtype=torch.int32)
        work = transport.launch("much", (comm.AllToAll(sent, splits, receives=receives),))
        (parts,) = transport.wait(work)
        sent.fill_(-1)
        transport.wait(transport.launch("after", (comm.AllReduce(torch.ones(1)),)))
        for source, (part, count) in enumerate(zip(parts, receives, strict=True)):
            assert len(part) == count and part.eq(10 * number + source).all(), (number, source)


@each_rank_of(over(torchrun, 3))
def test_parts_of_an_all_to_all_may_be_empty(transport: Any) -> None:
    """Each rank sends to the next one alone."""
    rank, size = transport.rank, transport.size
    splits, receives = ([0] * size for _ in range(2))
    splits[(rank + 1) % size] = receives[(rank - 1) % size] = 5
    request = comm.AllToAll(torch.full((5,), float(rank)), tuple(splits), receives=tuple(receives))
    (parts,) = transport.wait(transport.launch("next", (request,)))
    assert [part.tolist() for part in parts] == [[float(r)] * receives[r] for r in range(size)]


def to_all(own: Tensor, size: int) -> comm.AllToAll:
    return comm.AllToAll(own.repeat(size), (len(own),) * size)


def gather(own: Tensor, size: int) -> comm.AllGather:
    return comm.AllGather(own)


@pytest.mark.parametrize("request_of", [to_all, gather])
@each_rank_of(over(torchrun, 3))
def test_messages_of_torch_are_matched_by_name(transport: Any, request_of: Any) -> None:
    rank, size = transport.rank, transport.size
    own = {name: torch.full((1,), 10.0 * number + rank) for number, name in enumerate(("first", "second"))}
    works = {
        name: transport.launch(name, (request_of(own[name], size),)) for name in (own if rank else reversed(own))
    }
    for number, name in enumerate(own):
        (parts,) = transport.wait(works[name])
        assert torch.cat(parts).tolist() == [10.0 * number + r for r in range(size)]


@pytest.mark.parametrize("request_of", [to_all, gather])
@each_rank_of(over(torchrun, 3))
def test_messages_of_torch_use_the_same_connections_on_all_communicators(transport: Any, request_of: Any) -> None:
    rank, size = transport.rank, transport.size
    transport.open_communicator("later")
    requests = (request_of(torch.full((1,), float(rank)), size),)
    (parts,) = transport.wait(transport.launch("mean", requests, "later" if rank else ""))
    assert torch.cat(parts).tolist() == list(range(size))


@each_rank_of(over(torchrun, 3))
def test_an_all_to_all_can_be_awaited_without_blocking(transport: Any) -> None:
    """`poll` is False as long as rank 0 takes no part, and becomes True without `wait`."""
    size = transport.size
    request = comm.AllToAll(torch.arange(float(size)), (1,) * size)
    if transport.rank:
        work = transport.launch("polled", (request,))
        early = transport.poll(work)
    transport.wait(transport.launch("first", (comm.AllReduce(torch.ones(1)),)))
    if not transport.rank:
        work, early = transport.launch("polled", (request,)), False
    end = time.monotonic() + patient(20)
    while not transport.poll(work):
        assert time.monotonic() < end
        time.sleep(0.001)
    (parts,) = transport.wait(work)
    assert not early and torch.cat(parts).tolist() == [float(transport.rank)] * size


@pytest.mark.parametrize("chosen", ["auto", "torch"])
@pytest.mark.parametrize("group", [over(alone, 1)], indirect=True)
def test_one_process_without_a_launcher_sends_nothing(group: Group, chosen: str) -> None:
    group.run(check_requests, hierarchical=True, transport=chosen)
    assert group.run(started, hierarchical=True, transport=chosen) == [[]]


def started(transport: Any) -> list[Any]:
    """What the network does for requests in a group of one rank: operations of Gloo, or Horovod's handles."""
    own = torch.arange(4.0)
    sent = (comm.AllReduce(own), comm.AllGather(own), comm.AllToAll(own, (4,)), comm.ReduceScatter(own))
    work = transport.launch("started", (*sent, comm.Broadcast(own, 0)))
    operations = getattr(work, "operations", None)
    found = [handle for _, handle in work if handle is not None] if operations is None else sum(operations, [])
    transport.wait(work)
    return found


def conversation(rank: int, size: int) -> Any:
    ones = torch.arange(2 * size, dtype=torch.float32) + rank
    bytes_ = torch.full((3,), rank, dtype=torch.uint8)
    right, left = (rank + 1) % size, (rank - 1) % size
    exchange = comm.Exchange({right: ones[: rank + 1].clone()}, {left: torch.empty(left + 1)})
    replies = []
    for requests in (
        (comm.AllReduce(ones.clone(), "sum"), comm.AllReduce(ones.clone(), "mean"), comm.AllGather(bytes_)),
        (comm.AllReduce(ones.clone(), "min"), comm.AllReduce(ones.clone(), "max")),
        (comm.AllToAll(ones.clone(), (2,) * size), comm.ReduceScatter(ones.clone(), "sum")),
        (comm.Broadcast(ones.clone(), size - 1), exchange),
        (comm.AllReduce(ones.clone(), "sum", "local"), comm.AllGather(bytes_, "cross")),
    ):
        replies.append((yield requests))
    return replies


def check_requests(transport: Any) -> None:
    rank, size = transport.rank, transport.size
    world = LockstepWorld(size)
    expected = world.converse("all", [conversation(r, size) for r in range(size)])[rank]
    meter = comm.TrafficMeter()
    for _ in range(2):  # a name is used again
        replies = comm.RunningConversation("all", conversation(rank, size), transport, meter).finish()
        torch.testing.assert_close(replies, expected, rtol=0, atol=0)
    assert meter.payload_bytes == 2 * world.meters[rank].payload_bytes
    assert comm.all_gather_object(transport, "x" * rank) == ["x" * r for r in range(size)]
    assert comm.broadcast_object(transport, {"from": rank}, root=size - 1) == {"from": size - 1}


def clipped(ratio: float, **options: Any) -> methods.DGCCompressor:
    memory = DGCSGDMemory(0.9, nesterov=True, gradient_clipping=ClipByGlobalNorm(5.0))
    return methods.DGCCompressor(ratio, memory, **options)


SMALL: dict[str, Any] = {"fp16_values": True, "int32_indices": True, "warmup_epochs": 2}
SCATTERED: dict[str, Any] = {"exchange": "reduce_scatter", "values": Int8Values(), "indices": RiceIndices()}
COMPRESSORS: dict[str, Callable[[], Any]] = {
    "dense": methods.DenseCompressor,
    "fp16": methods.FP16Compressor,
    "bf16": methods.BF16Compressor,
    "residual": lambda: methods.DGCCompressor(0.01, ResidualMemory()),
    "dgc": lambda: dgc(0.01),
    "dgc-wire": lambda: clipped(0.001, **SMALL),
    "reduce-scatter": lambda: dgc(0.01, **SCATTERED),
    "8 bits": methods.TwoPhaseCompressor,
    "4 bits": lambda: methods.TwoPhaseCompressor(4, 64, 8),
    "chunks": lambda: methods.ChunkCompressor(0.01, DGCSGDMemory(0.9)),
    "paper-dgc": lambda: paper.DGC(0.01),
    "paper-2bit": lambda: paper.Threshold(2, 0.01),
    "gtopk": lambda: contrib.GTopKCompressor(0.01),  # from rank to rank
}


def train(
    transport: Any, compression: Any, steps: int = 12, hidden: int = 300, bad: int | None = None, **options: Any
) -> tuple[str, int, list[str]]:
    """A hash of the model, the number of dropped steps, and the messages of errors, of data of this rank's own.

    One rank alone uses a layer, in each step another. bad: The step in which the last rank has NaN.
    """
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 40), torch.nn.Linear(40, 10)]
    model = torch.nn.ModuleList([torch.nn.Sequential(*layers), torch.nn.Linear(32, 10)])
    broadcast_parameters(model.state_dict(), transport=transport)
    corrected = getattr(compression, "correction", None)
    nesterov = corrected is not None and corrected.nesterov
    # products with a power of two are exact: a backend for GPUs leaves dense steps to torch, which rounds once
    inner = DGCSGD(model.parameters(), lr=2**-6, momentum=0.9, weight_decay=1e-4, nesterov=nesterov)
    options = {"transport": transport, "bucket_mb": 0.02, **options}
    optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, **options)
    generator = torch.Generator().manual_seed(100 + transport.rank)
    weights = torch.randn(32, 10, generator=torch.Generator().manual_seed(5))
    messages = []
    for step in range(steps):
        if step % 5 == 0:
            optimizer.begin_epoch(step // 5)
        inputs = torch.randn(8, 32, generator=generator)
        if step == bad and transport.rank == transport.size - 1:
            inputs[0, 0] = float("nan")
        optimizer.zero_grad()
        outputs = model[0](inputs)
        if transport.rank == step % transport.size:
            outputs = outputs + model[1](inputs)
        torch.nn.functional.cross_entropy(outputs, (inputs @ weights).argmax(1)).backward()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            messages.append(told(optimizer.step, methods.NonFiniteGradientError))
    optimizer.close()
    assert all(p.isfinite().all() for p in model.parameters()) and optimizer.error_norm() < 1e6
    return digest(model.parameters()), optimizer.dropped_steps, [message for message in messages if message]


@each_rank_of(*ALL, WITH_GLOO)
def test_replicas_stay_equal_where_nan_on_one_rank_drops_the_step_or_raises_on_all(transport: Any) -> Any:
    found = {}
    for name, make in COMPRESSORS.items():
        for policy in ("skip", "raise") if name != "gtopk" or transport.point_to_point else ():
            model, dropped, messages = train(transport, make(), nonfinite=policy, bad=6)
            assert dropped == 1 and len(messages) == (policy == "raise"), (name, policy)
            assert all(f"on rank {transport.size - 1} has NaN or inf" in m for m in messages), (name, messages)
            found[name, policy] = model, messages
    return found


@each_rank_of(*OF_HOROVOD)
def test_horovods_compressions(transport: Any) -> Any:
    import horovod.torch as hvd

    return [train(transport, compression) for compression in (hvd.Compression.none, hvd.Compression.fp16)]


@each_rank_of(*OF_HOROVOD, hierarchical=True)
def test_horovods_broadcast_of_the_optimizers_state_leaves_the_weights_alone(transport: Any) -> None:
    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    before = model.weight.detach().clone()
    inner = DGCSGD(model.parameters(), lr=0.8, momentum=0.9, weight_decay=0.01)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), dgc(0.5), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(model.weight, before)


@each_rank_of(over(mpirun, 2))
def test_hvd_join_is_refused_where_gradients_are_compressed(transport: Any) -> None:
    import horovod.torch as hvd

    from dgc.comm import horovod

    horovod._cannot_join.clear()  # of other tests
    for compression in (None, hvd.Compression.fp16):
        train(transport, compression, 2)
        assert not horovod._cannot_join
    for make in (lambda: dgc(0.1), lambda: methods.PowerSGDCompressor(2)):
        horovod._cannot_join.clear()
        train(transport, make(), 2)
        assert told(hvd.join, RuntimeError).startswith("hvd.join() serves all-reduces of dense gradients only")


def train_with_dgc(transport: Any, steps: int) -> Any:
    return train(transport, COMPRESSORS["dgc-wire"](), steps)


@each_rank_of(over(horovodrun, 2))
def test_replicas_of_horovodrun_with_gloo_are_equal(transport: Any) -> Any:
    return train_with_dgc(transport, 4)


@pytest.mark.parametrize("group", TORCHRUN, indirect=True)
def test_40_steps_repeat_bit_for_bit_on_equal_replicas(group: Group) -> None:
    first = group.run(train_with_dgc, 40)
    assert first == [first[0]] * group.size == group.run(train_with_dgc, 40)


@pytest.mark.parametrize("group", PROOFS_OF_MPIRUN, indirect=True)
def test_200_steps_repeat_bit_for_bit_on_equal_replicas_of_other_processes(group: Group) -> None:
    first = group.run(train_with_dgc, 200, last=True)
    assert first == [first[0]] * group.size == group.run(train_with_dgc, 200)


@each_rank_of(over(mpirun, 2), last=True)
def test_ratios_that_differ_are_told(transport: Any) -> None:
    """Ratios, and with them payloads or collectives, which Horovod checks. With Gloo, they end the process."""
    rank = transport.rank
    for numel, ratios in ((1000, [0.25, 0.125]), (100, [0.006, 0.01]), (1000, [1.0, 0.125])):  # 1 ends Horovod
        model = torch.nn.Linear(numel, 1, bias=False)
        compression = dgc(ratios[1], warmup_epochs=2, warmup_coeff=[*ratios, ratios[1]])
        optimizer = wrap(model, transport, dgc_sgd, compression=compression)
        optimizer.begin_epoch(rank)
        model(torch.ones(1, numel)).sum().backward()
        found = told(optimizer.step, RuntimeError)
        optimizer.close()
        theirs = rf"rank {1 - rank} encoded bucket \S+ at compress_ratio {ratios[1 - rank]:g}"
        here = rf"this rank at {ratios[rank]:g}: call begin_epoch\(epoch\) on every rank"
        if ratios[rank] == 1:
            # waits for an all-reduce until the other rank has left, whose process may have ended already
            assert re.match(rf".*\brank {1 - rank} \(.*Horovod has been shut down", found), found
        else:
            assert re.match(f"{theirs}, {here}", found), found
    from dgc.comm import horovod

    atexit.unregister(horovod._meet_at_exit)  # it waits 10 s for a rank that waits until this one has ended


def check_backends(transport: Any, steps: int, hidden: int, *modes: str) -> str:
    """Every backend leads to the same model, also with a different instruction set per rank ("mixed")."""
    models, supported = set(), supported_isas()
    for mode in modes:
        isa = {0: "avx2", 1: "portable"}.get(transport.rank, supported[-1]) if mode == "mixed" else ""
        os.environ["DGC_KERNELS_ISA"] = isa if isa in supported else ""
        kernels.use("native" if mode == "mixed" else mode)
        kernels._backend.cache_clear()
        used = kernels.describe(torch.device("cpu"))
        assert used.startswith(f"native ({isa})" if isa in supported else mode.replace("mixed", "native")), used
        compression = clipped(0.01, values=CastValues("fp16"), indices=RiceIndices(), warmup_epochs=3)
        models.add(train(transport, compression, steps, hidden, bucket_mb=0.06)[0])
    os.environ["DGC_KERNELS_ISA"] = ""
    kernels.use("auto")
    kernels._backend.cache_clear()
    (model,) = models
    return model


@each_rank_of(TWO)
def test_each_rank_may_have_a_backend_of_its_own(transport: Any) -> str:
    return check_backends(transport, 25, 300, "native", "mixed", "reference")


@each_rank_of(*PROOFS_OF_MPIRUN)
def test_200_steps_on_every_backend(transport: Any) -> str:
    return check_backends(transport, 200, 300, "native", "mixed", "reference")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is optional")
@pytest.mark.timeout(2000)
@each_rank_of(*PROOFS_OF_MPIRUN, within=1900, last=True)
def test_200_steps_on_the_gpus_kernels_interpreted(transport: Any) -> str:
    os.environ["TRITON_INTERPRET"] = "1"  # of which triton asks when it is imported
    for name in [name for name in sys.modules if re.match(r"triton(?!\._C)|dgc\.kernels\.triton", name)]:
        del sys.modules[name]
    return check_backends(transport, 200, 24, "native", "triton")


def test_a_rank_that_fails_ends_all() -> None:
    program = """
import sys
from dgc.comm import barrier
from dgc.comm.horovod import HorovodTransport
transport = HorovodTransport()
sys.exit(7) if transport.rank == 2 else barrier(transport)
"""
    assert mpirun(3, ["-c", program], timeout=60).returncode != 0


def rank_and_process(transport: Any) -> tuple[int, int]:
    return transport.rank, os.getpid()


def fails(transport: Any) -> None:
    raise KeyError("of the function")


def hangs(transport: Any) -> None:
    time.sleep(10_000)


ONE_RANK = pytest.mark.parametrize("group", [over(alone, 1)], indirect=True)


@ONE_RANK
def test_functions_share_the_ranks(group: Group) -> None:
    first = group.run(rank_and_process)
    assert first[0][0] == 0 and group.run(rank_and_process) == first


@ONE_RANK
def test_the_error_of_a_function_that_fails_shows_where(group: Group) -> None:
    """The next function gets new ranks."""
    first = group.run(rank_and_process)
    told = "fails failed\\n--- rank 0: Traceback(.|\\n)*KeyError: 'of the function'"
    with pytest.raises(AssertionError, match=told):
        group.run(fails)
    assert group.run(rank_and_process) != first


@ONE_RANK
def test_the_error_of_a_function_that_is_late_shows_where(group: Group) -> None:
    group.run(rank_and_process)  # starts the ranks
    with pytest.raises(AssertionError, match="rank 0: no answer in time(.|\\n)*test_ranks.py.* in hangs"):
        group.run(hangs, within=1)
