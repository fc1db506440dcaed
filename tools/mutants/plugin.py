"""Plugin for pytest: runs chosen tests in a given order, and records which lines each test runs."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage

LINES, SECONDS = "lines", "seconds.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", type=Path, help="JSON list of tests, files or folders")
    parser.addoption("--record", type=Path, help="folder for the lines and the seconds of each test")


@pytest.hookimpl(trylast=True)  # after conftest.py has sorted them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(json.loads(config.option.chosen.read_text()))}
    if all("::" in name for name in order):
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record:
        config.pluginmanager.register(Recorder(config))


class Recorder:
    """Under xdist the first process has the seconds, and the others have the lines."""

    def __init__(self, config: pytest.Config):
        self.folder = config.option.record
        self.is_first = not hasattr(config, "workerinput")
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.coverage = None
        if not (self.is_first and config.option.numprocesses):
            packages = [str(config.rootpath / name) for name in ("dgc", "dgc_training")]
            self.coverage = Coverage(self.folder / LINES, data_suffix=True, config_file=False, source=packages)
            self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # a test that fails without a fault detects none
        self.seconds[report.nodeid] += math.inf if report.failed else report.duration

    def pytest_sessionfinish(self) -> None:
        if self.coverage:
            self.coverage.stop()
            self.coverage.save()
        if self.is_first:
            (self.folder / SECONDS).write_text(json.dumps(self.seconds))
