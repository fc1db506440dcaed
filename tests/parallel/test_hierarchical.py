"""Two levels on real ranks: two machines of two ranks, simulated by two daemons or agents on this machine."""

from pathlib import Path
from typing import Any

import pytest
from parallel.ranks import findings, two_agents, two_gloo_machines, two_machines


@pytest.mark.parametrize("launch", [two_machines, two_gloo_machines, two_agents])
def test_two_machines_of_two_ranks(launch: Any, tmp_path: Path) -> None:
    found = findings(4, tmp_path, launch=launch, worker="machines_worker.py")
    for name, first in found[0].items():
        two = [own[name]["auto"] for own in found]
        one = [own[name]["off"] for own in found]
        places = [(own["place"]["machine"], own["place"]["local_rank"]) for own in two]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)], name
        assert all(own["place"]["machines"] == own["place"]["local_size"] == 2 for own in two)
        assert all(own["place"] is None for own in one)
        # a sum of two numbers has one order, so that all carriers compute the same bits
        assert {own["model"] for own in two} == {first["lockstep"]}, name
        assert {own["message"] for own in two} == {two[0]["message"]} and "on rank 3 has NaN" in two[0]["message"]
        between = [sum(own["between"] for own in mode) for mode in (two, one)]
        assert 0 < between[0] < between[1] * (0.67 if name == "powersgd" else 0.5), name
