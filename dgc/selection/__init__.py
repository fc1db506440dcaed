"""Selectors, which choose the elements to send, and the plan of how many each tensor sends."""

from dgc.selection.estimators import Estimator as Estimator
from dgc.selection.estimators import Fixed as Fixed
from dgc.selection.estimators import Laplace as Laplace
from dgc.selection.estimators import Sampled as Sampled
from dgc.selection.estimators import Trimmed as Trimmed
from dgc.selection.exact import Exact as Exact
from dgc.selection.exact import Predicted as Predicted
from dgc.selection.exact import Radix as Radix
from dgc.selection.exact import TopKPerChunk as TopKPerChunk
from dgc.selection.selector import Plan as Plan
from dgc.selection.selector import Selector as Selector
from dgc.selection.selector import SelectorResult as SelectorResult
from dgc.selection.selector import plan_selection as plan_selection
