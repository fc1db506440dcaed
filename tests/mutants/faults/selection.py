"""Faults of selectors."""

from ..fault import Fault

SELECTION = [
    Fault(
        "k-rounded-down",
        "dgc/selection/selector.py",
        "return math.ceil(numel * ratio * (1 - 1e-9))",
        "return math.floor(numel * ratio)",
        ["tests/selection/test_plan.py"],
    ),
    Fault(
        "free-slots-stay-empty",
        "dgc/selection/selector.py",
        "return Budget(self.per_tensor.bounds, kept + extra, self.capacity)",
        "return Budget(self.per_tensor.bounds, kept, self.capacity)",
        ["tests/selection/test_plan.py"],
    ),
    Fault(
        "threshold-of-the-first-step-for-ever",
        "dgc/selection/estimators.py",
        'history["threshold"] = t',
        'history.setdefault("threshold", t)',
        ["tests/selection/test_selectors.py::test_a_warm_start_begins_at_the_last_threshold"],
    ),
    Fault(
        "same-sample-in-every-step",
        "dgc/selection/estimators.py",
        ".manual_seed(segments.seed)",
        ".manual_seed(0)",
        ["tests/selection/test_sampled.py"],
    ),
    Fault(
        "stages-adapt-in-the-wrong-direction",
        "dgc/selection/estimators.py",
        "stages = (stages + change)",
        "stages = (stages - change)",
        ["tests/selection/test_selectors.py::test_stages_rise_where_too_few_and_fall_where_too_many"],
    ),
    Fault(
        "quantile-of-one-tail",
        "dgc/selection/estimators.py",
        "torch.special.ndtri(1 - segments.density / 2)",
        "torch.special.ndtri(1 - segments.density)",
        ["tests/selection/test_selectors.py::test_estimates_where_they_should_hold"],
    ),
    Fault(
        "threshold-per-bucket",
        "dgc/selection/exact.py",
        "return plan.per_bucket if self.per_bucket else plan.per_tensor",
        "return plan.per_bucket",
        ["tests/selection/test_selectors.py::test_promises_on_every_shape"],
    ),
]
