"""Faults of buckets and of the kernels in Python."""

from ..fault import Fault

KERNELS = [
    Fault(
        "an-empty-tensor-takes-a-place-in-its-bucket",
        "dgc/bucket.py",
        "offset += tensor.numel()",
        "offset += max(1, tensor.numel())",
        ["tests/engine/test_buckets.py"],
    ),
    Fault(
        "gradients-are-copied-over-the-result",
        "dgc/bucket.py",
        "self.release()",
        "pass",
        ["tests/optim/test_pieces.py"],
    ),
    Fault(
        "tensors-with-gaps-count-as-a-block",
        "dgc/bucket.py",
        "if stride != expected:",
        "if stride < expected:",
        ["tests/engine/test_buckets.py"],
    ),
    Fault(
        "nesterov-ignored-in-the-reference",
        "dgc/kernels/selection.py",
        "u.add_(g).mul_(inputs.momentum)",
        "u.mul_(inputs.momentum).add_(g)",
        ["tests/kernels/test_reference.py"],
    ),
    Fault(
        "parts-merged-in-reverse-order-of-ranks",
        "dgc/kernels/selection.py",
        "for part in parts for count, indices in",
        "for part in reversed(parts) for count, indices in",
        ["tests/kernels/test_reference.py"],
    ),
    Fault(
        "one-tie-too-many-selected",
        "dgc/kernels/selection.py",
        "equal[: k - greater.numel()]",
        "equal[: k - greater.numel() + 1]",
        ["tests/kernels/test_reference.py"],
    ),
    Fault(
        "too-large-gradients-not-flagged",
        "dgc/kernels/selection.py",
        "first = first_of(~mask)",
        "first = first_of(~torch.isfinite(g))",
        ["tests/kernels/test_kernel_laws.py::test_nonfinite_elements_count_as_zero"],
    ),
    Fault(
        "int8-truncates-instead-of-rounding",
        "dgc/kernels/codec.py",
        "(values / steps).round()",
        "(values / steps).trunc()",
        ["tests/kernels/test_codec.py::test_codecs_agree_bit_for_bit"],
    ),
    Fault(
        "bins-of-2-bits-exclude-the-mean",
        "dgc/kernels/codec.py",
        "(above >= 0).long()",
        "(above > 0).long()",
        ["tests/wire/test_payload.py"],
    ),
    Fault(
        "one-table-of-2-bits-for-all-tensors",
        "dgc/kernels/codec.py",
        "table[4 * owner + unpacked",
        "table[unpacked",
        ["tests/wire/test_payload.py"],
    ),
    Fault(
        "count-of-a-payload-not-checked",
        "dgc/kernels/codec.py",
        "valid = (ordered | ~live).all() & (count >= 0) & (count <= given.numel())",
        "valid = (ordered | ~live).all() & (count >= 0)",
        ["tests/kernels/test_codec.py::test_a_count_beyond_the_section_is_not_sound"],
    ),
    Fault(
        "stochastic-rounding-is-not-random",
        "dgc/kernels/quantize.py",
        "r = 0.5 if seed is None else (random_bits(n, seed, v.device) >> 8).float() * 2.0**-24",
        "r = 0.5",
        ["tests/kernels/test_quantizers.py::test_tiers_agree_bit_for_bit_and_decode_what_they_encoded"],
    ),
]
