"""Faults of the kernels in C++: selection, codec, quantizers, low rank, statistics."""

from ..fault import Fault

NATIVE = [
    Fault(
        "masking-not-asked-for",
        "dgc/kernels/cpp/accumulate/pass_body.h",
        "if (has_u && sent.masks) s.u[i] = 0.0f;",
        "if (has_u) s.u[i] = 0.0f;",
        ["tests/kernels/test_sent.py::test_accumulate"],
    ),
    Fault(
        "threshold-of-the-next-element",
        "dgc/kernels/cpp/selection/rank.cpp",
        "uint32_t threshold = members[k - 1];",
        "uint32_t threshold = members[k];",
        ["tests/kernels/test_kernel_laws.py::test_select"],
    ),
    Fault(
        "merged-sums-not-averaged",
        "dgc/kernels/cpp/selection/merge.cpp",
        "values[found] = sums[at] / size;",
        "values[found] = sums[at];",
        ["tests/kernels/test_kernel_laws.py::test_merge_mean"],
    ),
    Fault(
        "every-mean-by-an-inverse",
        "dgc/kernels/cpp/decode/decode_body.h",
        "const bool power_of_two = (bits_of(size) & 0x007FFFFFu) == 0;",
        "const bool power_of_two = true;",
        ["tests/wire/test_mean.py::test_quotients_are_rounded_once"],
    ),
    Fault(
        "infinite-mean-not-reported",
        "dgc/kernels/cpp/decode/decode.cpp",
        "finite &= divide(sums",
        "divide(sums",
        ["tests/wire/test_mean.py::test_a_mean_that_is_not_finite_is_reported"],
    ),
    Fault(
        "rice-parameter-not-the-smallest",
        "dgc/kernels/cpp/codec/rice.cpp",
        "if (more - high > count) break;",
        "if (more - high >= count) break;",
        ["tests/kernels/test_codec.py::test_codecs_agree_bit_for_bit"],
    ),
    Fault(
        "checksum-without-positions",
        "dgc/kernels/cpp/codec/payload.cpp",
        "(2 * c + 1) * sums[c]",
        "sums[c]",
        ["tests/kernels/test_codec.py::test_the_checksum_is_the_weighted_sum_of_the_words"],
    ),
    Fault(
        "mean-magnitude-of-all-tensors-together",
        "dgc/kernels/cpp/codec/values.cpp",
        "static_cast<double>(end - begin)",
        "static_cast<double>(count)",
        ["tests/kernels/test_codec.py::test_codecs_agree_bit_for_bit"],
    ),
    Fault(
        "mean-of-a-bin-by-all-of-its-tensor",
        "dgc/kernels/cpp/codec/values.cpp",
        "static_cast<float>(sums[code] / std::max(1.0, counts[code]));",
        "static_cast<float>(sums[code] / members);",
        ["tests/kernels/test_codec.py::test_codecs_agree_bit_for_bit"],
    ),
    Fault(
        "negative-threshold-exclusive",
        "dgc/kernels/cpp/quantize/quantize_body.h",
        "mask_of(v[i] <= -threshold)",
        "mask_of(v[i] < -threshold)",
        [
            "tests/kernels/test_quantizers.py::test_mxnet_s_layouts",
            "tests/kernels/test_quantizers.py::test_small_integers",
        ],
    ),
    Fault(
        "low-rank-product-added-to-the-error",
        "dgc/kernels/cpp/lowrank/lowrank_body.h",
        "x[b] -= w.U[k * w.n + i + b] * along;",
        "x[b] += w.U[k * w.n + i + b] * along;",
        ["tests/kernels/test_lowrank.py::test_one_pass_is_subtraction_addition_and_product"],
    ),
    Fault(
        "maximum-of-the-last-unit",
        "dgc/kernels/cpp/selection/statistics.cpp",
        "sum.largest = std::max(sum.largest, next.largest);",
        "sum.largest = next.largest;",
        ["tests/kernels/test_statistics.py::test_moments"],
    ),
    Fault(
        "means-of-later-ranks-begin-at-zero",
        "dgc/kernels/cpp/mean/mean.cpp",
        "tables + r, count, groups, r == 0, sums);",
        "tables + r, count, groups, true, sums);",
        ["tests/kernels/test_quantizers.py::test_the_mean_of_all_ranks_is_that_of_one_rank_after_the_other"],
    ),
    Fault(
        "fields-of-a-word-from-the-lowest-bits",
        "dgc/kernels/cpp/mean/mean_body.h",
        "(highest_first ? 8 - width - in_byte : in_byte)",
        "in_byte",
        ["tests/kernels/test_quantizers.py::test_the_mean_of_all_ranks_is_that_of_one_rank_after_the_other"],
    ),
    Fault(
        "sums-of-the-first-share-everywhere",
        "dgc/kernels/cpp/mean/mean.cpp",
        "unpack(packed[share] + at",
        "unpack(packed[0] + at",
        ["tests/kernels/test_quantizers.py::test_sums_are_sent_as_levels"],
    ),
]
