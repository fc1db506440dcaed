"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009): ever fewer dense steps, then local steps and their sum in 1 bit.

It keeps the settings of the Adam or AdamW before it: of the experiment, or of configs/adam.
"""

from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc_training.config import Config, configs

optimizer = configs.train.optimizer
if optimizer._target_ not in ("torch.optim.Adam", "torch.optim.AdamW"):
    raise ValueError(f"0/1 Adam needs Adam, and not {optimizer._target_}: stack configs/adam before this file")
optimizer._target_ = ZeroOneAdam

configs.train.local = Config(ZeroOneSteps)
configs.train.local.var_freeze_step = 100  # the second moment stays from then on, and local steps begin
configs.train.local.var_update_scaler = 16  # updates of it until the interval between them doubles
configs.train.local.local_step_scaler = 100  # steps until the interval between exchanges doubles
configs.train.local.local_step_clipper = 4  # largest interval between exchanges, in steps
configs.train.local.gradients = None  # those that update the second moment: fp32; configs/adam/fp16 halves it

configs.requires["train.optimizer._target_"] = configs.train.optimizer._target_
configs.requires["train.local._target_"] = configs.train.local._target_
configs.requires["train.dgc"] = False  # momentum before compression is not for Adam
configs.requires["train.gossip"] = None  # ranks train alone between exchanges
configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
