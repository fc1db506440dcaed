"""Trains on handwritten digits with FSDP2: sharded inside machines, Deep Gradient Compression between them.

On machines 0 and 1, with --node-rank 0 and 1 and the address of machine 0:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 \
        examples/train_fsdp2.py [EPOCHS]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from dgc.comm.torch_distributed import connect
from dgc.compression import DGCCompressor
from dgc.fsdp import compress, local_mesh
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD
from digits import Digits, network

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
transport = connect(hierarchical=True)  # starts torch.distributed, with groups inside and between machines
mesh = local_mesh(transport)
data, model = Digits(transport.rank, transport.size), network()  # the same parameters on every rank
for layer in model.children():
    if list(layer.parameters()):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

# 1 % of the elements of each matrix is sent to the other machines, from the third epoch on. The memory applies the
# momentum, before compression, so DGCSGD leaves it out for the compressed parameters.
compression = DGCCompressor(
    0.01, memory=DGCSGDMemory(momentum=0.9), values="fp16", indices="int32", warmup_epochs=3
)
exchange = compress(model, compression, transport=transport)
optimizer = DGCSGD(model.parameters(), lr=0.05, momentum=0.9)

losses = []
for epoch in range(epochs):
    exchange.begin_epoch(epoch)
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # the exchange of a layer starts when its gradient is complete
        optimizer.step()
        total += loss.detach() / len(data.loader)
    dist.all_reduce(total)
    losses.append(float(total) / transport.size)
    accuracy = data.accuracy(model)  # on every rank, because each has a part of the model
    if transport.rank == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")

if transport.rank == 0:
    print(exchange.meter.summary())
dist.destroy_process_group()
