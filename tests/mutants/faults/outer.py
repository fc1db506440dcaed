"""Faults of outer steps: their time, their optimizers, fragments in flight, dropped exchanges, SparseLoCo."""

from ..fault import Fault

OUTER = [
    Fault(
        "average-one-step-late",
        "dgc/outer/steps.py",
        "(self.steps - i * H // count) % H == 0",
        "(self.steps - i * H // count) % H == 1 % H",
        ["tests/gossip/test_compressed.py::test_after_an_average_over_all_ranks_no_error_remains"],
    ),
    Fault(
        "slow-momentum-not-divided-by-the-rate",
        "dgc/outer/optimizers.py",
        "mul_(group[\"beta\"]).add_(z0.grad, alpha=1 / lr)",
        "mul_(group[\"beta\"]).add_(z0.grad)",
        ["tests/gossip/test_training.py::test_slow_momentum_by_hand"],
    ),
    Fault(
        "outer-nesterov-ignored",
        "dgc/outer/optimizers.py",
        "nesterov=self.momentum > 0",
        "nesterov=False",
        ["tests/gossip/test_training.py::test_slow_momentum_by_hand"],
    ),
    Fault(
        "pseudo-gradient-of-the-other-sign",
        "dgc/outer/fragment.py",
        "torch.sub(z0, segment.of(x), out=difference)",
        "torch.sub(segment.of(x), z0, out=difference)",
        ["tests/outer/test_outer_steps.py::test_diloco_by_hand"],
    ),
    Fault(
        "merged-by-the-other-share",
        "dgc/outer/fragment.py",
        "z.lerp_(z0, 1 - alpha)",
        "z.lerp_(z0, alpha)",
        ["tests/outer/test_outer_steps.py::test_a_fragment_is_used_after_the_delay_and_merged_by_alpha"],
    ),
    Fault(
        "dropped-exchange-not-undone",
        "dgc/outer/exchange.py",
        "fragment.rollback()",
        "pass",
        ["tests/outer/test_outer_steps.py::test_what_a_dropped_exchange_has_sent_is_an_error_again"],
    ),
    Fault(
        "mean-in-flight-not-saved",
        "dgc/outer/exchange.py",
        "fragment.load_means(state[\"means\"])",
        "pass",
        ["tests/outer/test_outer_steps.py::test_a_state_saved_in_flight_goes_on_bit_for_bit"],
    ),
    Fault(
        "residual-does-not-decay",
        "dgc/memory/residual.py",
        "v.mul_(self.decay)",
        "v.mul_(1.0)",
        ["tests/outer/test_sparseloco.py::test_sparseloco_by_hand"],
    ),
    Fault(
        "chunks-that-leave-the-end-of-a-tensor-to-the-last",
        "dgc/selection/plan.py",
        "offset + start * numel // k",
        "offset + start * (numel // k)",
        ["tests/selection/test_per_chunk.py::test_the_largest_of_each_chunk"],
    ),
    Fault(
        "last-element-of-a-chunk-in-the-next",
        "dgc/wire/chunks.py",
        "torch.searchsorted(ends, position, right=True)",
        "torch.searchsorted(ends, position + 1, right=True)",
        ["tests/outer/test_sparseloco.py::test_indices_within_chunks"],
    ),
    Fault(
        "who-joins-keeps-the-model-of-another-rank",
        "dgc/outer/exchange.py",
        "fragment.merge(0.0)",
        "pass",
        ["tests/outer/test_islands.py::test_a_rank_that_has_lost_its_disk_returns_without_errors"],
    ),
    Fault(
        "who-joins-keeps-the-errors-of-another-rank",
        "dgc/outer/exchange.py",
        "key: {name: torch.zeros_like(error) for name, error in value.items()}",
        "key: {name: error.clone() for name, error in value.items()}",
        ["tests/outer/test_islands.py::test_a_rank_that_has_lost_its_disk_returns_without_errors"],
    ),
    Fault(
        "two-ranks-continue-one",
        "dgc_training/checkpoint/islands.py",
        "free = sorted(files - set(continues))",
        "free = sorted(files)",
        ["tests/outer/test_islands.py::test_which_rank_continues_which"],
    ),
    Fault(
        "scheduled-rates-multiplied-up",
        "dgc/outer/fragment.py",
        "group[\"lr\"] = factor * rate",
        "group[\"lr\"] *= factor",
        ["tests/outer/test_outer_steps.py::test_the_outer_learning_rate_follows_its_schedule"],
    ),
]
