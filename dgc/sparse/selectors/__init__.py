"""Selectors, which choose the elements to send, and the quota: how many each tensor sends."""

from dgc.sparse.selectors.estimators import Estimator as Estimator
from dgc.sparse.selectors.estimators import Fixed as Fixed
from dgc.sparse.selectors.estimators import Laplace as Laplace
from dgc.sparse.selectors.estimators import Sampled as Sampled
from dgc.sparse.selectors.estimators import Trimmed as Trimmed
from dgc.sparse.selectors.exact import Exact as Exact
from dgc.sparse.selectors.exact import Predicted as Predicted
from dgc.sparse.selectors.exact import Radix as Radix
from dgc.sparse.selectors.exact import TopKPerChunk as TopKPerChunk
from dgc.sparse.selectors.selector import Quota as Quota
from dgc.sparse.selectors.selector import Selector as Selector
from dgc.sparse.selectors.selector import SelectorResult as SelectorResult
from dgc.sparse.selectors.selector import quota_of as quota_of
