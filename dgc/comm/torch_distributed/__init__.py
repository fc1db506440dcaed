"""Transport over torch.distributed."""

from dgc.comm.torch_distributed.transport import TorchTransport as TorchTransport
from dgc.comm.torch_distributed.transport import connect as connect
