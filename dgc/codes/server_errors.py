"""What a rank has not sent of the mean, where it compresses a part of the mean for all ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar

from jaxtyping import Float32
from torch import Tensor

from dgc.core.bucket import Bucket
from dgc.core.protocol import Vector
from dgc.core.state import State, Tables, flat_from, parts_of

S = TypeVar("S", bound="ServerState")


@dataclass(eq=False, kw_only=True)
class ServerState(State, ABC):
    """The state of a rank that is the server of one chunk of the bucket.

    Attributes:
        chunk_errors: What the server has not sent [chunk], in the unit of the sum over ranks. A checkpoint has it
            in whole tensors, with zeros in the chunks of other ranks.
    """

    chunk_errors: Float32[Tensor, "chunk"]

    def moving(self) -> list[Tensor]:
        return [*super().moving(), self.chunk_errors]

    @abstractmethod
    def server_errors(self, bucket: Bucket) -> Vector:
        """`chunk_errors` in the order of the bucket, with zeros in the chunks of other ranks."""

    @abstractmethod
    def own(self, bucket: Bucket, whole: Vector) -> Float32[Tensor, "chunk"]:
        """A copy of the elements of this rank's chunk."""

    def unsent(self, bucket: Bucket) -> list[Tensor]:
        return [self.errors["errors"] + self.server_errors(bucket)]

    def saved(self, bucket: Bucket) -> Tables:
        return {**super().saved(bucket), "server_errors": parts_of(bucket, self.server_errors(bucket))}

    def loaded(self: S, bucket: Bucket, tables: Tables) -> S:
        whole = flat_from("server_errors", bucket, tables["server_errors"])
        state = replace(super().loaded(bucket, tables), chunk_errors=self.own(bucket, whole))
        # what belongs to the chunks of other ranks is sent with the gradient
        state.errors["errors"].add_(whole - state.server_errors(bucket))
        return state
