"""SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): 64 of each 4096 elements in 2 bits, every 30 steps."""

import torch

from dgc.compression import SparseCompressor
from dgc.memory import ResidualMemory
from dgc.sparse.payloads import RiceIndices, TwoBitValues
from dgc.sparse.selectors import TopKPerChunk
from dgc_training.config import Config, configs, derived

local = configs.train.local
local.average_every = 30
local.outer = Config(torch.optim.SGD, _partial_=True, lr=1.0)  # the paper's alpha, 0.4 to 1; no outer momentum
local.compression = Config(SparseCompressor)
local.compression.compress_ratio = 64 / 4096  # share of a chunk's elements that is sent
local.compression.memory = Config(ResidualMemory, decay=0.95)  # what is left of the unsent rest at each exchange
local.compression.selector = Config(TopKPerChunk, chunk_size=4096)
local.compression.values = Config(TwoBitValues, range_in_sigmas=6.0)
local.compression.indices = Config(RiceIndices)  # or ChunkIndices, the paper's 12 bits per index
local.compression.vectors = "sparse"
local.compression.seed = derived("seed")
