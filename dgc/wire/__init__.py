"""Payload formats: encoding of a sparse selection as one uint8 buffer of planned size, and decoding."""

from dgc.wire.envelope import PayloadError as PayloadError
from dgc.wire.indices import ChunkIndices as ChunkIndices
from dgc.wire.indices import IndexFormat as IndexFormat
from dgc.wire.indices import PackedIndices as PackedIndices
from dgc.wire.indices import PlainIndices as PlainIndices
from dgc.wire.indices import RiceIndices as RiceIndices
from dgc.wire.payload import Encoded as Encoded
from dgc.wire.payload import SparseFormat as SparseFormat
from dgc.wire.values import CastValues as CastValues
from dgc.wire.values import Int8Values as Int8Values
from dgc.wire.values import SignValues as SignValues
from dgc.wire.values import TwoBitValues as TwoBitValues
from dgc.wire.values import ValueFormat as ValueFormat
