"""Laws of the Triton backend on a real device: tests/kernels/test_triton.py, and bitwise results of whole steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.gpu_steps import FORMATS, Codec, Whole, random_gradients
from benchmarks.stand_ins import cases, load_tests
from dgc.compression import DGCCompressor, PowerSGDCompressor
from dgc.compression.protocol import Compressor, SparseResult
from dgc.memory import DGCSGDMemory
from dgc.wire import SparseFormat

TESTS = Path(__file__).parents[1] / "tests" / "kernels" / "test_triton.py"
LEFT_OUT = {
    "test_every_kernel_compiles_for_gpus": "compiles for other GPUs than this one",
    "test_importing_dgc_does_not_import_triton": "says nothing of the device",
}
SHAPES = [(64, 300), (40, 33), (500,), (64, 300)]
STEPS = 4
CPU = torch.device("cpu")


def laws(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    yield from cases(load_tests(TESTS), LEFT_OUT)
    for name, form in FORMATS.items():
        yield f"payload of {name} has the CPU's bits", lambda form=form: payloads_are_alike(form, device)  # type: ignore[misc]
    methods: dict[str, Callable[[], Compressor]] = {
        "DGC": lambda: DGCCompressor(0.02, DGCSGDMemory(0.9)),
        "PowerSGD": lambda: PowerSGDCompressor(2, 0),
    }
    for name, make in methods.items():
        yield f"{name} repeats bit for bit", lambda make=make: repeats(make, device)  # type: ignore[misc]
    yield "DGC on the GPU has the CPU's bits", lambda: dgc_is_alike(device)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Use the reference backend instead of Triton's."""
    kernels.use("reference")
    try:
        yield
    finally:
        kernels.use("triton")


def payloads_are_alike(form: SparseFormat, device: torch.device) -> None:
    here = Codec(form, 20_000, 0.02, device, ranks=3)
    with plain_torch():
        there = Codec(form, 20_000, 0.02, CPU, ranks=3)
    for ours, theirs in zip(here.payloads, there.payloads, strict=True):
        assert torch.equal(ours.cpu(), theirs), "the payloads differ"
    for mine, expected in zip(here.parts, there.parts, strict=True):
        assert torch.equal(mine.indices.cpu(), expected.indices) and same_bits(mine.values, expected.values)


def repeats(make: Callable[[], Compressor], device: torch.device) -> None:
    for first, again in zip(results(make(), device), results(make(), device), strict=True):
        assert same_bits(first, again), "a second run gives other bits"


def dgc_is_alike(device: torch.device) -> None:
    def make() -> Compressor:
        return DGCCompressor(0.02, DGCSGDMemory(0.9))

    with plain_torch():
        expected = results(make(), CPU)
    for ours, theirs in zip(results(make(), device), expected, strict=True):
        assert same_bits(ours, theirs), "the CPU gives other bits"


def results(compressor: Compressor, device: torch.device) -> list[Tensor]:
    """Return the results of some steps, and the residual after them."""
    whole, found = Whole("", compressor, [SHAPES], device), []
    for step in range(STEPS):
        given = random_gradients([SHAPES], step, device)
        for result, bucket in zip(whole.step(given), whole.buckets, strict=True):
            assert result.nonfinite is None, result.nonfinite
            if isinstance(result, SparseResult):
                found += [result.indices, result.values]
            else:
                found.append(bucket.flat.clone())
    return [*found, *whole.states.errors()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
