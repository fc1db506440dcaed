"""The codecs that this machine can run, for tests that hold for each of them."""

from dgc.kernels.codec.native import NativeCodec
from dgc.kernels.codec.protocol import Codec
from dgc.kernels.codec.reference import TorchCodec

CODECS: dict[str, Codec] = {"reference": TorchCodec(), "native": NativeCodec()}
