"""Launches, and cached tables for one launch per bucket. Tables are made without waiting for the device."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from inspect import signature
from itertools import accumulate
from operator import attrgetter, itemgetter, or_
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from jaxtyping import Int32, Int64
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from dgc.kernels.library import refusal

WARPS = 8
BLOCK = 1024  # elements or bytes per program, where there are no segments
LARGEST = torch.iinfo(torch.int32).max


class Launcher:
    """Launches kernels on the device of the tensor `near`.

    Triton examines every argument of every launch to find the compiled kernel, which takes several times as long
    as the launch. Here compiled kernels are kept under a key that tells apart whatever Triton specializes on:

        the kernel, the device, and the types of the arguments
        the dtype of each tensor, and whether it begins at a multiple of 16 bytes
        the constants (tl.constexpr)
        whether a number needs 64 bits; if it is not declared in do_not_specialize, also whether it is 1, and
            whether it is a multiple of 16

    The first launch of a key is Triton's own. Hooks of Triton's profilers see only those.
    """

    def __init__(self, interpreted: bool):
        self.interpreted = interpreted
        self._sites: dict[tuple[int, tuple[type, ...]], _Site] = {}

    def __call__(self, kernel: Any, near: Tensor, programs: int, *arguments: object) -> None:
        if programs == 0:
            return
        if not near.is_cuda:
            self._launch_by_triton(kernel, programs, arguments)
            return
        if self.interpreted:
            raise ValueError("Triton's interpreter (TRITON_INTERPRET=1) cannot follow pointers to a GPU's memory")
        device = near.get_device()
        if device == torch.cuda.current_device():
            self.launch_on(device, kernel, programs, arguments)
        else:
            with torch.cuda.device(device):
                self.launch_on(device, kernel, programs, arguments)

    def launch_on(self, device: int, kernel: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel on the current device."""
        types = tuple(map(type, arguments))
        site = self._sites.get((id(kernel), types))
        if site is None:
            site = self._sites[id(kernel), types] = _Site(kernel, types)
        key = device, site.key(arguments)
        compiled = site.compiled.get(key)
        if compiled is None:
            recorder = _recorder.get()
            if recorder is not None and recorder.captures:
                raise RuntimeError(f"{kernel.fn.__name__} is not compiled for the arguments of this step")
            site.compiled[key] = self._launch_by_triton(kernel, programs, arguments)
            return
        stream = current_stream(torch.device("cuda", device)) if _raw_stream is None else _raw_stream(device)
        # grid, stream, kernel, and no data for hooks
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )

    def _launch_by_triton(self, kernel: Any, programs: int, arguments: Sequence[Any]) -> Any:
        # no FMA, which would skip the rounding of products
        return kernel[(programs,)](*arguments, num_warps=WARPS, enable_fp_fusion=False)


class _Site:
    """Where a kernel is called with arguments of these types, and its compiled variants by the rest of the key."""

    def __init__(self, kernel: Any, types: tuple[type, ...]):
        self.kernel = kernel  # its id is a key, so it must not be deleted
        self.compiled: dict[Any, Any] = {}
        given = list(zip(range(len(types)), types, kernel.params, strict=True))
        variable = [(i, kind, p) for i, kind, p in given if not p.is_constexpr]
        self._constants = _picker([i for i, _, p in given if p.is_constexpr])
        self._tensors = _picker([i for i, kind, _ in variable if issubclass(kind, Tensor)])
        self._numbers = _picker([i for i, kind, _ in variable if kind is int])
        self._special = _picker([i for i, kind, p in variable if kind is int and not p.do_not_specialize])

    def key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all but kernel, device and types, mostly by functions that run in C."""
        tensors, numbers, special = self._tensors(arguments), self._numbers(arguments), self._special(arguments)
        places = tuple(map(Tensor.data_ptr, tensors))
        sizes: tuple[Any, ...] = ()
        ones: tuple[Any, ...] = ()
        aligned: Any = reduce(or_, places, 0) % 16 == 0 or tuple(place % 16 == 0 for place in places)
        if max(numbers, default=0) > LARGEST or min(numbers, default=0) < -LARGEST - 1:
            sizes = tuple((x > LARGEST or x < -LARGEST - 1, x >= 2**63) for x in numbers)
        if special:
            ones = tuple((x == 1, x % 16 == 0) for x in special)
        return tuple(map(_dtype, tensors)), aligned, sizes, ones, self._constants(arguments)


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function of a tuple that returns its entries at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


_dtype, _device = attrgetter("dtype"), attrgetter("device")


SECTOR = 32  # bytes that a GPU moves for an element that no neighbour in the same access shares
MOST_READ = 1 << 16  # bytes that a program reads at most: one that reads more lasts longer than the others
_TRAFFIC: dict[str, Callable[[Any], tuple[int, int]]] = {}
_MOST: dict[str, Callable[[Any], int]] = {}
K = TypeVar("K")


def moves(
    reads: str,
    writes: str,
    most: Callable[[Any], int],
    more: Callable[[Any], tuple[int, int]] = lambda _: (0, 0),
) -> Callable[[K], K]:
    """Decorator that states which bytes a kernel moves. A few numbers per program and segment are left out.

    Args:
        reads: Names of arguments that are read once, as far as they are tensors.
        writes: Those that are written once. Atomic operations read and write.
        most: Given the arguments by name, and `programs`, returns the most bytes that one program reads.
        more: Given the same, returns the bytes that are read and written besides.
    """

    def state(kernel: Any) -> Any:
        def traffic(a: Any) -> tuple[int, int]:
            further = more(a)
            read, written = (
                sum(t.nbytes for t in (getattr(a, name) for name in names.split()) if isinstance(t, Tensor))
                for names in (reads, writes)
            )
            return read + further[0], written + further[1]

        _TRAFFIC[kernel.fn.__name__], _MOST[kernel.fn.__name__] = traffic, most
        return kernel

    return state


def of_each(nbytes: int, size: str = "TILE") -> Callable[[Any], int]:
    """Return what `moves` needs where a program reads so many bytes for each of its elements."""
    return lambda a: nbytes * int(getattr(a, size))


def read_and_written(n: int) -> tuple[int, int]:
    """Return the bytes of n bytes that are read and written."""
    return n, n


def bytes_moved(kernel: Any, programs: int, arguments: Sequence[object]) -> tuple[int, int]:
    """Return the bytes that a launch reads and writes.

    Where they depend on the data it is the most, unless a segment must be read again for lack of candidates.

    Raises:
        KeyError: The kernel has no `moves`.
    """
    return _TRAFFIC[kernel.fn.__name__](_named(kernel, programs, arguments))


def most_read(kernel: Any, programs: int, arguments: Sequence[object]) -> int:
    """Return the most bytes that one program of a launch reads, whatever the data.

    Raises:
        KeyError: The kernel has no `moves`.
    """
    return _MOST[kernel.fn.__name__](_named(kernel, programs, arguments))


def _named(kernel: Any, programs: int, arguments: Sequence[object]) -> SimpleNamespace:
    named = dict(zip(signature(kernel.fn).parameters, arguments, strict=True))
    return SimpleNamespace(programs=programs, **named)


@dataclass(frozen=True)
class Tree:
    """Groups of programs. The last one to arrive adds the sums of its group, then of as many groups, until one sum
    is left: `dgc.kernels.selection.triton.arrive`.

    Attributes:
        levels: How often sums are added.
        sums: The number of sums that are added, of all levels.
        groups: The number of groups, each of which needs a counter.
    """

    levels: int
    sums: int
    groups: int


@lru_cache(maxsize=1024)
def tree_of(programs: int, fan: int) -> Tree:
    """Return the tree of so many programs, with groups of `fan`."""
    levels = sums = groups = 0
    while programs > 1:
        sums += programs
        programs = -(-programs // fan)
        groups += programs
        levels += 1
    return Tree(levels, sums, groups)


def groups_of_ranks(
    ranks: int, each: int, besides: int = 0, continued: int = 0, at_most: int = LARGEST
) -> list[tuple[int, int]]:
    """Divide the ranks among launches that follow each other, so that no program reads more than MOST_READ.

    Args:
        each: Bytes that a program reads of each rank.
        besides: What it reads besides.
        continued: What it reads further if its sums continue those of a launch before.
        at_most: Ranks of a launch.

    Returns:
        The first rank of each launch, and the one after its last.
    """
    together = min(ranks, at_most)
    if besides + ranks * each > MOST_READ:
        together = max(1, min(together, (MOST_READ - besides - continued) // each))
    return [(first, min(first + together, ranks)) for first in range(0, ranks, together)]


def blocks(n: int) -> int:
    """Return the number of programs for n elements."""
    return -(-n // BLOCK)


@dataclass(frozen=True, eq=False)
class Tiling:
    """A bucket divided into tiles, each within one segment and one gradient piece.

    The number of needed tiles depends on the bounds, which are on the device, because segments need not fill their
    last tile. The largest possible number is allocated, and the last tiles are empty.

    Attributes:
        table: Rows start, length, segment, piece, start within the piece.
        first_tiles: The first tile of each segment.
    """

    table: Int32[Tensor, "5 tiles"]
    first_tiles: Int64[Tensor, "S"]
    _groups: dict[int, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.table.shape[1]

    @property
    def n_segments(self) -> int:
        return self.first_tiles.numel()

    def groups(self, size: int) -> Int32[Tensor, "2 groups"]:
        """Groups of this many tiles of a segment, as `divided`. They are kept."""
        if size not in self._groups:
            bounds = pad(self.first_tiles, (0, 1), value=self.count)
            self._groups[size] = divided(bounds, self.count, size)
        return self._groups[size]


class Tilings:
    """A cache of tilings by the tensor of bounds, the lengths of the pieces and the creating stream."""

    def __init__(self, tile: int):
        self.tile = tile
        self._kept = WeakTensorKeyDictionary()

    def of(self, bounds: Int64[Tensor, "bounds"], lengths: tuple[int, ...]) -> Tiling:
        kept: dict[tuple[tuple[int, ...], int], Tiling] = self._kept.setdefault(bounds, {})
        key = (lengths, current_stream(bounds.device))
        if key not in kept:
            kept[key] = cut(bounds, lengths, self.tile)
        return kept[key]


def cut(bounds: Int64[Tensor, "bounds"], lengths: tuple[int, ...], tile: int) -> Tiling:
    device, n, segments = bounds.device, sum(lengths), bounds.numel() - 1
    if n > LARGEST:
        raise ValueError(
            f"a bucket of {n} elements is too large for the triton kernels: the maximum is {LARGEST}; split "
            "the tensor, or use DGC_KERNELS=reference"
        )
    starts = on_device((0, *accumulate(lengths[:-1])), torch.int64, device)
    cuts = torch.cat([bounds, starts]).sort().values
    tiles = (cuts.diff() + tile - 1) // tile
    ends = tiles.cumsum(0)
    t = torch.arange(n // tile + tiles.numel(), dtype=torch.int64, device=device)
    segment = torch.searchsorted(ends, t, right=True).clamp_(max=tiles.numel() - 1)
    start = (cuts[segment] + (t - (ends - tiles)[segment]) * tile).clamp_(max=n)
    length = (cuts[segment + 1] - start).clamp_(0, tile)
    own_range = (torch.searchsorted(bounds, start, right=True) - 1).clamp_(max=segments - 1)
    piece = torch.searchsorted(starts, start, right=True) - 1
    first_tiles = torch.searchsorted(own_range, torch.arange(segments, dtype=torch.int64, device=device))
    return Tiling(torch.stack([start, length, own_range, piece, start - starts[piece]]).int(), first_tiles)


def divided(bounds: Int64[Tensor, "bounds"], n: int, part: int) -> Int32[Tensor, "2 parts"]:
    """Divide the segments of n elements into parts of `part` elements, one or more for each segment.

    Returns rows segment, number of the part in its segment. As in a `Tiling` the number of needed parts depends on
    bounds on the device, and the last parts may be none of a segment's: their numbers are too large.
    """
    counts = ((bounds.diff() + part - 1) // part).clamp_(min=1)
    ends = counts.cumsum(0)
    t = torch.arange(n // part + counts.numel(), dtype=torch.int64, device=bounds.device)
    segment = torch.searchsorted(ends, t, right=True).clamp_(max=counts.numel() - 1)
    return torch.stack([segment, t - (ends - counts)[segment]]).int()


def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor. It is cached and must not be changed in place."""
    recorder = _recorder.get()
    if recorder is None:
        return _table(values, dtype, device, current_stream(device))
    made = _table.cache_info().misses
    table = recorder.keep(_table(values, dtype, device, current_stream(device)))
    if recorder.captures and _table.cache_info().misses != made:
        raise RuntimeError("the step needs a table that the steps before it have not made")
    return table


class Recorder:
    """What the launches of a CUDA graph use. The graph keeps it.

    Args:
        seeds: Number of seeds that a step uses.
        device: The GPU.

    Attributes:
        captures: Whether launches are captured at present. Nothing may then be compiled, or copied from the host.
        unused: The seeds of this step that are not used yet.
    """

    def __init__(self, seeds: int, device: torch.device):
        # each begins at a multiple of 16 bytes, so that they share the variant of a kernel
        self._slots = torch.zeros(seeds, 2, dtype=torch.int64, device=device)
        self._kept: dict[int, Tensor] = {}
        self.captures, self.unused = False, deque[int]()

    def begin(self, seeds: Sequence[int]) -> None:
        """Begin a step with these seeds, in the order in which kernels take them."""
        self.unused = deque(seeds)

    def fill(self, seeds: Sequence[int]) -> None:
        """Begin a step, and write its seeds to the device. No host memory is read later."""
        self.begin(seeds)
        for slot, seed in zip(self._slots, seeds, strict=True):
            slot.fill_(seed)

    def slot(self, seed: int) -> Int64[Tensor, "2"] | None:
        """Return where a kernel finds its seed. None: it is not the next one of this step.

        Raises:
            RuntimeError: The same, while launches are captured.
        """
        if not self.unused or self.unused[0] != seed:
            if self.captures:
                raise RuntimeError("the step takes other random numbers than it says")
            return None
        self.unused.popleft()
        return self._slots[len(self._slots) - len(self.unused) - 1]

    def keep(self, tensor: Tensor) -> Tensor:
        self._kept[id(tensor)] = tensor
        return tensor


_recorder: ContextVar[Recorder | None] = ContextVar("_recorder", default=None)


@contextmanager
def recording(recorder: Recorder, captures: bool = False) -> Iterator[Recorder]:
    """Let the launches inside use a recorder."""
    token, recorder.captures = _recorder.set(recorder), captures
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def held(tensor: Tensor) -> Tensor:
    """Return a tensor that a cache may drop, while a CUDA graph still uses it."""
    recorder = _recorder.get()
    return tensor if recorder is None else recorder.keep(tensor)


def seed_slot(seed: int) -> Int64[Tensor, "2"] | None:
    """Return where a kernel reads its seed, of 64 bits with a sign. None: the seed is an argument, as it is."""
    recorder = _recorder.get()
    return None if recorder is None else recorder.slot(seed)


@lru_cache(maxsize=1024)
def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    # from pinned memory: other copies wait for the device
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


_zeros: dict[tuple[torch.device, int], Tensor] = {}


def zeros_on(device: torch.device, n: int) -> Int32[Tensor, "n"]:
    """Return n zeros that all launches of the current stream share. Each launch must leave them as zeros."""
    key = (device, current_stream(device))
    zeros = _zeros.get(key)
    if zeros is None or zeros.numel() < n:
        zeros = _zeros[key] = torch.zeros(1 << (n - 1).bit_length(), dtype=torch.int32, device=device)
    return held(zeros)[:n]


_scratch: dict[tuple[torch.device, int], Tensor] = {}


def scratch_on(device: torch.device, n: int) -> Int32[Tensor, "n"]:
    """Return n words of any content that all launches of the current stream share: as `zeros_on`."""
    key = (device, current_stream(device))
    words = _scratch.get(key)
    if words is None or words.numel() < n:
        words = _scratch[key] = torch.empty(n, dtype=torch.int32, device=device)
    return held(words)[:n]


def pointers(
    tensors: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device
) -> Int64[Tensor, "tensors"]:
    """Return the addresses of the tensors' elements, 0 for None.

    Raises:
        TypeError: A tensor has another dtype or device, or is not contiguous.
    """
    given = [t for t in tensors if t is not None]
    # by functions that run in C, because there may be hundreds of gradients
    alike = {dtype}.issuperset(map(_dtype, given)) and {device}.issuperset(map(_device, given))
    if not (alike and all(map(Tensor.is_contiguous, given))):
        wrong = (t for t in given if t.dtype != dtype or t.device != device or not t.is_contiguous())
        raise TypeError(refusal(next(wrong), dtype, str(device)))
    addresses = tuple(map(Tensor.data_ptr, given))
    if len(given) < len(tensors):
        addresses = tuple(0 if t is None else t.data_ptr() for t in tensors)
    return on_device(addresses, torch.int64, device)


def as_rows(tensors: Sequence[Tensor], unit: int = 1) -> Tensor:
    """Return tensors [n] of all ranks as rows of one: not copied if they lie at equal distances in one tensor.

    They do after an all-gather. Rows begin at multiples of `unit` elements.
    """
    first, n, places = tensors[0], tensors[0].numel(), [t.storage_offset() for t in tensors]
    stride = places[1] - places[0] if len(places) > 1 else n
    is_one = len(tensors) == 1 or (first._base is not None and all(t._base is first._base for t in tensors))
    even = places == [places[0] + i * stride for i in range(len(places))] and stride >= n
    if is_one and even and places[0] % unit == 0 and stride % unit == 0:
        return first.as_strided((len(tensors), n), (stride, 1))
    return torch.stack(list(tensors))


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """Return the current stream, as a cache key: only work of the creating stream is ordered after a table."""
    if device.type != "cuda":
        return 0
    if device.index is None or _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)  # makes no object, as Triton itself asks
