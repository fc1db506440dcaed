"""Payload formats: encoding of a sparse selection as one uint8 buffer of planned size, and decoding."""

from dgc.core.envelope import PayloadError as PayloadError
from dgc.core.values import CastValues as CastValues
from dgc.core.values import Int8Values as Int8Values
from dgc.core.values import SignValues as SignValues
from dgc.core.values import TwoBitValues as TwoBitValues
from dgc.core.values import ValueFormat as ValueFormat
from dgc.sparse.payloads.indices import ChunkIndices as ChunkIndices
from dgc.sparse.payloads.indices import IndexFormat as IndexFormat
from dgc.sparse.payloads.indices import PackedIndices as PackedIndices
from dgc.sparse.payloads.indices import PlainIndices as PlainIndices
from dgc.sparse.payloads.indices import RiceIndices as RiceIndices
from dgc.sparse.payloads.payload import Encoded as Encoded
from dgc.sparse.payloads.payload import SparseFormat as SparseFormat
