"""Rounds of gossip, and messages per rank, until all ranks agree.

    python -m benchmarks.consensus --ranks 8 16 64 256

Every rank begins with a random number. `exact` is the first round, if any, after which every
z = x / w is the mean up to rounding, and `rounds` the first one after which no z is further from the mean than
--error times the largest distance at the start.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks._harness import Table, options, print_json
from dgc import gossip
from dgc.gossip import Topology, TopologyError, uniform
from dgc.gossip.topology import mixing_matrix

TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "n_peer_exponential": gossip.n_peer_exponential,
    "exponential": gossip.exponential,
    "bipartite_exponential": gossip.bipartite_exponential,
    "linear": gossip.linear,
    "bipartite_linear": gossip.bipartite_linear,
    "ring": gossip.ring,
    "ring, 2 peers": lambda size: gossip.ring(size, 2),
    "static_exponential": gossip.static_exponential,
    "full": gossip.full,
    "star": gossip.star,
    "grid": gossip.grid,
    "random_matching": gossip.random_matching,
    "hierarchical, 4 a machine": lambda size: gossip.hierarchical(size, 4),
}
ROUNDING = 1e-12
MOST = 200_000  # rounds
TAKES = "1 min"


def simulate(topology: Topology, error: float) -> dict[str, int | None]:
    """Rounds until the error is reached, and until the mean is exact."""
    generator = torch.Generator().manual_seed(topology.size)
    x = torch.randn(topology.size, generator=generator, dtype=torch.float64)
    w, mean = torch.ones_like(x), x.mean()
    start = float((x - mean).abs().max())
    rounds = [mixing_matrix(topology, uniform, t) for t in range(topology.period)]
    found: dict[str, int | None] = {"period": topology.period, "exact": None, "rounds": None}
    for t in range(MOST):
        P = rounds[t % topology.period]
        x, w = P @ x, P @ w
        distance = float((x / w - mean).abs().max())
        if found["rounds"] is None and distance <= error * start:
            found["rounds"] = t + 1
        if distance <= ROUNDING * start:
            # within two periods the mean is exact; later it is reached by repeated reduction
            found["exact"] = t + 1 if t < 2 * topology.period else None
            break
    return found


def main() -> None:
    parser = options("benchmarks.consensus", __doc__, error=1e-6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64, 256])
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "consensus", "error": args.error, "ranks": {}}
    for size in args.ranks:
        print(f"\n{size} ranks, to {args.error:g} of the initial distance", end="")
        table = Table("topology", 26, [(key, key, "8d") for key in ("period", "exact", "rounds")])
        for name, make in TOPOLOGIES.items():
            try:
                table.add(name, simulate(make(size), args.error))
            except TopologyError as error:
                print(f"{name:<26}  {error}")
        result["ranks"][str(size)] = table.rows
    print_json(result)


if __name__ == "__main__":
    main()
