"""Two levels on real ranks: two machines of two ranks, simulated by two daemons or agents on this machine."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import patient
from failing_model import failing_model
from optim import nets
from parallel.ddp_trainer import Trainer
from parallel.found import digest, told
from parallel.ranks import Group, each_rank_of, over, two_agents, two_gloo_machines, two_machines
from torch.distributed import is_initialized

from dgc import compression as methods
from dgc.comm import all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllReduce
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory

OVER_HOROVOD = [over(two_machines, 4), over(two_gloo_machines, 4, pytest.mark.proof)]
CLIP = ClipByGlobalNorm(5.0)
METHODS: dict[str, Any] = {
    "dgc": lambda: methods.DGCCompressor(0.05, DGCSGDMemory(0.9, gradient_clipping=CLIP), int32_indices=True),
    "powersgd": lambda: methods.PowerSGDCompressor(1, num_iters_per_step=4),
    "2bit": lambda: methods.ThresholdCompressor(threshold=0.01),
    "4 bits": lambda: methods.TwoPhaseCompressor(4),
}


def train(transport: Any, method: str, hierarchical: str = "auto", through: str = "optimizer") -> Any:
    """What exchanges the gradients, the message of a dropped step, and a hash of the model."""
    # some shares of a machine's ranks have no matrix, or nothing
    options: Any = {"bucket_mb": 0.002, "nonfinite": "raise", "hierarchical": hierarchical}
    trainer, message = Trainer(transport, METHODS[method](), through, **options), ""
    for step in range(5):
        factor = float("inf") if (step, transport.rank) == (3, 3) else 1.0
        message += told(partial(trainer.step, step, factor), methods.NonFiniteGradientError)
    return trainer.exchange, message, trainer.weights


def trained(transport: Any) -> dict[str, Any]:
    """Hashes of the models, which all ranks have, with half of the bytes between machines."""
    models = {}
    for name in METHODS:
        exchange, message, model = train(transport, name)
        place = vars(exchange.place)
        assert (place["machine"], place["local_rank"]) == divmod(transport.rank, 2), name
        assert place["machines"] == place["local_size"] == 2, name
        of_all = all_gather_object(transport, (message, model))
        assert of_all == [(message, model)] * 4 and "on rank 3 has NaN" in message, (name, of_all)
        models[name] = model
        if is_initialized():
            assert train(transport, name, through="ddp")[1:] == (message, model), name
        if name == "dgc":
            one_level, _, _ = train(transport, name, "off")
            assert one_level.place is None
            meters = (exchange.meter, one_level.meter)
            two, one = (sum(all_gather_object(transport, m.cross_wire_bytes)) for m in meters)
            assert 0 < two <= one / 2, (two, one)
    return models


@pytest.mark.parametrize("group", [*OVER_HOROVOD, over(two_agents, 4)], indirect=True)
def test_models_are_those_of_simulated_machines_with_half_of_the_bytes_between_them(group: Group) -> None:
    """A sum of two numbers has one order, so that all transports compute the same bits."""
    found, threads = group.run(trained, hierarchical="auto"), torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has: products of matrices have other bits with more
    simulated = {name: LockstepWorld(4, 2).run(partial(train, method=name))[0][2] for name in METHODS}
    torch.set_num_threads(threads)
    assert found == [simulated] * 4


def in_process_set(rank: int, compression: Any = None, **options: Any) -> str:
    """A hash of the model after some steps on the data of a rank."""
    model = nets.net()
    optimizer = nets.wrap(model, make=nets.dgc_sgd, compression=compression, **{"transport": None, **options})
    nets.train(model, optimizer, range(4), rank)
    optimizer.close()
    return digest(model.parameters())


@each_rank_of(*OVER_HOROVOD, hierarchical="auto")
def test_horovods_process_sets_train_as_simulated_ranks_do(transport: Any) -> None:
    import horovod.torch as hvd

    members, rank = [0, 3], transport.rank
    own = in_process_set(rank, nets.dgc(), process_set=hvd.add_process_set(members))
    if rank in members:
        alike = LockstepWorld(2).run(lambda t: in_process_set(members[t.rank], nets.dgc(), transport=t))[0]
    else:
        alike = in_process_set(rank, transport=nets.alone())
    assert own == alike
    assert len(set(all_gather_object(transport, own))) == 3  # ranks 0 and 3 have one model


@each_rank_of(*OVER_HOROVOD, over(two_agents, 4), hierarchical="auto", last=True)
def test_the_exit_of_one_machine_does_not_end_a_message_of_the_other(transport: Any) -> None:
    if transport.rank > 1:
        time.sleep(1.0)
    transport.wait(transport.launch("last", (AllReduce(torch.ones(1), "sum", group="local"),)))


@pytest.mark.horovod
@pytest.mark.proof
@pytest.mark.timeout(200)
def test_a_stopped_rank_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod may wait for it inside a call that keeps the interpreter locked, so that no watchdog can run."""
    stopped = failing_model(tmp_path, 4, "os.kill(os.getpid(), signal.SIGSTOP)", rank=3)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm0.py", str(stopped)]
    words += ["--configs.model.width", "4", "--configs.train.timeout", f"{patient(10)}"]
    words += ["--configs.train.num_epochs", "2", "--run-dir", str(tmp_path / "run")]
    done = two_machines(4, ["train.py", *words], timeout=150)
    assert done.returncode != 0
    assert "gradients are compressed between 2 machines" in done.stdout
    assert re.search(r"does not respond at all|Timeout \(0:00:\d", done.stderr), done.stderr[-3000:]
