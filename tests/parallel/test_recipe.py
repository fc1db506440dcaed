"""The script of docs/recipe.md trains, and sends what the page says."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import DOCS, code
from environment import REPOSITORY
from parallel.ranks import torchrun

from dgc.advise import main

LINE = re.compile(r"step (\d+): loss ([\d.]+), sent ([\d.]+) of ([\d.]+) MB, residual ([\d.]+), dropped (\d+)")


@pytest.mark.timeout(300)
def test_the_script_of_the_recipe_trains(tmp_path: Path) -> None:
    script, text = tmp_path / "train_gpt.py", tmp_path / "text.txt"
    for block in code("recipe.md"):  # the first line is the name of the file
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    text.write_text("".join(path.read_text() for path in sorted((REPOSITORY / "dgc/optim").glob("*.py"))))
    done = torchrun(2, ["-W", "error::UserWarning:dgc", str(script), str(text), "small", "50"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = [tuple(map(float, numbers)) for numbers in LINE.findall(done.stdout)]
    assert [step for step, *_ in found] == [5.0 * (i + 1) for i in range(10)]
    assert found[-1][1] < found[0][1] - 0.5
    sent, dense = (
        [b[place] - a[place] for a, b in zip([(0.0,) * 6, *found], found, strict=False)] for place in (2, 3)
    )
    assert [round(s / d, 2) for s, d in zip(sent, dense, strict=True)] == [0.5] * 2 + [0.03] * 8
    assert [residual > 0 for *_, residual, _ in found] == [False] * 2 + [True] * 8


def test_the_advisor_takes_the_model_of_the_recipe() -> None:
    names: dict[str, Any] = {}
    exec(code("recipe.md")[0], names)
    model, batch, loss = names["make"]("small")
    assert loss(model, batch).item() == pytest.approx(math.log(256), abs=0.1)
    with torch.device("meta"):
        assert sum(p.numel() for p in names["make"]()[0].parameters()) == pytest.approx(354e6, rel=1e-3)


def test_the_recipe_shows_what_the_advisor_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "recipe.md").read_text()
    command = re.search(r"python -m dgc\.advise (--parameters .*?)\n\n", page, re.S)
    assert command is not None and main(command[1].replace("\\\n", " ").split()) == 0
    printed = capsys.readouterr().out.partition("\nNot predicted")[0].splitlines()
    assert len(printed) == 19 and "".join(f"    {line}".rstrip() + "\n" for line in printed) in page


def test_the_recipe_shows_what_its_script_prints() -> None:
    shown = LINE.findall((DOCS / "recipe.md").read_text())
    assert len(shown) == 10
