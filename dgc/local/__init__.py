"""Outer steps: local training, and compressed exchanges of pseudo-gradients."""

from dgc.local.exchange import BufferExchange as BufferExchange
from dgc.local.optimizers import Nesterov as Nesterov
from dgc.local.optimizers import OuterOptimizer as OuterOptimizer
from dgc.local.optimizers import SlowMo as SlowMo
from dgc.local.steps import OuterSchedule as OuterSchedule
from dgc.local.steps import OuterSteps as OuterSteps
from dgc.local.steps import Ramp as Ramp
