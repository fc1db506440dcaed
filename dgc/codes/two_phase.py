"""Two-phase reduction in 16, 8 or 4 bits, with error feedback in both directions.

The blocks of a bucket (dgc.kernels.codes.blocks) are divided into N chunks. Rank r of N also reduces chunk r:

    rank i      v = g_i + e_i                       send chunk r of Q[v] to rank r     e_i = v - Q[v]
    rank r      z = sum over i of Q[v_i] + d_r      send Q[z] to all ranks             d_r = z - Q[z]
    result      Q[z] / N of all chunks, the same bits on every rank

Q rounds each element to the nearest of 2 L + 1 evenly spaced levels of its block. The sums are in fp32, in the
order of ranks. Blocks begin at the same elements for any N, so N does not change a scale.

With 16 bits, Q rounds to bfloat16, to nearest or stochastically, a block is one element, and there is no error
feedback (e = d = 0) unless it is asked for. Only the sum of all ranks is rounded, and not each sum on the way.

Sources: qgZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209, section 3.3) reduces gradients by one all-to-all of
quantized blocks, since a ring would quantize N - 1 times. LoCo (Xie et al. 2024, arXiv 2407.04480, Algorithm 1)
adds error feedback to its 4 bits. SDP4Bit (Jia et al. 2024, arXiv 2410.15526, section 3.2) transforms gradients
before 4 bits (`hadamard`). The error of the second phase is the error of the server in DoubleSqueeze (Tang et al.
2019, arXiv 1905.05957).

Payload of a bucket in bytes: N (24 + B) in the first phase and 24 + B in the second, where B, rounded up to 8, is
ceil(b / N) (2 + size bits / 8) for the b blocks of a bucket, with the bits of that phase. With 16 bits it is
2 ceil(n / N) for n elements. A rank sends N - 1 parts in each phase: 2 (N - 1) / N of about bits / 8 + 2 / size
bytes per element, and of 2 with 16 bits.

Memory of a rank between steps, in bytes: 8 per element and 8 / N for the errors and for their next values, and the
payloads.

If a checkpoint is loaded on another number of ranks or with other buckets, elements of d that do not belong to the
rank's new chunk become part of e.

Differences from the papers: One hop, where ZeRO++ and SDP4Bit reduce inside a machine first. Two levels do that
here (`hierarchical`), without rounding. LoCo keeps a moving average of the error in 8 bits; here it is the error
itself in fp32. ZeRO++, LoCo and SDP4Bit need the mean of one chunk only and have no second phase.
"""

from dataclasses import dataclass
from zlib import crc32

import torch
from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.codes.server_errors import ServerState
from dgc.comm.requests import Conversation
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.dense import DenseCompressor, place_of_mean
from dgc.core.envelope import blank, envelope_of
from dgc.core.protocol import Compressor, Repeats, Vector
from dgc.core.results import Reduced, reported
from dgc.core.state import State, zeros
from dgc.kernels import BlockCode
from dgc.kernels.codes.blocks import SIZES


@dataclass(eq=False, kw_only=True)
class TwoPhaseState(ServerState):
    """code: The code of the first phase. The chunk is a part of the padded vector, with the bucket's blocks."""

    code: BlockCode

    def server_errors(self, bucket: Bucket) -> Vector:
        padded = self.chunk_errors.new_zeros(self.size, self.chunk_errors.numel())
        padded[self.rank] = self.chunk_errors
        return padded.view(-1)[self.code.places(bucket.bounds, bucket.numel)]

    def own(self, bucket: Bucket, whole: Vector) -> Float32[Tensor, "chunk"]:
        padded = self.chunk_errors.new_zeros(self.size, self.chunk_errors.numel())
        padded.view(-1)[self.code.places(bucket.bounds, bucket.numel)] = whole
        return padded[self.rank].clone()


@checked
class TwoPhaseCompressor(Compressor):
    """16, 8 or 4 bits per element, reduced by an all-to-all and gathered again, with error feedback.

    It sends 2, 4 or 8 times fewer bytes than fp32 for any number of ranks, and suits every optimizer.

    With 16 bits, elements are numbers of bfloat16, which are added in fp32. Error feedback is off by default then:
    the error of a mean is about 2**-9 of its elements, far below the noise of gradients, and errors would take 8
    bytes per element.

    Args:
        bits (int): bits per element of what a rank sends of its gradients, 16, 8 or 4.
        block (int, optional): elements that share a scale: 64, 128, 256 or 512. None: 256 with 8 bits, 128 with 4.
            With 16 bits there is no scale.
        second_bits (int, optional): bits per element of the second phase, 8 or 4. None: as `bits`.
        error_feedback (bool, optional): keep what is not sent, in both directions, and add it to the next step's.
            None: with 8 and 4 bits.
        hadamard (bool): transform each 64 elements before they are rounded, which spreads large ones. Useful with
            4 bits, and not possible with 16.
        random (bool): round stochastically in both directions. Only with 16 bits and without error feedback.
        seed (int): seed of the random numbers.

    Raises:
        ValueError: if bits, block or second_bits is none of these, or these options exclude each other.

    Example:
        >>> compression = TwoPhaseCompressor(bits=8)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    fallback: Compressor = DenseCompressor()

    def __init__(
        self,
        bits: int = 8,
        block: int | None = None,
        second_bits: int | None = None,
        error_feedback: bool | None = None,
        hadamard: bool = False,
        random: bool = False,
        seed: int = 0,
    ):
        second_bits = bits if second_bits is None else second_bits
        for name, value in (("bits", bits), ("second_bits", second_bits)):
            if value not in (4, 8, 16):
                raise ValueError(f"{name} must be 16, 8 or 4, not {value}")
        if block is not None and block not in SIZES:
            raise ValueError(f"block must be one of {', '.join(map(str, SIZES))}, not {block}")
        if 16 in (bits, second_bits) and (bits != second_bits or block is not None or hadamard):
            raise ValueError(
                "16 bits have no blocks: leave out block and hadamard, and use 16 bits in both phases"
            )
        if random and (bits != 16 or error_feedback):
            raise ValueError("random=True is for bits=16 without error feedback")
        self.bits, self._random, self._seed = bits, random, seed
        self.error_feedback = bits != 16 if error_feedback is None else error_feedback
        self.code = kernels.code_of(bits, block, hadamard, random)
        self.second_code = kernels.code_of(second_bits, self.code.size, hadamard, random)

    @property
    def keeps_server_errors(self) -> bool:  # type: ignore[override]
        return self.error_feedback

    @property
    def compress_ratio(self) -> float:
        return 1.0 if self.bits == 16 else self.bits / 32  # as of fp16 and bf16, which count as dense

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        numel = self._blocks_of_chunk(bucket, size) * self.code.size
        constants = {"chunk": torch.tensor([0, numel], dtype=torch.int64, device=bucket.device)}
        if self.code.rotate:  # the values of what fills a tensor's last block are not zero then
            real = torch.zeros(size, numel, dtype=torch.float32, device=bucket.device)
            real.view(-1)[self.code.places(bucket.bounds, bucket.numel)] = 1.0
            constants["real"] = real[rank].clone()
        if not self.error_feedback:
            return State(size, rank, constants=constants)
        own = torch.zeros(numel, dtype=torch.float32, device=bucket.device)
        errors = {"errors": zeros(bucket)}
        return TwoPhaseState(size, rank, errors=errors, constants=constants, chunk_errors=own, code=self.code)

    def _blocks_of_chunk(self, bucket: Bucket, size: int) -> int:
        return -(-self.code.blocks(bucket.bounds) // size)

    def _seeded(self, code: BlockCode, bucket: Bucket, state: State, phase: int) -> BlockCode:
        """The code with the random numbers of this rank, bucket, step and phase."""
        words = f"{self._seed} {state.rank} {bucket.segments[0].name} {state.steps} {phase}"
        return code.seeded(crc32(words.encode()))

    # --- one step ---------------------------------------------------------------------------------

    def repeats(self, bucket: Bucket, state: State) -> Repeats | None:
        # plain PyTorch has no coder
        return None if self._random or kernels.of(bucket.bounds).coder is None else Repeats()

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        bounds, blocks = bucket.bounds, kernels.of_code(self.code, bucket.bounds)
        code, second_code = (
            self._seeded(self.code, bucket, state, 1),
            self._seeded(self.second_code, bucket, state, 2),
        )
        each, own = self._blocks_of_chunk(bucket, state.size), state.scratch
        envelope = envelope_of(bucket, bounds, self.compress_ratio, f"two phases {self.code} {self.second_code}")
        nbytes = code.row_bytes(each)
        rows, room = blank(state.size, nbytes, bounds, own.get("rows"))
        gradients, v = bucket.gradients, state.errors.get("errors")
        if v is not None:
            kept = own["errors"] if "errors" in own else torch.empty_like(v)
            first_nonfinite = blocks.add_encode_(gradients, v, bounds, code, room, kept)
            bucket.release()
        else:
            bucket.release()  # the bucket's own memory takes the gradients, and would copy them
            first_nonfinite = blocks.encode_gradient_(gradients, place_of_mean(bucket), bounds, code, room)
        parts, flags = yield from envelope.scatter_filled(rows, nbytes, first_nonfinite)

        chunk_errors = kept_chunk = None
        if isinstance(state, TwoPhaseState):
            chunk_errors = state.chunk_errors
            kept_chunk = own["chunk_errors"] if "chunk_errors" in own else torch.empty_like(chunk_errors)
        nbytes = second_code.row_bytes(each)
        (second,), room = blank(1, nbytes, bounds, own.get("second"))
        given = (chunk_errors, state.constants.get("real"), state.constants["chunk"])
        blocks.second_phase_(parts, code, *given, second_code, room, kept_chunk)
        gathered, second_flags = yield from envelope.gather_filled(second, nbytes, bounds[-1])

        # the transform adds values, and half precision rounds them: both may overflow
        is_finite = bucket.dtype is torch.float32 and not second_code.rotate
        places = bucket.destinations if is_finite else None
        mean = (place_of_mean(bucket),) if places is None else places
        blocks.decode(gathered, bounds, second_code, state.size, mean)
        if places is None:
            bucket.flat.copy_(mean[0])
        flags = flags.with_checks_of(second_flags)
        result = reported(bucket, flags, is_finite=is_finite, is_delivered=places is not None)

        own = {"rows": rows, "second": second.view(1, -1)}
        if v is None or chunk_errors is None or kept_chunk is None:
            new = state.next(scratch=own)
            return Reduced(result, new, dropped=new)
        # the next step overwrites the residual of the state that is not taken
        scratch = {**own, "errors": v, "chunk_errors": chunk_errors}
        new = state.next(errors={"errors": kept}, chunk_errors=kept_chunk, scratch=scratch)
        old = state.next(scratch={**own, "errors": kept, "chunk_errors": kept_chunk})
        return Reduced(result, new, dropped=old)
