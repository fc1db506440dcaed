"""Compiles every Triton kernel, with the arguments its operation gives it, for a GPU that need not be there.

`python compile_triton.py cuda:90 bfloat16` prints for each kernel the registers of a thread, the bytes of shared
memory and the bytes or registers that spill, the most of its variants. An FMA where the meaning has a product and
a sum is an error.
"""

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dgc.kernels.codes import seed_word
from dgc.kernels.codes.blocks import BlockCode
from dgc.kernels.codes.elements import ElementCode, Form, Scale
from dgc.kernels.codes.halves import HalfCode
from dgc.kernels.codes.triton import TritonQuantizers
from dgc.kernels.codes.triton_blocks import TritonBlocks
from dgc.kernels.codes.triton_elements import TritonElementCoder
from dgc.kernels.codes.triton_halves import TritonHalves
from dgc.kernels.launch import MOST_READ, WARPS, Launcher, Recorder, recording
from dgc.kernels.lowrank import Batch, Cast, SentUpdate
from dgc.kernels.lowrank.triton import TritonLowRank
from dgc.kernels.payload import Terms
from dgc.kernels.payload.triton import TritonCodec, TritonMeanDecoder
from dgc.kernels.selection import Budget, PassInputs, SparseVector
from dgc.kernels.selection import triton as backend
from dgc.sparse import payloads as formats
from dgc.sparse.payloads.payload import PayloadPlan

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
NUMBERS = {int: "i32", float: "fp32"}
SUMS_OF_PRODUCTS = (
    "accumulate decay subtract_at uniform_encode uniform_add mean_of_fields merge write_plain write_coded add_up "
    "encode measure mean_of_payloads encode_blocks add_blocks decode_blocks".split()
)


class Compile:
    """In the place of a `Launcher`."""

    def __init__(self, target: Any) -> None:
        backend, arch = target.split(":")
        self.target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
        self.done: set[Any] = set()
        self.most: dict[str, tuple[int, ...]] = {}

    def __call__(self, kernel: Any, near: Any, programs: Any, *arguments: Any) -> None:
        signature, constants, aligned = {}, {}, {}
        for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
            one = type(value) is int and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or one:
                signature[parameter.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
                if value.data_ptr() % 16 == 0:
                    aligned[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = NUMBERS[type(value)]
        name = kernel.fn.__name__
        variant = (name, *signature.values(), *map(str, constants.values()), *aligned)
        if variant in self.done:
            return
        self.done.add(variant)
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=self.target, options=options)
        used = self.resources(compiled)
        self.most[name] = tuple(map(max, zip(used, self.most.get(name, used), strict=True)))
        assert ".ftz" not in str(compiled.asm.get("ptx")), f"{name} takes denormals for zero"
        if name == "accumulate":
            assembly = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
            wide = re.search(r"ld\.global\S*\.(v4\.b32|v2\.b64)|load_dwordx4", assembly)
            assert wide, f"{name} does not load 128 bits at a time"
        # AMD divides with FMAs, which cannot be told apart: `accumulate` does where it predicts lower bounds
        predicts = name == "accumulate" and signature["last"] != "constexpr"
        dividing = "merge mean_of_fields add_up write_coded measure encode mean_of_payloads".split()
        divides = predicts or name in dividing or name.endswith("_blocks")
        if name in SUMS_OF_PRODUCTS and not (divides and self.target.backend == "hip"):
            assembly = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
            # AMD's fma_mix also stands for a product alone whose operands or result are fp16
            contracted = re.search("fma(?!_mix)|fmac", assembly)
            assert not contracted, f"{name} contracts a product and a sum into one rounding"

    def resources(self, compiled: Any) -> tuple[int, int, int]:
        """Registers of a thread, bytes of shared memory, and what spills."""
        if self.target.backend == "hip":
            found = {key: int(n) for key, n in re.findall(r"\.(\w+):\s+(\d+)", compiled.asm["amdgcn"])}
            spilled = found["vgpr_spill_count"] + found["sgpr_spill_count"]
            return found["vgpr_count"], compiled.metadata.shared, spilled
        from triton.backends.nvidia.compiler import get_ptxas

        ptx = compiled.asm["ptx"]
        with tempfile.TemporaryDirectory() as folder:
            file, gpu = Path(folder, "kernel.ptx"), re.findall(r"\.target (\w+)", ptx)[0]
            file.write_text(ptx)
            command = [get_ptxas(self.target.arch).path, "-v", "--gpu-name", gpu, "-o", f"{file}.o", str(file)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes (?:spill|stack)", said))
        return int(re.findall(r"Used (\d+) registers", said)[0]), compiled.metadata.shared, spilled


def every_operation(kernels: Any, dtypes: Any) -> None:
    n, capacity = 6000, 50
    bounds = torch.tensor([0, 2500, n])
    budget, lower_bounds = Budget(bounds, torch.tensor([20, 30]), capacity), torch.ones(2)
    u, v, x = torch.zeros(n), torch.zeros(n), torch.zeros(capacity)
    part = SparseVector(x.int(), x, torch.tensor(capacity, dtype=torch.int32))
    for dtype in dtypes:
        p = torch.zeros(n, dtype=dtype)
        kernels.accumulate_(PassInputs((p,), None, v))
        kernels.assign_((p,), v)
        kernels.accumulate_(PassInputs((p,), u, v, 0.9, True))
        kernels.accumulate_and_select_(PassInputs((p,), u, v, 0.9), budget, lower_bounds)
        kernels.decay_(p, p, 0.1, 0.1, 0.9, True)
        kernels.subtract_at_([p[:2500], p[2500:]], bounds, x.long(), x, [0.1, 0.1])
    kernels.select(v, budget)
    kernels.moments(v, bounds)
    kernels.tail(v, bounds, lower_bounds)
    for own_u in (u, None):
        kernels.remove_sent_(part, own_u, v)
    kernels.merge_mean([part, part], 2, n)


def every_quantizer(quantizers: Any) -> None:
    n, bounds, each = 6000, torch.tensor([0, 2500, 6000]), torch.ones(2)
    v = torch.zeros(n)
    quantizers.largest(v, bounds)
    quantizers.sign_encode(v, bounds, each, each, False)
    codes, _ = quantizers.sign_encode(v, bounds, each, each)
    quantizers.sign_add_(codes, bounds, each, v)
    quantizers.tern_add_(quantizers.tern_encode(v, bounds, each)[0], bounds, each, v)
    for seed in (None, 2**32 - 1):
        for bits in (2, 4, 8):
            codes, _ = quantizers.uniform_encode(v, bounds, each, 2 ** (bits - 1) - 1, bits, seed)
            quantizers.uniform_add_(codes, bounds, each, 2 ** (bits - 1) - 1, bits, v)
    quantizers.sign_mean_([codes] * 2, bounds, [each] * 2, each, 2, v)
    quantizers.tern_mean_([codes] * 2, bounds, [each] * 2, None, 2, v)
    for bits in (1, 3, 8):
        quantizers.pack(codes[:n], bits)


def every_payload(codec: Any, decoder: Any) -> None:
    n, capacity = 6000, 50
    bounds, first = torch.tensor([0, 2500, n]), torch.tensor(n)
    x, count = torch.zeros(capacity), torch.tensor(capacity, dtype=torch.int32)
    values: list[formats.ValueFormat] = [*map(formats.CastValues, ("fp32", "fp16", "bf16")), formats.SignValues()]
    for form in (*values, formats.Int8Values(), formats.TwoBitValues()):
        plain = map(formats.PlainIndices, ("int32", "int64"))
        coded = formats.PackedIndices(), formats.RiceIndices()
        for indices in (*plain, *coded, formats.ChunkIndices()):
            budget = Budget(bounds, torch.tensor([20, 30]), capacity)
            plan = PayloadPlan(formats.SparseFormat(form, indices), budget, n)
            payload = plan.encode(codec, SparseVector(x.int(), x, count), first).payload
            codec.words_of([payload])
            for most in (MOST_READ, 0):  # for one program, and in parts
                with patch("dgc.kernels.payload.triton.MOST_READ", most):
                    decoder.mean_into_(torch.zeros(n), [payload] * 2, plan.layout, bounds, 2)
    codec.seal_rows_(payload.view(1, -1), count, first, bounds, torch.ones(()), Terms(1.0, 0))


def every_code(coder: Any, dtypes: Any) -> None:
    n, bounds, each = 6000, torch.tensor([0, 2500, 6000]), torch.ones(2)
    v, terms = torch.zeros(n), Terms(1.0, 0)
    for scale in Scale:
        coder.measure_(ElementCode(Form.SIGNS, scale, bounds, 1), (v,), v, True)
    codes = [ElementCode(Form.CUTS, Scale.NONE, bounds, 1)]
    codes += [ElementCode(Form.LEVELS, Scale.LARGEST, bounds, bits, random=bits < 8) for bits in (2, 4, 8)]
    signs = ElementCode(Form.SIGNS, Scale.MEAN, bounds, 1)
    majority = ElementCode(Form.SIGNS, Scale.NONZERO, bounds, 1, momentum=0.9, majority=True)
    for code in (signs, majority, ElementCode(Form.TERNARY, Scale.NONE, bounds, 2), *codes):
        for keep in (False, True):
            measured = coder.measure_(code, (v,), v, keep)
            seed = 2**32 - 1 if code.random else None
            payload, _ = coder.encode(code, v, measured, None, seed, keep, bounds, terms)
            if seed is not None:  # also on the device
                with recording(Recorder(1, v.device)) as recorder:
                    recorder.begin([seed_word(seed)])
                    coder.encode(code, v, measured, None, seed, keep, bounds, terms)
        coder.mean_into_(v, code, [payload] * 2, each if code.form == Form.TERNARY else None)
    for dtype in dtypes:
        p = torch.zeros(n, dtype=dtype)
        coder.measure_(signs, (p,), v, True)
        coder.mean_into_(p, signs, [payload] * 2, None)


def every_block(blocks: Any) -> None:
    v, bounds = torch.zeros(6000), torch.tensor([0, 2500, 6000])
    for bits, size, rotate in ((8, 256, False), (4, 128, False), (8, 64, True), (4, 128, True)):
        code = BlockCode(bits, size, rotate)
        each = code.blocks(bounds)
        rows = torch.zeros(2, code.row_bytes(each), dtype=torch.uint8)
        for keep in (False, True):
            blocks.encode_(v, bounds, code, rows[:1], keep)
        blocks.add_sum_(rows.unbind(), code, torch.zeros(each * size))
        blocks.decode(rows[:1].unbind(), bounds, code, 2, (v,))


def every_half(halves: Any) -> None:
    v, bounds, rows = torch.zeros(6000), torch.tensor([0, 6000]), torch.zeros(2, 12000, dtype=torch.uint8)
    for keep, random in product((False, True), (False, True)):
        halves.encode_(v, bounds, HalfCode(random=random), rows[:1], keep)
    halves.add_sum_(rows.unbind(), HalfCode(), v)
    halves.decode(rows[:1].unbind(), bounds, HalfCode(), 2, (v,))


def every_product(products: Any, dtypes: Any, lengths: Any) -> None:
    shapes = [Batch((0, 1), 0, 2, 70, 90, 2, 2 * 70 * 90), Batch((2,), 12600, 1, 65, 9, 2, 585)]
    v = torch.zeros(12600 + 585 + 30)
    P, Q = ([torch.zeros(b.factor_shape(side)) for b in shapes] for side in "PQ")
    last = SentUpdate(list(zip(P, Q, strict=True)), torch.zeros(30))
    sent, casts = [None, SentUpdate(last.products), last], [Cast(torch.float16, 1e4, 1e4)]
    casts += [Cast(torch.float32, None, limit) for limit in (None, 1e4)]
    for dtype in dtypes:
        flat = v.to(dtype)
        parts = flat.split([6300, 6300, 585, 30])
        for cast, even, update in product(casts, (True, False), sent):
            products.begin_(v, shapes, update, parts, P if even else Q, even, cast)
        products.outer(last.products, [parts[:2], parts[2:3]], v[:30], parts[3:], torch.zeros(1).int())
    for even, given in product((True, False), (last.products, [])):
        products.project(v, shapes, given, P if even else Q, even, Cast(torch.float32, None, None))
    products.remove_(v, shapes, last)
    for rank, length in product((1, 2, 4, 32), lengths):
        products.orthonormal([torch.zeros(1, rank, length)], False, 1e-8, 2**32 - 1)
        with recording(Recorder(1, v.device)) as recorder:
            recorder.begin([5])
            products.orthonormal([torch.zeros(1, rank, length)], False, 1e-8, 5)


def everything(dtypes: Any, lengths: Any = (50, 20000)) -> None:
    """lengths: of the rows that become a basis."""
    kernels = backend.TritonSelection()
    every_operation(kernels, dtypes)
    every_quantizer(TritonQuantizers())
    every_payload(TritonCodec(), TritonMeanDecoder())
    every_code(TritonElementCoder(), dtypes)
    every_block(TritonBlocks())
    every_half(TritonHalves())
    every_product(TritonLowRank(kernels), dtypes, lengths)


if __name__ == "__main__":
    # nothing runs, so neither GPU nor interpreter is needed
    backend.INTERPRETED = True
    launch = Compile(sys.argv[1])
    with patch.object(Launcher, "__call__", lambda launcher, *arguments: launch(*arguments)):
        everything([getattr(torch, name) for name in sys.argv[2:]])
    for name, numbers in sorted(launch.most.items()):
        print(name, *numbers)
