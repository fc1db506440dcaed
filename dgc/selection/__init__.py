"""Which elements to send: selectors, and the plan that they fill."""

from dgc.selection.exact import Exact as Exact
from dgc.selection.plan import Plan as Plan
from dgc.selection.plan import Selector as Selector
from dgc.selection.plan import plan_selection as plan_selection
from dgc.selection.sampled import Sampled as Sampled
