"""The help of train.py."""

import re
import shlex

import pytest

from dgc_training.config import load
from dgc_training.config.layers import FLAGS
from dgc_training.config_files import REPOSITORY
from dgc_training.startup.arguments import parse_arguments


def test_the_help_has_a_working_example_and_the_file_of_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in FLAGS)
    (named,) = set(re.findall(r"configs/__init__\.py", text))
    assert (REPOSITORY / named).is_file()
    examples = re.findall(r"^ +.*python train\.py (.+)$", text, flags=re.MULTILINE)
    assert len(examples) >= 2
    assert any("--print-config" in example for example in examples)
    assert any("--configs." in example for example in examples)
    for example in examples:
        args, overrides = parse_arguments(shlex.split(example))
        load(args.configs, overrides)
