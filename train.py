"""Trains the model that a stack of config files describes, on as many ranks as the launcher started.

    python train.py --configs configs/digits/cnn.py
    horovodrun -np 4 python train.py --configs configs/digits/cnn.py configs/dgc/wm5.py --configs.seed 7

`main` reads the command line and the configs. Nothing is started or written before both are checked. `run` builds
every part from the config. `train` is the training loop. The communication algorithm is set by the config alone:
in this file it is the optimizer that wraps the one that takes the steps.
"""

import dgc_training.startup.installed  # noqa: F401  (prints what to do if torch is missing)

# isort: split
import gc
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from dgc.comm import Transport
from dgc.comm.connect import choose_transport, connect
from dgc.launch import LaunchError
from dgc.optim import broadcast_parameters
from dgc.terminal import escape_unprintable
from dgc_training.checkpoint.files import Checkpoints, checkpoint_name
from dgc_training.checkpoint.progress import TrainingProgress
from dgc_training.checkpoint.state import Recorder, RunState
from dgc_training.config import ConfigError, load, to_yaml
from dgc_training.faults.failure import UsageError, end_process, ending_all_ranks
from dgc_training.faults.interruption import EXIT_SAVED
from dgc_training.faults.watchdog import WatchedTransport, watching
from dgc_training.launcher import launched_rank, may_restart, print_error
from dgc_training.logging.formatting import result_text
from dgc_training.logging.log import Log
from dgc_training.logging.summary import summarize, write_summary
from dgc_training.random_state import seed_everything
from dgc_training.schedule import Schedule, is_due, scale_learning_rate
from dgc_training.startup.agreement import check_agreement
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.build import (
    Described,
    build,
    build_as,
    build_method,
    config_errors,
    open_transport,
    parameter_groups,
    wrap_optimizer,
)
from dgc_training.startup.run_directory import check_run_directory, open_run_directory
from dgc_training.startup.run_name import run_name, warn_of_other_run
from dgc_training.startup.setup import choose_kernels, prepare_device, require_complete
from dgc_training.stepping import Stepping, make_scaler
from dgc_training.synchronization import Synchronization, check_replicas
from dgc_training.tasks.protocol import Setup, Task


def main(
    argv: Sequence[str] | None = None,
    connect: Callable[..., Transport] = connect,
    leave: Callable[[int], None] = end_process,
) -> int:
    """Trains as the command line says and returns the exit status.

    Args:
        argv: the command line without the program's name. None: the command line of this process.
        connect: creates the transport. It takes the arguments of `dgc.comm.connect.connect`.
        leave: ends this process with an exit status after an error. All ranks end with it.
    """
    args, overrides = parse_arguments(argv)
    try:
        tree = load(args.configs, overrides)
        if not args.print_config:
            require_complete(tree, args.devices)
            with config_errors():
                choice = choose_transport(tree.train.transport)
    except (ConfigError, LaunchError) as error:
        return print_error(str(error))
    except KeyboardInterrupt:
        print_error("Stopped by Ctrl-C (or by a config that raises KeyboardInterrupt). Nothing was started.")
        return 128 + signal.SIGINT
    if args.print_config:
        if launched_rank() == 0:
            print(to_yaml(tree, resolve=True), end="")
        return 0
    status = 0
    with ending_all_ranks(leave):
        method = build_method(tree.train)
        opened = open_transport(tree.train, method, partial(connect, transport=choice.transport))
        transport = WatchedTransport(opened)
        with watching(transport, tree.train.timeout, leave):
            status = run(args, tree, transport, method, str(choice))
    return status


def run(
    args: Namespace,
    tree: DictConfig,
    transport: Transport,
    method: Any = None,
    description: str = "given by the caller",
) -> int:
    """Runs one rank, from building to the summary. Returns 0, or EXIT_SAVED if a signal or --minutes stopped it.

    Args:
        args: the options of the command line.
        tree: the complete config.
        transport: connects the ranks.
        method: the compressor or gossip algorithm of the config. None: it is built here.
        description: the transport and why it was chosen, for the log.
    """
    rank, size, settings = transport.rank, transport.size, tree.train
    device = prepare_device(tree, args.devices, transport)
    check_agreement(tree, device, transport)

    # Build. Every rank draws the same initial model. Afterwards each rank draws different random numbers.
    with config_errors():
        kernels = choose_kernels(settings.kernels, device)
        dataset = build_as(Mapping, tree.dataset)
        model: nn.Module = build_as(nn.Module, tree.model).to(device)
        broadcast_parameters(model.state_dict(), root=0, transport=transport)
        seed_everything(tree.seed + rank)
        task: Task = build_as(Task, tree.task, Setup(tree, dataset, model, transport, device))
        groups = parameter_groups(model, settings.optimize_bn_separately, settings.parameter_groups)
        inner = build_as(Optimizer, settings.optimizer, groups)
        scaler = make_scaler(settings, device)
        optimizer = wrap_optimizer(inner, model, settings, transport, scaler, method)
        scale_learning_rate(optimizer, settings.num_batches_per_step * size)
        schedule = Schedule(
            optimizer,
            lambda scaled: build(settings.scheduler, scaled),
            size=size,
            steps_per_epoch=task.batches.steps_per_epoch,
            warmup_epochs=settings.warmup_lr_epochs,
            per_epoch=settings.schedule_lr_per_epoch,
        )
        stepping = Stepping(optimizer, model, settings, device, scaler)
        sync = Synchronization(optimizer, settings, args.minutes)
        name = run_name(args.configs, args.suffix, None if may_restart() else size)
        directory = Path(args.run_dir) if args.run_dir else Path("runs") / name
        recorder = None
        if settings.recorder is not None:
            recorder = build_as(Recorder, settings.recorder, directory, tree, optimizer)
        progress = TrainingProgress()
        state = RunState(model, optimizer, schedule, progress, transport, device, task, recorder, scaler)
        checkpoints = Checkpoints(directory / "checkpoints", transport)

    gc.enable()  # dgc_training.startup.installed has disabled it
    # Nothing is written before this point, where all parts have been built.
    if args.evaluate:
        return evaluate_checkpoint(directory, tree, checkpoints, state, task)
    with open_run_directory(directory, tree, transport, resume=not args.no_resume):
        latest = checkpoints.find("latest")
        if latest is not None:
            state.load(checkpoints.load(latest, part=optimizer.part, replica_group=optimizer.replica_group))
        elif args.run_dir is None and not args.no_resume:
            warn_of_other_run(directory, rank)
        log = Log(directory, state, sync, recorder, tree, task.batches.steps_per_epoch, task.item)
        choices = [part.description() for part in (groups, inner) if isinstance(part, Described)]
        log.begin(kernels, description, task.results, latest, choices)

        def save(best: bool = False) -> None:
            checkpoint = checkpoint_name(progress.epoch, progress.step)
            shared = state.shared_part(to_yaml(tree, resolve=False))
            checkpoints.save(checkpoint, shared, state.own_part(), best, optimizer.replica_group)

        train(settings, state, sync, task, stepping, log, save)
        log.close()
        optimizer.close()
        if sync.stop_signal is not None and progress.epoch < settings.num_epochs:
            saved = checkpoint_name(progress.epoch, progress.step)
            log.print(f"Stopped by {sync.stop_signal.name}: saved {saved}. The same command resumes from it.")
            return EXIT_SAVED
        if rank == 0:
            metric, lower = settings.metric, task.lower_is_better
            rounds = None if settings.groups is None else optimizer.metrics()
            about: Any = {"item": task.item, "lower_is_better": lower, "rounds": rounds}
            summary = summarize(name, progress, ranks=size, metric=metric, **about)
            write_summary(directory, summary)
    return 0


def train(
    settings: DictConfig,
    state: RunState,
    sync: Synchronization,
    task: Task,
    stepping: Stepping,
    log: Log,
    save: Callable[..., None],
) -> None:
    """The training loop. It ends after `num_epochs` epochs, or when it is stopped and has saved a checkpoint."""
    model, optimizer, schedule, progress = state.model, state.optimizer, state.schedule, state.progress
    model.train()
    with sync:
        while progress.epoch < settings.num_epochs and sync.stop_signal is None:
            epoch = progress.epoch
            optimizer.begin_epoch(epoch)
            for step, passes in log.timer.iterate("data", sync.steps(task.batches, epoch, progress.step)):
                schedule.begin_step(epoch, step)
                optimizer.zero_grad()
                mean, items = torch.zeros((), device=state.device), 0
                with log.timer.phase("forward_backward"):
                    for batch in passes:
                        with stepping.autocast():
                            loss = task.loss(model, batch)
                        part = loss.mean / len(passes)
                        stepping.backward(part)
                        mean += part.detach()
                        items += loss.items
                        log.batch(loss)
                if settings.groups is not None:
                    optimizer.groups.count(items)
                stepping.step()
                log.step(mean, samples=sync.size * items)
                if is_due(settings.check_replicas_every, step):
                    check_replicas(model, state.transport)
                sync.end_step()
                ends_epoch = step + 1 == task.batches.steps_per_epoch
                if is_due(settings.checkpoint_every, step) and not ends_epoch and sync.stop_signal is None:
                    save()
            if not sync.end_epoch():
                save()
                break
            progress.epoch, progress.step = epoch + 1, 0
            with sync.averaged_model():
                results = task.evaluate(model)
            best = progress.add_results(results, settings.metric, lower_is_better=task.lower_is_better)
            log.end_epoch(results, task.texts())
            save(best)
            log.resume_timing()
            sync.check_signals()


def evaluate_checkpoint(
    directory: Path, tree: DictConfig, checkpoints: Checkpoints, state: RunState, task: Task
) -> int:
    """Evaluates the best checkpoint (the latest one if there is no metric) and prints the results."""
    found = checkpoints.find("best", "latest")
    if found is None:
        raise UsageError(
            f"--evaluate: there is no checkpoint in {checkpoints.directory}. Train first, or set --run-dir."
        )
    # No lock: a run can be evaluated while it trains.
    cure = f"To evaluate it as it was trained: --configs {directory / 'config.yaml'} --run-dir {directory}"
    check_run_directory(directory, tree, state.transport, cure)
    state.load_model(checkpoints.load(found, own_part=False))
    results = task.evaluate(state.model)
    if state.transport.rank == 0:
        for name, value in results.items():
            print(f"{name} {result_text(value)}")
    return 0


def put_repository_last_on_path() -> None:
    """Moves this file's folder from the front of sys.path to its end.

    At the front, its `configs` and `scripts` would hide packages of the same names that a user's module imports.
    """
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    escape_unprintable()
    gc.freeze()  # searches for garbage, in training and at the end of the process, skip what has been imported
    put_repository_last_on_path()
    sys.exit(main())
