"""FSDP2 over all machines with quantized collectives: gradients in 16, 8 or 4 bits, weights in 8 or 4.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    quantizer = quantize(model, gradients=4, weights=8)

For each parameter group of FSDP2, with N ranks,

    reduce-scatter   v = g + e          rank i sends row j of Q[v] to rank j     e = v - Q[v]
                     mean               of the rows that have arrived, in fp32, in the order of ranks
    all-gather       w = Q8[shard]      of every shard, this rank's own one included

Q rounds to blocks of 8 or 4 bits (dgc.kernels.codes.blocks), and a block has elements of one parameter only. The
sharded parameter is not rounded: the optimizer and checkpoints see it alone. e is kept on every rank for all
elements, in blocks of 8 bits. Forward and backward gather the same bits, because rounding has no state.

Gradients of 16 bits are numbers of bfloat16, which are added in fp32. They have no error, unless it is asked for.
Weights of 4 bits are differences to the weights that were gathered last (dgc.fsdp.differences).

Every row of gradients has a header that says whether its rank has NaN or inf. All ranks have the headers of all
others when backward ends, and drop the step together, without a further message. e changes at the end of backward.
With groups on several meshes, or with replicas, each mesh knows its own headers alone, and all ranks exchange a
number that says whether to drop the step.

On a GPU, FSDP2's collectives overlap with computing, on streams. Its own on a CPU do not. These do: an all-gather
is waited for where FSDP2 copies the result, so that prefetching has an effect. A reduce-scatter is waited for when
the next one has been launched, and the last one at the end of backward, unless FSDP2 reads the result before.

Payload of a group in bytes, for parameters whose shards, with padding, have m_p elements: N (24 + R) for gradients
and 24 + R for weights, where R, rounded up to 8, is the sum over p of ceil(m_p / size) (2 + size bits / 8), or of
2 m_p with 16 bits. Weights of 4 bits are sent in forward alone, and the first time in full.

Sources: qgZ and qwZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209, section 3), and the 8-bit error of LoCo (Xie et
al. 2024, arXiv 2407.04480, Algorithm 1).

Differences from the papers: One hop, where ZeRO++ reduces inside a machine first. LoCo keeps a moving average of
the error, and resets it at times; here it is the error itself. hpZ is FSDP2's `reshard_after_forward=L`: the
gather in backward is among L ranks then, of values that are rounded already, and is left as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import dgc.kernels as kernels
from dgc.comm.collectives import all_gather_object, all_reduce
from dgc.comm.meter import TrafficMeter
from dgc.comm.torch_distributed import connect, exchange_parts
from dgc.core.arguments import WHOLE, require
from dgc.core.bucket import local_part
from dgc.core.envelope import Unchecked, blank, envelope, values_of
from dgc.core.results import NonFiniteGradientError
from dgc.core.state import check_mapping, check_tensor
from dgc.engine.drops import DropPolicy, check_nonfinite
from dgc.engine.loop import LossScale
from dgc.engine.steps import AwaitedStep, BackwardPass, after_steps, before_steps, check_not_running
from dgc.fsdp.differences import FP16, LastGathered, Sends
from dgc.fsdp.shards import ParameterGroup, Place, check_sharded, parameter_groups, sharded_like
from dgc.kernels import BlockCode, usable

TABLES = {"errors", "ranks", "counts", "weights", "current"}  # of the state
UNUSABLE = "{name} on rank {rank} has NaN or inf, or is 2**64 or more"
WEIGHTS = ERROR = BlockCode(8, 256)
DIFFERENCES = BlockCode(4, 128)
TAG = 8 << 20  # of the messages of the first group
# FSDP2 divides fp16 gradients by a factor that depends on the number of ranks before it sums them
TYPES = {
    "gradients": (torch.float32, torch.bfloat16),
    "weights": (torch.float32, torch.bfloat16, torch.float16),
}


class _RowLayout:
    """The buffer of a collective: a row for each rank, with its part of each parameter in turn.

    row: Bounds of the parameters in one row. rows: The same in all rows.
    """

    def __init__(self, names: Sequence[str], places: Sequence[Place], ranks: int, code: BlockCode, device: Any):
        self.names, self.ranks, self.code = names, ranks, code
        self.sizes = [place.reserved for place in places]
        self.blocks = [-(-size // code.size) for size in self.sizes]
        self.numel = sum(self.sizes)
        starts = [r * self.numel + place.start for r in range(ranks) for place in places]
        bounds = torch.tensor([*starts, ranks * self.numel], dtype=torch.int64)
        self.rows = bounds.to(device)
        self.row = bounds[: len(places) + 1].to(device)
        self.row_bytes = code.row_bytes(sum(self.blocks))


class _Collective:
    """What FSDP2 calls in place of a collective of one group."""

    def __init__(self, owner: "FSDPQuantizer", group: ParameterGroup, layout: _RowLayout, what: str):
        self.group, self.layout, self._owner = group, layout, owner
        self._what, self._types = f"the {what} of {group.label}", TYPES[what]
        bounds = layout.rows if what == "gradients" else layout.row  # of what this rank sends
        self._envelope = envelope(self._what, bounds, layout.code.bits / 32, f"{what} {layout.code}")

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(self, buffer: Tensor, numel: int) -> None:
        if buffer.dtype not in self._types:
            raise RuntimeError(
                f"{self._what} are {buffer.dtype}, not {' or '.join(map(str, self._types))}: for gradients pass "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), and for weights of "
                "several types its param_dtype="
            )
        if buffer.numel() != numel:
            raise RuntimeError(
                f"{self._what} have {buffer.numel()} elements, not {numel}: if parameters were frozen, unfrozen "
                "or replaced after dgc.fsdp.quantize, close() the quantizer and call it again"
            )


class _ReduceScatter(_Collective):
    """The reduce-scatter of gradients. It keeps the group's error.

    tag: Of its messages on a CPU. kept: Of all elements, blocks of ERROR or fp32, [ranks, bytes or numel].
    changed: The same after this backward pass. None: zeros, or unchanged.
    alone: On one rank, the buffers of this backward pass: by turns the gradients, and the result.
    """

    tag = TAG
    kept: Tensor | None = None
    changed: Tensor | None = None

    def __init__(self, owner: "FSDPQuantizer", group: ParameterGroup, layout: _RowLayout):
        super().__init__(owner, group, layout, "gradients")
        self.alone: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = super().allocate(size, dtype=dtype, device=device)
        if self.layout.ranks == 1:  # FSDP2 copies gradients to the result itself
            self._check(buffer, self.layout.numel)
            self._owner.begin()
            self.alone.append(buffer)
        return buffer

    def nonfinite_alone(self) -> str | None:
        """On one rank, return the first parameter with NaN or inf in a result of this backward pass."""
        rank = self.group.mesh.shards[0]
        for result in self.alone[1::2]:
            unscaled = result.to(torch.float32, copy=self._owner.scale.enabled)
            if self._owner.scale.enabled:
                self._owner.scale.divide_(unscaled)
            if problem := _first_unusable(self.layout.names, unscaled.split(self.layout.sizes), rank):
                return problem
        return None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        owner, layout, ranks = self._owner, self.layout, self.layout.ranks
        self.alone.clear()  # a version of FSDP2 that leaves nothing out
        self._check(input_tensor, ranks * layout.numel)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                f"FSDP2 asks for a scaled sum of {self._what}, which dgc.fsdp.quantize cannot form: beside "
                "set_gradient_divide_factor call set_force_sum_reduction_for_comms(True)"
            )
        owner.begin()
        coder, code = kernels.of_code(layout.code, input_tensor), layout.code.seeded(owner.noise(self.group))
        with owner.meter.timing("compress", self._what):
            if owner.scale.enabled:
                owner.scale.divide_(input_tensor)
            memory = owner.memory("v", input_tensor)
            payload, room = blank(ranks, layout.row_bytes, memory)
            if owner.error is None:
                first_nonfinite = coder.encode_gradient_((input_tensor,), memory, layout.rows, code, room)
            else:
                v = self.error(self.kept if self.changed is None else self.changed, memory)
                is_stored = owner.error == "float32"  # as it is
                residual = torch.empty_like(v) if is_stored else owner.memory("residual", v)
                first_nonfinite = coder.add_encode_((input_tensor,), v, layout.rows, code, room, residual)
                self.changed = self.stored(residual)
            self._envelope.seal_rows_(payload, first_nonfinite)
        arrived, works = torch.empty_like(payload), list[dist.Work]()
        with owner.meter.timing("launch", self._what):
            if payload.is_cpu:
                works = exchange_parts(arrived.unbind(), payload.unbind(), group, self.tag)
            else:
                dist.all_to_all_single(arrived.view(-1), payload.view(-1), group=group)
        wire = (ranks - 1) * payload.shape[1]
        owner.count(payload.nbytes, wire, (ranks - 1) * input_tensor.nbytes / ranks)

        def finish() -> None:
            opened = self._envelope.open(arrived.unbind(), layout.row_bytes)
            owner.report(self, opened)
            total = torch.zeros(sum(layout.blocks) * layout.code.size, dtype=torch.float32, device=arrived.device)
            coder.add_sum_(opened.contents, code, total)
            if op == dist.ReduceOp.AVG:  # by a tensor: for a number, a GPU multiplies by its inverse
                total.div_(torch.full((), ranks, dtype=torch.float32, device=total.device))
            owner.scale.multiply_(total)
            padded = total.split([blocks * layout.code.size for blocks in layout.blocks])
            parts = [part[:size] for part, size in zip(padded, layout.sizes, strict=True)]
            torch._foreach_copy_(list(output_tensor.split(layout.sizes)), parts)

        owner.finish_sum(_Sum(self._what, works, finish))
        # FSDP2 divides a sum after this call
        if not works or op != dist.ReduceOp.AVG or not self.group.takes_views_of(output_tensor):
            owner.finish_sum()

    # --- the error --------------------------------------------------------------------------------

    def error(self, kept: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return a copy of the error of all elements, fp32 [ranks numel], from what is kept of it."""
        device, n = self.layout.rows.device, self.layout.ranks * self.layout.numel
        out = torch.empty(n, dtype=torch.float32, device=device) if out is None else out
        if kept is None:
            return out.zero_()
        if self._owner.error == "float32":
            return out.copy_(kept.flatten())
        kernels.of(out).blocks.decode(list(kept), self.layout.rows, ERROR, 1, (out,))
        return out

    def stored(self, error: Tensor) -> Tensor:
        """Return what is kept of an error, fp32 [ranks numel]."""
        if self._owner.error == "float32":
            return error.view(self.layout.ranks, -1)
        nbytes = ERROR.row_bytes(sum(-(-size // ERROR.size) for size in self.layout.sizes))
        rows = torch.zeros(self.layout.ranks, nbytes, dtype=torch.uint8, device=error.device)
        kernels.of(error).blocks.encode_(error, self.layout.rows, ERROR, rows, False)
        return rows

    def parts(self, kept: Tensor) -> list[list[Tensor]]:
        """Return for each parameter the views of `kept` that have its error, [ranks, some]."""
        if self._owner.error == "float32":
            return [[part] for part in kept.split(self.layout.sizes, 1)]
        blocks = [-(-size // ERROR.size) for size in self.layout.sizes]
        scales, codes = kept.split([2 * sum(blocks), ERROR.code_bytes * sum(blocks)], 1)
        pairs = zip(
            scales.split([2 * b for b in blocks], 1),
            codes.split([ERROR.code_bytes * b for b in blocks], 1),
            strict=True,
        )
        return [list(pair) for pair in pairs]

    def exact(self) -> Tensor:
        """Return what is kept, or its zeros."""
        if self.kept is None:
            self.kept = self.stored(self.error(None))
        return self.kept


class _AllGather(_Collective):
    """The all-gather of weights.

    last: What was gathered last, to which it sends differences. None: it sends weights.
    """

    def __init__(
        self, owner: "FSDPQuantizer", group: ParameterGroup, layout: _RowLayout, last: LastGathered | None
    ):
        super().__init__(owner, group, layout, "weights")
        self.last = last
        self._running: _Gathering | None = None
        self._in_full = envelope(self._what, layout.row, 1.0, "weights in full")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        layout, owner, last, others = self.layout, self._owner, self.last, group.size() - 1
        if others != layout.ranks - 1:  # the second gather of reshard_after_forward=L, of rounded values
            owner.count(input_tensor.nbytes, others * input_tensor.nbytes, others * input_tensor.nbytes)
            work: dist.Work | None = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op or input_tensor.is_cpu
            )
            return work
        self._check(input_tensor, layout.numel)
        if self._running is not None:  # which FSDP2 has not waited for, if an exception came between
            self._running.wait()
        sends = Sends.SHARD if last is None else last.next(input_tensor)
        if last is not None and sends is Sends.NOTHING:
            assert last.rows is not None
            owner.meter.dense_wire_bytes += others * input_tensor.nbytes
            owner.meter.dense_cross_wire_bytes += others * input_tensor.nbytes
            output_tensor.copy_(last.rows)
            return None
        backend, is_whole = kernels.of(input_tensor), last is not None and sends is Sends.SHARD
        nbytes, sealed = (input_tensor.nbytes, self._in_full) if is_whole else (layout.row_bytes, self._envelope)
        with owner.meter.timing("compress", self._what):
            v = torch.empty(layout.numel, dtype=torch.float32, device=input_tensor.device)
            first_nonfinite = backend.selection.assign_((input_tensor,), v)
            if last is not None:
                last.begin(input_tensor)
            (payload,), room = blank(1, nbytes, v)
            if is_whole:
                room.copy_(v.to(input_tensor.dtype).view(torch.uint8)[None])
            else:
                if last is not None:
                    last.difference_(v, group.rank())
                backend.blocks.encode_(v, layout.row, layout.code, room, False)
            sealed.seal_(payload, first_nonfinite)
        arrived = payload.new_empty(layout.ranks, payload.numel())
        with owner.meter.timing("launch", self._what):
            work = dist.all_gather_single(arrived.view(-1), payload, group=group, async_op=payload.is_cpu)
        owner.count(payload.nbytes, others * payload.nbytes, others * input_tensor.nbytes)

        def finish() -> None:
            opened = sealed.open(arrived.unbind(), nbytes)
            try:
                owner.report(self, opened)
            except RuntimeError:
                if last is not None:
                    last.rows = None  # begin again with the weights in full
                raise
            if last is None:
                self._decode(opened.contents, output_tensor)
            elif is_whole:
                parts = [part.view(output_tensor.dtype) for part in opened.contents]
                last.rows = torch.cat(parts)
                output_tensor.copy_(last.rows)
            else:
                differences = torch.empty(output_tensor.numel(), dtype=torch.float32, device=arrived.device)
                backend.blocks.decode(opened.contents, layout.rows, layout.code, 1, (differences,))
                output_tensor.copy_(last.add(differences, output_tensor.dtype))

        self._running = _Gathering(self._what, owner.meter, work, finish)
        if work is not None:
            return self._running
        self._running.wait()
        return None

    def _decode(self, contents: Sequence[Tensor], output: Tensor) -> None:
        # the input is a part of the output
        out = output if output.dtype == torch.float32 else output.float()
        kernels.of(out).blocks.decode(contents, self.layout.rows, self.layout.code, 1, (out,))
        if out is not output:
            if output.dtype == torch.float16:  # the scale of a block is rounded up, to 65536 too
                out.clamp_(-FP16, FP16)
            output.copy_(out)


@dataclass(frozen=True, eq=False)
class _Sum:
    """A reduce-scatter whose rows are on the way. finish: Adds them up when they have arrived."""

    what: str
    works: list[dist.Work]
    finish: Callable[[], None]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _Gathering(dist.Work):
    """An all-gather that FSDP2 waits for when it needs the weights."""

    def __init__(self, what: str, meter: TrafficMeter, work: dist.Work | None, decode: Callable[[], None]):
        super().__init__()
        self._what, self._meter, self._work = what, meter, work
        self._decode: Callable[[], None] | None = decode  # None: it is done, and its memory is free

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._decode is None:
            return True
        if self._work is not None:
            with self._meter.timing("wait", self._what):
                self._work.wait(timeout)
        decode, self._decode, self._work = self._decode, None, None
        with self._meter.timing("decode", self._what):
            decode()
        return True


@dataclass(frozen=True, eq=False)
class _Report:
    collective: _Collective
    opened: Unchecked[Tensor]


class FSDPQuantizer:
    """Quantizes the collectives of a model that FSDP2 shards. `quantize` is another name for it.

    Construction is collective, after `fully_shard` and before training. Gradients are the means over all ranks, as
    FSDP2 forms them. The gradient of a trainable parameter that a backward pass does not use counts as zero. Over
    the replicas of a mesh FSDP2 averages in full precision.

    Args:
        model (Module): the model, on which `fully_shard` was called last.
        gradients (int, optional): bits per element of gradients, 16, 8 or 4. None: FSDP2's own reduce-scatter.
        weights (int, optional): bits per element of weights in forward and backward, 8 or 4. With 4 bits, every
            rank keeps the weights that were gathered last, in their type, and a gather sends the differences to
            them. None: FSDP2's own all-gather.
        error (str, optional): how each rank keeps what it does not send of its gradients: "int8", about one byte
            per element of the whole model, or "float32", four. None: it is lost. "auto": "int8" with 8 and 4 bits,
            and None with 16, whose error is far below the noise of gradients.
        block (int, optional): elements of gradients that share a scale: 64, 128, 256 or 512. None: 256 with 8
            bits, 128 with 4. Weights have blocks of 256 with 8 bits, of 128 with 4.
        hadamard (bool): transform each 64 elements of gradients before they are rounded. Useful with 4 bits.
        random (bool): round gradients stochastically. Only with 16 bits and without error.
        seed (int): seed of the random numbers.
        nonfinite (str), grad_scaler: as for `dgc.ddp.compress`.

    Attributes:
        meter (TrafficMeter): bytes that this rank sent. `dense_wire_bytes` are the bytes of FSDP2's own
            collectives.
        dropped_steps (int): backward passes whose gradients were dropped because of NaN or inf.

    Raises:
        ValueError: if an argument is invalid or differs between ranks, the model is sharded in another way, or its
            gradients are exchanged already.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: int | None = 8,
        weights: int | None = None,
        *,
        error: str | None = "auto",
        block: int | None = None,
        hadamard: bool = False,
        random: bool = False,
        seed: int = 0,
        nonfinite: str = "skip",
        grad_scaler: Any = None,
    ):
        check_nonfinite(nonfinite, grad_scaler)
        choices: dict[str, tuple[object, tuple[object, ...]]] = {
            "gradients": (gradients, (16, 8, 4, None)),
            "weights": (weights, (8, 4, None)),
            "error": (error, ("auto", "int8", "float32", None)),
            "block": (block, (64, 128, 256, 512, None)),
            "hadamard": (hadamard, (True, False)),
            "random": (random, (True, False)),
        }
        for name, (value, allowed) in choices.items():
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
        require("a whole number", WHOLE, seed=seed)
        if gradients == 16 and (block is not None or hadamard):
            raise ValueError("gradients of 16 bits have no blocks: leave out block and hadamard")
        if error == "auto":
            error = None if gradients == 16 else "int8"
        if random and (gradients != 16 or error is not None):
            raise ValueError("random=True is for gradients=16 without error")
        self.error, self.scale = error, LossScale(grad_scaler, ())
        self._seed, self._random, self._passes = seed, random, 0
        self.meter = TrafficMeter(dense="FSDP2's own collectives")
        self._groups = parameter_groups(model, frozen=True)
        check_sharded(self._groups)
        meshes = {group.mesh for group in self._groups}
        # parallelism of tensors or experts adds a dimension, whose other ranks have parts of the same parameters
        has_one = all(p.device_mesh.ndim == 1 for group in self._groups for p in group.gathered)
        is_flat = has_one and len(meshes) == 1 and self._groups[0].mesh.replicas is None
        # the ranks that decide together: those of the only mesh, or all
        self._deciding: Any = self._groups[0].process_group if is_flat else None
        self._everyone = None if is_flat else connect()
        effect = "every rank drops this step, in which every .grad is None"
        is_first = not dist.get_rank(self._deciding)
        self._drops = DropPolicy(nonfinite, effect, grad_scaler=grad_scaler, warns=is_first)
        settings = {name: value for name, (value, _) in choices.items()}
        own = {"error": error, "seed": seed, "nonfinite": nonfinite, "uses_grad_scaler": self.scale.enabled}
        self._check_settings({**settings, **own})
        self._sums: list[_ReduceScatter] = []
        self._lasts: list[LastGathered] = []
        undo: list[Callable[[], object]] = []
        for group in self._groups:
            group.check_own_collectives()
            if gradients is not None:
                group.check_elements()
        for group in self._groups:
            reduce_scatter, all_gather, ranks = None, None, len(group.mesh.shards)
            if gradients is not None and group.parameters:
                code = kernels.code_of(gradients, block, hadamard, random)
                layout = _RowLayout(group.names, group.places, ranks, code, group.device)
                reduce_scatter = _ReduceScatter(self, group, layout)
                reduce_scatter.tag = TAG + len(self._sums)
                self._sums.append(reduce_scatter)
            if weights is not None:
                code, last = (WEIGHTS, None) if weights == 8 else (DIFFERENCES, LastGathered(group))
                layout = _RowLayout(group.gathered_names, group.gathered_places, ranks, code, group.device)
                all_gather = _AllGather(self, group, layout, last)
                if last is not None:
                    self._lasts.append(last)
            undo.append(group.use_collectives(reduce_scatter, all_gather))
            group.claim(self)
        if weights is not None and any(len(mesh.shards) == 1 for mesh in meshes):  # FSDP2 gathers nothing
            undo.append(model.register_forward_pre_hook(lambda *_: self._check_own_weights()).remove)
        if weights == 4:
            undo += [before_steps(self._before_step), after_steps(self._after_step)]
        self._undo = undo
        self._reports: list[_Report] = []
        self._sum: _Sum | None = None
        self._memory: dict[str, Tensor] = {}
        self._pass = BackwardPass()
        self._awaited_step = AwaitedStep(p for group in self._groups for p in group.parameters)

    @property
    def dropped_steps(self) -> int:
        return self._drops.dropped

    def _check_settings(self, own: Mapping[str, object]) -> None:
        found = self._of_each_rank(own)
        for rank, other in enumerate(found):
            for name, value in found[0].items():
                if other[name] != value:
                    raise ValueError(
                        f"{name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}: every rank needs the "
                        "same settings"
                    )

    # --- differences of weights -------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer) -> list[LastGathered]:
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        return [last for last in self._lasts if last.has_any_of(parameters)]

    def _before_step(self, optimizer: Optimizer) -> None:
        for last in self._stepped(optimizer):
            last.note_changes()

    def _after_step(self, optimizer: Optimizer) -> None:
        for last in self._stepped(optimizer):
            last.note_step()

    def weights_changed(self) -> None:
        """With weights of 4 bits, send all of them in full at the next gather. To be called on every rank.

        It is needed after weights were written into the memory of the shards, as `p.data.copy_()` does. After
        `load_state_dict()`, functions of torch.nn.init and other operations on the parameters it is not.
        """
        for last in self._lasts:
            last.rows = None

    # --- one backward pass ------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a backward pass, unless that has been done."""
        if self._pass.is_running:
            return
        for group in self._groups:
            group.check_not_replaced("quantize")
        self._forget()  # what a pass that ended with an exception has left
        self._reports = [report for report in self._reports if isinstance(report.collective, _AllGather)]
        self._passes += 1
        self._pass.begin(self._finish)

    def noise(self, group: ParameterGroup) -> int:
        """A seed for the gradients of this rank, group and backward pass."""
        return crc32(f"{self._seed} {dist.get_rank()} {group.names[0]} {self._passes}".encode())

    def memory(self, what: str, like: Tensor) -> Tensor:
        """Return fp32 memory like `like`. On a CPU all groups use the same: new pages take as long as the work."""
        n, kept = like.numel(), self._memory.get(what)
        if kept is None or kept.numel() < n:
            kept = torch.empty(n, dtype=torch.float32, device=like.device)
        if like.is_cpu:
            self._memory[what] = kept
        return kept[:n]

    def finish_sum(self, following: "_Sum | None" = None) -> None:
        """Finish the reduce-scatter that has not ended, and keep the following one."""
        last, self._sum = self._sum, following
        if last is not None:
            with self.meter.timing("wait", last.what):
                last.wait()
            with self.meter.timing("decode", last.what):
                last.finish()

    def _forget(self) -> None:
        if self._sum is not None:  # Gloo needs its memory until the messages have arrived
            self._sum.wait()
        self._sum = None
        for collective in self._sums:
            collective.changed = None
            collective.alone.clear()

    def report(self, collective: _Collective, opened: Unchecked[Tensor]) -> None:
        """Take what the headers of a collective say. A GPU is not waited for before the end of backward."""
        # without the contents, which of all groups are as large as the model
        self._reports.append(_Report(collective, replace(opened, contents=[])))
        is_old = len(self._reports) > 8 * len(self._groups)  # without backward passes
        if isinstance(collective, _AllGather) and (collective.layout.row.is_cpu or is_old):
            self._check_weights()

    def _check_weights(self) -> None:
        waiting = [report for report in self._reports if isinstance(report.collective, _AllGather)]
        self._reports = [report for report in self._reports if report not in waiting]
        if problem := _nonfinite(waiting):
            raise RuntimeError(f"{problem}: it cannot be trained further. Load a checkpoint")
        for last in self._lasts:
            last.check()

    @torch.no_grad()
    def _check_own_weights(self) -> None:
        """As `_check_weights`, of groups with one shard."""
        for group in (group for group in self._groups if len(group.mesh.shards) == 1):
            parts = [local_part(p) for p in group.gathered]
            if problem := _first_unusable(group.gathered_names, parts, group.mesh.shards[0]):
                raise RuntimeError(f"{problem}: it cannot be trained further. Load a checkpoint")

    def count(self, payload: int, wire: float, dense: float) -> None:
        self.meter.payload_bytes += payload
        self.meter.wire_bytes += wire
        self.meter.cross_wire_bytes += wire  # every rank counts as a machine
        self.meter.dense_wire_bytes += dense
        self.meter.dense_cross_wire_bytes += dense
        self.meter.rounds += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """Keep or drop the gradients of this backward pass, as all ranks do. Runs at its end."""
        try:
            self.finish_sum()
            self._check_weights()
            reports, self._reports = self._reports, []
            alone = (collective.nonfinite_alone() for collective in self._sums)
            problem = self._told_to_all(_nonfinite(reports) or next(filter(None, alone), None))
            for collective in self._sums if problem is None else ():
                if collective.changed is not None:
                    collective.kept = collective.changed
            self._awaited_step.begin()
        finally:
            self._forget()
        if problem is not None:
            self._drops.withhold(p for group in self._groups for p in group.parameters)
            if self._drops.drop(reason := f"the gradient of {problem}"):
                raise NonFiniteGradientError(reason)

    def _told_to_all(self, problem: str | None) -> str | None:
        """Return a problem of any rank. With one mesh all its ranks know it."""
        if self._everyone is None:
            return problem
        flag = torch.tensor([problem is not None], dtype=torch.int64)
        if not all_reduce(self._everyone, flag, "max", "quantize.dropped").item():
            return None
        return next(filter(None, all_gather_object(self._everyone, problem, "quantize.reason")))

    def close(self) -> None:
        """Give the model FSDP2's own collectives again. The error is lost."""
        self._forget()
        for undo in self._undo:
            undo()
        for group in self._groups:
            group.release(self)
        self._undo, self._groups = [], []

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self, of_each_rank: bool = True) -> dict[str, dict[str, Any]]:
        """Return the error, for torch.distributed.checkpoint. Collective.

        Args:
            of_each_rank: With the error of each rank, as it is kept. A run continues bit for bit with it, on the
                same number of ranks. Without it, the state can be loaded from a checkpoint of any number of ranks.

        Returns:
            "errors": The mean error over the ranks by parameter name, sharded as the parameter. "ranks": The
            error of each rank of the parameter's mesh, [ranks, ...], which is empty without `of_each_rank`.
            "counts": With `random`, the number of backward passes, which random numbers depend on. "weights": With
            weights of 4 bits, what was gathered last, by parameter name, sharded as the parameter. "current": For
            each of these, whether the parameter has not changed since.

        Raises:
            RuntimeError: It is called between backward() and the optimizer's step().
        """
        check_not_running("state_dict()", self._pass.is_running)
        self._awaited_step.check("state_dict()")
        errors, each, counts = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        if self._random:
            counts["passes"] = torch.tensor(self._passes, dtype=torch.int64)
        for own in self._sums if self.error else ():
            group, row = own.group, own.group.mean_row(own.error(own.kept))
            for name, p, place, views in zip(
                group.names, group.parameters, group.places, own.parts(own.exact()), strict=True
            ):
                errors[name] = sharded_like(p, place.rows_of(row).view(place.shape).clone())
                if of_each_rank:
                    stored, by_rank = torch.cat(views, 1).view(1, -1), [Shard(0)] * p.device_mesh.ndim
                    each[name] = DTensor.from_local(stored, p.device_mesh, by_rank, run_check=False)
        weights, current = dict[str, Tensor](), dict[str, Tensor]()
        for last in self._lasts:
            last.note_changes()
            parts = last.saved(dist.get_rank(last.group.process_group))
            for name, p, part in zip(last.group.gathered_names, last.group.gathered, parts, strict=True):
                weights[name] = sharded_like(p, part)
                current[name] = torch.tensor(last.is_current, dtype=torch.int64)
        return {"errors": errors, "ranks": each, "counts": counts, "weights": weights, "current": current}

    def state_for(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, DTensor]]:
        """Return a state to load a checkpoint into, given the sizes of its tensors: the mean if ranks differ.

        Keys are those of torch.distributed.checkpoint.
        """
        own = self.state_dict()
        is_same = all(sizes.get(f"ranks.{name}") == tuple(error.shape) for name, error in own["ranks"].items())
        return own if is_same else self.state_dict(of_each_rank=False)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `state_dict` returned on this rank, or torch.distributed.checkpoint has loaded into it.

        Without the error of each rank, all ranks get the mean error. Collective.

        Raises:
            ValueError: On every rank, if the state of one has not the error of these parameters, was saved with
                another `error`, or is damaged. Nothing is changed then.
        """
        check_not_running("load_state_dict()", self._pass.is_running)
        exact, problem = False, None
        try:
            exact = self._check_state(state)
        except ValueError as error:
            problem = str(error)
        # a rank that refuses alone would leave the others waiting
        found = self._of_each_rank((problem, exact))
        for rank, (refusal, way) in enumerate(found):
            if refusal is not None:
                raise ValueError(f"{refusal} (on rank {rank})")
            if way != found[0][1]:
                raise ValueError(
                    f"ranks 0 and {rank} load differently: one has the error of each rank, one the mean"
                )
        loaded = []
        for own in self._sums if self.error else ():
            kept = own.exact().clone()
            if exact:
                for name, views in zip(own.group.names, own.parts(kept), strict=True):
                    stored, widths = local_part(state["ranks"][name]), [view.shape[1] for view in views]
                    for view, part in zip(views, stored.view(len(kept), -1).split(widths, 1), strict=True):
                        view.copy_(part)
            else:
                row = torch.zeros(own.layout.numel, dtype=torch.float32, device=kept.device)
                for name, place in zip(own.group.names, own.group.places, strict=True):
                    place.rows_of(row).copy_(local_part(state["errors"][name]).flatten())
                kept = own.stored(own.group.gather(row))
            loaded.append((own, kept))
        for own, kept in loaded:
            own.kept = kept
        if self._random:
            self._passes = int(state["counts"]["passes"])
        for last in self._lasts:
            names = last.group.gathered_names
            is_current = all(bool(state["current"][name]) for name in names)
            last.load((local_part(state["weights"][name]) for name in names), is_current)

    def _check_state(self, state: Any) -> bool:
        """Raise ValueError for what this rank cannot load. Returns whether it has the error of each rank."""
        if not isinstance(state, Mapping) or state.keys() != TABLES:
            raise ValueError("the state is not what state_dict() of a FSDPQuantizer returned")
        for table_name in TABLES:
            check_mapping(f"{table_name} of the state", state[table_name])
        errors, each = state["errors"], state["ranks"]
        self._check_gathered(state["weights"], state["current"])
        if self._random:
            passes = state["counts"].get("passes")
            check_tensor("the number of backward passes", passes, (), torch.int64, least=0)
        names = {name for own in self._sums if self.error for name in own.group.names}
        for table in (errors, *([each] if each else [])):
            if missing := sorted(names - table.keys()):
                raise ValueError(
                    f"the state has no error of {missing[0]}: it was saved with another model or error="
                )
            if unknown := sorted(map(str, table.keys() - names)):
                raise ValueError(
                    f"the state has an error of {unknown[0]}, which was saved with another model or error="
                )
        for own in self._sums if self.error else ():
            parts = own.parts(own.exact())
            for name, p, views in zip(own.group.names, own.group.parameters, parts, strict=True):
                what, error = f"the error of {name}", errors[name]
                self._check_sharded(what, error, p)
                if each:
                    self._check_stored(what, each[name], p.device_mesh, views)
        return bool(each)

    def _check_gathered(self, weights: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        names = {name for last in self._lasts for name in last.group.gathered_names}
        for found in (weights, current):
            if different := sorted(map(str, names ^ found.keys())):
                which = "lacks" if different[0] in names else "has"
                raise ValueError(
                    f"the state {which} gathered weights of {different[0]}: it was saved with another model or "
                    "weights="
                )
        for last in self._lasts:
            for name, p in zip(last.group.gathered_names, last.group.gathered, strict=True):
                self._check_sharded(f"the gathered weights of {name}", weights[name], p)
                check_tensor(f"whether the weights of {name} are current", current[name], (), torch.int64, least=0)

    def _check_sharded(self, what: str, saved: Any, p: DTensor) -> None:
        if not isinstance(saved, DTensor) or saved.placements != p.placements or saved.shape != p.shape:
            raise ValueError(f"{what} is not sharded as the parameter, of shape {list(p.shape)}: {saved!r}")
        check_tensor(what, local_part(saved), local_part(p).shape)

    def _check_stored(self, what: str, error: Any, mesh: DeviceMesh, views: Sequence[Tensor]) -> None:
        """Raise ValueError unless `error` has what this rank can keep in these views of it."""
        (first, *_), numel = views, sum(view.numel() for view in views)
        expected, by_rank = (mesh.size(), numel), (Shard(0),) * mesh.ndim
        if not isinstance(error, DTensor) or error.placements != by_rank or tuple(error.shape) != expected:
            raise ValueError(
                f"{what} is {getattr(error, 'dtype', type(error))} {list(getattr(error, 'shape', ()))}, not "
                f"{first.dtype} {list(expected)}, a row for each rank: it was saved with another error= or number "
                "of ranks. Load the checkpoint into state_dict(of_each_rank=False)"
            )
        stored = local_part(error)
        check_tensor(what, stored, (1, numel), first.dtype)
        if self.error == "int8":  # the first view has the scales, which are bfloat16
            scales = stored.view(len(first), -1)[:, : first.shape[1]].contiguous().view(torch.bfloat16).float()
            check_tensor(f"a scale of {what}", scales, least=0)

    def _of_each_rank(self, own: Any) -> list[Any]:
        """Return what all ranks have, in their order. Collective."""
        found: list[Any] = [None] * dist.get_world_size(self._deciding)
        dist.all_gather_object(found, own, group=self._deciding)
        return found


def _nonfinite(reports: Sequence[_Report]) -> str | None:
    """Return the first parameter and rank with NaN or inf. Raises PayloadError for a damaged payload."""
    found = None
    for report, numbers in zip(reports, values_of([report.opened.flags for report in reports]), strict=True):
        names = report.collective.layout.names
        for rank, number in zip(report.collective.group.mesh.shards, numbers, strict=True):
            if number and found is None:
                found = UNUSABLE.format(name=names[(number - 1) % len(names)], rank=rank)
    return found


def _first_unusable(names: Sequence[str], parts: Sequence[Tensor], rank: int) -> str | None:
    """Return the same for one rank, whose parameters or gradients are `parts`."""
    flags = [usable(part.detach().float()).all() for part in parts]
    if not flags or bool(torch.stack(flags).all()):
        return None
    return UNUSABLE.format(name=names[[bool(flag) for flag in flags].index(False)], rank=rank)


quantize = FSDPQuantizer
