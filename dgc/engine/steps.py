"""The parts of a step that exchanges observe: autograd's backward pass, and the steps of all optimizers.

A state may be saved after a step is complete, and before the next one begins.
"""

from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.core.bucket import local_part

T = TypeVar("T")
CURE = "A hook or a signal handler can set a flag, for the loop to save after step()"


def check_not_running(call: str, is_running: bool) -> None:
    """Raise RuntimeError if `call` would meet a step of which only a part is done."""
    if is_running:
        raise RuntimeError(
            f"{call} while gradients are exchanged: some buckets are in the state before this step, and others in "
            f"that after it. Call it when the step is complete. {CURE}"
        )


def check_taken(call: str, parameters: Iterable[Tensor]) -> None:
    """Raise RuntimeError if the parameters, whose means no step has used yet, still have their gradients.

    Gradients that are not finite belong to a step that is dropped, or that a GradScaler leaves out.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    plain = [local_part(g) for g in gradients]
    if plain and all(bool((g.coalesce().values() if g.is_sparse else g).isfinite().all()) for g in plain):
        raise RuntimeError(
            f"{call} between the exchange of the gradients and the optimizer's step(): the residual is that after "
            "this step, and the weights are those before it. Call it after step(), or after zero_grad() if this "
            f"step is left out. {CURE}"
        )


class _Observers:
    """Methods that are called at each step of any optimizer, while their objects exist.

    All use one hook of torch, which stays: torch iterates over its hooks, and the garbage collector, which may run
    in each of them, must not remove one.

    has_parts: Call them also for optimizers that step inside another one (`is_part_of_another`).
    """

    def __init__(self, register: Callable[[Any], Any], has_parts: bool):
        self._register, self._has_parts = register, has_parts
        self._methods: dict[object, WeakMethod[Callable[[Optimizer], None]]] = {}
        self._handle: Any = None

    def add(self, method: Callable[[Optimizer], None]) -> Callable[[], object]:
        """Begin to call a method. Returns a function that ends it."""
        if self._handle is None:
            self._handle = self._register(self._call)
        key = object()
        end = partial(self._methods.pop, key, None)
        self._methods[key] = WeakMethod(method, lambda _: end())
        return end

    def _call(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._has_parts and getattr(optimizer, "is_part_of_another", False):
            return
        for reference in list(self._methods.values()):  # other threads and the garbage collector change them
            if (method := reference()) is not None:
                method(optimizer)


before_steps = _Observers(register_optimizer_step_pre_hook, has_parts=False).add
after_steps = _Observers(register_optimizer_step_post_hook, has_parts=True).add


class ParametersOf(Generic[T]):
    """What an exchange knows of the parameters of an optimizer: found once, until it has other ones.

    Steps ask in every step of any optimizer, and to look up hundreds of parameters takes a part of a millisecond.

    find: given the parameters, returns what is known of them.
    """

    def __init__(self, find: Callable[[list[Tensor]], T]):
        self._find = find
        # no parameter of other models is kept alive
        self._known: WeakKeyDictionary[Optimizer, tuple[list[ref[Tensor]], T]] = WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer) -> T:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = self._known.get(optimizer)
        if known is not None:
            references, found = known
            same = len(references) == len(parameters) and all(map(is_, [r() for r in references], parameters))
            if same:
                return found
        found = self._find(parameters)
        self._known[optimizer] = list(map(ref, parameters)), found
        return found


class AwaitedStep:
    """Knows whether optimizers still have to step on the means that were exchanged last.

    Optimizers of torch are seen. Of parameters on which none has stepped before, nothing is known.

    on_first_step: a method that is called with the first optimizer, after its first step, while its object exists.
    """

    def __init__(self, parameters: Iterable[Tensor], on_first_step: Callable[[Optimizer], None] | None = None):
        self._own = ParametersOf(set(parameters).intersection)
        # the parameters on which each optimizer has stepped last, and those with a mean that it has not used yet
        self._owned: WeakKeyDictionary[Optimizer, set[Tensor]] = WeakKeyDictionary()
        self._awaited: dict[Optimizer, set[Tensor]] = {}
        self._on_first_step = None if on_first_step is None else WeakMethod(on_first_step)
        after_steps(self._after_step)

    def _after_step(self, optimizer: Optimizer) -> None:
        owned = self._own(optimizer)
        if owned:
            if self._owned.get(optimizer) is not owned:
                # an optimizer of the same parameters replaces those before it
                others = [o for o, its in self._owned.items() if o is not optimizer and not owned.isdisjoint(its)]
                for other in others:
                    del self._owned[other]
                    self._awaited.pop(other, None)
                self._owned[optimizer] = owned
            self._awaited.pop(optimizer, None)
            if self._on_first_step is not None and not getattr(optimizer, "is_part_of_another", False):
                on_first_step, self._on_first_step = self._on_first_step(), None
                if on_first_step is not None:
                    on_first_step(optimizer)

    def begin(self) -> None:
        """The gradients have been exchanged."""
        self._awaited = dict(self._owned)

    def check(self, call: str) -> None:
        """Raise RuntimeError if `call` would combine the residual after a step with the weights before it."""
        if self._awaited:
            check_taken(call, set().union(*self._awaited.values()))


class BackwardPass:
    """A backward pass of autograd in which gradients are exchanged."""

    def __init__(self) -> None:
        self._callback: ref[Callable[[], None]] | None = None  # autograd drops it if an exception ends the pass
        self._is_complete = True

    def begin(self, end: Callable[[], None] = lambda: None) -> None:
        """Call `end` when the backward pass that runs now has ended, unless an exception ends it.

        It is called after what was queued before, such as the end of FSDP2's own work.
        """

        def callback() -> None:
            try:
                end()
                self._is_complete = True
            finally:
                self._callback = None  # the traceback of an error would keep the function

        self._callback, self._is_complete = ref(callback), False
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(callback)

    @property
    def is_running(self) -> bool:
        return self._callback is not None and self._callback() is not None

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended the pass that was begun last."""
        return not self._is_complete and not self.is_running
