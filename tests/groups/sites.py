"""Groups of one rank in threads of this process, which meet over real connections."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from environment import patient
from optim.nets import loss_of, net
from torch import Tensor

from dgc.comm.lockstep import LockstepWorld
from dgc.groups import Groups, connect
from dgc.groups.coordinator import Settings
from dgc.groups.serve import Server
from dgc.local import OuterSteps
from dgc.optim import LocalOptimizer

T = TypeVar("T")


class Post:
    """A coordinator in a thread. It may be stopped, and started again at the same port."""

    def __init__(self, folder: Path, **settings: Any):
        self.settings = Settings(**{"grace": patient(3), "timeout": patient(20), "lost": patient(2), **settings})
        self.told: list[str] = []
        self.file, self._port = folder / "coordinator.json", 0
        self.start()

    def start(self) -> None:
        self.server = Server(self.settings, self.file, self._port, "127.0.0.1", self.told.append)
        self._port = self.server.port
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.server.close()
        self._thread.join(patient(4))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def round(self) -> int:
        return self.server.coordinator.committed.round


@contextmanager
def post(folder: Path, **settings: Any) -> Iterator[Post]:
    own = Post(folder, **settings)
    try:
        yield own
    finally:
        own.stop()


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Site:
    """A group of one rank that trains. items: counted in each step."""

    def __init__(
        self,
        address: str,
        number: int,
        steps: OuterSteps,
        make: Callable[[Any], torch.optim.Optimizer] = momentum,
        seed: int = 0,
        items: int | None = None,
        **options: Any,
    ):
        self.number, self.items, self.done, self.told = number, items, 0, list[str]()
        self.model = net(seed)
        self.groups: Groups = connect(address, name=f"g{number}", log=self.told.append, **options)
        transport = LockstepWorld(1).transports[0]
        named = self.model.named_parameters()
        self.own = LocalOptimizer(make(self.model), named, steps, transport=transport, groups=self.groups)

    def steps(self, count: int) -> Tensor:
        for _ in range(count):
            self.own.zero_grad()
            loss_of(self.model, self.done, self.number).backward()
            if self.items is not None:
                self.groups.count(self.items)
            self.own.step()
            self.done += 1
        return self.z

    def begin(self) -> None:
        """Join the run, without a step."""
        self.own.zero_grad()

    @property
    def z(self) -> Tensor:
        return self.own.model.z.clone()

    @property
    def method(self) -> Any:
        return self.own.method


def together(*work: Callable[[], T]) -> list[T]:
    """Run functions in threads, and return their results."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(patient(40)) for future in [pool.submit(of) for of in work]]


def all_step(sites: Sequence[Site], count: int) -> list[Tensor]:
    return together(*(lambda site=site: site.steps(count) for site in sites))


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.02)
