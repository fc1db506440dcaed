"""Trains on handwritten digits with Accelerate and 8 bits. Saves every epoch, and resumes from there.

torchrun --nproc-per-node 2 examples/train_accelerate.py FOLDER [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from dgc import TwoPhaseCompressor
from dgc.integrations.accelerate import compress
from digits import Digits, network

folder, epochs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net, data = network(), Digits(rank=0, size=1)  # prepare() divides the batches among the ranks
adamw = torch.optim.AdamW(net.parameters(), lr=0.003)
model, optimizer, loader = accelerator.prepare(net, adamw, data.loader)
exchange = compress(accelerator, model, TwoPhaseCompressor(bits=8), optimizer)

newest = folder / "newest"
start = int(newest.read_text()) if newest.exists() else 0
if start:
    accelerator.load_state(str(folder / str(start)))

losses = []
for epoch in range(start, epochs):
    loader.set_epoch(epoch)
    total = torch.zeros(())
    for images, labels in loader:
        with accelerator.accumulate(model):  # gradients are exchanged in the last backward pass of a step
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / len(loader)
    losses.append(float(accelerator.reduce(total, "mean")))
    accuracy = data.accuracy(net)
    accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")

    accelerator.save_state(str(folder / str(epoch + 1)))  # with what each rank has not sent yet
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        newest.write_text(str(epoch + 1))  # last, so that it names a complete checkpoint

accelerator.print(exchange.meter.summary())
