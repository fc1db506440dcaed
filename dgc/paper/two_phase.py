"""Reduction of quantized blocks in two phases, with error feedback in both directions: qgZ of ZeRO++ (Wang et al.
2023, arXiv 2306.10209, section 3.3), the error feedback of LoCo (Xie et al. 2024, arXiv 2407.04480, Algorithm 1),
and the servers of DoubleSqueeze (Tang et al. 2019, arXiv 1905.05957, Algorithm 1).

The elements of a tensor are divided into blocks of B, the last one filled with zeros, and the blocks of all
tensors into N chunks. On each of N workers i, which is also the server of chunk i, with the gradient g:

    v = e + g
    send Q[v] of chunk r to server r           e = v - Q[v]
    z = d + sum over workers of their Q[v]     of the own chunk
    send Q[z] to all workers                   d = z - Q[z]
    result = Q[z] / N

    Q[x] of a block: s = max |x|, rounded up to bfloat16;  level = floor(L |x| / s + 1/2);  sign(x) level s / L

L is 127 (8 bits) or 7 (4 bits).

Payload of a bucket in bytes: (N + 1) ceil(b / N) (B + 2) for b blocks, and 8. With 4 bits a level takes a byte as
well; dgc.compression.TwoPhaseCompressor puts two into a byte, and gives the same bits.

Differences from the papers: ZeRO++ and LoCo have the first phase only, and LoCo keeps a moving average of e in 8
bits. What is not finite: see feedback.py. `SixteenBits` is not from a paper: Q rounds to bfloat16, the chunks are
N parts of ceil(n / N) elements, and there is no error feedback.
"""

import torch
from jaxtyping import Float32, Int8, Int16
from torch import Tensor

from dgc.comm.requests import AllGather, AllToAll, Conversation
from dgc.core.bucket import Bucket
from dgc.core.results import Reduced
from dgc.core.state import State, zeros
from dgc.paper.feedback import ErrorFeedback, gradient_of, parts_of, result_of

Blocks = Float32[Tensor, "b B"]


class TwoPhase(ErrorFeedback):
    """bits: 8 or 4. block: B."""

    def __init__(self, bits: int = 8, block: int = 256):
        self.L, self.block, self.compress_ratio = 2 ** (bits - 1) - 1, block, bits / 32

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank, errors={"e": zeros(bucket), "d": zeros(bucket)})

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        (g, bad), N, r = gradient_of(bucket), state.size, state.rank
        v = state.errors["e"] + g
        s, levels = self.quantize(x := self.blocks(bucket, v, N))
        e = self.elements(bucket, x - self.dequantize(s, levels))
        to_servers = AllToAll(s, (len(s) // N,) * N), AllToAll(levels.view(-1), (levels.numel() // N,) * N)
        scales, codes, flags = yield (*to_servers, AllGather(bad))

        z = self.blocks(bucket, state.errors["d"], N).chunk(N)[r].clone()
        for own, code in zip(scales, codes, strict=True):
            z += self.dequantize(own, code.view(-1, self.block))
        s, levels = self.quantize(z)
        d = torch.zeros_like(x)
        d.chunk(N)[r].copy_(z - self.dequantize(s, levels))
        scales, codes = yield (AllGather(s), AllGather(levels.view(-1)))

        mean = self.dequantize(torch.cat(list(scales)), torch.cat(list(codes)).view(-1, self.block)) / N
        result = result_of(bucket, self.elements(bucket, mean), flags)
        new = state.next(errors={"e": e, "d": self.elements(bucket, d)})
        return Reduced(result, new, dropped=state.next(errors={**state.errors, "e": v}))

    def quantize(self, x: Blocks) -> tuple[Int16[Tensor, "b"], Int8[Tensor, "b B"]]:
        """The upper halves of the scales, and the levels with their signs."""
        s = ((x.abs().amax(1).view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)
        scales = self.scales(s)
        inverses = (torch.full_like(scales, self.L) / scales).nan_to_num(posinf=0.0)  # L / scales is rounded twice
        levels = (x.abs() * inverses + 0.5).clamp(max=self.L).floor()
        return s, (levels * x.sign()).to(torch.int8)

    def dequantize(self, s: Int16[Tensor, "b"], levels: Int8[Tensor, "b B"]) -> Blocks:
        return self.scales(s) / self.L * levels

    def scales(self, s: Int16[Tensor, "b"]) -> Float32[Tensor, "b 1"]:
        return (s.int() << 16).view(torch.float32)[:, None]

    def blocks(self, bucket: Bucket, vector: Float32[Tensor, "n"], N: int) -> Blocks:
        """The blocks of all tensors, and blocks of zeros to a multiple of N."""
        B = self.block
        parts = [
            torch.nn.functional.pad(part, (0, -len(part) % B)).view(-1, B) for part in parts_of(bucket, vector)
        ]
        whole = torch.cat(parts)
        return torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % N))

    def elements(self, bucket: Bucket, blocks: Blocks) -> Float32[Tensor, "n"]:
        """The inverse of `blocks`."""
        counts = [-(-s.numel // self.block) for s in bucket.segments]
        parts = blocks[: sum(counts)].split(counts)
        return torch.cat([part.view(-1)[: s.numel] for part, s in zip(parts, bucket.segments, strict=True)])


class SixteenBits(ErrorFeedback):
    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank)

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        (g, bad), N = gradient_of(bucket), state.size
        halves = torch.nn.functional.pad(g, (0, -len(g) % N)).bfloat16().view(torch.int16)
        parts, flags = yield AllToAll(halves, (len(halves) // N,) * N), AllGather(bad)
        z = torch.zeros(len(halves) // N, dtype=torch.float32, device=g.device)
        for part in parts:
            z += part.view(torch.bfloat16)
        (sums,) = yield (AllGather(z.bfloat16().view(torch.int16)),)
        mean = torch.cat(list(sums)).view(torch.bfloat16).float()[: len(g)] / N
        new = state.next()
        return Reduced(result_of(bucket, mean, flags), new, dropped=new)
