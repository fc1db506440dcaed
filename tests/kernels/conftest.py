"""Every backend of kernels that this machine can run."""

from collections.abc import Iterator

import pytest
from kernels.backends import NAMES, backend

from dgc.kernels.selection import SelectionKernels


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Iterator[SelectionKernels]:
    with backend(request.param) as chosen:
        yield chosen


@pytest.fixture(params=NAMES[1:])
def native(request: pytest.FixtureRequest) -> Iterator[SelectionKernels]:
    with backend(request.param) as chosen:
        yield chosen
