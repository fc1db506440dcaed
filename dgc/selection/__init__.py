"""Which elements to send: selectors, and the plan that they fill."""

from dgc.selection.exact import Exact as Exact
from dgc.selection.exact import Histogram as Histogram
from dgc.selection.exact import Predicted as Predicted
from dgc.selection.plan import Plan as Plan
from dgc.selection.plan import plan_selection as plan_selection
from dgc.selection.sampled import Sampled as Sampled
from dgc.selection.selector import Selected as Selected
from dgc.selection.selector import Selector as Selector
