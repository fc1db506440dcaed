"""CUDA graphs: the kernels of a bucket's step are recorded once, and then launched together.

A graph repeats launches with the numbers and addresses that they had. It is therefore made only of methods whose
steps differ in nothing but the content of tensors (`Compressor.repeats`), and only the seeds of random numbers may
differ: kernels read them from the device. Two steps are recorded, because methods alternate between two memories
of a residual, or between two factors:

    step A    state 0 -> state 1
    step B    state 1 -> state 2, of which each tensor is copied to its place in state 0, if it is elsewhere

A step has one graph from the gradient to its first request, and one more from each reply on. Between two graphs
the conversation goes on as without them: the same requests, replies, reads and results. A reply that is not where
the graph reads it is copied there.

What is recorded is used only where all of this holds, and the step otherwise runs as it is, without a graph:

    the compressor is the same object, so no setting has changed; nor has the method's own key
    gradients, and the places of the mean, have the same addresses; gradients that move in each step are copied
    the state is the one that the last step returned; or its tensors are copied to the places of state 0

Another compressor or key, or other addresses, begin the warm-up again, and then make new graphs.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dgc.comm.requests import AllGather, AllToAll, Conversation, Read, Reply, Request
from dgc.core.bucket import Bucket
from dgc.core.protocol import Compressor, Repeats
from dgc.core.results import Reduced
from dgc.core.state import State
from dgc.kernels.launch import Recorder, recording
from dgc.warn import warn

SWITCH = "DGC_CUDA_GRAPHS"
WARM_UP = 3  # steps that run without a graph, in which kernels are compiled and tables are made
# Replies are kept. They may take so many bytes per element of a bucket, or so many bytes.
MOST_REPLIES, FEW = 8, 1 << 20
Places = tuple[tuple[int, int], ...]
Rounds = list[tuple[Any, Any]]  # requests of a step, with their replies


def graphs_of(bucket: Bucket) -> "StepGraphs | None":
    """Return the graphs of a bucket on a GPU. None: the switch is off, or the bucket is elsewhere.

    Raises:
        ValueError: The switch is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, not {switch!r}")
    return StepGraphs(bucket) if switch == "1" and bucket.device.type == "cuda" else None


@dataclass(eq=False)
class Part:
    """A graph, and what follows it.

    Attributes:
        reads: The tensors of the replies that it reads. `places`: their addresses.
        requests: What the method asks for then. None: the step ends.
        releases: Whether the gradients are not needed any more.
    """

    graph: Any
    reads: tuple[Tensor, ...] = ()
    requests: tuple[Request, ...] | None = None
    releases: bool = False
    places: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.places = tuple(map(Tensor.data_ptr, self.reads))


@dataclass(eq=False)
class RecordedStep:
    """A step. before: the state with which it begins. hidden: what it leaves in `State.hidden`."""

    key: tuple[Any, ...]
    before: State
    parts: list[Part]
    reduced: Reduced
    hidden: dict[str, Tensor]

    def ended(self, state: State) -> Reduced:
        """Return its end, where `state` has the numbers of steps before it."""
        state.hidden().update(self.hidden)
        new, dropped = self.reduced.state, self.reduced.dropped
        return Reduced(
            self.reduced.result,
            new.counted_from(state, self.before),
            state if dropped is None else dropped.counted_from(state, self.before),
        )


class StepGraphs:
    """Runs the steps of a bucket: the first ones as they are, and then as graphs.

    Attributes:
        captures: Number of cycles of two steps that were recorded.
    """

    def __init__(self, bucket: Bucket):
        self._bucket, self.captures = bucket, 0
        bucket.keeps_scratch = True
        self._is_refused = False
        self._gradients: Places | None = None
        self._moves = 0
        self._like: tuple[Any, ...] = ()  # compressor and addresses of the last step
        self._expected: State | None = None  # that the last step has returned
        self._steps = 0  # alike, one after the other
        self._rounds: list[Rounds] = []  # of the last two steps of the warm-up
        self._recorder: Recorder | None = None
        self._cycle: list[RecordedStep] = []
        self._places: list[Tensor] = []  # of the tensors of state 0
        self._next = 0

    def reduce(self, compressor: Compressor, state: State) -> Conversation[Reduced]:
        """Do `compressor.reduce`."""
        bucket = self._bucket
        repeats = None if self._is_refused else compressor.repeats(bucket, state)
        if repeats is None:
            self._steps = 0
            return (yield from compressor.reduce(bucket, state))
        self._settle()
        like = (compressor, self._gradients, addresses_of(bucket.destinations or ()))
        if like != self._like or (self._cycle and repeats.key not in [step.key for step in self._cycle]):
            self._like, self._steps, self._cycle, self._places = like, 0, [], []
        if not self._cycle:
            reduced = yield from self._warm_up(compressor, state, repeats)
        elif self._continues(state, repeats):
            reduced = yield from self._replay(state, repeats)
        else:
            self._expected = None
            return (yield from compressor.reduce(bucket, state))
        self._expected = reduced.state
        return reduced

    def _settle(self) -> None:
        """Give the gradients of this step addresses that stay.

        They are copied into the bucket, which moves 8 more bytes per element, once their addresses have changed
        more than WARM_UP times. To refuse them would end the training of a model whose backward allocates its
        gradients anew, which is the default of PyTorch.
        """
        before, here = self._gradients, addresses_of(self._bucket.gradients)
        if self._moves <= WARM_UP and before is not None and here != before:
            self._moves += 1
            if self._moves > WARM_UP:
                warn(
                    "the addresses of the gradients change in each step, so gradients are copied to where they "
                    f"can stay. zero_grad(set_to_none=False) avoids the copy, and {SWITCH}=0 CUDA graphs"
                )
        # reading `flat` copies them
        self._gradients = here if self._moves <= WARM_UP else addresses_of([self._bucket.flat])

    # --- steps without a graph ------------------------------------------------------------------------

    def _warm_up(self, compressor: Compressor, state: State, repeats: Repeats) -> Conversation[Reduced]:
        self._steps = 1 if state is not self._expected else self._steps + 1
        if self._steps > WARM_UP:
            if self._record(compressor, state, repeats):
                return (yield from self._replay(state, repeats))
            return (yield from compressor.reduce(self._bucket, state))
        if self._steps < WARM_UP - 1:
            return (yield from compressor.reduce(self._bucket, state))
        # with the variants of kernels that read seeds from the device
        self._recorder = Recorder(len(repeats.seeds), self._bucket.device)
        self._recorder.fill(repeats.seeds)
        conversation, replies = compressor.reduce(self._bucket, state), None
        rounds: Rounds = []
        self._rounds = [*self._rounds[-1:], rounds]
        while True:
            with recording(self._recorder):
                try:
                    requests = conversation.send(replies)
                except StopIteration as stop:
                    reduced: Reduced = stop.value
                    return reduced
            replies = yield requests
            rounds.append((requests, replies))

    # --- recording ------------------------------------------------------------------------------------

    def _record(self, compressor: Compressor, state: State, repeats: Repeats) -> bool:
        """Record two steps, without doing them. Return whether that has succeeded: if not, no step is recorded."""
        bucket, recorder, (odd, even) = self._bucket, self._recorder, self._rounds
        self._rounds = []
        if forms_of(odd) == forms_of(even):
            odd = even  # one memory for the replies of both
        memory = {t.data_ptr(): t.nbytes for rounds in (odd, even) for t in own_memory(rounds)}
        reads = any(isinstance(requests, Read) for requests, _ in even)
        if reads or sum(memory.values()) > max(FEW, MOST_REPLIES * bucket.numel):
            self._is_refused = True
            return False
        assert recorder is not None
        gradients, hidden = bucket.elsewhere, dict(state.hidden())
        places, pool = state.moving(), torch.cuda.graph_pool_handle()
        try:
            first = self._record_step(compressor, state, repeats, odd, pool, [])
            bucket.elsewhere = gradients
            following = compressor.repeats(bucket, first.reduced.state)
            if following is None:
                raise RuntimeError("a step after this one does something else")
            second = self._record_step(compressor, first.reduced.state, following, even, pool, places)
        except RuntimeError as error:
            self._is_refused = True
            warn(
                f"the step of bucket {bucket.name} cannot be a CUDA graph ({error}): its kernels are launched one "
                f"by one. {SWITCH}=0 avoids the attempt"
            )
            return False
        finally:
            bucket.elsewhere = gradients
            state.hidden().update(hidden)
        second.reduced = replace(second.reduced, state=state.counted_from(second.reduced.state, state))
        second.hidden = hidden
        self._cycle, self._places, self._next, self.captures = [first, second], places, 0, self.captures + 1
        self._expected = state
        return True

    def _record_step(
        self,
        compressor: Compressor,
        state: State,
        repeats: Repeats,
        rounds: Rounds,
        pool: Any,
        places: Sequence[Tensor],
    ) -> RecordedStep:
        """Record one step, with replies of an earlier one. places: where the tensors of its state are copied."""
        bucket, recorder = self._bucket, self._recorder
        assert recorder is not None
        recorder.begin(repeats.seeds)
        conversation, parts = compressor.reduce(bucket, state), list[Part]()
        replies: tuple[Reply, ...] | None = None
        for asked, given in (*rounds, ((), ())):
            reads = () if replies is None else tensors_of(replies)
            requests: Any = None
            graph = torch.cuda.CUDAGraph()
            with recording(recorder, captures=True), captured(graph, bucket.device, pool):
                try:
                    requests = conversation.send(replies)
                except StopIteration as stop:
                    reduced: Reduced = stop.value
                    if places:
                        copy_all(places, reduced.state.moving())
            part = Part(graph, reads, None, bucket.is_flat)
            parts.append(part)
            if requests is None:
                break
            if forms_of([(requests, ())]) != forms_of([(asked, ())]):
                raise RuntimeError("the step asks for something else than the one before it")
            replies = tuple(map(stand_in, requests, asked, given))
            part.requests = tuple(map(with_memory, requests, replies))
        else:
            raise RuntimeError("the step has more rounds than the one before it")
        if recorder.unused:
            raise RuntimeError("the step takes fewer random numbers than it says")
        return RecordedStep(repeats.key, state, parts, reduced, dict(reduced.state.hidden()))

    # --- replaying ------------------------------------------------------------------------------------

    def _continues(self, state: State, repeats: Repeats) -> bool:
        """Whether the recorded steps go on from this state. Another one, of a like step, becomes state 0."""
        if state is self._expected and repeats.key == self._cycle[self._next].key:
            return True
        tensors = state.moving()
        alike = list(map(Tensor.size, tensors)) == list(map(Tensor.size, self._places))
        if repeats.key != self._cycle[0].key or not alike:
            return False
        copy_all(self._places, tensors)
        self._next = 0
        return True

    def _replay(self, state: State, repeats: Repeats) -> Conversation[Reduced]:
        step = self._cycle[self._next]
        if repeats.seeds:
            assert self._recorder is not None
            self._recorder.fill(repeats.seeds)
        replies: Any = None
        for part in step.parts:
            if replies is not None:
                tensors = tensors_of(replies)
                if tuple(map(Tensor.data_ptr, tensors)) != part.places:
                    copy_all(part.reads, tensors)
            part.graph.replay()
            if part.releases:
                self._bucket.release()
            if part.requests is not None:
                replies = yield part.requests
        self._next = 1 - self._next
        return step.ended(state)


@contextmanager
def captured(graph: Any, device: torch.device, pool: Any) -> Iterator[None]:
    """Record the work of this thread on the device's current stream, without doing it."""
    stream = torch.cuda.current_stream(device)
    # of this thread alone: others call CUDA meanwhile, such as the one that watches over NCCL
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


def addresses_of(tensors: Sequence[Tensor]) -> Places:
    """Return the address and the number of elements of each tensor."""
    return tuple(zip(map(Tensor.data_ptr, tensors), map(Tensor.numel, tensors), strict=True))


def tensors_of(replies: Sequence[Reply]) -> tuple[Tensor, ...]:
    """Return the tensors of replies, in their order."""
    found: list[Tensor] = []
    for reply in replies:
        if isinstance(reply, Tensor):
            found.append(reply)
        else:
            found += reply.values() if isinstance(reply, dict) else reply
    return tuple(found)


def own_memory(rounds: Rounds) -> list[Tensor]:
    """Return the tensors of replies that do not lie in the tensors of their requests."""
    asked = [(requests, replies) for requests, replies in rounds if not isinstance(requests, Read)]
    given = {r.tensor.data_ptr() for requests, _ in asked for r in requests if hasattr(r, "tensor")}
    return [t for _, replies in asked for t in tensors_of(replies) if t.data_ptr() not in given]


def forms_of(rounds: Rounds) -> list[Any]:
    """Return what the requests of like steps have in common."""
    asked = [list(requests) if isinstance(requests, tuple) else [requests] for requests, _ in rounds]
    tensors = [[(type(r), getattr(r, "tensor", None)) for r in requests] for requests in asked]
    return [[(kind, None if t is None else (t.shape, t.dtype)) for kind, t in each] for each in tensors]


def stand_in(request: Request, earlier: Request, reply: Reply) -> Reply:
    """Return where the reply to a request is expected: where the reply to an earlier one was, or in its tensor."""
    if isinstance(reply, dict) or not hasattr(request, "tensor") or not hasattr(earlier, "tensor"):
        return reply
    place = earlier.tensor.data_ptr()
    if isinstance(reply, Tensor):
        return request.tensor if reply.data_ptr() == place else reply
    return tuple(request.tensor if part.data_ptr() == place else part for part in reply)


def with_memory(request: Request, reply: Reply) -> Request:
    """Return the request with the memory in which its reply is expected, if that is one tensor."""
    if not isinstance(request, AllGather | AllToAll):
        return request
    whole = reply[0]._base
    if whole is None or whole.numel() != sum(map(Tensor.numel, reply)):
        return request
    return replace(request, into=whole)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor to its target. A source may be its own target, or the target of another source."""
    places = set(map(Tensor.data_ptr, targets))
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.data_ptr() != s.data_ptr()]
    copies = [(t, s.clone() if s.data_ptr() in places else s) for t, s in pairs]
    for target, source in copies:
        target.copy_(source)
