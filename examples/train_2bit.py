"""Trains on handwritten digits with Horovod and MXNet's 2-bit compression.

    horovodrun -np 2 python examples/train_2bit.py [EPOCHS]
"""

import sys

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import dgc
from dgc.compression import ThresholdCompressor
from dgc.optim import DistributedOptimizer
from digits import BATCH_SIZE, Digits, network

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
dgc.init()  # in place of hvd.init()
data, model = Digits(hvd.rank(), hvd.size()), network()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

# Every element is sent as -t, 0 or t. The rest is added to the next gradient. MXNet's default t = 0.5 is for
# gradients that are summed over the batch; PyTorch's are means. Most elements wait several steps until they reach
# t, and momentum on top of this delay slows training down.
compression = ThresholdCompressor(bits=2, threshold=0.5 / BATCH_SIZE)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression)

losses = []
for epoch in range(epochs):
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
