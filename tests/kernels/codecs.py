"""The codecs that this machine can run, for tests that hold for each of them."""

from dgc.kernels.codec import Codec
from dgc.kernels.native import NativeCodec

CODECS: dict[str, Codec] = {"reference": Codec(), "native": NativeCodec()}
