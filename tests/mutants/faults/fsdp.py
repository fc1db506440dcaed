"""Faults of dgc.fsdp."""

from ..fault import Fault

PARALLEL = ["tests/parallel/test_fsdp.py"]

FSDP = [
    Fault(
        "places-without-padding",
        "dgc/fsdp/shards.py",
        "largest = -(-whole[dim] // ranks)",
        "largest = shard[dim]",
        ["tests/fsdp/test_shards.py"],
    ),
    Fault(
        "only-the-last-backward-pass-counts",
        "dgc/fsdp/exchange.py",
        "segment.numel].add_(place.rows_of(output))",
        "segment.numel].copy_(place.rows_of(output))",
        ["tests/fsdp/test_shards.py"],
    ),
    Fault(
        "gradients-of-the-machine-stay",
        "dgc/fsdp/exchange.py",
        "output.zero_()",
        "output.mul_(1)",
        PARALLEL,
    ),
    Fault(
        "only-ranks-with-the-bad-shard-drop-a-step",
        "dgc/fsdp/exchange.py",
        'AllReduce(flag, "max", "local")',
        'AllReduce(flag, "min", "local")',
        PARALLEL,
    ),
    Fault(
        "one-rank-of-a-machine-drops-a-local-step",
        "dgc/fsdp/local.py",
        '"min", group="local"',
        '"max", group="local"',
        PARALLEL,
    ),
    Fault(
        "models-compared-without-the-order-of-elements",
        "dgc/fsdp/exchange.py",
        "crc32(as_bytes(p.to_local().detach().cpu().contiguous()).numpy().data)",
        "int(as_bytes(p.to_local().detach().cpu().contiguous()).sum())",
        ["tests/fsdp/test_shards.py"],
    ),
    Fault(
        "a-pass-begins-in-that-which-failed",
        "dgc/fsdp/exchange.py",
        "if self._end is None or self._end() is None:",
        "if self._end is None:",
        ["tests/fsdp/test_exceptions.py"],
    ),
    Fault(
        "a-repeated-module-starts-too-early",
        "dgc/fsdp/exchange.py",
        "self._expected = [max(1, parts) for parts in self._parts]",
        "self._expected = [1 for parts in self._parts]",
        PARALLEL,
    ),
]
