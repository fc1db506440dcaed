"""Trains on handwritten digits with Horovod and Deep Gradient Compression.

    horovodrun -np 2 python examples/train_dgc.py [EPOCHS]
"""

import sys

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import dgc
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from digits import Digits, network

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
dgc.init()  # in place of hvd.init()
data, model = Digits(hvd.rank(), hvd.size()), network()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

# 1 % of the elements of each matrix is sent, from the third epoch on. The memory applies the momentum, before
# compression, so DGCSGD leaves it out for the compressed parameters.
compression = DGCCompressor(
    0.01, memory=DGCSGDMemory(momentum=0.9), fp16_values=True, int32_indices=True, warmup_epochs=3
)
sgd = DGCSGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression)

losses = []
for epoch in range(epochs):
    optimizer.begin_epoch(epoch)
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # a bucket's exchange starts when its gradients are complete
        optimizer.step()
        total += loss.detach()
    losses.append(float(hvd.allreduce(total / len(data.loader), name="loss")))
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {data.accuracy(model):.1f} %")

if hvd.rank() == 0:
    meter = optimizer.meter
    print(f"sent {meter.wire_bytes / 1e6:.2f} MB; dense fp32 gradients: {meter.dense_wire_bytes / 1e6:.2f} MB")
