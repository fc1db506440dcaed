"""Faults of the command-line tools."""

from ..fault import Fault

TOOLS: list[Fault] = [
    Fault(
        "any-metric-is-drawn-as-an-error",
        "scripts/plot_figures.py",
        "error = [100 - y for y in curve.y] if run.unit else curve.y",
        "error = [100 - y for y in curve.y]",
        ["tests/test_plot.py"],
    ),
    Fault(
        "bytes-of-every-step-grow-with-its-time",
        "benchmarks/step_times.py",
        'times_longer = 1.0 if idle(name) in per_step else row["until_ms"] / milliseconds',
        'times_longer = row["until_ms"] / milliseconds',
        ["tests/test_network_benchmarks.py"],
    ),
    Fault(
        "any-gain-is-recommended",
        "scripts/advise/advice.py",
        "if plain.step >= WORTHWHILE * best.step:",
        "if plain.step >= best.step:",
        ["tests/test_advise.py::test_compression_that_gains_little_is_not_recommended"],
    ),
    Fault(
        "compared-with-the-slowest-uncompressed-step",
        "scripts/advise/advice.py",
        "plain = min((row for row in rows if row.name in UNCOMPRESSED)",
        "plain = max((row for row in rows if row.name in UNCOMPRESSED)",
        ["tests/test_advise.py"],
    ),
    Fault(
        "advice-for-the-epochs-of-warm-up",
        "scripts/advise/candidates.py",
        "optimizer.begin_epoch(settings.num_epochs - 1)",
        "optimizer.begin_epoch(0)",
        ["tests/test_advise.py::test_a_candidate_has_the_traffic_of_its_optimizer"],
    ),
    Fault(
        "exchanges-of-the-warm-up-are-timed",
        "scripts/advise/candidates.py",
        "found = typical(steps[WARMUP:])",
        "found = typical(steps)",
        ["tests/test_advise.py::test_exchanges_of_the_warm_up_are_not_timed"],
    ),
    Fault(
        "replies-of-a-reduction-grow",
        "dgc/cost/computing.py",
        "if kinds and kinds <= REDUCED:",
        "if kinds and kinds > REDUCED:",
        ["tests/test_cost.py::test_the_time_of_decoding_is_a_line_of_the_ranks"],
    ),
    Fault(
        "levels-of-the-network-exchanged",
        "scripts/advise/collectives.py",
        "inside, across = fits[0], fits[-1]",
        "across, inside = fits[0], fits[-1]",
        ["tests/test_advise.py::test_levels_are_measured_inside_machines_and_between_them"],
    ),
]
