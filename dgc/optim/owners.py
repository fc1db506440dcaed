"""Which rank iterates which matrix, and the messages to that rank and back.

The Newton-Schulz iterations of a matrix of A rows and B columns take time in proportion to A B min(A, B). Each
matrix has one owner among the ranks. The costliest is given away first, each to the rank with the least to do so
far. A matrix that some ranks hold whole, such as an expert of a stack sharded by experts, goes to one of them.

    1. Ranks send the parts that they hold to the owners.   all-to-all; nothing if owners hold their matrices
    2. Owners iterate.
    3. Owners send to each rank the part that it holds.     all-gather if all ranks hold all, else all-to-all

Both rounds have the same sizes in every step, also if a gradient is missing on some ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import AllGather, AllToAll, Conversation, as_bytes
from dgc.comm.transport import Transport
from dgc.optim.muon_rule import Parts, rows_of

Box = tuple[tuple[int, int], ...]  # of each dimension the first element, and the one after the last


class Ranks(Protocol):
    """The ranks that share matrices."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, own: Tensor) -> Sequence[Tensor]:
        """Gather vectors of one length. Returns them by rank."""
        ...

    def all_to_all(self, own: Tensor, splits: Sequence[int], receives: Sequence[int]) -> Sequence[Tensor]:
        """Send the first splits[0] elements to rank 0, and so on. Returns the receives[r] elements of rank r."""
        ...


class Alone:
    """One rank, which sends nothing."""

    rank, size = 0, 1

    def all_gather(self, own: Tensor) -> Sequence[Tensor]:
        return (own,)

    def all_to_all(self, own: Tensor, splits: Sequence[int], receives: Sequence[int]) -> Sequence[Tensor]:
        return (own,)


class TransportRanks:
    """All ranks of a transport, on a communicator of their own. Construction is collective.

    Messages are bytes: Horovod has no bf16 in all collectives.
    """

    def __init__(self, transport: Transport, meter: TrafficMeter, name: str):
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._meter, self._name = transport, meter, name
        transport.open_communicator(name)

    def all_gather(self, own: Tensor) -> Sequence[Tensor]:
        return self._converse("back", _reply_to(AllGather(as_bytes(own))), own.dtype)

    def all_to_all(self, own: Tensor, splits: Sequence[int], receives: Sequence[int]) -> Sequence[Tensor]:
        size = own.element_size()
        sizes, expected = tuple(size * n for n in splits), tuple(size * n for n in receives)
        request = AllToAll(as_bytes(own), sizes, receives=expected)
        return self._converse("there", _reply_to(request), own.dtype)

    def _converse(self, way: str, conversation: Conversation[Any], dtype: torch.dtype) -> list[Tensor]:
        name = f"{self._name}.{way}"
        running = RunningConversation(name, conversation, self._transport, self._meter, (self._name,))
        return [reply.view(dtype) for reply in running.finish()]


def _reply_to(request: AllGather | AllToAll) -> Conversation[Any]:
    (reply,) = yield (request,)
    return reply


@dataclass(frozen=True)
class Matrix:
    """A matrix in a parameter.

    Attributes:
        parameter: Number of the parameter.
        place: Its place in a stack of matrices. None: the parameter is no stack.
        first: Its first row in the parameter, or in the matrix at that place of the stack.
        shape: Rows and columns.
    """

    parameter: int
    place: int | None
    first: int
    shape: tuple[int, int]

    @property
    def cost(self) -> int:
        return prod(self.shape) * min(self.shape)

    @property
    def whole(self) -> Box:
        return tuple((0, n) for n in self.shape)

    def part_in(self, box: Box) -> Box | None:
        """The rows and columns of the matrix that a part of the parameter has. None: it has none of it."""
        *stack, (start, stop), columns = box
        if stack and self.place not in range(*stack[0]):
            return None
        last = self.first + self.shape[0]
        rows = max(start, self.first) - self.first, min(stop, last) - self.first
        return (rows, columns) if rows[0] < rows[1] and columns[0] < columns[1] else None

    def of(self, tensor: Tensor, box: Box, part: Box) -> Tensor:
        """A part of the matrix, as a view of `tensor`, which is what this rank holds of the parameter."""
        *stack, (start, _), (left, _) = box
        if stack:
            assert self.place is not None
            tensor = tensor[self.place - stack[0][0]]
        (first, last), (from_column, to_column) = part
        offset = self.first - start
        return tensor[first + offset : last + offset, from_column - left : to_column - left]


def matrices_of(parameter: int, shape: Sequence[int], parts: Parts) -> list[Matrix]:
    """The matrices in a parameter [rows, columns] or a stack [places, rows, columns], by place and row."""
    *stack, _, columns = shape
    found = []
    for place in range(stack[0]) if stack else (None,):
        first = 0
        for rows in rows_of(shape[-2:], parts):
            found.append(Matrix(parameter, place, first, (rows, columns)))
            first += rows
    return found


@dataclass(frozen=True)
class Layout:
    """Where each rank holds a parameter.

    Attributes:
        boxes: What it holds, by rank.
        replicas: Number of its replica, by rank. The ranks of a replica hold the parameter together.
    """

    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]


def replicated(shape: Sequence[int], ranks: int) -> Layout:
    """The layout of a parameter that each rank holds whole."""
    return Layout((tuple((0, n) for n in shape),) * ranks, tuple(range(ranks)))


def sharded(shape: Sequence[int], mesh: Sequence[int], dims: Sequence[int | None]) -> Layout:
    """The layout of a parameter on a mesh, for its ranks in row-major order.

    mesh: The size of each dimension of the mesh. dims: The dimension of the parameter that each of them shards, in
    chunks of ceil(n / size) elements, as torch.chunk does. None: it replicates.
    """
    boxes, replicas = list[Box](), list[int]()
    numbers: dict[tuple[int, ...], int] = {}
    for place in product(*map(range, mesh)):
        box = [(0, n) for n in shape]
        for at, size, dim in zip(place, mesh, dims, strict=True):
            if dim is not None:
                start, stop = box[dim]
                chunk = -(-(stop - start) // size)
                box[dim] = min(start + at * chunk, stop), min(start + (at + 1) * chunk, stop)
        boxes.append(tuple(box))
        copy = tuple(at for at, dim in zip(place, dims, strict=True) if dim is None)
        replicas.append(numbers.setdefault(copy, len(numbers)))
    return Layout(tuple(boxes), tuple(replicas))


def deal(matrices: Sequence[Matrix], layouts: Sequence[Layout], ranks: int) -> list[int]:
    """The owner of each matrix. layouts: of the parameters."""
    holders = []
    for matrix in matrices:
        parts = (matrix.part_in(box) for box in layouts[matrix.parameter].boxes)
        holders.append([rank for rank, part in enumerate(parts) if part == matrix.whole] or list(range(ranks)))
    loads, owners = [0] * ranks, [0] * len(matrices)
    # without a choice first
    for i in sorted(range(len(matrices)), key=lambda i: (len(holders[i]) > 1, -matrices[i].cost, i)):
        owners[i] = owner = min(holders[i], key=lambda rank: (loads[rank], rank))
        loads[owner] += matrices[i].cost
    return owners


@dataclass(frozen=True)
class Piece:
    """A part of a matrix, as a message has it."""

    matrix: int
    part: Box

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.part)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def of(self, matrix: Tensor) -> Tensor:
        (first, last), (left, right) = self.part
        return matrix[first:last, left:right]


class Exchange:
    """The messages of one step between the owners of matrices and the ranks that hold them.

    Args:
        ranks: The ranks that share the matrices.
        matrices, layouts: Of all parameters, the same on every rank.

    Attributes:
        own: Numbers of the matrices that this rank iterates.
        held: The parts of matrices that this rank holds.
    """

    def __init__(self, ranks: Ranks, matrices: Sequence[Matrix], layouts: Sequence[Layout]):
        self._ranks, self.matrices, self.layouts = ranks, matrices, layouts
        rank, size = ranks.rank, ranks.size
        owners = deal(matrices, layouts, size)
        self.own = [i for i, owner in enumerate(owners) if owner == rank]
        self.held = list[Piece]()
        # the pieces to and from each rank
        self._there: list[list[Piece]] = [[] for _ in range(size)]
        self._arriving: list[list[Piece]] = [[] for _ in range(size)]
        self._back: list[list[Piece]] = [[] for _ in range(size)]
        self._returning: list[list[Piece]] = [[] for _ in range(size)]
        self._gathers = self._scatters = False  # the same on every rank
        for i, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            layout = layouts[matrix.parameter]
            parts = [matrix.part_in(box) for box in layout.boxes]
            from_others = parts[owner] != matrix.whole
            self._gathers |= from_others
            for other, part in enumerate(parts):
                if part is None:
                    continue
                piece = Piece(i, part)
                self._scatters |= other != owner
                if other == rank:
                    self.held.append(piece)
                    self._returning[owner].append(piece)
                if owner == rank:
                    self._back[other].append(piece)
                if from_others and layout.replicas[other] == layout.replicas[owner]:
                    if other == rank:
                        self._there[owner].append(piece)
                    if owner == rank:
                        self._arriving[other].append(piece)
        is_whole = all(box == layout.boxes[0] for layout in layouts for box in layout.boxes)
        self._is_replicated = is_whole and not self._gathers
        sizes = [0] * size
        for matrix, owner in zip(matrices, owners, strict=True):
            sizes[owner] += prod(matrix.shape)
        self._largest = max(sizes)

    def box(self, matrix: Matrix) -> Box:
        """What this rank holds of the parameter of a matrix."""
        return self.layouts[matrix.parameter].boxes[self._ranks.rank]

    def gather(self, read: Callable[[Piece], Tensor], like: Tensor) -> list[Tensor]:
        """The matrices that this rank owns. read: returns a piece that this rank holds. like: of the same type."""
        if not self._gathers:
            return [read(Piece(i, self.matrices[i].whole)) for i in self.own]
        rank = self._ranks.rank
        there = [[] if to == rank else [read(piece) for piece in pieces] for to, pieces in enumerate(self._there)]
        arrived = self._send(there, self._arriving, like)
        found: dict[int, list[tuple[Piece, Tensor]]] = {i: [] for i in self.own}
        for pieces, tensors in zip(self._arriving, arrived, strict=True):
            for j, piece in enumerate(pieces):
                found[piece.matrix].append((piece, read(piece) if tensors is None else tensors[j]))
        wholes = []
        for i in self.own:
            if not found[i]:
                wholes.append(read(Piece(i, self.matrices[i].whole)))
                continue
            whole = like.new_empty(self.matrices[i].shape)
            for piece, tensor in found[i]:
                piece.of(whole).copy_(tensor)
            wholes.append(whole)
        return wholes

    def scatter(self, updates: Sequence[Tensor], like: Tensor) -> list[tuple[Piece, Tensor]]:
        """The pieces that this rank holds of what the owners have made of their matrices."""
        made = dict(zip(self.own, updates, strict=True))
        if self._ranks.size == 1:
            return [(piece, piece.of(made[piece.matrix])) for piece in self.held]
        rank = self._ranks.rank
        if self._is_replicated:
            own = like.new_zeros(self._largest)
            parts = [made[i].reshape(-1) for i in self.own]
            if parts:
                torch.cat(parts, out=own[: sum(part.numel() for part in parts)])
            # a transport may store replies in what it sends
            gathered = self._ranks.all_gather(own)
            arrived: list[Any] = [_cut(w, pieces) for w, pieces in zip(gathered, self._returning, strict=True)]
        else:
            back = [[piece.of(made[piece.matrix]) for piece in pieces] for pieces in self._back]
            # contiguous on every rank: the memory order of a sum's terms may change its last bit
            at_home = [tensor.contiguous() for tensor in back[rank]]
            back[rank] = []
            arrived = [[] for _ in back]
            if self._scatters:
                arrived = self._send(back, self._returning, like)
            arrived[rank] = at_home
        return [
            pair
            for pieces, tensors in zip(self._returning, arrived, strict=True)
            for pair in zip(pieces, tensors, strict=True)
        ]

    def _send(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Piece]], like: Tensor
    ) -> list[Any]:
        """Send tensors to each rank, and receive pieces of each. None: of this rank."""
        rank = self._ranks.rank
        flat = [tensor.reshape(-1) for tensors in sends for tensor in tensors]
        splits = [sum(tensor.numel() for tensor in tensors) for tensors in sends]
        expected = [0 if r == rank else sum(piece.size for piece in pieces) for r, pieces in enumerate(receives)]
        arrived = self._ranks.all_to_all(torch.cat(flat) if flat else like.new_empty(0), splits, expected)
        return [
            None if r == rank else _cut(whole, pieces)
            for r, (whole, pieces) in enumerate(zip(arrived, receives, strict=True))
        ]


def _cut(message: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The pieces in a message, which may have more behind them."""
    found, start = [], 0
    for piece in pieces:
        found.append(message[start : start + piece.size].view(piece.shape))
        start += piece.size
    return found
