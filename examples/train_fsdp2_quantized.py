"""Trains on handwritten digits with FSDP2 over all ranks: gradients are sent in 4 bits, and weights in 8.

torchrun --nproc-per-node 2 examples/train_fsdp2_quantized.py [EPOCHS]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from dgc.fsdp import quantize
from digits import Digits, network

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data, model = Digits(rank, size), network()  # the same parameters on every rank
for layer in model.children():
    if list(layer.parameters()):
        fully_shard(layer)
fully_shard(model)

# What 4 bits lose of a gradient is kept, one byte per element, and added to the next one.
quantizer = quantize(model, gradients=4, weights=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

losses = []
for epoch in range(epochs):
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()  # of the shards, which are not rounded
        total += loss.detach() / len(data.loader)
    dist.all_reduce(total)
    losses.append(float(total) / size)
    accuracy = data.accuracy(model)  # on every rank, because each has a part of the model
    if rank == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")

if rank == 0:
    print(quantizer.meter.summary())
dist.destroy_process_group()
