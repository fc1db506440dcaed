"""Standard output of the command lines: a name with any character is printed, in any encoding."""

import io
import os
import runpy
import subprocess
import sys
from unittest.mock import Mock

import pytest
from environment import REPOSITORY

COMMANDS = (
    "dgc/advise.py",
    "dgc/doctor.py",
    "scripts/advise.py",
    "scripts/plot.py",
    "scripts/report.py",
    "train.py",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_names_that_the_encoding_of_its_output_lacks(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # the doctor, which has no options, finds no program to start
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=FileNotFoundError))
    with pytest.raises(SystemExit):
        runpy.run_path(str(REPOSITORY / command), run_name="__main__")
    print(os.fsdecode(b"/b\xff/"), "\u03bc", sep="")
    output.flush()
    assert output.buffer.getvalue().endswith(b"/b\\udcff/\\u03bc\n")
