"""The number of elements that each bucket sends at the current ratio, and the selector's history."""

from typing import Any

from dgc.bucket import Bucket
from dgc.selection import Plan, plan_selection


class Plans:
    """The plan of each bucket for one ratio, with the selector's history.

    A history belongs to one ratio: another ratio begins without one.
    """

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}
        self._history: dict[str, Any] = {"ratio": None, "tensors": {}}  # loaded rows by tensor name

    def of(self, bucket: Bucket, ratio: float) -> Plan:
        """Return the bucket's plan for this ratio."""
        plan = self._plans.get(bucket.name)
        if plan is None or plan.ratio != ratio:
            plan = plan_selection(bucket.segments, ratio, bucket.device)
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
        for name, rows in state["tensors"].items():
            if bad := [key for key, row in rows.items() if bool(row.isnan().any())]:
                raise ValueError(f"history of {name}: {bad[0]} has NaN")
        self._plans.clear()
        self._history = state
