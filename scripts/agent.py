"""torchrun, with a rendezvous that also survives the loss of a machine while the machines start their ranks, and
without restarts of ranks that were started with wrong settings.

    python -m scripts.agent OPTIONS-OF-TORCHRUN --rdzv-backend persistent ...

After the machines have agreed on a new round, they exchange addresses through the store. With the backend c10d,
every torchrun ends with DistStoreError if a machine is lost in this second, and a machine that goes down often
loses a rank first. Here they wait until all machines of the round are present. If one is not, they begin another.
"""

import logging
import sys
from collections.abc import Mapping

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher import api
from torch.distributed.run import main

BACKEND = "persistent"
USAGE_ERROR = 2  # status of a rank that has printed what is wrong with its settings or files


def is_usage_error(failures: Mapping[int, ProcessFailure]) -> bool:
    return any(failure.exitcode == USAGE_ERROR for failure in failures.values())


class OtherErrors(logging.Filter):
    """Leaves out what torch logs of ranks that end after wrong settings, which the first rank has printed."""

    def filter(self, record: logging.LogRecord) -> bool:
        # of the other ranks, and of a program that would have started this one, before the status is logged
        if record.msg.startswith(("Sending process", "no error file defined for parent")):
            return False
        status = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not (record.msg.startswith("failed (exitcode") and status == USAGE_ERROR)


class Agent(LocalElasticAgent):
    """Ends if a rank's settings are wrong: the rank would print the same error after every restart."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and is_usage_error(result.failures):
            self._remaining_restarts = 0
        return result


class PersistentRendezvous(RendezvousHandler):
    """A rendezvous of the backend c10d that begins another round if a machine is lost in the present one."""

    def __init__(self, parameters: RendezvousParameters):
        backend, store = create_backend(parameters)
        self._inner = create_handler(store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            try:
                info = self._inner.next_rendezvous()
                info.store.set(f"present/{info.rank}", "")
                info.store.wait([f"present/{rank}" for rank in range(info.world_size)])
                return info
            except DistStoreError as error:
                print(f"a machine was lost while ranks were being started ({error})", file=sys.stderr, flush=True)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, PersistentRendezvous)
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").addFilter(OtherErrors())
    try:
        main()
    except ChildFailedError as error:
        if is_usage_error(error.failures):
            sys.exit(USAGE_ERROR)
        raise
    except RendezvousClosedError:
        sys.exit("The run of this RUN_ID has ended on the other machines. Use another RUN_ID for a new run.")
    except SignalException as error:  # the ranks have ended and printed what they saved
        sys.exit(128 + error.sigval)
