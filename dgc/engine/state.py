"""The saved state of the compression methods of an optimizer or a wrapped model: whose it is, of which step and
epoch, and its checks.

The residual of another rank has the same names and shapes. States therefore carry their identity under the key
`identity`: rank, step, and the settings that their meaning depends on. Every loader verifies it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from types import GeneratorType
from typing import Any, NoReturn, Protocol, TypedDict, runtime_checkable
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import all_gather_object
from dgc.comm.requests import Conversation
from dgc.comm.transport import Transport
from dgc.core.arguments import FLAG, NUMBER, WHOLE, checked, require
from dgc.core.bucket import Bucket, local_part
from dgc.core.graphs import StepGraphs, graphs_of
from dgc.core.protocol import Compressor, MomentumOwner
from dgc.core.results import Reduced, Result
from dgc.core.state import State, Tables, check_count, check_mapping
from dgc.engine.drops import DropPolicy
from dgc.warn import warn


def check_steps_per_epoch(steps: Any) -> None:
    """Raise ValueError for what is neither None nor a positive int."""
    if steps is not None:
        whole = isinstance(steps, int) and not isinstance(steps, bool)
        if not whole or steps < 1:
            raise ValueError(f"steps_per_epoch must be None or a positive int, not {steps!r}")


class EpochCount:
    """Calls `begin_epoch` before the first step of each epoch.

    The position is saved in epochs, so it stays valid if the number of steps per epoch changes on resume. With
    steps_per_epoch=None epochs are not counted.
    """

    def __init__(self, steps_per_epoch: int | None, begin_epoch: Callable[[int], Any]):
        check_steps_per_epoch(steps_per_epoch)
        self.steps_per_epoch, self._begin_epoch = steps_per_epoch, begin_epoch
        self._steps, self._epoch = 0, -1

    def begin(self) -> None:
        """Begin the epoch of the next step, unless it has begun already."""
        if self.steps_per_epoch is not None and (epoch := self._steps // self.steps_per_epoch) != self._epoch:
            self._epoch = epoch
            self._begin_epoch(epoch)

    def begin_step(self) -> None:
        """Count a step. Call it once per step, before the step sends anything."""
        self.begin()
        self._steps += 1

    def state_dict(self) -> dict[str, float]:
        return {} if self.steps_per_epoch is None else {"epochs": self._steps / self.steps_per_epoch}

    def check(self, epochs: Any) -> None:
        """Raise ValueError if a saved position is needed and `epochs` is None, or if it is no position."""
        if epochs is not None:
            require("a number of 0 or more", NUMBER, least=0, **{"epochs of the state": epochs})
            if epochs >= 2**53:
                raise ValueError(f"epochs of the state must be finite and below 2**53, not {epochs}")
        if self.steps_per_epoch is not None and epochs is None:
            raise ValueError(
                "this state was saved without steps_per_epoch, so it has no epoch: build the optimizer without "
                "steps_per_epoch and call begin_epoch(epoch) before each epoch"
            )

    def load(self, epochs: float | None) -> None:
        """Continue from a saved position, in epochs. It is ignored if epochs are not counted."""
        if self.steps_per_epoch is not None and epochs is not None:
            self._steps, self._epoch = round(epochs * self.steps_per_epoch), -1
            self.begin()


KEY, METHOD = "identity", "method"


class ResidualPart(TypedDict):
    """Which part of the residual a rank has, if the ranks of a machine divide it among them."""

    machine: int
    machines: int
    tensors: list[str]  # names of this rank's parameters
    others: list[str]  # names of those that other ranks of the machine have


@checked
@dataclass(frozen=True)
class Identity:
    """Whose state it is. All values are plain, so that `torch.load(weights_only=True)` reads them.

    Attributes:
        rank, size: The rank and the number of ranks. Of a model that FSDP2 shards inside machines, the machine and
            the number of machines.
        step: Number of steps so far, dropped ones included. None: ranks take different numbers of steps.
        shard, shards: Which shard of a machine's model it is of, and the number of shards.
        settings: Those that the meaning of the state depends on, by name.
    """

    rank: int
    size: int
    step: int | None
    shard: int = 0
    shards: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.shards == 1:
            return f"rank {self.rank} of {self.size}"
        return f"shard {self.shard} of {self.shards} on machine {self.rank} of {self.size}"


def identified(state: Mapping[str, Any], identity: Identity) -> dict[str, Any]:
    """Return the state with its identity."""
    return {**state, KEY: asdict(identity)}


def texts(keys: Iterable[Any]) -> list[str]:
    """Return keys, which may be of any type, sorted for a message."""
    return sorted(map(str, keys))


def check_is_state(state: Any) -> None:
    """Raise ValueError if the argument is not a state."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be what compression_state_dict() returned, not {state!r}")


def identity_of(state: Mapping[str, Any]) -> Identity:
    """Return the identity of a state.

    Raises:
        ValueError: It has none, or it is damaged.
    """
    check_is_state(state)
    saved = state.get(KEY)
    if saved is None:
        raise ValueError(
            f"the state has no {KEY}, which says whose it is: load what compression_state_dict() returned, whole"
        )
    try:
        identity = Identity(**saved)
        if any(isinstance(v, Tensor) or not isinstance(k, str) for k, v in identity.settings.items()):
            raise ValueError("a setting is a tensor, or its name is no text")
        if identity.step is None or 0 <= identity.step < 2**63:
            return identity
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{KEY} of the state is damaged: {saved!r}")


def verified(
    state: Mapping[str, Any], own: Identity, allow_other_rank: bool = False
) -> tuple[dict[str, Any], int | None]:
    """Check that a state belongs to this rank and fits its settings.

    own: The identity of this rank. allow_other_rank: Accept the state of another rank, or of another number of
    ranks, but not of another shard. Returns the state without its identity, and its step. None: ranks take
    different numbers of steps.

    Raises:
        ValueError: The state has no identity, or belongs elsewhere. The message names whose it is, and the cures.
    """
    identity = identity_of(state)
    content = {name: value for name, value in state.items() if name != KEY}
    if (identity.shard, identity.shards) != (own.shard, own.shards):
        raise ValueError(
            f"this state is from {identity}, and {own} loads it: shards are different parts of the model. Load "
            "the state that this rank has saved, with the same number of ranks on each machine"
        )
    if (identity.rank, identity.size) != (own.rank, own.size) and not allow_other_rank:
        raise ValueError(
            f"this state is from {identity}, and {own} loads it. What is not sent yet differs between ranks: "
            "this rank's would be lost, and the other rank's sent twice. Save the state on every rank, "
            "into a file of its own, and load this rank's file. For another number of ranks, use "
            "dgc.optim.redistribute on the states of all ranks. allow_other_rank=True loads it nevertheless "
            "(page Checkpoints of the documentation)"
        )
    if (identity.step is None) != (own.step is None):
        raise ValueError(
            f"this state is of step {identity.step}, which says that another kind of exchange saved it"
        )
    for name in sorted({*identity.settings, *own.settings}):
        saved, here = identity.settings.get(name), own.settings.get(name)
        if saved != here:
            raise ValueError(
                f"this state was saved with {name}={saved}, and here it is {here}: the state has another meaning "
                f"then. Use {saved}, or begin from the model alone, saved inside consensus()"
            )
    return content, identity.step


def has_steps(optimizer: Optimizer) -> bool:
    """Whether an optimizer has taken more steps than the one without gradients that may have made its state."""
    for own in filter(None, optimizer.state.values()):
        if "step" in own:
            return float(own["step"]) > 1
        # of a DTensor the part of this rank, since only rank 0 asks
        tensors = (local_part(t) for t in own.values() if isinstance(t, Tensor))
        return any(bool(t.any()) for t in tensors)
    return False


def compare_states(transport: Transport, step: int, common: Mapping[str, int]) -> None:
    """Check that the states of all ranks are of one step, and have loaded the same. Collective.

    common: Of the parameters of which a loaded state has what all ranks must have: a digest for each method and
    set of parameters.

    Raises:
        ValueError: They are not. Raised on every rank, with the steps of all ranks, or the two that differ.
    """
    # the name is shown where a rank waits for others
    states = all_gather_object(transport, (step, common), "load_compression_state_dict_on_every_rank")
    first_seen: dict[str, tuple[int, int]] = {}
    ranks: dict[int, list[str]] = {}
    for rank, (other, _) in enumerate(states):
        ranks.setdefault(other, []).append(str(rank))
    if len(ranks) == 1:
        for rank, (_, digests) in enumerate(states):
            for key, digest in digests.items():
                other, expected = first_seen.setdefault(key, (rank, digest))
                if digest != expected:
                    raise ValueError(
                        f"ranks {other} and {rank} have loaded states with factors of different parameters: "
                        "load the states of one checkpoint, whole"
                    )
        return
    found = "; ".join(
        f"{'ranks' if len(its) > 1 else 'rank'} {', '.join(its)}: step {other}" for other, its in ranks.items()
    )
    raise ValueError(
        f"the ranks have residuals of different steps ({found}): load the states of one checkpoint on every "
        "rank. A rank that has loaded none is at step 0"
    )


class BucketStates:
    """A compressor in one exchange, and the states of its buckets on this rank. They are kept, restored, saved and
    loaded here.

    Attributes:
        compressor: With the settings of the present epoch.
        common: The parameters of the last loaded state, of each of its common tables.
    """

    def __init__(self, compressor: Compressor):
        self._given, self.compressor = compressor, compressor.in_epoch(0)
        self._epoch: int | None = None  # the one that was begun
        self._is_told = False  # whether it is known to the user if none was
        self._of: dict[str, tuple[Bucket, State]] = {}
        self._dropped: dict[str, State] = {}  # what replaces a state if the last step is dropped
        self.common: dict[str, list[str]] = {}
        self._graphs: dict[str, StepGraphs | None] = {}
        compressor.used_by(self)

    def add(self, bucket: Bucket, size: int, rank: int) -> None:
        """Begin with the initial state of a bucket, on rank `rank` of `size`."""
        state = self.compressor.init(bucket, size, rank)
        if self._epoch is not None:
            state = self.compressor.at_epoch(bucket, state, self._epoch)
        self._of[bucket.name] = bucket, state
        self._graphs[bucket.name] = graphs_of(bucket)

    @property
    def names(self) -> set[str]:
        """The names of all parameters."""
        return {s.name for bucket, _ in self._of.values() for s in bucket.segments}

    @property
    def partial(self) -> set[str]:
        """The tables of the saved state that need not have all parameters."""
        return {table for _, state in self._of.values() for table in state.partial}

    def __getitem__(self, bucket: Bucket) -> Any:
        """The state of a bucket."""
        return self._of[bucket.name][1]

    def __setitem__(self, bucket: Bucket, state: State) -> None:
        self._of[bucket.name] = bucket, state

    # --- one step ---------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        """Average a bucket, and keep its new state.

        Raises:
            ValueError: `reduce` of the compressor is not a generator or does not return a `Reduced`.
        """
        if not self._is_told:
            self._warn_of_no_epoch()
        state, epoch = self._of[bucket.name][1], self._epoch
        graphs = self._graphs.get(bucket.name)
        conversation = (
            self.compressor.reduce(bucket, state) if graphs is None else graphs.reduce(self.compressor, state)
        )
        if not isinstance(conversation, GeneratorType):
            raise ValueError(
                f"reduce of {self.compressor.class_name} must be a generator, which yields tuples of requests and "
                f"returns a Reduced, not {type(conversation).__name__}"
            )
        reduced = yield from conversation
        if not isinstance(reduced, Reduced):
            raise ValueError(f"reduce of {self.compressor.class_name} must return a Reduced, not {reduced!r}")
        new, dropped = reduced.state, state if reduced.dropped is None else reduced.dropped
        if self._epoch is not None and self._epoch != epoch:  # it has begun meanwhile, as in delayed outer steps
            new, dropped = (self.compressor.at_epoch(bucket, s, self._epoch) for s in (new, dropped))
        self._of[bucket.name] = bucket, new
        self._dropped[bucket.name] = dropped
        return reduced.result

    def rollback(self, bucket: Bucket) -> None:
        """Undo the last step in the state: what this rank has sent is unsent again."""
        self._of[bucket.name] = bucket, self._dropped[bucket.name]

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0."""
        self.compressor, self._epoch = self._given.in_epoch(epoch), epoch
        for bucket, state in self._of.values():
            self[bucket] = self.compressor.at_epoch(bucket, state, epoch)
        # the last step may still be dropped, if its exchange is used after it
        for name, state in self._dropped.items():
            self._dropped[name] = self.compressor.at_epoch(self._of[name][0], state, epoch)

    def _warn_of_no_epoch(self) -> None:
        """Let rank 0 warn, in the first step, if the compressor depends on the epoch and none has begun."""
        self._is_told = True
        depends = self._epoch is None and self.compressor is not self._given
        if depends and all(state.rank == 0 for _, state in self._of.values()):
            warn(
                f"{self.compressor.class_name} depends on the epoch, as with warmup_epochs, but begin_epoch was "
                f"not called before the first step: compress_ratio stays at {self.compress_ratio:.4g}. Before "
                "each epoch call exchange.begin_epoch(epoch), of what compress returned, or "
                "optimizer.begin_epoch(epoch), of DistributedOptimizer. Or pass steps_per_epoch to it"
            )

    # --- what the states say ----------------------------------------------------------------------

    @property
    def compress_ratio(self) -> float:
        """Current nominal fraction of elements sent."""
        return self.compressor.ratio_of(list(self._of.values()))

    @property
    def dense_share(self) -> float | None:
        """Fraction of the elements that were sent dense in the last step. None if the method does not decide."""
        decided = [(bucket.numel, state.dense) for bucket, state in self._of.values() if state.dense is not None]
        return sum(n for n, dense in decided if dense) / max(1, sum(n for n, _ in decided)) if decided else None

    def errors(self) -> Iterator[Tensor]:
        """The residual, bucket by bucket: tensors that are not yet sent."""
        return (error for bucket, state in self._of.values() for error in state.unsent(bucket))

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tables from the names of parameters to tensors, numbers and mappings.

        The key "method" has the name of the method, if it keeps anything. Tables of others may have equal names.
        """
        tables = self._tables()
        return {METHOD: self.compressor.class_name, **tables} if tables else {}

    def _tables(self) -> Tables:
        tables: Tables = {}
        for bucket, state in self._of.values():
            for table, values in state.saved(bucket).items():
                tables.setdefault(table, {}).update(values)
        return tables

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state. Nothing changes if it is refused.

        Raises:
            ValueError: It is from another method or model, or damaged.
        """
        self.loader(saved)()

    def loader(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state, as `load_state_dict`, and return the function that takes it over and cannot fail."""
        check_mapping("state of a compressor", saved)
        own, names = self._tables(), self.names
        tables, kind = {key: table for key, table in saved.items() if key != METHOD}, self.compressor.class_name
        for table in tables.keys() ^ own.keys():
            if table in own or tables[table] != {}:
                raise ValueError(f"state of another compressor: it has {texts(tables)}, not {texts(own)}")
        if saved.get(METHOD, None if own else kind) != kind:
            raise ValueError(f"state of another compressor: of {saved.get(METHOD)!r}, not {kind}")
        for table in own:
            check_mapping(table, values := tables[table])
            if table not in self.partial and own[table].keys() != values.keys():
                missing, extra = names - values.keys(), values.keys() - names
                raise ValueError(f"{table} of another model: missing {texts(missing)}, unknown {texts(extra)}")
        loaded = {b.name: (b, state.loaded(b, tables)) for b, state in self._of.values()}
        common = {table: sorted(tables[table]) for _, state in self._of.values() for table in state.common}

        def take() -> None:
            self._of, self.common = loaded, common
            self._dropped.clear()

        return take


@runtime_checkable
class Method(Protocol):
    """The common interface of compressors, with their states, and of gossip algorithms.

    The attribute `fixed_settings`, where there is one, has the settings that the meaning of a state depends on, as
    plain values by name.
    """

    @property
    def compress_ratio(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...
    def errors(self) -> Iterable[Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def loader(self, state: dict[str, Any]) -> Callable[[], None]: ...


def named_methods(methods: Iterable[Any]) -> dict[str, Any]:
    """Return methods by the names under which their states are saved."""
    return {
        f"{m.compressor.class_name if isinstance(m, BucketStates) else type(m).__name__}.{i}": m
        for i, m in enumerate(methods)
    }


class HasCompression:
    """Base class of what exchanges gradients or models with compression methods: compressors, or gossip.

    steps_per_epoch: Count epochs by steps. None: the user calls `begin_epoch`. drops: What is done about steps
    whose gradients are not finite.
    """

    part: ResidualPart | None = None  # None: the residual of this rank is its own
    _is_sharded = False  # whether the ranks of a machine have shards of one model
    _takes_common_steps = True  # whether all ranks take the same number of steps

    def __init__(
        self, methods: Sequence[Method], transport: Transport, steps_per_epoch: int | None, drops: DropPolicy
    ):
        self._methods, self._ranks, self._drops = list(methods), transport, drops
        self._steps, self._compares_steps = 0, True
        self._epochs = EpochCount(steps_per_epoch, self._set_epoch)

    @property
    def nonfinite(self) -> str:
        """The response to a gradient with NaN or inf: "skip" or "raise"."""
        return self._drops.nonfinite

    @property
    def dropped_steps(self) -> int:
        """Number of steps dropped because of NaN or inf in a gradient."""
        return self._drops.dropped

    def _begin_step(self) -> None:
        """Count a step. Call it before the step sends anything. Collective in the first step and after a load."""
        if self._steps == 0 and self._known_optimizer is not None:
            self._warn_of_lost_state(self._known_optimizer)
        if self._compares_steps and self._takes_common_steps:
            compare_states(self._ranks, self._steps, self._common())
        self._compares_steps = False
        self._steps += 1
        if self._epochs.steps_per_epoch is not None:
            self._epochs.begin_step()

    @property
    def _known_optimizer(self) -> Optimizer | None:
        """The optimizer that takes the means, if the adapter knows it before it steps."""
        return None

    def _common(self) -> dict[str, int]:
        """See `compare_states`. Shards, and the parts of a machine's ranks, are compared with their like."""
        identity, states = self._identity(), [m for m in self._methods if isinstance(m, BucketStates)]
        return {
            f"{identity.shard} {i} {crc32(repr(sorted(m.names)).encode())}": crc32(repr(m.common).encode())
            for i, m in enumerate(states)
            if m.common
        }

    def _warn_of_lost_state(self, optimizer: Optimizer) -> None:
        """Let rank 0 warn if an optimizer has taken steps and this exchange, which keeps a residual, none."""
        of_gradients = isinstance(optimizer, MomentumOwner) and not optimizer.exchanges_momentum
        if self._ranks.rank or of_gradients or not has_steps(optimizer) or not any(True for _ in self.errors()):
            return
        warn(
            f"{type(optimizer).__name__} has taken steps, and the exchange none, so its residual is empty. If the "
            "run resumes, load the state of the exchange too: load_compression_state_dict(), see "
            "docs/checkpoints.md. If compression begins here, nothing is lost"
        )

    def _check_idle(self, call: str) -> None:
        """Raise RuntimeError if `call` would meet a step that is not complete. Adapters say when that is."""

    def _check_taken(self, call: str) -> None:
        """Raise RuntimeError if the optimizer has not used the last means yet. Adapters say when that is."""

    def _identity(self) -> Identity:
        ranks, named = self._ranks, named_methods(self._methods)
        step = self._steps if self._takes_common_steps else None
        settings = {
            f"{name}.{key}": value
            for name, method in named.items()
            for key, value in getattr(method, "fixed_settings", {}).items()
        }
        if not self._is_sharded:
            return Identity(ranks.rank, ranks.size, step, settings=settings)
        (machine, shard), (machines, shards) = (
            (of("cross"), of("local")) for of in (ranks.group_rank, ranks.group_size)
        )
        return Identity(machine, machines, step, shard, shards, settings)

    def begin_epoch(self, epoch: int) -> float:
        """Set the epoch, counted from 0, for the warm-up of the compressors. Returns the new compress_ratio."""
        if self._epochs.steps_per_epoch is not None:
            raise ValueError(
                f"begin_epoch() was called, but steps_per_epoch={self._epochs.steps_per_epoch} counts the epochs: "
                "keep one of the two"
            )
        self._check_idle("begin_epoch()")
        self._set_epoch(epoch)
        return self.compress_ratio

    def _set_epoch(self, epoch: int) -> None:
        require("a whole number of at least 0", WHOLE, least=0, epoch=epoch)
        for method in self._methods:
            method.begin_epoch(epoch)

    @property
    def compress_ratio(self) -> float:
        """The smallest nominal fraction of elements that a compressor currently sends. 1.0 is dense."""
        return min((m.compress_ratio for m in self._methods), default=1.0)

    def errors(self) -> Iterator[Tensor]:
        """This rank's residual, the unsent part of its gradients: flat tensors, read-only."""
        return (error for method in self._methods for error in method.errors())

    def error_norm(self) -> float:
        """Return the L2 norm of `errors`."""
        return sqrt(sum(float(error.norm(dtype=torch.float64)) ** 2 for error in self.errors()))

    def compression_state_dict(self) -> dict[str, Any]:
        """Return this rank's residual. Unlike `state_dict()` it differs between ranks: save it on each.

        Raises:
            RuntimeError: Gradients are being exchanged, so that a part of the residual is that before the step. Or
                they have been exchanged, and the optimizer's step() has not followed yet, so that the weights are
                those before it. Or an exception has ended an earlier step.
        """
        self._check_idle("compression_state_dict()")
        self._check_taken("compression_state_dict()")
        states = {name: method.state_dict() for name, method in named_methods(self._methods).items()}
        part = {} if self.part is None else {"part": self.part}
        return identified({**states, **part, **self._epochs.state_dict()}, self._identity())

    def load_compression_state_dict(self, state: dict[str, Any], *, allow_other_rank: bool = False) -> None:
        """Load this rank's residual. Call it on every rank: the next step compares the steps of all states.

        Args:
            state: What `compression_state_dict()` returned on this rank, or this rank's element of what
                `redistribute` returns.
            allow_other_rank: Load the state of another rank, or of another number of ranks. What this rank had not
                sent is lost. If all ranks load the state of one, the mean of the unsent gradients becomes the one
                of this one.

        Raises:
            ValueError: The state is from another rank, method or model, or from other settings.
            RuntimeError: Gradients are being exchanged, or an exception has ended an earlier step.
        """
        require("True or False", FLAG, allow_other_rank=allow_other_rank)
        self._check_idle("load_compression_state_dict()")
        state, step = verified(state, self._identity(), allow_other_rank)
        saved, epochs = state.pop("part", None), state.pop("epochs", None)
        self._epochs.check(epochs)
        _check_part(saved)
        if _division(saved, allow_other_rank) != _division(self.part, allow_other_rank):
            raise ValueError(
                f"this residual is {_describe(saved)}, and this rank needs {_describe(self.part)}: load it "
                "with the same `hierarchical`, machines, ranks and bucket_mb, or redistribute it with "
                "dgc.optim.redistribute (page Checkpoints of the documentation)"
            )
        methods = named_methods(self._methods)
        # what keeps no state may be of another class: dense tensors in fp16 in place of fp32
        lacks_state = any(methods[name].state_dict() for name in methods.keys() - state.keys())
        unknown = [state[name] for name in state.keys() - methods.keys()]
        if lacks_state or any(not isinstance(part, Mapping) or part for part in unknown):
            found = f"it has {texts(state)}, not {texts(methods)}"
            raise ValueError(f"state of other compressors: {found}. Use the compressors of the run that saved it")
        for name, part in state.items():
            require("a mapping", (Mapping,), **{str(name): part})
        # all are checked before the first one changes
        for load in [method.loader(state[name]) for name, method in methods.items() if name in state]:
            load()
        self._steps, self._compares_steps = self._steps if step is None else step, True
        self._epochs.load(epochs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save state_dict() and, on each rank, "
            "compression_state_dict(), and load them into a new one"
        )


def _check_part(part: Any) -> None:
    """Raise ValueError for what is neither None nor a ResidualPart."""
    if part is None:
        return
    check_mapping("part of the state", part)
    if part.keys() != ResidualPart.__required_keys__:
        raise ValueError(f"part of the state must have {texts(ResidualPart.__required_keys__)}, not {texts(part)}")
    for key in ("machine", "machines"):
        check_count(f"{key} of the state's part", part[key])
    for key in ("tensors", "others"):
        require("a list of names", (list, tuple), **{f"{key} of the state's part": part[key]})


def _division(part: ResidualPart | None, allow_other_rank: bool) -> Any:
    """What a state must have in common with the rank that loads it, of the division of a machine's residual."""
    return part["tensors"] if part is not None and allow_other_rank else part


def _describe(part: ResidualPart | None) -> str:
    if part is None:
        return "from a rank of its own"
    return f"from {len(part['tensors'])} tensors on machine {part['machine']} of {part['machines']}"
