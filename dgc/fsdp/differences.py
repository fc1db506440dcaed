"""The weights that all ranks have gathered last, for differences to them.

    first gather     w' = w                    every rank sends its shard w in full
    after a step     w' = w' + Q[w - w']       of its own shard, with the same w' on every rank
    no change        w'                        nothing is sent: in backward, and from one evaluation to the next

Q rounds to blocks of 4 bits. What it loses is in the next difference, so that w' follows w. w' has the type of the
gathered weights. What rounding to that type loses is in the next difference too.

All ranks must choose the same of the three, without a message. They choose by what the whole program does: steps
of torch's optimizers on the parameters, and other changes of the parameters, after which shards are sent in full.
Those are `load_state_dict()`, functions of torch.nn.init, and other operations in place. What writes to the memory
of a shard is seen by no other rank: `p.data.copy_()`, `p.to_local().copy_()`, and what
torch.distributed.checkpoint loads into `model.state_dict()` alone. A gather that would send nothing raises
RuntimeError after that.

Memory of a rank between steps: all weights of the model, in the type of a gather.

Source: SDP4Bit (Jia et al. 2024, arXiv 2410.15526), quantized differences of weights. Differences from the paper:
FSDP2 gathers the weights of one module at a time, and frees them between forward and backward. w' is kept.
"""

from collections.abc import Iterable
from enum import Enum, auto

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.fsdp.shards import ParameterGroup

FP16 = torch.finfo(torch.float16).max


class Sends(Enum):
    """What a gather sends."""

    SHARD = auto()
    DIFFERENCE = auto()
    NOTHING = auto()


class LastGathered:
    """The weights of one group that all of its ranks have gathered last.

    rows: These, [ranks numel], of the type of a gather, or fp32 after loading. None: nothing was gathered.
    is_current: The parameters have not changed since.
    """

    def __init__(self, group: ParameterGroup):
        self.group = group
        self.rows: Tensor | None = None
        self.is_current = self._is_written = False
        self._parameters = set(group.gathered)
        self._version: int | None = None
        self._sum: Tensor | None = None  # of the shard that was sent last
        self._is_hidden: Tensor | None = None

    # --- changes of the parameters -----------------------------------------------------------------

    def has_any_of(self, parameters: Iterable[Tensor]) -> bool:
        return not self._parameters.isdisjoint(parameters)

    def note_changes(self) -> None:
        """Find changes that no optimizer has made. Called before its steps and before a gather."""
        version = sum(p._version for p in self.group.gathered)
        self._is_written |= self._version not in (None, version)
        self._version = version

    def note_step(self) -> None:
        self.is_current, self._version = False, sum(p._version for p in self.group.gathered)

    def next(self, shard: Tensor) -> Sends:
        """Return what to send of this shard."""
        self.note_changes()
        if self.rows is None or self._is_written:
            return Sends.SHARD
        if not self.is_current:
            return Sends.DIFFERENCE
        if self._sum is not None:
            is_written = self._sum != sum_of_bits(shard)
            self._is_hidden = is_written if self._is_hidden is None else self._is_hidden | is_written
            if shard.is_cpu:
                self.check()
        return Sends.NOTHING

    def check(self) -> None:
        """Raise RuntimeError if a gather has found a change that other ranks cannot see. Waits for the device."""
        found, self._is_hidden = self._is_hidden, None
        if found is not None and bool(found):
            raise RuntimeError(
                f"weights of {self.group.label} were written into the memory of their shards, which other ranks "
                "cannot see: call quantizer.weights_changed() on every rank after that"
            )

    # --- gathers ----------------------------------------------------------------------------------

    def begin(self, shard: Tensor) -> None:
        """A gather of this shard has begun, in which it or its difference is sent."""
        self.is_current, self._is_written, self._sum = True, False, sum_of_bits(shard)

    def difference_(self, v: Float32[Tensor, "numel"], rank: int) -> None:
        """Subtract what was gathered of this rank's shard from v, the shard."""
        assert self.rows is not None
        v.sub_(self.rows[rank * v.numel() : (rank + 1) * v.numel()])

    def add(self, differences: Float32[Tensor, "all"], dtype: torch.dtype) -> Tensor:
        """Add the differences of all shards. Returns the weights, of this type."""
        assert self.rows is not None
        self.rows = self.rows.to(dtype).add_(differences)
        if dtype == torch.float16:  # the scale of a block is rounded up
            self.rows.clamp_(-FP16, FP16)
        return self.rows

    # --- checkpoints ------------------------------------------------------------------------------

    def saved(self, rank: int) -> list[Tensor]:
        """Return what was gathered of this rank's part of each parameter, in fp32, or else the parameters."""
        if self.rows is None:
            return [p.to_local().detach().float().clone() for p in self.group.gathered]
        row = self.rows.view(len(self.group.mesh.shards), -1)[rank].float()
        return [place.rows_of(row).view(place.shape).clone() for place in self.group.gathered_places]

    def load(self, parts: Iterable[Tensor], is_current: bool) -> None:
        """Load these, of all ranks. The model may be loaded before or after. Collective."""
        places = self.group.gathered_places
        row = torch.zeros(sum(place.reserved for place in places), dtype=torch.float32, device=self.group.device)
        for part, place in zip(parts, places, strict=True):
            place.rows_of(row).copy_(part.flatten())
        self.rows, self.is_current = self.group.gather(row), is_current
        self._is_written, self._version, self._sum = False, None, None


def sum_of_bits(shard: Tensor) -> Tensor:
    """Return a sum of the elements' bits. Nothing waits for the device."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[shard.element_size()]
    return shard.detach().contiguous().view(whole).sum(dtype=torch.int64)
