"""Faults of translation: masks and search of the model, shares of the ranks, sums over the ranks."""

from ..fault import Fault

TESTS = "tests/training/test_translation.py"
TRANSLATION = [
    Fault(
        "decoder-sees-later-tokens",
        "dgc_models/transformer_layers.py",
        "causal=past is None",
        "causal=False",
        ["tests/test_transformer.py::test_later_tokens_do_not_change_earlier_logits"],
    ),
    Fault(
        "beams-not-reordered",
        "dgc_models/decoding.py",
        "        state.reorder(rows)\n",
        "",
        ["tests/test_transformer.py::test_beam_search_finds_what_a_search_of_all_targets_finds"],
    ),
    Fault(
        "beam-search-ends-too-early",
        "dgc_models/decoding.py",
        "sums[:, 0] / penalty_at_limit",
        "sums[:, 0] / penalty(length)",
        ["tests/test_transformer.py::test_the_search_goes_on_while_a_longer_target_may_be_better"],
    ),
    Fault(
        "ranks-translate-the-same-batch",
        "dgc_training/tasks/translation_batches.py",
        "of_all_ranks[self.rank]",
        "of_all_ranks[0]",
        [f"{TESTS}::test_each_pair_is_seen_once_up_to_the_last_batches"],
    ),
    Fault(
        "resumed-translation-begins-the-epoch-again",
        "dgc_training/tasks/translation_batches.py",
        "first = position * per_step",
        "first = (step - start) * per_step",
        [f"{TESTS}::test_a_run_resumes_at_any_step"],
    ),
    Fault(
        "sentences-of-rank-0-evaluated-by-all-ranks",
        "dgc_training/tasks/translation_batches.py",
        "share = order[rank::size]",
        "share = order[0::size]",
        [f"{TESTS}::test_the_shares_of_an_evaluation"],
    ),
]
