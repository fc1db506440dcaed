"""After another file: the outer learning rate rises from 0.4 to 1 times its value (SparseLoCo's alpha)."""

from dgc.local import Ramp
from dgc_training.config import Config, configs

configs.train.local.outer_schedule = Config(Ramp, first=0.4, last=1.0)
configs.train.local.outer_schedule.steps = 1000  # inner steps until the last factor
