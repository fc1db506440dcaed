"""Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887) for the experiment stacked before it."""

from dgc.compression import DGCCompressor
from dgc.memory import ClipByNorm, DGCSGDMemory
from dgc.optim import DGCSGD
from dgc_training.config import Config, configs, derived

optimizer = configs.train.optimizer
if optimizer._target_ not in ("torch.optim.SGD", "dgc.optim.DGCSGD"):
    raise ValueError(f"DGC corrects the momentum of SGD, but train.optimizer is {optimizer._target_}")

configs.train.dgc = True

# The optimizer keeps its keys. Its momentum is applied by the memory below, before compression (section 3.2).
optimizer._target_ = DGCSGD
optimizer.setdefault("momentum", 0.0)
optimizer.setdefault("nesterov", False)

configs.train.compression = Config(DGCCompressor)
configs.train.compression.compress_ratio = 0.001  # share of a tensor's elements that is sent
# Each of these is a name or a constructor of dgc.sparse.selectors or dgc.sparse.payloads.
configs.train.compression.selector = None  # which elements; None: exact top-k
configs.train.compression.values = None  # fp32, fp16, bf16, int8, sign or 2bit; None: fp32
configs.train.compression.indices = None  # int64, int32, packed or rice; None: int64
configs.train.compression.exchange = "all_gather"  # how selections are summed: also reduce_scatter, auto
# values of vectors, which are not compressed: fp32, fp16, bf16 or int8 (dense_int8.py); None: what fits the values
configs.train.compression.dense_values = None
configs.train.compression.vectors = "dense"  # sparse (vectors_sparse.py): they are compressed too
configs.train.compression.vector_ratio = None  # share of their elements that is then sent; None: compress_ratio

# The original's sampled threshold, instead of a selector:
configs.train.compression.sample_ratio = None  # share sampled to estimate it (the original's is 0.01)
configs.train.compression.strided_sample = True  # every n-th element; False: random elements
configs.train.compression.compress_upper_bound = 1.3  # above 1.3 times the target, the threshold is adapted
configs.train.compression.compress_lower_bound = 0.8  # below 0.8 times the target as well
configs.train.compression.max_adaptation_iters = 10  # maximum number of adaptations
configs.train.compression.resample = True  # if still too many elements pass: exact top-k among them

configs.train.compression.fp16_values = False  # the original's key for values = "fp16"
configs.train.compression.int32_indices = False  # the original's key for indices = "int32"
configs.train.compression.warmup_epochs = -1  # epochs of ratio warm-up (wm5.py); -1 or 0: none
configs.train.compression.warmup_coeff = None  # None: exponential; a list (wm5o.py): the ratio per epoch
configs.train.compression.seed = derived("seed")  # of the samples

configs.train.compression.memory = Config(DGCSGDMemory)
configs.train.compression.memory.momentum = derived("train.optimizer.momentum")
configs.train.compression.memory.nesterov = derived("train.optimizer.nesterov")
configs.train.compression.memory.momentum_masking = True  # sent elements lose their momentum (section 3.3)
# Clipping of each tensor's gradient, before compression (vectors: after averaging): a constructor, for example
# dgc.memory.ClipByNorm.
configs.train.compression.memory.gradient_clipping = None
# An average of accumulated gradients is larger than a gradient: an experiment's limit applies before compression.
if (limit := configs.train.clip_norm) is not None:
    configs.train.compression.memory.gradient_clipping = Config(ClipByNorm, max_norm=limit)
    configs.train.clip_norm = None

# Without these, a later file that sets plain SGD or another compression would silently disable DGC.
configs.requires["train.dgc"] = True
configs.requires["train.optimizer._target_"] = optimizer._target_
configs.requires["train.compression._target_"] = configs.train.compression._target_
