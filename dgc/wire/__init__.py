"""Payload formats: how a sparse selection becomes one uint8 buffer of planned size, and back."""

from dgc.wire.indices import PlainIndices as PlainIndices
from dgc.wire.payload import PayloadError as PayloadError
from dgc.wire.payload import SparseFormat as SparseFormat
from dgc.wire.values import CastValues as CastValues
