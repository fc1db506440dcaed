"""Trains the model that a stack of config files describes, on as many ranks as the launcher started.

    python train.py --configs configs/digits/cnn.py
    horovodrun -np 4 python train.py --configs configs/digits/cnn.py configs/dgc/wm5.py --configs.seed 7

`main` reads the command line and the configs. Nothing is started or written before both are checked.
`build_and_train` builds every part from the config and runs the training loop. The communication algorithm is
set by the config alone: in this file it is the optimizer that wraps the one that takes the steps.
"""

import dgc_training.startup.installed  # noqa: F401  (prints what to do if torch is missing)

# isort: split
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from omegaconf import DictConfig

from dgc.comm import Transport
from dgc.comm.horovod import connect
from dgc.comm.launch import LaunchError, check_launcher
from dgc.optim import broadcast_parameters
from dgc_training.checkpoint.files import Checkpoints, checkpoint_name
from dgc_training.checkpoint.random_state import seed_everything
from dgc_training.checkpoint.state import Progress, State
from dgc_training.config import ConfigError, load, to_yaml
from dgc_training.data import TrainBatches
from dgc_training.evaluation import Evaluation
from dgc_training.faults.failure import Refused, end_process, ending_all_ranks
from dgc_training.faults.interruption import SAVED, Interruption
from dgc_training.faults.replicas import check_replicas
from dgc_training.faults.watchdog import WatchedTransport, watching
from dgc_training.labels import LabelCheck
from dgc_training.logging.log import Log
from dgc_training.logging.rank_csv.rows import Rows
from dgc_training.logging.summary import finish, summarize
from dgc_training.parameters import parameter_groups
from dgc_training.schedule import Schedule, scale_learning_rate
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.launcher import complain, launched_rank
from dgc_training.startup.runs import run_name
from dgc_training.startup.setup import (
    build,
    building,
    check_agreement,
    check_run_directory,
    choose_kernels,
    open_run_directory,
    prepare_device,
    require_complete,
    wrap_optimizer,
)


def main(
    argv: Sequence[str] | None = None,
    connect: Callable[..., Transport] = connect,
    leave: Callable[[int], None] = end_process,
) -> int:
    """Trains as the command line says and returns the exit status.

    Args:
        argv: the command line without the program's name. None: that of this process.
        connect: creates the transport. Takes the keywords of `dgc.comm.horovod.connect`.
        leave: ends this process with an exit status after an error. All ranks end with it.
    """
    args, overrides = parse_arguments(argv)
    try:
        tree = load(args.configs, overrides)
        if not args.print_config:
            require_complete(tree, args.devices)
            check_launcher(os.environ)
    except (ConfigError, LaunchError) as error:
        return complain(str(error))
    except KeyboardInterrupt:
        complain("Stopped by Ctrl-C (or by a config that raises KeyboardInterrupt): nothing was started.")
        return 128 + signal.SIGINT
    if args.print_config:
        if launched_rank() == 0:
            print(to_yaml(tree, resolve=True), end="")
        return 0
    status = 0
    with ending_all_ranks(leave):
        with building():
            gossip = build(tree.train.gossip)
            carrier = connect(
                hierarchical=gossip is not None and gossip.needs_groups,
                timeout=tree.train.timeout,
                point_to_point=gossip is not None,
            )
        transport = WatchedTransport(carrier)
        with watching(transport, tree.train.timeout, leave):
            status = run(args, tree, transport)
    return status


def run(args: Namespace, tree: DictConfig, transport: Transport) -> int:
    """Runs one rank, from building to the summary. Returns exit status 0, or SAVED if a signal ended the run."""
    with ExitStack() as held:
        return build_and_train(args, tree, transport, held)


def build_and_train(args: Namespace, tree: DictConfig, transport: Transport, held: ExitStack) -> int:
    """Builds all parts from the config and trains. `held` keeps the lock of the run directory until the end."""
    rank, size, settings = transport.rank, transport.size, tree.train
    device = prepare_device(tree, args.devices, transport)
    check_agreement(tree, device, transport)

    # Build. Every rank draws the same initial model. Afterwards each rank draws different random numbers.
    with building():
        tier = choose_kernels(settings.kernels, device)
        dataset = build(tree.dataset)
        model = build(tree.model).to(device)
        broadcast_parameters(model.state_dict(), root=0, transport=transport)
        seed_everything(tree.seed + rank)
        criterion = build(settings.criterion).to(device)
        batches = TrainBatches(
            dataset["train"],
            settings.batch_size,
            settings.num_batches_per_step,
            rank=rank,
            size=size,
            seed=tree.seed,
            device=device,
            num_workers=tree.data.num_workers,
        )
        inner = build(settings.optimizer, parameter_groups(model, settings.optimize_bn_separately))
        optimizer = wrap_optimizer(inner, model, settings, transport)
        scale_learning_rate(optimizer, settings.num_batches_per_step * size)
        schedule = Schedule(
            optimizer,
            lambda scaled: build(settings.scheduler, scaled),
            size=size,
            steps_per_epoch=batches.steps_per_epoch,
            warmup_epochs=settings.warmup_lr_epochs,
            per_epoch=settings.schedule_lr_per_epoch,
        )
        evaluation = Evaluation(dataset, settings, transport, device, tree.data.num_workers)
        progress = Progress()
        name = run_name(args.configs, args.suffix, size)
        directory = Path(args.run_dir) if args.run_dir else Path("runs") / name
        rows = Rows(directory, settings, tree.data.num_workers, optimizer) if settings.csv else None
        state = State(model, optimizer, schedule, progress, transport, device, rows)

    # Nothing is written before this point, where all parts have been built.
    checkpoints = Checkpoints(directory / "checkpoints", transport)
    if args.evaluate:
        return evaluate_only(directory, tree, checkpoints, state, evaluation)
    held.enter_context(open_run_directory(directory, tree, transport, resume=not args.no_resume))
    latest = checkpoints.find("latest")
    if latest is not None:
        state.load(checkpoints.load(latest))
    log = Log(directory, state, tree, batches.steps_per_epoch)
    log.begin(tier, evaluation.names, latest)

    def save(best: bool = False) -> None:
        checkpoint = checkpoint_name(progress.epoch, progress.step)
        checkpoints.save(checkpoint, state.shared(to_yaml(tree, resolve=False)), state.own(), best)

    check_labels = LabelCheck(criterion)
    model.train()
    with Interruption(transport, lag=optimizer.steps_apart) as interruption:
        asked = None
        while progress.epoch < settings.num_epochs and asked is None:
            epoch = progress.epoch
            optimizer.begin_epoch(epoch)
            pace = optimizer.pace(size * batches.steps_per_epoch * (epoch + 1))
            more = None if pace is None else lambda pace=pace: pace() and not interruption.asked
            for step, passes in log.clock.each("data", batches.epoch(epoch, progress.step, more)):
                interruption.begin_step()
                schedule.begin_step(epoch, step)
                optimizer.zero_grad()
                loss = torch.zeros((), device=device)
                with log.clock.phase("forward_backward"):
                    for inputs, targets in passes:
                        outputs = model(inputs)
                        check_labels(outputs, targets)
                        part = criterion(outputs, targets) / len(passes)
                        part.backward()
                        loss += part.detach()
                        log.batch(outputs, targets)
                optimizer.step()
                log.step(loss, samples=size * sum(targets.size(0) for _, targets in passes))
                if settings.check_replicas_every and (step + 1) % settings.check_replicas_every == 0:
                    check_replicas(model, transport)
                asked = interruption.end_step()
                due = settings.checkpoint_every and (step + 1) % settings.checkpoint_every == 0
                if asked is not None or (due and step + 1 < batches.steps_per_epoch):
                    save()
                if asked is not None:
                    break
            else:
                optimizer.settle()
                if more is not None and (asked := interruption.now()) is not None:
                    save()
                    break
                progress.epoch, progress.step = epoch + 1, 0
                with optimizer.consensus():
                    results = evaluation(model)
                best = progress.add_results(results, settings.metric)
                log.end_epoch(results)
                save(best)
                log.resume_timing()
                asked = interruption.now()
    log.close()
    optimizer.close()
    if progress.epoch < settings.num_epochs:
        saved = checkpoint_name(progress.epoch, progress.step)
        log.say(f"Asked to end by {asked.name if asked else ''}: saved {saved}. The same command goes on from it.")
        return SAVED
    if rank == 0:
        finish(directory, summarize(name, progress, ranks=size, metric=settings.metric))
    return 0


def evaluate_only(
    directory: Path, tree: DictConfig, checkpoints: Checkpoints, state: State, evaluation: Evaluation
) -> int:
    """Evaluates the best checkpoint (the latest one if there is no metric) and prints the results."""
    found = checkpoints.find("best", "latest")
    if found is None:
        raise Refused(
            f"--evaluate: there is no checkpoint in {checkpoints.directory}; train first, or give --run-dir."
        )
    # No lock: a run can be evaluated while it trains.
    cure = f"--configs {directory / 'config.yaml'} --run-dir {directory} evaluates it as it was trained."
    check_run_directory(directory, tree, state.transport, cure)
    state.load_model(checkpoints.load(found, own_part=False))
    results = evaluation(state.model)
    if state.transport.rank == 0:
        for name, value in results.items():
            print(f"{name} {value:.2f}")
    return 0


def put_repository_last_on_path() -> None:
    """Moves this file's folder from the front of sys.path to its end.

    At the front, its `configs` and `scripts` would hide packages of the same names that a user's module imports.
    """
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    put_repository_last_on_path()
    sys.exit(main())
