"""Rounds of gossip, and messages per rank, until all ranks agree.

    python -m benchmarks.consensus --ranks 8 16 64 256

Every rank begins with a random number. The columns are:

exact      the first round, if any, after which every z = x / w is the mean up to rounding
rounds     the first round after which no z is further from the mean than --error times the largest distance at
           the start
theory     the rounds computed from the mixing matrices of one period: for a factor of --error, by the
           second-largest eigenvalue, or for the exact mean if that eigenvalue is zero

Messages are the largest number that one rank sends during `rounds`. The output is a table for each number of ranks
and a last line of JSON.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.results import print_json
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
LONG = 100  # largest period, in rounds
SQUARINGS = 10


def simulate(topology: Topology, error: float) -> dict[str, int | None]:
    """Rounds until the error is reached and until the mean is exact, and the messages until the former."""
    generator = torch.Generator().manual_seed(topology.size)
    x = torch.randn(topology.size, generator=generator, dtype=torch.float64)
    w, mean = torch.ones_like(x), x.mean()
    start = float((x - mean).abs().max())
    rounds = [mixing_matrix(topology, uniform, t) for t in range(topology.period)]
    messages = torch.zeros(topology.size, dtype=torch.int64)
    found: dict[str, int | None] = {"exact": None, "rounds": None, "messages": None}
    for t in range(MOST):
        P = rounds[t % topology.period]
        x, w = P @ x, P @ w
        messages += (P != 0).sum(0) - 1
        distance = float((x / w - mean).abs().max())
        if found["rounds"] is None and distance <= error * start:
            found |= {"rounds": t + 1, "messages": int(messages.max())}
        if distance <= ROUNDING * start:
            # within two periods the mean is exact; later it is reached by repeated reduction
            found["exact"] = t + 1 if t < 2 * topology.period else None
            break
    return found


def theory(topology: Topology, error: float) -> float | None:
    """Return the theoretical rounds; see above. None if a period is longer than a run."""
    if topology.period > LONG:
        return None
    P = torch.eye(topology.size, dtype=torch.float64)
    for t in range(topology.period):
        P = mixing_matrix(topology, uniform, t) @ P
    # P minus its limit, squared repeatedly and scaled to norm 1: its growth is the eigenvalue
    rest = P - torch.linalg.matrix_power(P, 2**30)
    logarithm = 0.0
    for _ in range(SQUARINGS):
        rest = rest @ rest
        norm = float(torch.linalg.matrix_norm(rest))
        if norm < ROUNDING:  # zero: one period is exact
            return float(topology.period)
        logarithm, rest = 2 * logarithm + math.log(norm), rest / norm
    return topology.period * math.log(error) / (logarithm / 2**SQUARINGS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64, 256])
    parser.add_argument("--error", type=float, default=1e-6)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "consensus", "error": args.error, "ranks": {}}
    for size in args.ranks:
        print(f"\n{size} ranks, to {args.error:g} of the initial distance")
        print(f"{'topology':<26}{'period':>7}{'exact':>7}{'rounds':>8}{'theory':>9}{'messages':>10}")
        rows = result["ranks"][str(size)] = {}
        for name, make in TOPOLOGIES.items():
            try:
                topology = make(size)
            except TopologyError as error:
                print(f"{name:<26}  {error}")
                continue
            row: dict[str, Any] = {**simulate(topology, args.error), "theory": theory(topology, args.error)}
            rows[name] = row
            expected = "-" if row["theory"] is None else f"{row['theory']:.0f}"
            cells = f"{row['exact'] or '-':>7}{row['rounds'] or '-':>8}{expected:>9}{row['messages'] or '-':>10}"
            print(f"{name:<26}{topology.period:>7}{cells}", flush=True)
    print_json(result)


if __name__ == "__main__":
    main()
