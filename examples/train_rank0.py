"""Trains on handwritten digits with DDP and 8 bits. Rank 0 alone saves, as in nanoGPT: every epoch. Resumes.

torchrun --nproc-per-node 2 examples/train_rank0.py FOLDER [EPOCHS]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc import TwoPhaseCompressor, compress
from digits import Digits, network

folder, epochs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data, net, file = Digits(rank, size), network(), folder / "checkpoint.pt"
saved = torch.load(file) if file.exists() else None  # on every rank: the model; only rank 0 needs the exchange
if saved:
    net.load_state_dict(saved["model"])
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
exchange = compress(model, TwoPhaseCompressor(bits=8), optimizer)
if saved:
    optimizer.load_state_dict(saved["optimizer"])
    exchange.load_gathered(saved["exchange"])  # rank 0 sends each rank its part

losses = []
for epoch in range(saved["epoch"] + 1 if saved else 0, epochs):
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # the exchange of a bucket starts when its gradients are complete
        optimizer.step()
        total += loss.detach() / len(data.loader)
    dist.all_reduce(total)
    losses.append(float(total) / size)
    accuracy = data.accuracy(net)
    gathered = exchange.gather_state()  # on every rank; what was not sent differs between ranks
    if rank == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")
        folder.mkdir(parents=True, exist_ok=True)
        states = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "exchange": gathered}
        torch.save({**states, "epoch": epoch}, f"{file}.tmp")
        os.replace(f"{file}.tmp", file)
dist.destroy_process_group()
