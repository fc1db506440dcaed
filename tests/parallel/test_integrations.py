"""The Trainer of transformers with compression: runs that were killed resume bit for bit on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from parallel.ranks import torchrun

WORKER = Path(__file__).with_name("integrations_worker.py")
pytestmark = [pytest.mark.timeout(300), pytest.mark.proof]


def test_a_killed_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(part: str, is_killed: bool) -> list[dict[str, Any]]:
        done = torchrun(2, ["-W", "error", str(WORKER), str(tmp_path), part])
        assert bool(done.returncode) == is_killed == ("SIGKILL" in done.stderr), done.stdout + done.stderr
        return [json.loads((tmp_path / f"{part}{rank}.json").read_text()) for rank in (0, 1)]

    begun, resumed = run("begin", True), run("resume", False)

    for whole, parts in zip(begun, resumed, strict=True):
        assert whole["dense"]["losses"] == whole["none"]["losses"] and len(whole["none"]["losses"]) == 14
        assert whole["dense"]["model"] == whole["none"]["model"]
        for method in ("powersgd", "onebit", "dgc"):
            assert whole[method]["losses"][-1] < 0.8 * whole[method]["losses"][0], (method, whole[method])
            assert parts[method] == whole[method], method
    for method in ("powersgd", "onebit", "dgc"):
        one, other = (ranks[method] for ranks in begun)
        assert one["model"] == other["model"] and one["errors"] != other["errors"]
    for rank, parts in enumerate(resumed):
        assert "rank 1 has no file" in parts["lacking"]
        assert len(parts["new"]) == (1 if rank == 0 else 0)
