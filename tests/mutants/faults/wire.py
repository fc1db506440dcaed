"""Faults of payload formats."""

from ..fault import Fault

WIRE = [
    Fault(
        "checksum-of-a-payload-ignored",
        "dgc/wire/payload.py",
        "if not sealed:",
        "if not (sealed or indices_valid):",
        ["tests/wire/test_corruption.py::test_every_flipped_bit_is_noticed"],
    ),
    Fault(
        "non-finite-flag-of-a-payload-ignored",
        "dgc/wire/payload.py",
        "return list(words[1::WORDS])",
        "return [0] * len(ranks)",
        ["tests/wire/test_payload.py::test_the_first_tensor_that_is_not_finite_is_named"],
    ),
    Fault(
        "format-of-other-ranks-not-compared",
        "dgc/wire/envelope.py",
        "if form != own_form:",
        "if form != own_form and ratio != own_ratio:",
        ["tests/wire/test_terms.py"],
    ),
    Fault(
        "checksum-of-sealed-codes-ignored",
        "dgc/wire/envelope.py",
        "if not sealed or count or not 0 <= number <= segments:",
        "if count or not 0 <= number <= segments:",
        ["tests/wire/test_corruption.py", "tests/wire/test_terms.py"],
    ),
    Fault(
        "checksum-of-messages-between-two-ranks-ignored",
        "dgc/gossip/messages.py",
        "one.check(words[each * i : each * (i + 1)])",
        "pass",
        ["tests/gossip/test_flipped_bits.py"],
    ),
    Fault(
        "checksum-of-asynchronous-messages-ignored",
        "dgc/gossip/adpsgd.py",
        "opened(as_bytes(message), 8 * (message.numel() - KIND), MESSAGE, sender).wait()",
        "opened(as_bytes(message), 8 * (message.numel() - KIND), MESSAGE, sender)",
        ["tests/gossip/test_adpsgd.py::test_a_flipped_bit_is_noticed"],
    ),
    Fault(
        "sum-over-ranks-overflows-the-wire",
        "dgc/wire/values.py",
        "limit = wire.max / (1 if summands == 1 else 2 * summands)",
        "limit = wire.max / (1 if summands == 1 else 2)",
        ["tests/wire/test_payload.py::test_a_sum_on_the_wire_stays_in_range"],
    ),
    Fault(
        "2-bit-values-beyond-the-gradients-range",
        "dgc/wire/values.py",
        "codec.table_encode_(self.kind, limited, bounds",
        "codec.table_encode_(self.kind, selection, bounds",
        ["tests/wire/test_payload.py::test_values_stay_in_the_gradients_range"],
    ),
    Fault(
        "no-reserve-in-a-planned-length",
        "dgc/wire/indices.py",
        "likely = _ceil(mean + variance.sqrt())",
        "likely = _ceil(mean)",
        ["tests/wire/test_plans.py"],
    ),
    Fault(
        "code-longer-than-plain-indices",
        "dgc/wire/indices.py",
        "return coded if coded.nbytes < plain.nbytes else plain",
        "return coded",
        ["tests/wire/test_plans.py"],
    ),
]
