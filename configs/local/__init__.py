"""Every rank trains alone, or gossips by a file of configs/gossip, and models are exchanged every so many steps.

Files of this folder may follow one another: diloco.py, then powersgd.py.
"""

from dgc.local import OuterSteps
from dgc_training.config import Config, configs, derived

before = configs.train.local  # of a file of another folder, such as muon/local.py
configs.train.local = Config(OuterSteps, base=derived("train.gossip"))  # between exchanges; null: every rank alone
configs.train.local.average_every = 30  # steps between two exchanges
configs.train.local.outer = None  # outer optimizer (diloco.py, sparseloco.py); null: the mean of the models
configs.train.local.compression = None  # of pseudo-gradients: a constructor of dgc.compression; null: none
configs.train.local.fragment_mb = None  # size of a part that is exchanged at a time (streaming.py)
configs.train.local.delay = 0  # steps from an exchange to the use of its result
configs.train.local.alpha = 0.0  # share of its own model that a rank then keeps
configs.train.local.outer_schedule = None  # factor of the outer learning rate by step (ramp.py); null: 1
configs.train.local.average_momentum = False  # exchange momenta with the models (momentum.py)
configs.train.local.warmup_steps = 0  # first steps, after each of which models are averaged (post-local SGD)
if before is not None and before._target_ == configs.train.local._target_:
    configs.train.local.update(before)

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
