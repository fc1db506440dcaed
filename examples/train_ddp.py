"""Trains on handwritten digits with DistributedDataParallel and Deep Gradient Compression. No Horovod, no MPI.

torchrun --nproc-per-node 2 examples/train_ddp.py [EPOCHS]
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc import DGCSGD, DGCCompressor, compress
from digits import Digits, network

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data, model = Digits(rank, size), DistributedDataParallel(network())

# 1 % of the elements of each matrix is sent, from the third epoch on. DGC applies the optimizer's momentum before
# compression, so DGCSGD leaves it out for the compressed parameters.
compression = DGCCompressor(0.01, values="fp16", indices="int32", warmup_epochs=3)
optimizer = DGCSGD(model.parameters(), lr=0.05, momentum=0.9)
exchange = compress(model, compression, optimizer)

losses = []
for epoch in range(epochs):
    exchange.begin_epoch(epoch)
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # the exchange of a bucket starts when its gradients are complete
        optimizer.step()
        total += loss.detach() / len(data.loader)
    dist.all_reduce(total)
    losses.append(float(total) / size)
    accuracy = data.accuracy(model.module)
    if rank == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")

if rank == 0:
    print(exchange.meter.summary())
dist.destroy_process_group()
