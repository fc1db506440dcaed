"""Launches without Triton's examination of their arguments: a kept kernel is the one that Triton would choose.

No GPU is needed: a stand-in takes the place of what Triton compiles.
"""

from itertools import combinations
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernels.interpreter import ORDERS, run_programs
from kernels.interpreter import interpreter as interpreter
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks._gpu_steps import MOST_CALLS, host_costs
from dgc.kernels import launch
from dgc.kernels.launch import Launcher
from dgc.kernels.selection import triton as selection

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
BYTES = torch.zeros(4096, dtype=torch.uint8)


def tensor(offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """It begins this many elements after a multiple of 64 bytes."""
    start = -BYTES.data_ptr() % 64
    return BYTES[start : start + 512].view(dtype)[offset:]


def arguments(**changes: Any) -> tuple[Any, ...]:
    """Of `decay`, whose size is specialized."""
    given = {"p": tensor(), "buffer": tensor(16), "n": 48, "settings": tensor(0, torch.float64)}
    given |= {"NESTEROV": True, "P": "fp32", "WIDE": "fp32", "BLOCK": 1024, **changes}
    return tuple(given.values())


def compiled_for(kernel: Any) -> Any:
    """The kernel as Triton compiles it, although its interpreter is on."""
    return JITFunction(kernel.fn, **{key: kernel.kwargs.get(key) for key in ("do_not_specialize",)})


DECAY = compiled_for(selection.decay)
TAKE = compiled_for(selection.take)
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "another aligned place": {"p": tensor(64)},
    "a place that is not aligned": {"p": tensor(1)},
    "another place that is not aligned": {"buffer": tensor(3)},
    "both": {"p": tensor(1), "buffer": tensor(1)},
    "another dtype": {"p": tensor(0, torch.float16)},
    "no tensor": {"buffer": None},
    "the size 1": {"n": 1},
    "an odd size": {"n": 49},
    "another odd size": {"n": 51},
    "another multiple of 16": {"n": 64},
    "a size of 64 bits": {"n": 2**31},
    "an odd size of 64 bits": {"n": 2**32 - 1},
    "a size of 64 bits without a sign": {"n": 2**63 + 16},
    "a number that is no integer": {"n": 1.0},
    "another constant": {"BLOCK": 2048},
    "a constant of another type": {"NESTEROV": 1},
}


def triton_key(kernel: Any, given: tuple[Any, ...]) -> str:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, _ = bind(*given)
    # the type of a constant counts, too
    return repr(specialization)


def our_key(kernel: Any, given: tuple[Any, ...]) -> Any:
    types = tuple(map(type, given))
    return types, launch._Site(kernel, types).key(given)


@pytest.mark.parametrize(("one", "other"), combinations(CHANGES, 2))
def test_arguments_for_which_triton_compiles_two_kernels_have_two_keys(one: str, other: str) -> None:
    first, second = (arguments(**CHANGES[name]) for name in (one, other))
    if triton_key(DECAY, first) != triton_key(DECAY, second):
        assert our_key(DECAY, first) != our_key(DECAY, second)


@pytest.mark.parametrize("change", ["another aligned place", "another multiple of 16"])
def test_arguments_that_triton_does_not_tell_apart_share_a_kernel(change: str) -> None:
    assert our_key(DECAY, arguments()) == our_key(DECAY, arguments(**CHANGES[change]))
    assert triton_key(DECAY, arguments()) == triton_key(DECAY, arguments(**CHANGES[change]))


@pytest.mark.parametrize(("n_words", "alike"), [(1, True), (32, True), (2**31, False)])
def test_numbers_that_are_not_specialized_share_a_kernel_unless_they_need_64_bits(
    n_words: int, alike: bool
) -> None:
    def given(n_words: int) -> tuple[Any, ...]:
        return (*[tensor()] * 6, n_words, 7, True, True, 1024)

    assert (our_key(TAKE, given(17)) == our_key(TAKE, given(n_words))) == alike
    assert (triton_key(TAKE, given(17)) == triton_key(TAKE, given(n_words))) == alike


class Kernel:
    """A stand-in. It notes how it was launched: by Triton, or as a kernel that was kept."""

    params = DECAY.params

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def by_triton(*arguments: Any, **options: Any) -> Any:
            assert options == {"num_warps": launch.WARPS, "enable_fp_fusion": False}
            self.launched.append(("by Triton", grid[0], arguments))
            return self

        return by_triton

    function, packed_metadata = "function", "metadata"

    def run(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        assert (y, z, stream, function, metadata) == (1, 1, 77, "function", "metadata")
        assert rest[:3] == (None, None, None)  # data for hooks, and the hooks
        self.launched.append(("kept", x, rest[3:]))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setattr(launch, "_raw_stream", lambda device: 77)
    return Launcher(False)


def test_the_second_launch_of_a_key_uses_the_kernel_of_the_first(launcher: Launcher) -> None:
    kernel, given, moved = Kernel(), arguments(), arguments(**CHANGES["a place that is not aligned"])
    for programs, each in ((3, given), (5, given), (4, moved), (6, moved), (7, given)):
        launcher.launch_on(0, kernel, programs, each)
    hows = [(how, programs) for how, programs, _ in kernel.launched]
    assert hows == [("by Triton", 3), ("kept", 5), ("by Triton", 4), ("kept", 6), ("kept", 7)]
    for (_, _, found), expected in zip(kernel.launched, (given, given, moved, moved, given), strict=True):
        assert all(x is y for x, y in zip(found, expected, strict=True))


def test_a_kept_kernel_belongs_to_its_device(launcher: Launcher) -> None:
    kernel = Kernel()
    for device in (0, 1, 0, 1):
        launcher.launch_on(device, kernel, 1, arguments())
    assert [how for how, _, _ in kernel.launched] == ["by Triton"] * 2 + ["kept"] * 2


@pytest.mark.parametrize("name", MOST_CALLS)
def test_the_payload_of_four_buckets_takes_no_more_calls_than_planned(name: str) -> None:
    """Of Python and C, with launches replaced by nothing: times would depend on the machine."""
    assert 0 < host_costs([name], repeats=1)[name]["calls"] <= MOST_CALLS[name]


def record(order: Any, count: Any) -> None:
    tl.store(order + tl.atomic_add(count, 1), tl.program_id(0))


@pytest.mark.parametrize("order", ORDERS)
def test_the_interpreter_runs_programs_in_the_order_that_a_test_asks_for(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_programs(order, monkeypatch)
    found, count = torch.zeros(2, 5, dtype=torch.int32)
    triton.jit(record)[(5,)](found, count)
    assert found.tolist() == [*ORDERS[order](5)]
