"""What is particular to native kernels: its segments, threads and instruction sets, its building and loading."""

import os
import platform
import subprocess
import sys
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from environment import patient
from kernels.backends import NAMES, backend
from warm import python

from dgc.kernels import _backend, build, library
from dgc.kernels.library import KernelsUnavailable, supported_isas
from dgc.kernels.native import NativeSelection
from dgc.kernels.selection import TOO_LARGE, Budget, PassInputs, SelectionKernels, TopKResult, as_selection

REFERENCE = SelectionKernels()
ISAS = supported_isas()


@pytest.fixture(params=NAMES[1:])
def native(request: pytest.FixtureRequest) -> Any:
    with backend(request.param) as kernels:
        yield kernels


def random(n: Any, seed: Any) -> Any:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def budget_of(*sizes_and_ks: Any) -> Any:
    sizes, ks = zip(*sizes_and_ks, strict=True)
    return Budget(torch.tensor([0, *sizes]).cumsum(0), torch.tensor(ks), sum(ks))


def bits(tensor: Any) -> Any:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def assert_same(ours: TopKResult, expected: TopKResult) -> None:
    for a, b in (
        (ours.elements.indices, expected.elements.indices),
        (ours.elements.values, expected.elements.values),
        (ours.elements.count, expected.elements.count),
        (ours.thresholds, expected.thresholds),
        (ours.first_nonfinite, expected.first_nonfinite),
    ):
        assert a.dtype == b.dtype and torch.equal(bits(a), bits(b))


class Given:
    """A pass over random numbers and what the reference makes of it, computed once for all backends."""

    def __init__(self, budget: Any, bad: Any = ()) -> None:
        n = int(budget.bounds[-1])
        self.budget, self.g, self.u, self.v = budget, random(n, 1), random(n, 2), random(n, 3)
        for where, what in bad:
            self.g[where] = what
        self.inputs = self.accumulation()
        self.expected = REFERENCE.accumulate_and_select_(self.inputs, budget, None)

    def accumulation(self) -> Any:
        return PassInputs((self.g,), self.u.clone(), self.v.clone(), 0.9)

    def missed(self, native: Any, lower_bounds: Any = None) -> Any:
        """The number of segments missed with these lower bounds. Nothing else may depend on them."""
        ours = self.accumulation()
        chosen = native.accumulate_and_select_(ours, self.budget, lower_bounds)
        assert_same(chosen, self.expected)
        assert torch.equal(bits(ours.u), bits(self.inputs.u)) and torch.equal(bits(ours.v), bits(self.inputs.v))
        return int(chosen.missed)


@cache
def large() -> Any:
    """Several units of a segment end up in different threads."""
    return Given(budget_of((300_001, 300), (5, 5), (0, 0), (400_000, 4000), (17, 0), (299_980, 1)))


@cache
def tiny() -> Any:
    return Given(budget_of(*((i % 40, min(i % 40, i % 5)) for i in range(1000))))


@cache
def spoiled(lane: Any, bad: Any) -> Any:
    return Given(budget_of((34, 3), (36, 5)), [(lane, bad)])


def test_floors_that_fit_and_others(native: Any) -> None:
    given = large()
    thresholds = given.expected.thresholds
    assert given.missed(native) == 0
    assert given.missed(native, thresholds * 0.98) == 0
    # of the six segments one is empty and one sends nothing: no lower bound is too high or too low for these
    assert given.missed(native, thresholds + 1e-3) == 4
    assert given.missed(native, torch.full_like(thresholds, 1e-30)) == 3
    for nonsense in (float("inf"), float("nan"), -1.0, 0.0):
        assert given.missed(native, torch.full_like(thresholds, nonsense)) == 0


@cache
def levels() -> Any:
    """Buffers of one, two and three magnitudes, without zeros and with: each with its plan and its choice."""
    n, budget = 50_001, budget_of((20_000, 20), (30_001, 300))
    buffers = []
    for count in (1, 2, 3):
        v = (torch.arange(n) * 7919 % count + 1.0) * (1 - 2 * (torch.arange(n) % 2)) * 0.37
        some = v.clone()
        some[::3] = 0
        some[1::97] = -0.0
        buffers += [v, some]
    return [(v, budget, REFERENCE.select(v, budget)) for v in buffers]


def test_more_equal_magnitudes_than_any_list_holds(native: Any) -> None:
    """A sample tells of a level, but far more elements share it than candidates fit: magnitudes are counted."""
    for v, budget, expected in levels():
        assert_same(native.select(v, budget), expected)


def test_counting_finds_the_last_bit(native: Any) -> None:
    """Equal upper halves of the bits: nearly all elements pass a sample's lower bound."""
    n = 60_000
    low = torch.randint(0, 1 << 16, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    v = (low | 0x3F800000).view(torch.float32)
    v[: n // 2] = v[: n // 2].mean()
    budget = budget_of((n, 6000))
    assert_same(native.select(v, budget), REFERENCE.select(v, budget))


def test_structure_that_misleads_a_sample(native: Any) -> None:
    """What counts lies in one place."""
    n = 200_000
    v = random(n, 5) * 1e-3
    v[123_456:123_656] = random(200, 6)
    budget = budget_of((n, 200))
    assert_same(native.select(v, budget), REFERENCE.select(v, budget))


def test_fewer_nonzero_than_asked_for(native: Any) -> None:
    v = torch.zeros(300_000)
    v[[3, 77_000, 140_000, 299_999]] = torch.tensor([1.0, -1e-45, 3e38, 0.5])
    budget = budget_of((100_000, 1000), (100_000, 1000), (100_000, 1))
    for _ in range(2):
        chosen = native.select(v, budget)
        assert_same(chosen, REFERENCE.select(v, budget))
        assert chosen.elements.indices[:5].tolist() == [3, 77_000, 140_000, 299_999, 0]
        assert chosen.thresholds.tolist() == [0, 0, 0.5]


def test_many_tiny_ranges(native: Any) -> None:
    given = tiny()
    for lower_bounds in (None, given.expected.thresholds * 0.9, given.expected.thresholds * 1.1):
        given.missed(native, lower_bounds)


def test_all_and_nothing(native: Any) -> None:
    for n in (0, 1, 15, 16, 17, 50_003):
        v = random(n, 10)
        for k in (0, n):
            budget = budget_of((n, k))
            with case(n, k):
                assert_same(native.select(v, budget), REFERENCE.select(v, budget))


@pytest.mark.usefixtures("no_type_checks")
def test_nonfinite_in_every_lane(native: Any) -> None:
    others = (float("inf"), -float("inf"), TOO_LARGE, -3e38)
    for lane in range(70):
        for bad in (float("nan"), others[lane % 4]):
            given = spoiled(lane, bad)
            with case(bad, "in lane", lane):
                assert int(given.expected.first_nonfinite) == lane
                given.missed(native, given.expected.thresholds * 0.9)
                assert int(native.accumulate_(given.accumulation())) == lane
                without_u = [PassInputs((given.g,), None, given.v.clone()) for _ in range(2)]
                assert int(native.accumulate_(without_u[0])) == int(REFERENCE.accumulate_(without_u[1])) == lane
                assert torch.equal(bits(without_u[0].v), bits(without_u[1].v))


def test_nonfinite_far_apart(native: Any) -> None:
    """The first one counts, whichever thread comes first."""
    g = torch.zeros(1_000_003)
    g[[200_000, 500_000, 999_999]] = float("nan")
    assert int(native.accumulate_(PassInputs((g,), None, torch.zeros_like(g)))) == 200_000


def test_pieces_shorter_than_a_vector(native: Any) -> None:
    sizes = [1, 2, 0, 3, 30, 0, 0, 200_000, 7, 100_000, 1, 0]
    whole = random(sum(sizes), 14)
    pieces = tuple(torch.cat([torch.zeros(3), part])[3:] for part in whole.split(sizes))
    budget = budget_of((200_010, 700), (sum(sizes) - 200_010, 50))
    inputs = [PassInputs(g, random(len(whole), 15), random(len(whole), 16), 0.9) for g in (pieces, (whole,))]
    expected = REFERENCE.accumulate_and_select_(inputs[1], budget, None)
    assert_same(native.accumulate_and_select_(inputs[0], budget, None), expected)
    assert inputs[0].u is not None and inputs[1].u is not None
    assert torch.equal(inputs[0].u, inputs[1].u) and torch.equal(inputs[0].v, inputs[1].v)


def test_large_merge_and_subtract(native: Any) -> None:
    """Large enough for every thread to have a share."""
    n, k = 300_000, 40_000
    v = random(n, 17)
    parts = [
        as_selection(torch.randperm(n, generator=torch.Generator().manual_seed(s))[:k].sort().values, v * s, k + s)
        for s in range(1, 4)
    ]
    merged = native.merge_mean(parts, 3, n).valid(), REFERENCE.merge_mean(parts, 3, n).valid()
    assert all(torch.equal(a, b) for a, b in zip(*merged, strict=True))
    bounds = torch.tensor([0, 100, 100, 200_001, n])
    targets = [[random(b - a, 19) for a, b in zip(bounds, bounds[1:], strict=False)] for _ in range(2)]
    for kernels, mine in zip((native, REFERENCE), targets, strict=True):
        kernels.subtract_at_(mine, bounds, *merged[0], (0.1, 0.2, 0.3, 0.4))
    assert all(torch.equal(a, b) for a, b in zip(*targets, strict=True))


def test_several_python_threads_at_once(native: Any) -> None:
    budget = budget_of((100_000, 100), (60_000, 6000))
    states = [random(160_000, 20 + i) for i in range(4)]
    expected = [REFERENCE.select(v, budget) for v in states]
    found: dict[int, list[TopKResult]] = {}

    def work(i: Any) -> None:
        found[i] = [native.select(states[i], budget) for _ in range(5)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i in range(4):
        for chosen in found[i]:
            assert_same(chosen, expected[i])


def run_python(code: Any, **environment: Any) -> Any:
    return subprocess.run(
        [python(), "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=False,
    )


def test_a_child_of_fork_has_threads_of_its_own() -> None:
    """In a fresh process, since the parent's pool must have been used and nothing of this one's be in the way."""
    done = run_python(
        """
import os, torch
torch.set_num_threads(3)
from dgc.kernels.native import NativeSelection
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
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_names_the_instructions(monkeypatch: pytest.MonkeyPatch, isa: Any) -> None:
    monkeypatch.setenv("DGC_KERNELS_ISA", isa)
    assert NativeSelection().isa == isa and isa in str(NativeSelection())
    monkeypatch.delenv("DGC_KERNELS_ISA")
    assert NativeSelection().isa == ISAS[-1]


def test_instructions_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGC_KERNELS_ISA", "mmx")
    with pytest.raises(KernelsUnavailable, match="DGC_KERNELS_ISA=mmx: expected portable, avx2 or avx512"):
        NativeSelection()


def test_instructions_that_the_cpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGC_KERNELS_ISA", "avx512")
    limited = library._open().dgc_limit_isa
    limited(0)
    try:
        assert supported_isas() == ("portable",)
        with pytest.raises(KernelsUnavailable, match="this CPU has only portable"):
            NativeSelection()
    finally:
        limited(2)


def test_a_library_that_was_never_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libdgc_kernels.so")
    with pytest.raises(
        KernelsUnavailable, match=r"not built: install a wheel.*, or run `python -m dgc\.kernels\.build`"
    ):
        library._open.__wrapped__()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match=r"install a C\+\+ compiler .* or set CXX, then run `"):
        library._open.__wrapped__()


@pytest.mark.parametrize(("rank", "warned"), [(None, 1), ("0", 1), ("1", 0)])
def test_one_rank_of_a_machine_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str | None, warned: int
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libdgc_kernels.so")
    monkeypatch.setattr(library, "_open", library._open.__wrapped__)
    if rank is not None:
        for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.setenv(name, rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backend = _backend.__wrapped__("auto", torch.device("cpu"))
    assert len(said) == warned and backend.decoder is None


def test_the_command_that_builds_says_nothing_of_itself() -> None:
    done = subprocess.run([sys.executable, "-m", "dgc.kernels.build"], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_a_library_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sources_digest", lambda: "0" * 20)
    with pytest.raises(
        KernelsUnavailable, match=r"from other sources: install a wheel.* run `python -m dgc\.kernels\.build`"
    ):
        library._open.__wrapped__()


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libdgc_kernels.so").write_bytes(b"nothing of the kind")
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libdgc_kernels.so")
    with pytest.raises(KernelsUnavailable, match="do not load"):
        library._open.__wrapped__()


def test_building_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler: no-such-compiler was not found"):
        build.build()


def test_building_again_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"isa.cpp": 'extern "C" const char* stamp() { return DGC_STAMP; }', "x.h": ""}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "lib.so")
    assert build.build() and not build.build()
    (tmp_path / "x.h").write_text("// changed")
    assert build.build() and not build.build()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["isa.cpp", "lib.so", "x.h"]


def test_a_build_that_fails_leaves_the_library_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("no C++")
    (tmp_path / "lib.so").write_bytes(b"before")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "lib.so")
    with pytest.raises(RuntimeError, match=r"broken\.cpp"):
        build.build()
    assert (tmp_path / "lib.so").read_bytes() == b"before"


@pytest.mark.proof
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="its files are for x86-64")
def test_no_file_lends_its_instructions_to_others(tmp_path: Path) -> None:
    """What a file of one instruction set exports is its table; every function in it is its own."""
    for source in sorted(build.SOURCES.rglob("*_avx*.cpp")):
        target = tmp_path / (source.stem + ".o")
        words = [*build.compiler(), *build.flags_of(source), f"-I{build.SOURCES}"]
        subprocess.run([*words, "-c", str(source), "-o", str(target)], check=True, timeout=patient(100))
        symbols = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True).stdout
        functions = [line for line in symbols.splitlines() if line.split()[-2:-1] != ["U"] and " W " in line]
        assert functions == [], f"{source.name} has functions that the linker may pick for others"
        dump = subprocess.run(["objdump", "-d", str(target)], check=True, capture_output=True, text=True).stdout
        assert "fmadd" not in dump and "fmsub" not in dump
