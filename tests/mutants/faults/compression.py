"""Faults of compressors: sparse, low rank, quantized, dense, routes and warm-up."""

from ..fault import Fault

COMPRESSION = [
    Fault(
        "same-seed-in-every-step",
        "dgc/compression/sparse/sparse.py",
        'seed = crc32(f"{self.seed} {bucket.segments[0].name} {count}".encode())',
        'seed = crc32(f"{self.seed} {bucket.segments[0].name}".encode())',
        [
            "tests/compression/test_dgc_compressor.py::test_the_seed_option_changes_the_sample",
            "tests/compression/test_dgc_compressor.py::test_every_step_has_another_seed",
        ],
    ),
    Fault(
        "payloads-compared-not-bytes-on-the-wire",
        "dgc/compression/sparse/sparse.py",
        "dense = all_reduce_wire_bytes(",
        "dense = all_gather_wire_bytes(",
        ["tests/compression/test_dgc_compressor.py::test_the_cheaper_way_is_taken"],
    ),
    Fault(
        "non-finite-flags-of-other-ranks-ignored",
        "dgc/compression/sparse/sparse.py",
        "nonfinite = first_nonfinite_message(bucket, flags) or sparse_overflow(bucket, indices, values)",
        "nonfinite = sparse_overflow(bucket, indices, values)",
        ["tests/compression/test_dgc_compressor.py::test_a_nonfinite_gradient_is_named_on_every_rank"],
    ),
    Fault(
        "thresholds-of-another-ratio-kept",
        "dgc/compression/sparse/plans.py",
        'if self._history["ratio"] != ratio:',
        'if self._history["ratio"] is None:',
        [
            "tests/compression/test_dgc_compressor.py::test_a_selectors_history_is_kept_with_the_state_and_belongs_to_its_ratio"
        ],
    ),
    Fault(
        "warm-up-one-epoch-too-long",
        "dgc/compression/warmup.py",
        "if epoch >= self.warmup_epochs:",
        "if epoch > self.warmup_epochs:",
        ["tests/compression/test_warmup.py"],
    ),
    Fault(
        "lowest-dimension-of-a-rule-left-out",
        "dgc/compression/route.py",
        "self.min_dim <= len(segment.shape)",
        "self.min_dim < len(segment.shape)",
        ["tests/compression/test_dense_and_route.py"],
    ),
    Fault(
        "bf16-summed-not-averaged",
        "dgc/compression/dense.py",
        "bucket.flat.copy_(total.div_(len(payloads)))",
        "bucket.flat.copy_(total)",
        ["tests/compression/test_dense_and_route.py"],
    ),
    Fault(
        "healthy-ranks-blamed-for-nan",
        "dgc/compression/finite.py",
        "bad = ~own.isfinite().view(1)",
        "bad = own.isfinite().view(1)",
        ["tests/optim/test_nonfinite.py::test_a_step_is_dropped_on_every_rank"],
    ),
    Fault(
        "a-sum-of-codes-does-not-fit-its-bits",
        "dgc/compression/quantized/threshold.py",
        "values = 2 * self.size + 1 if self.bits == 2 else self.size + 1",
        "values = 2 * self.size if self.bits == 2 else self.size",
        [
            "tests/compression/test_threshold.py::test_every_wire_gives_the_same_bits",
            "tests/compression/test_threshold.py::test_the_scattered_sums_take_as_few_bits_as_they_can",
        ],
    ),
    Fault(
        "codes-of-later-tensors-shifted",
        "dgc/compression/quantized/threshold.py",
        "at += -(-segment.numel // word) * word",
        "at += segment.numel",
        [
            "tests/laws/test_laws.py::test_nothing_is_lost[3-2bit]",
            "tests/compression/test_threshold.py::test_every_wire_gives_the_same_bits",
        ],
    ),
    Fault(
        "error-not-rolled-back-in-a-dropped-step",
        "dgc/compression/error_feedback.py",
        "self._snapshots.replace(self._error, bucket, kept)",
        "self._error.replace(bucket, kept)",
        ["tests/laws/test_laws.py::test_nothing_is_lost_in_a_dropped_step[3-onebit-]"],
    ),
    Fault(
        "same-noise-on-every-rank",
        "dgc/compression/error_feedback.py",
        'owner = "all" if shared else self.rank',
        'owner = "all"',
        ["tests/compression/test_quantized.py::test_ranks_round_on_their_own"],
    ),
    Fault(
        "same-noise-in-every-step",
        "dgc/compression/error_feedback.py",
        "self._steps[bucket.name] += 1",
        "self._steps[bucket.name] += 0",
        [
            "tests/compression/test_quantized.py::test_randomness_repeats_with_the_seed_and_differs_from_step_to_step"
        ],
    ),
    Fault(
        "random-k-is-biased",
        "dgc/compression/sparse/random_k.py",
        "(1 if self.error_feedback else factor)",
        "(factor if self.error_feedback else 1)",
        ["tests/compression/test_quantized.py::test_unbiased"],
    ),
    Fault(
        "lower-mean-over-the-whole-row",
        "dgc/compression/quantized/onebit.py",
        "(rows.diff() - above).clamp(min=1)",
        "rows.diff().clamp(min=1)",
        ["tests/compression/test_quantized.py::test_one_bit_sends_the_mean_of_each_side_of_each_row"],
    ),
    Fault(
        "votes-summed-not-decided",
        "dgc/compression/quantized/signsgd.py",
        "return total.sign_()",
        "return total",
        ["tests/compression/test_quantized.py::test_the_majority_decides"],
    ),
    Fault(
        "squared-norm-as-scale",
        "dgc/compression/quantized/qsgd.py",
        "moments.squares.sqrt()",
        "moments.squares",
        ["tests/compression/test_quantized.py::test_qsgd_divides_the_norm_into_levels"],
    ),
    Fault(
        "inclusion-probabilities-do-not-add-up",
        "dgc/compression/lowrank/svd.py",
        "p[j:] = (r - j) * s[j:] / rest[j]",
        "p[j:] = r * s[j:] / rest[j]",
        ["tests/compression/test_quantized.py::test_probabilities_add_up"],
    ),
    Fault(
        "error-refers-to-the-mean-factor",
        "dgc/compression/lowrank/powersgd.py",
        "append_(step.sent.products, X, Y if wire is flat else factor_views(wire.float(), shapes), even)",
        "append_(step.sent.products, X, Y_mean, even)",
        ["tests/paper/test_definitions_of_powersgd_and_gossip.py::test_powersgd"],
    ),
    Fault(
        "half-steps-do-not-alternate",
        "dgc/compression/lowrank/powersgd.py",
        "even = (state.factors.half_steps + k) % 2 == 0",
        "even = k % 2 == 0",
        [
            "tests/compression/test_powersgd.py::test_warm_factors_find_the_best_approximation",
            "tests/compression/test_powersgd.py::test_zeros_give_zeros_and_training_goes_on",
        ],
    ),
    Fault(
        "sign-of-the-correction",
        "dgc/compression/lowrank/state.py",
        "Y[b].baddbmm_(X[b].bmm(along.mT), across, alpha=-1)",
        "Y[b].baddbmm_(X[b].bmm(along.mT), across, alpha=1)",
        ["tests/compression/test_powersgd.py::test_nothing_is_lost_within_rounding"],
    ),
    Fault(
        "factors-not-rolled-back-in-a-dropped-step",
        "dgc/compression/lowrank/state.py",
        "self.factors, self.deferred, self.previous = self.previous, None, None",
        "self.deferred, self.previous = None, None",
        ["tests/compression/test_powersgd.py::test_a_dropped_step_never_was"],
    ),
    Fault(
        "change-relative-to-the-new-norm",
        "dgc/compression/lowrank/accordion.py",
        "abs(before - norm) >= self.change * before",
        "abs(before - norm) >= self.change * norm",
        ["tests/compression/test_powersgd.py::test_accordion_chooses_by_the_change_of_the_norm"],
    ),
    Fault(
        "directions-stay-dependent",
        "dgc/compression/lowrank/orthogonal.py",
        "rest.baddbmm_(rest.bmm(row.mT), row, alpha=-1)",
        "rest.baddbmm_(rest.bmm(row.mT), row, alpha=-0.5)",
        ["tests/compression/test_orthogonal.py"],
    ),
    Fault(
        "gradients-left-in-place",
        "dgc/compression/aggregate.py",
        "g.zero_()",
        "pass",
        ["tests/compression/test_powersgd.py::test_three_lines_train"],
    ),
]
