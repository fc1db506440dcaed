"""The codecs that this machine can run, for tests that hold for each of them."""

from dgc.kernels.bits import TorchCodec
from dgc.kernels.native_codec import NativeCodec

CODECS = {"reference": TorchCodec(), "native": NativeCodec()}
