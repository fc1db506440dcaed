"""Wrong settings under torchrun, which starts ranks again. Kills are in tests/proof/test_elastic.py."""

from pathlib import Path

from environment import patient
from parallel.elastic import ElasticRun
from warm import python


def test_wrong_settings_are_named_once(tmp_path: Path) -> None:
    """Ranks that would fail in the same way again are not started again."""
    with ElasticRun(tmp_path, 1, ("configs/dgc/wm5.py", "--configs.train.num_epoch=1"), python=python()) as run:
        status = run.start(2).process.wait(patient(60))
    assert status == 2 and "Traceback" not in run.text()
    assert run.text().count("unknown key train.num_epoch; closest: train.num_epochs") == 1
