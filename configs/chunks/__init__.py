"""Coarse-grained sparse communication, CSC (Sun et al. 2019, arXiv 1902.06855), for the experiment stacked before.

It is DGC for whole chunks of the gradients, the same ones on every rank, by an all-reduce without indices.
"""

from dgc.compression import ChunkCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD
from dgc_training.config import Config, configs, derived

optimizer = configs.train.optimizer
if optimizer._target_ not in ("torch.optim.SGD", "dgc.optim.DGCSGD"):
    raise ValueError(f"CSC corrects the momentum of SGD, but train.optimizer is {optimizer._target_}")

# The optimizer keeps its keys. Its momentum is applied by the memory below, before compression.
optimizer._target_ = DGCSGD
optimizer.setdefault("momentum", 0.0)
optimizer.setdefault("nesterov", False)

configs.train.compression = Config(ChunkCompressor)
configs.train.compression.compress_ratio = 0.1  # share of a bucket's chunks that is sent
configs.train.compression.chunk_size = 32768  # largest number of elements of a chunk
configs.train.compression.dtype = "fp16"  # or fp32 (fp32.py): type of the sums over ranks
configs.train.compression.warmup_epochs = -1  # epochs of ratio warm-up (wm5.py); -1 or 0: none
configs.train.compression.warmup_coeff = None  # None: exponential; a list (wm5o.py): the ratio per epoch

configs.train.compression.memory = Config(DGCSGDMemory)
configs.train.compression.memory.momentum = derived("train.optimizer.momentum")
configs.train.compression.memory.nesterov = derived("train.optimizer.nesterov")
configs.train.compression.memory.momentum_masking = True  # sent elements lose their momentum
configs.train.compression.memory.gradient_clipping = None  # or a constructor, such as dgc.memory.ClipByNorm

configs.requires["train.optimizer._target_"] = optimizer._target_
configs.requires["train.compression._target_"] = configs.train.compression._target_
