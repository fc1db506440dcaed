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
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import dgc_datasets.torchvision_compat  # noqa: F401  (transformers imports torchvision)

warnings.filterwarnings("default", module=r"(transformers|accelerate)\.")  # they warn of their own code
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dgc.compression import (  # noqa: E402
    DenseCompressor,
    DGCCompressor,
    OneBitAdamCompressor,
    PowerSGDCompressor,
)
from dgc.integrations.transformers import CompressionCallback  # noqa: E402
from dgc.memory import DGCSGDMemory  # noqa: E402
from dgc.optim import DGCSGD, OneBitAdam  # noqa: E402

STEPS, SAVED, KILLED = 14, 6, 9
OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
found: dict[str, Any] = {}


class Killed(Exception):
    pass


class Kill(TrainerCallback):
    """Ends training between two checkpoints: by an exception, or rank 1 by a signal."""

    def __init__(self, really: bool):
        self.really = really

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == KILLED and not self.really:
            raise Killed
        if state.global_step == KILLED and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def compression_of(method: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "dense": DenseCompressor,
        "powersgd": lambda: PowerSGDCompressor(rank=2, num_iters_per_step=2),
        "onebit": OneBitAdamCompressor,
        "dgc": lambda: DGCCompressor(0.05, DGCSGDMemory(momentum=0.9), warmup_epochs=2),
    }
    return made[method]()


def trainer_of(method: str, folder: Path, **settings: Any) -> tuple[Trainer, CompressionCallback | None]:
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 12, "vocab_size": 16}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    first = torch.randint(0, 16, (160, 1))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in (first + 5 * torch.arange(12)) % 16]
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=SAVED,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    made = {
        "onebit": lambda: OneBitAdam(model.parameters(), lr=0.01, freeze_step=4),
        "dgc": lambda: DGCSGD(model.parameters(), lr=0.3, momentum=0.9),
    }
    optimizers = (made[method](), None) if method in made else (None, None)
    if method == "none":
        return Trainer(model, args, train_dataset=data), None
    compression = CompressionCallback(compression_of(method))
    trainer = Trainer(model, args, train_dataset=data, optimizers=optimizers, callbacks=[compression])
    compression.attach(trainer)
    return trainer, compression


def record(name: str, trainer: Trainer, compression: CompressionCallback | None) -> None:
    tensors = list(trainer.model.state_dict().values())
    own = [] if compression is None or compression.exchange is None else list(compression.exchange.errors())
    model, errors = (
        sha256(b"".join(t.detach().numpy().tobytes() for t in part)).hexdigest() for part in (tensors, own)
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found[name] = {"losses": losses, "model": model, "errors": errors}
    (OUT / f"{sys.argv[2]}{RANK}.json").write_text(json.dumps(found))


METHODS: dict[str, dict[str, Any]] = {"onebit": {"max_grad_norm": 0.5}, "dgc": {}, "powersgd": {"bf16": True}}

if sys.argv[2] == "begin":
    for method in ("none", "dense", *METHODS):
        trainer, compression = trainer_of(method, OUT / f"{method}-whole", **METHODS.get(method, {}))
        trainer.train()
        record(method, trainer, compression)
    for method, settings in METHODS.items():
        trainer, _ = trainer_of(method, OUT / method, **settings)
        trainer.add_callback(Kill(really=method == "powersgd"))
        try:
            trainer.train()
        except Killed:
            pass
    raise SystemExit("rank 1 was to be killed")

for method, settings in METHODS.items():
    trainer, compression = trainer_of(method, OUT / method, **settings)
    trainer.train(resume_from_checkpoint=True)
    record(method, trainer, compression)

saved = OUT / "powersgd" / f"checkpoint-{STEPS}"  # save_total_limit=1: the only one that is left
assert [path.name for path in saved.parent.iterdir()] == [saved.name]
own = OUT / f"lacking{RANK}"
shutil.copytree(saved, own)
(own / "exchange1.pt").unlink()
trainer, _ = trainer_of("powersgd", OUT / "other", bf16=True)
try:
    trainer.train(resume_from_checkpoint=str(own))
except ValueError as error:
    found["lacking"] = str(error)
(own / "exchange0.pt").unlink()
trainer, compression = trainer_of("powersgd", OUT / "other", bf16=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer.train(resume_from_checkpoint=str(own))
found["new"] = [str(w.message) for w in caught if "nothing unsent" in str(w.message)]
record("begun", trainer, compression)
