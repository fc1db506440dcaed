"""The codecs that this machine can run, for tests that hold for each of them."""

from dgc.kernels.codec.native import NativeCodec
from dgc.kernels.codec.reference import TorchCodec

CODECS = {"reference": TorchCodec(), "native": NativeCodec()}
