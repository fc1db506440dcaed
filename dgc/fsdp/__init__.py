"""FSDP2: `fully_shard` inside a machine at full precision, the exchange between machines compressed."""

from dgc.fsdp.compression import compress as compress
from dgc.fsdp.exchange import FSDPExchange as FSDPExchange
from dgc.fsdp.outer import ShardedGossipOptimizer as ShardedGossipOptimizer
from dgc.fsdp.shards import local_mesh as local_mesh
