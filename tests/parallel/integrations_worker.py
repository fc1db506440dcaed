"""Trains a tiny GPT-2 with the Trainer of transformers in each rank, and writes the losses and a hash of each run.

torchrun --nproc-per-node 2 tests/parallel/integrations_worker.py OUT begin    # ends by SIGKILL of rank 1
torchrun --nproc-per-node 2 tests/parallel/integrations_worker.py OUT resume
"""

import json
import os
import shutil
import signal
import sys
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parallel.found import digest, told

import dgc_datasets.torchvision_compat  # noqa: F401  (transformers imports torchvision)
from dgc.compression import DenseCompressor, DGCCompressor, OneBitAdamCompressor, PowerSGDCompressor
from dgc.optim import DGCSGD, OneBitAdam

warnings.filterwarnings("default", module=r"(transformers|accelerate)\.")  # they warn of their own code
import transformers as hf  # noqa: E402

from dgc.integrations.transformers import CompressionCallback  # noqa: E402

STEPS, SAVED, KILLED = 14, 6, 9
OUT, PART, RANK = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
# by method: options of the Trainer, the compressor, and the optimizer if it is not the Trainer's
METHODS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "onebit": ({"max_grad_norm": 0.5}, OneBitAdamCompressor, partial(OneBitAdam, lr=0.01, freeze_step=4)),
    "dgc": ({}, partial(DGCCompressor, 0.05, warmup_epochs=2), partial(DGCSGD, lr=0.3, momentum=0.9)),
    "powersgd": ({"bf16": True}, partial(PowerSGDCompressor, rank=2, num_iters_per_step=2), None),
}
PLAIN: tuple[dict[str, Any], Any, Any] = ({}, DenseCompressor, None)
found: dict[str, Any] = {}


class Killed(Exception):
    pass


class Kill(hf.TrainerCallback):
    """Ends training between two checkpoints: by an exception, or (really) rank 1 by a signal."""

    def __init__(self, really: bool):
        self.really = really

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == KILLED and not self.really:
            raise Killed
        if state.global_step == KILLED and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(method: str, folder: str) -> tuple[Any, CompressionCallback | None]:
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 12, "vocab_size": 16}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    first = torch.randint(0, 16, (160, 1))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in (first + 5 * torch.arange(12)) % 16]
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    files = {"save_steps": SAVED, "save_total_limit": 1, "logging_steps": 1, "report_to": "none"}
    own, make, optimizer = METHODS.get(method, PLAIN)
    options = {"learning_rate": 0.01, "disable_tqdm": True, "use_cpu": True, **own}
    args = hf.TrainingArguments(str(OUT / folder), **batches, **files, **options)
    if method == "none":
        return hf.Trainer(model, args, train_dataset=data), None
    compression = CompressionCallback(make())
    optimizer = optimizer and optimizer(model.parameters())
    trainer = hf.Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[compression])
    compression.attach(trainer)
    return trainer, compression


def run(name: str, method: str, folder: str, **options: Any) -> None:
    trainer, compression = trainer_of(method, folder)
    trainer.train(**options)
    errors = [] if compression is None or compression.exchange is None else compression.exchange.errors()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model = digest(trainer.model.state_dict().values())
    found[name] = {"losses": losses, "model": model, "errors": digest(errors)}
    (OUT / f"{PART}{RANK}.json").write_text(json.dumps(found))


if PART == "begin":
    for method in ("none", "dense", *METHODS):
        run(method, method, f"{method}-whole")
    for method in METHODS:
        trainer, _ = trainer_of(method, method)
        trainer.add_callback(Kill(really=method == "powersgd"))
        with suppress(Killed):
            trainer.train()
    raise SystemExit("rank 1 was to be killed")

for method in METHODS:
    run(method, method, method, resume_from_checkpoint=True)

saved = OUT / "powersgd" / f"checkpoint-{STEPS}"  # save_total_limit=1: the only one that is left
assert [path.name for path in saved.parent.iterdir()] == [saved.name]
own = OUT / f"lacking{RANK}"
shutil.copytree(saved, own)
(own / "exchange1.pt").unlink()
trainer, _ = trainer_of("powersgd", "other")
found["lacking"] = told(lambda: trainer.train(resume_from_checkpoint=str(own)), ValueError)
(own / "exchange0.pt").unlink()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run("new run", "powersgd", "other", resume_from_checkpoint=str(own))
found["new"] = [str(w.message) for w in caught if "nothing unsent" in str(w.message)]
(OUT / f"{PART}{RANK}.json").write_text(json.dumps(found))
