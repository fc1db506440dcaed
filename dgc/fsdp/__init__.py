"""FSDP2: compression between machines that each shard the model, and quantized collectives over all ranks."""

# first, since it refuses other versions of torch
from dgc.fsdp.compatibility import TORCH as _TORCH  # noqa: F401
from dgc.fsdp.exchange import FSDPExchange as FSDPExchange
from dgc.fsdp.exchange import compress as compress
from dgc.fsdp.files import load_state as load_state
from dgc.fsdp.files import save_state as save_state
from dgc.fsdp.local import ShardedLocalOptimizer as ShardedLocalOptimizer
from dgc.fsdp.quantized import FSDPQuantizer as FSDPQuantizer
from dgc.fsdp.quantized import quantize as quantize
from dgc.fsdp.shards import local_mesh as local_mesh
