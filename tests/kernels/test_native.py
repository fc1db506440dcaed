"""What is particular to native kernels: threads and instruction sets, building, and which tensors they refuse."""

import platform
import struct
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from ctypes import ArgumentError, string_at
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import case
from environment import patient
from kernels.comparison import REFERENCE, Pass, assert_same_choice, budget_of, random
from warm import python

from dgc.kernels import _backend, build, library
from dgc.kernels.codes.native import NativeQuantizers
from dgc.kernels.library import Address, Addresses, KernelsUnavailable, supported_isas
from dgc.kernels.lowrank.native import NativeLowRank
from dgc.kernels.payload import IndexCode, IndexKind
from dgc.kernels.payload.native import NativeCodec
from dgc.kernels.selection import TOO_LARGE, Budget, PassInputs, SparseVector
from dgc.kernels.selection.native import NativeSelection

ISAS = supported_isas()


def given(sizes: Any, ks: Any, bad: float = 0.0, *where: int) -> Pass:
    n = sum(sizes)
    g = random(n, 1).index_fill(0, torch.tensor(where, dtype=torch.int64), bad)
    return Pass(PassInputs((g,), random(n, 2), random(n, 3), 0.9), budget_of(sizes, ks))


@cache
def large() -> Any:
    """Several units of a segment end up in different threads."""
    return given((300_001, 5, 0, 400_000, 17, 299_980), (300, 5, 0, 4000, 0, 1))


@cache
def tiny() -> Any:
    sizes = [i % 40 for i in range(1000)]
    return given(sizes, [min(size, i % 5) for i, size in enumerate(sizes)])


@cache
def spoiled(n: Any, lane: Any, bad: Any) -> Any:
    """And without momentum."""
    one = given((n // 2, n - n // 2), (min(3, n // 2), min(5, n - n // 2)), bad, lane, n - 1)
    return one, Pass(PassInputs(one.start.g, None, one.start.v))


def test_lower_bounds_tell_only_how_many_segments_were_missed(native: Any) -> None:
    """Nothing else may depend on them."""
    thresholds = large().expected.thresholds
    nonsense = [torch.full_like(thresholds, x) for x in (float("inf"), float("nan"), -1.0, 0.0)]
    # of the six segments one is empty and one sends nothing: no lower bound is too high or too low for these
    rows = [(0, lower_bounds) for lower_bounds in (None, thresholds * 0.98, *nonsense)]
    for missed, lower_bounds in (*rows, (4, thresholds + 1e-3), (3, torch.full_like(thresholds, 1e-30))):
        assert int(large().check(native, lower_bounds).missed) == missed, lower_bounds


def test_lower_bounds_of_many_tiny_segments_change_no_choice(native: Any) -> None:
    for lower_bounds in (None, tiny().expected.thresholds * 0.9, tiny().expected.thresholds * 1.1):
        tiny().check(native, lower_bounds)


def test_a_selection_is_the_reference_s_whatever_the_structure_of_the_values(native: Any) -> None:
    for number, (v, budget, expected) in enumerate(buffers()):
        with case("buffer", number):
            assert_same_choice(native.select(v, budget), expected)


@cache
def buffers() -> Any:
    """(v, its plan, the reference's choice)."""
    made = []
    # A sample tells of a level, but far more elements share it than candidates fit: magnitudes are counted.
    for count in (1, 2, 3):
        v = (torch.arange(50_001) * 7919 % count + 1.0) * (1 - 2 * (torch.arange(50_001) % 2)) * 0.37
        some = v.clone()
        some[::3] = 0
        some[1::97] = -0.0
        made += [(each, budget_of((20_000, 30_001), (20, 300))) for each in (v, some)]
    # Equal upper halves of the bits: nearly all elements pass a sample's lower bound.
    low = torch.randint(0, 1 << 16, (60_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    v = (low | 0x3F800000).view(torch.float32)
    v[:30_000] = v[:30_000].mean()
    made.append((v, budget_of((60_000,), (6000,))))
    # What counts lies in one place, which misleads a sample.
    v = random(200_000, 5) * 1e-3
    v[123_456:123_656] = random(200, 6)
    made.append((v, budget_of((200_000,), (200,))))
    made += [(random(50_003, 10), budget_of((50_003,), (k,))) for k in (0, 50_003)]
    # Fewer that are not zero than asked for.
    v = torch.zeros(300_000)
    v[[3, 77_000, 140_000, 299_999]] = torch.tensor([1.0, -1e-45, 3e38, 0.5])
    made.append((v, budget_of([100_000] * 3, (1000, 1000, 1))))
    # Chunks, where maxima of groups give a lower bound: normal numbers, large ones in few groups, ties, and fewer
    # numbers than are asked for.
    chunks = budget_of((4096, 4095, 32_768, 32_769, 300, 5000, 7), (64, 257, 256, 256, 200, 0, 7))
    v = random(int(chunks.bounds[-1]), 11)
    some = torch.arange(v.numel()) % 256 < 3
    others = v.where(some, v * 1e-3), v.round(), v * some * 1e-40, v.where(v > 3, 0.0)
    made += [(each, chunks) for each in (v, *others)]
    return [(v, budget, REFERENCE.select(v, budget)) for v, budget in made]


@pytest.mark.usefixtures("no_type_checks")
def test_a_nonfinite_element_in_any_lane_counts_as_zero(native: Any) -> None:
    others = (float("inf"), -float("inf"), TOO_LARGE, -3e38)
    for n, lane in [*((70, lane) for lane in range(70)), (1, 0), (16, 0), (33, 31), (5000, 1), (5000, 2500)]:
        for bad in (float("nan"), others[lane % 4]):
            one, without_u = spoiled(n, lane, bad)
            with case(bad, "in lane", lane, "of", n):
                assert int(one.expected.first_nonfinite) == lane and one.left.v.isfinite().all()
                one.check(native, one.expected.thresholds * 0.9)
                assert int(native.accumulate_(one.inputs())) == int(without_u.check(native)) == lane


def test_the_first_nonfinite_element_is_found_whichever_thread_comes_first(native: Any) -> None:
    g = torch.zeros(1_000_003)
    g[[200_000, 500_000, 999_999]] = float("nan")
    assert int(native.accumulate_(PassInputs((g,), None, torch.zeros_like(g)))) == 200_000


def test_several_python_threads_at_once(native: Any) -> None:
    budget = budget_of((100_000, 60_000), (100, 6000))
    states = [random(160_000, 20 + i) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda v: [native.select(v, budget) for _ in range(5)], states))
    for v, choices in zip(states, found, strict=True):
        expected = REFERENCE.select(v, budget)
        for chosen in choices:
            assert_same_choice(chosen, expected)


FORKS = """
import os, torch
torch.set_num_threads(3)
from dgc.kernels.selection.native import NativeSelection
from dgc.kernels.selection import Budget
native, v = NativeSelection(), torch.randn(400_000)
budget = Budget(torch.tensor([0, 400_000]), torch.tensor([400]), 400)
before = native.select(v, budget).elements.indices
child = os.fork()
same = torch.equal(native.select(v, budget).elements.indices, before)
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
print("done")
"""


def test_a_child_of_fork_has_threads_of_its_own() -> None:
    """In a fresh process, since the parent's pool must have been used and nothing of this one's be in the way."""
    done = subprocess.run([python(), "-c", FORKS], capture_output=True, text=True, timeout=patient(100))
    assert done.stdout == "done\n", done.stderr


def test_the_environment_names_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the CPU lacks are refused."""
    assert NativeSelection().isa == ISAS[-1]
    for isa in ISAS:
        monkeypatch.setenv("DGC_KERNELS_ISA", isa)
        assert NativeSelection().isa == isa and isa in str(NativeSelection())
    monkeypatch.setenv("DGC_KERNELS_ISA", "mmx")
    with pytest.raises(KernelsUnavailable, match="DGC_KERNELS_ISA=mmx: expected portable, avx2 or avx512"):
        NativeSelection()
    monkeypatch.setenv("DGC_KERNELS_ISA", "avx512")
    limited = library._open().dgc_limit_isa
    limited(0)
    try:
        assert supported_isas() == ("portable",)
        with pytest.raises(KernelsUnavailable, match="this CPU has only portable"):
            NativeSelection()
    finally:
        limited(2)


def test_a_library_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(build, "sources_digest", lambda: "0" * 20)
        with pytest.raises(KernelsUnavailable, match=r"from other sources: install a wheel.* or run `"):
            library._open.__wrapped__()
    missing = tmp_path / "libdgc_kernels.so"
    monkeypatch.setattr(build, "LIBRARY", missing)
    with pytest.raises(KernelsUnavailable, match=r"not built: install a wheel.*, or run `"):
        library._open.__wrapped__()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match=r"install a C\+\+ compiler .* or set CXX, then run `"):
        library._open.__wrapped__()
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler: no-such-compiler was not found"):
        build.build()
    missing.write_bytes(100 * b"nothing of the kind")
    with pytest.raises(KernelsUnavailable, match="do not load"):
        library._open.__wrapped__()


@pytest.fixture
def whole_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """A small library that was just built, and that must not be opened."""
    (tmp_path / "isa.cpp").write_text('extern "C" const char* stamp() { return DGC_STAMP; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "lib.so")
    assert build.build() and build.is_whole(build.LIBRARY)
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=AssertionError("opened")))
    return build.LIBRARY.read_bytes()


def test_a_library_that_is_cut_off_is_refused_before_it_is_opened(whole_library: bytes) -> None:
    for length in (0, 10, 64, 200, len(whole_library) // 2):
        build.LIBRARY.write_bytes(whole_library[:length])
        with pytest.raises(KernelsUnavailable, match=r"do not load \(.*lib\.so is cut off\): install a wheel"):
            library._open.__wrapped__()


def test_a_library_that_is_cut_off_is_built_anew(whole_library: bytes) -> None:
    build.LIBRARY.write_bytes(whole_library[: len(whole_library) // 2])
    assert build.build() and build.LIBRARY.read_bytes() == whole_library


def test_kernels_that_are_built_load_whatever_cxx_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'open")
    assert library._open.__wrapped__().dgc_best_isa() >= 0


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("false", "false --version ended with status 1"),
        ("g++ 'open", r"CXX is \"g\+\+ 'open\", which is no command: No closing quotation"),
        ("/", "the C\\+\\+ compiler / cannot be started: Permission denied"),
    ],
)
def test_a_compiler_that_does_not_work_is_one_message(
    compiler: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit, match=f"^the native kernels could not be built: {message}"):
        build.main()


def test_a_folder_that_cannot_be_written_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "lib.so")
    monkeypatch.setattr(
        "tempfile.mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied", str(tmp_path)))
    )
    with pytest.raises(
        SystemExit, match=f"^the native kernels could not be built: {tmp_path}: Permission denied$"
    ):
        build.main()


def test_one_rank_of_a_machine_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libdgc_kernels.so")
    monkeypatch.setattr(library, "_open", library._open.__wrapped__)
    for rank, warned in ((None, 1), ("0", 1), ("1", 0)):
        if rank is not None:
            for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
                monkeypatch.setenv(name, rank)
            monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            backend = _backend.__wrapped__("auto", torch.device("cpu"))
        assert len(said) == warned and backend.decoder is None, rank


def test_a_build_does_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Again it does nothing, and where it fails it leaves the library alone. The command prints no error."""
    done = subprocess.run([sys.executable, "-m", "dgc.kernels.build"], capture_output=True, text=True, check=True)
    assert not done.stderr
    (tmp_path / "isa.cpp").write_text('extern "C" const char* stamp() { return DGC_STAMP; }')
    (tmp_path / "x.h").touch()
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "lib.so")
    assert build.build() and not build.build()
    (tmp_path / "x.h").write_text("// changed")
    assert build.build() and not build.build()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["isa.cpp", "lib.so", "x.h"]
    built = (tmp_path / "lib.so").read_bytes()
    (tmp_path / "broken.cpp").write_text("no C++")
    with pytest.raises(RuntimeError, match=r"broken\.cpp"):
        build.build()
    assert (tmp_path / "lib.so").read_bytes() == built


@pytest.mark.proof
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="its files are for x86-64")
def test_no_file_lends_its_instructions_to_others(tmp_path: Path) -> None:
    """What a file of one instruction set exports is its table; every function in it is its own."""
    for source in sorted(build.SOURCES.rglob("*_avx*.cpp")):
        target = tmp_path / (source.stem + ".o")
        words = [*build.compiler(), *build.flags_of(source), *build.include_flags()]
        subprocess.run([*words, "-c", str(source), "-o", str(target)], check=True, timeout=patient(100))
        symbols = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True).stdout
        functions = [line for line in symbols.splitlines() if line.split()[-2:-1] != ["U"] and " W " in line]
        assert functions == [], f"{source.name} has functions that the linker may pick for others"
        dump = subprocess.run(["objdump", "-d", str(target)], check=True, capture_output=True, text=True).stdout
        assert "fmadd" not in dump and "fmsub" not in dump


def test_addresses_are_taken_in_few_places_alone() -> None:
    root = Path(build.__file__).parent
    found = {str(path.relative_to(root)): path.read_text().count("data_ptr") for path in root.rglob("*.py")}
    expected = {"library.py": 2, "launch.py": 3, "lowrank/triton.py": 1}
    assert {name: count for name, count in found.items() if count} == expected


X, ONE, SEVERAL = torch.arange(12.0).view(3, 4), Address(torch.float32), Addresses(torch.float32)


def test_an_address_is_where_a_tensor_begins() -> None:
    assert string_at(ONE.from_param(X), 8) == struct.pack("ff", 0, 1)
    assert string_at(ONE.from_param(X[1]), 8) == struct.pack("ff", 4, 5)
    assert SEVERAL.from_param([X, X[2]]) == b"".join(t.data_ptr().to_bytes(8, "little") for t in (X, X[2]))


def test_no_tensor_has_the_address_none() -> None:
    assert ONE.from_param(None) is None and SEVERAL.from_param(None) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (X.double(), r"torch.float32 tensor on cpu, not a contiguous torch.float64 tensor of shape \(3, 4\)"),
        (X.T, r"not a non-contiguous \(stride \(1, 4\)\) torch.float32 tensor of shape \(4, 3\) on cpu"),
        (X.to("meta"), "on cpu, not a contiguous torch.float32 tensor .* on meta"),
    ],
    ids=["of another type", "not contiguous", "on another device"],
)
def test_the_address_of_a_tensor_that_a_kernel_cannot_read_is_refused(wrong: torch.Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ONE.from_param(wrong)
    with pytest.raises(TypeError, match=message):
        SEVERAL.from_param([X, wrong])


@pytest.mark.usefixtures("no_type_checks")
def test_kernels_refuse_other_tensors() -> None:
    native, codec, quantizers, n = NativeSelection(), NativeCodec(), NativeQuantizers(), 64
    x, other = torch.ones(n), torch.ones(n, dtype=torch.float64)
    strided, bounds = torch.ones(2 * n)[::2], torch.tensor([0, n])
    budget, short = (Budget(edges, torch.tensor([3]), 3) for edges in (bounds, bounds.int()))
    sent = native.select(x, budget).elements
    doubled = SparseVector(sent.indices, sent.values.double(), sent.count)
    section, code = torch.zeros(64, dtype=torch.uint8), IndexCode(IndexKind.INT32, 3, n, 12)
    M, U, W = torch.ones(2, 4, 8), torch.ones(2, 1, 4), torch.ones(2, 1, 8)
    calls = {
        "v": lambda: native.accumulate_(PassInputs((x,), None, other)),
        "u": lambda: native.accumulate_(PassInputs((x,), other, x)),
        "strided v": lambda: native.accumulate_(PassInputs((x,), None, strided)),
        "strided g": lambda: native.accumulate_(PassInputs((strided,), None, x)),
        "sent": lambda: native.accumulate_(PassInputs((x,), None, x, sent=doubled)),
        "bounds": lambda: native.select(x, short),
        "lower_bounds": lambda: native.select(x, budget, other[:1]),
        "assign": lambda: native.assign_((strided,), x),
        "moments": lambda: native.moments(other, bounds),
        "largest": lambda: quantizers.largest(other, bounds),
        "bounds of segments": lambda: quantizers.largest(x, bounds.int()),
        "tail": lambda: native.tail(x, bounds, other[:1]),
        "take": lambda: native.remove_sent_(doubled, None, x),
        "merge": lambda: native.merge_mean([sent, doubled], 2, n),
        "decay": lambda: native.decay_(x, other, 0.1, 0.1, 0.9, False),
        "values": lambda: codec.cast_encode_(other, torch.float16, section),
        "section": lambda: codec.indices_encode_(sent, code, section.view(torch.int32)),
        "levels": lambda: quantizers.uniform_encode(x, bounds, other[:1], 1, 2, None),
        "total": lambda: quantizers.halves_mean_([section], torch.bfloat16, 1, strided),
        "matrices": lambda: NativeLowRank(native).subtract_(M.mT.contiguous().mT, U, W),
        "factors": lambda: NativeLowRank(native).subtract_(M, U.double(), W),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError, match="a kernel takes a contiguous torch"):
            call()
            pytest.fail(name)
