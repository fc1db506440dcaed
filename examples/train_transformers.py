"""Trains a small GPT-2 with the Trainer of transformers and 8 bits. Saves every epoch, and resumes from there.

torchrun --nproc-per-node 2 examples/train_transformers.py FOLDER [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dgc import TwoPhaseCompressor
from dgc.integrations.transformers import CompressionCallback


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """12 tokens from 0 to 15, each larger than the one before by 5, modulo 16."""
    first = torch.randint(0, 16, (count, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": tokens, "labels": tokens} for tokens in (first + 5 * torch.arange(12)) % 16]


torch.manual_seed(0)
folder, epochs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 12, "vocab_size": 16}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments(
    str(folder),
    num_train_epochs=epochs,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,  # gradients are exchanged in the last backward pass of a step
    learning_rate=0.01,
    lr_scheduler_type="constant",
    logging_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=sequences(512, seed=1))
compression = CompressionCallback(TwoPhaseCompressor(bits=8))
compression.attach(trainer)
start = get_last_checkpoint(folder) if folder.exists() else None
trainer.train(resume_from_checkpoint=start)

done = 0 if start is None else int(start.rpartition("-")[2])
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > done]
tokens = torch.stack([row["input_ids"] for row in sequences(256, seed=2)])
with torch.no_grad():
    right = model.eval()(tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]
accuracy = 100 * float(right.float().mean())
if trainer.is_world_process_zero():
    print(f"{accuracy:.1f} % of the next tokens of new sequences are right")
