"""DDP with the compression hook, on 2 and 3 ranks of torch.distributed. One launch of each number runs all."""

import json
from pathlib import Path
from typing import Any

import pytest
from environment import patient
from parallel.ranks import torchrun

WORKER = Path(__file__).with_name("ddp_worker.py")
Found = list[dict[str, Any]]  # what each rank found, by scenario


def findings(ranks: int, directory: Path, *scenarios: str) -> Found:
    done = torchrun(ranks, [str(WORKER), str(directory), *scenarios])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.proof), 3])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"ddp{request.param}")


@pytest.fixture(scope="module")
def found(directory: Path) -> Found:
    return findings(int(directory.name.removeprefix("ddp")[0]), directory)


def check_replicas(found: Found, scenario: str) -> None:
    """Check that the weights, wherever they are among the findings, are equal on all ranks."""

    def weights(part: Any) -> Any:
        if not isinstance(part, dict):
            return None
        return {key: value if key == "weights" else weights(value) for key, value in part.items()}

    for own in found:
        assert weights(own[scenario]) == weights(found[0][scenario])


@pytest.mark.parametrize("scenario", ["every_method", "kinds_of_parameters", "accumulation"])
def test_a_run_is_that_of_distributed_optimizer(found: Found, scenario: str) -> None:
    check_replicas(found, scenario)
    for own in found:
        for method, results in own[scenario].items():
            for mode in results.keys() - {"expected"}:
                # buckets change after the first step, unless unused parameters may differ from step to step
                expected = {**results["expected"], "rebuilt": mode != "unused"}
                assert results[mode] == expected, (method, mode)


def test_a_parameter_without_a_gradient_counts_as_zero_and_its_error_state_is_delivered(found: Found) -> None:
    check_replicas(found, "unused_parameters")
    for own in found:
        for case, result in own["unused_parameters"].items():
            assert result["ddp"] == result["expected"], case
            assert all(result["sent"]), case
        for method, result in own["conservation"].items():
            assert result["difference"] < 1e-6 and result["kept"] > 0.1, method


def test_an_overflow_on_one_rank_makes_every_scaler_skip_and_leaves_the_error_state_unscaled(found: Found) -> None:
    check_replicas(found, "loss_scaling")
    for own in found:
        results = own["loss_scaling"]
        for method in ("dgc", "powersgd", "2-bit"):
            small, large = results[f"{method}, 1.0"], results[f"{method}, 4096.0"]
            assert small == large, method
            assert (small["dropped"], small["unmoved"]) == (1, [2]), method
            assert small["scales"] == [1, 1, 0.5, 0.5, 0.5] and 0 < small["error"] < 100, method


def test_a_nan_on_one_rank_drops_the_step_or_raises_on_every_rank_and_training_goes_on(found: Found) -> None:
    check_replicas(found, "nonfinite")
    where = f"on rank {len(found) - 1} has NaN or inf"
    for rank, own in enumerate(found):
        for case, result in own["nonfinite"].items():
            method, policy, _ = case.split(", ")
            assert result["unmoved"] == [2], case
            assert result["error"] < 100, case
            assert result["dropped"] == (policy == "skip"), case
            told = policy == "raise" or rank == 0
            assert len(result["messages"]) == told and all(where in m for m in result["messages"]), case
            same = own["nonfinite"][f"{method}, skip, default"]
            assert all(result[key] == same[key] for key in ("weights", "error", "bytes")), case


def test_epochs_are_counted_or_set(found: Found) -> None:
    check_replicas(found, "epochs")
    for own in found:
        counted, by_hand = own["epochs"]["counted"], own["epochs"]["set"]
        assert counted == by_hand
        ratios = counted["ratios"]
        assert ratios[0] == ratios[1] > ratios[2] == ratios[3] > ratios[4] == ratios[-1] == 0.02


def test_a_state_continues_bit_for_bit_also_in_other_buckets_and_in_distributed_optimizer(found: Found) -> None:
    check_replicas(found, "checkpoints")
    for own in found:
        for method, ends in own["checkpoints"].items():
            for name in ("loaded", "from optimizer", "into optimizer"):
                assert ends[name] == ends["end"], (method, name)
            assert ends["other buckets"] == ends["other buckets, optimizer"], method
        assert (
            own["checkpoints"]["2-bit"]["other buckets"]["weights"]
            == own["checkpoints"]["2-bit"]["end"]["weights"]
        )


def test_ranks_without_further_data_take_part_in_join(found: Found) -> None:
    check_replicas(found, "uneven_data")
    for own in found:
        assert all(result["dropped"] == 1 for result in own["uneven_data"].values())


def test_a_later_backward_pass_exchanges_the_earlier_mean_again(found: Found) -> None:
    """As the documentation says: exact without compression, and other sums with it."""
    for own in found:
        assert own["several_exchanges"]["dense"] < 1e-6
        assert own["several_exchanges"]["sign values"] > 0.01


def test_buffers_and_models_are_freed(found: Found) -> None:
    for own in found:
        # threads of the transport may hold a few tensors of the last step; a leak would add some in every step
        assert own["memory"]["alive"][-1] < own["memory"]["alive"][5] + 12, own["memory"]["alive"]
        assert own["memory"]["freed"]


def test_another_process_resumes_and_an_error_of_one_rank_ends_the_others(found: Found, directory: Path) -> None:
    later = findings(len(found), directory, "resumed", "failure")
    for rank, (own, before) in enumerate(zip(later, found, strict=True)):
        assert own["resumed"] == {method: ends["end"] for method, ends in before["checkpoints"].items()}
        failure = own["failure"]
        assert failure["seconds"] < patient(60)
        if rank == len(found) - 1:
            assert (failure["error"], failure["message"]) == ("KeyError", '"the compressor\'s own"')
        else:
            assert failure["error"] == "RuntimeError" and "closed" in failure["message"].lower()
        assert "afterwards" in failure, "DDP cannot continue after an exception"
