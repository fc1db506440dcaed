"""Faults of communication: lockstep, Horovod, MPI, meter, staging."""

from ..fault import Fault

COMM = [
    Fault(
        "cross-group-has-ranks-of-other-places",
        "dgc/comm/lockstep/world.py",
        "return list(range(rank % self.local_size, self.size, self.local_size))",
        "return list(range(rank % self.local_size, self.size))",
        ["tests/comm/test_lockstep.py"],
    ),
    Fault(
        "launched-tensors-keep-their-content",
        "dgc/comm/lockstep/world.py",
        "invalidate(request for of_rank in requests for request in of_rank)",
        "invalidate(())",
        ["tests/comm/test_lockstep.py"],
    ),
    Fault(
        "minimum-is-the-maximum",
        "dgc/comm/lockstep/rendezvous.py",
        'if op == "min" else torch.maximum(total, tensor)',
        'if op == "max" else torch.maximum(total, tensor)',
        ["tests/comm/test_lockstep.py"],
    ),
    Fault(
        "rounds-of-one-name",
        "dgc/comm/conversation.py",
        'self._transport.launch(f"{self.name}.{self.rounds}", requests, lane)',
        "self._transport.launch(self.name, requests, lane)",
        ["tests/comm/test_lockstep.py"],
    ),
    Fault(
        "threads-of-process-groups-outlive-the-program",
        "dgc/comm/torch_distributed/transport.py",
        "        self._lanes.close()\n",
        "",
        ["tests/comm/test_torch_distributed.py"],
    ),
    Fault(
        "process-groups-destroyed-during-an-operation",
        "dgc/comm/torch_distributed/transport.py",
        "        if self._unfinished:\n            return\n",
        "",
        ["tests/comm/test_torch_distributed.py"],
    ),
    Fault(
        "all-reduce-counted-as-if-to-all",
        "dgc/comm/meter.py",
        "return 2 * payload * (size - 1) / size",
        "return 2 * payload",
        ["tests/comm/test_meter.py"],
    ),
    Fault(
        "messages-pending-while-another-is-awaited",
        "dgc/comm/staging.py",
        "for other in self._pending:",
        "for other in [flight]:",
        ["tests/comm/test_staging.py"],
    ),
    Fault(
        "message-launched-before-its-copy-is-complete",
        "dgc/comm/staging.py",
        "if is_behind or not (flight.ready is None or flight.ready.query()):",
        "if is_behind:",
        ["tests/comm/test_staging.py"],
    ),
    Fault(
        "largest-message-refused",
        "dgc/comm/mpi/point_to_point.py",
        "if content.size > unit * MAX_COUNT:",
        "if content.size >= unit * MAX_COUNT:",
        ["tests/comm/test_mpi.py"],
    ),
    Fault(
        "fusion-chosen-by-the-user-overwritten",
        "dgc/comm/horovod.py",
        'os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")',
        'os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"',
        ["tests/comm/test_horovod_environment.py::test_what_the_user_chose_is_kept"],
    ),
    Fault(
        "horovod-averages-what-it-should-sum",
        "dgc/comm/horovod.py",
        '"sum": hvd.Sum',
        '"sum": hvd.Average',
        ["tests/parallel/test_ranks.py::test_two_ranks"],
    ),
    Fault(
        "object-of-rank-0-broadcast",
        "dgc/comm/collectives.py",
        "Broadcast(data, root)",
        "Broadcast(data, 0)",
        ["tests/comm/test_collectives.py"],
    ),
]
