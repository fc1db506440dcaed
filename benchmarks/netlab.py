"""Run a Python script on several simulated hosts with links of a limited rate (docs/netlab.md).

    python -m benchmarks.netlab --hosts 4 --rate 1gbit -- train.py --configs configs/digits/cnn.py

The rate that a TCP connection reaches is measured and printed before the command starts.
"""

import sys

from benchmarks._harness import options, print_json
from benchmarks._laboratory import Laboratory, LaboratoryError
from benchmarks._launches import LAUNCHERS, measure, ranks_per_host, start

TAKES = "3 s beside the script"


def main() -> int:
    parser = options("benchmarks.netlab", __doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each host in each direction (default: 1gbit)")
    parser.add_argument("--latency", help="delay of each packet, such as 1ms (needs the kernel module sch_netem)")
    parser.add_argument("--ranks", type=int, help="a multiple of the number of hosts (default: one rank per host)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun")
    parser.add_argument("command", nargs="+", help="after --: a script and its arguments")
    args = parser.parse_args()
    words = args.command[1:] if args.command[0] in ("python", "python3") else args.command
    ranks = args.hosts if args.ranks is None else args.ranks
    try:
        ranks_per_host(ranks, args.hosts)
        with Laboratory(args.hosts, args.rate, args.latency) as laboratory:
            link = measure(laboratory)
            print(f"netlab: {args.hosts} hosts, {args.rate} each way; {link}", flush=True)
            before = laboratory.counters()
            status = start(laboratory, ranks, words, args.launcher)
            after = laboratory.counters()
    except (LaboratoryError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    moved = [{key: late[key] - early[key] for key in late} for early, late in zip(before, after, strict=True)]
    sent = ", ".join(f"{host['sent_bytes'] / 1e6:.3f}" for host in moved)
    print(f"netlab: status {status}; MB sent by each host, with headers: {sent}")
    print_json({"bits_per_second": link.bits_per_second, "round_trip": link.round_trip, "hosts": moved})
    return status


if __name__ == "__main__":
    sys.exit(main())
