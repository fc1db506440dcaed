"""Outer steps: local training, and compressed exchanges of pseudo-gradients."""

from dgc.outer.optimizers import Nesterov as Nesterov
from dgc.outer.optimizers import OuterOptimizer as OuterOptimizer
from dgc.outer.optimizers import SlowMo as SlowMo
from dgc.outer.steps import OuterSchedule as OuterSchedule
from dgc.outer.steps import OuterSteps as OuterSteps
from dgc.outer.steps import Ramp as Ramp
from dgc.outer.zero_one_adam import ZeroOneAdam as ZeroOneAdam
from dgc.outer.zero_one_steps import ZeroOneSteps as ZeroOneSteps
