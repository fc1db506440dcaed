"""The number of elements that each bucket sends at the current ratio, and the selector's history."""

import math
from typing import Any

from dgc.arguments import NOTHING, NUMBER, require
from dgc.bucket import Bucket
from dgc.selection import Plan, plan_selection

VECTORS = ("dense", "sparse")


class Plans:
    """The plan of each bucket for one ratio, with the selector's history.

    A history belongs to one ratio: another ratio begins without one.

    Args:
        vectors: "sparse" if tensors of less than two dimensions are compressed, or "dense".
        vector_ratio: Ratio of these tensors; above 1 the factor saved. A larger ratio of the others, as in a
            warm-up, is theirs too. None: that of the others.
        compress_ratio: Ratio of the other tensors after a warm-up.

    Raises:
        ValueError: An argument is none of these, or `vector_ratio` is given for vectors that go dense, or is less
            than `compress_ratio`.
    """

    def __init__(self, vectors: str, vector_ratio: float | None, compress_ratio: float) -> None:
        if vectors not in VECTORS:
            raise ValueError(f"vectors must be 'dense' or 'sparse', not {vectors!r}")
        require("None or a number", NUMBER + NOTHING, vector_ratio=vector_ratio)
        if vector_ratio is not None:
            if vectors == "dense":
                raise ValueError("vector_ratio has no effect on vectors that are sent dense: set vectors='sparse'")
            if not 0 < vector_ratio < math.inf:
                raise ValueError(f"vector_ratio must be positive and finite, not {vector_ratio}")
            vector_ratio = min(vector_ratio, 1 / vector_ratio)
            if vector_ratio < compress_ratio:
                raise ValueError(
                    f"vector_ratio is {vector_ratio:g}, less than the compress_ratio of {compress_ratio:g}: small "
                    "tensors need the larger share"
                )
        self._vector_ratio = vector_ratio
        self._plans: dict[str, Plan] = {}
        self._history: dict[str, Any] = {"ratio": None, "tensors": {}}  # loaded rows by tensor name

    def of(self, bucket: Bucket, ratio: float) -> Plan:
        """Return the bucket's plan for this ratio."""
        plan = self._plans.get(bucket.name)
        if plan is None or plan.ratio != ratio:
            plan = plan_selection(bucket.segments, ratio, bucket.device, self._vector_ratio)
            if self._history["ratio"] != ratio:
                self._history = {"ratio": None, "tensors": {}}
            plan.take_history(self._history["tensors"])
            self._plans[bucket.name] = plan
        return plan

    def state_dict(self, ratio: float, remembers: bool) -> dict[str, Any]:
        """Return the history by tensor name. remembers: whether the selector needs its history."""
        tensors = dict(self._history["tensors"]) if self._history["ratio"] == ratio else {}
        if remembers:
            for plan in self._plans.values():
                tensors |= plan.rows_of_history()
        return {"ratio": ratio, "tensors": tensors}

    def load_state_dict(self, state: Any) -> None:
        """Load a history.

        Raises:
            ValueError: It is not one, or has NaN.
        """
        if not isinstance(state, dict) or state.keys() != {"ratio", "tensors"}:
            raise ValueError("history is not a mapping of ratio and tensors")
        require("a number or None", NUMBER + NOTHING, **{"ratio of the history": state["ratio"]})
        for name, rows in state["tensors"].items():
            if bad := [key for key, row in rows.items() if bool(row.isnan().any())]:
                raise ValueError(f"history of {name}: {bad[0]} has NaN")
        self._plans.clear()
        self._history = state
