"""Trains on handwritten digits with Horovod, and DGC, PowerSGD or MXNet's 2-bit compression.

horovodrun -np 2 python examples/train_horovod.py dgc|powersgd|2bit [EPOCHS]
"""

from argparse import ArgumentParser

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import dgc
from dgc.compression import Compressor, DGCCompressor, PowerSGDCompressor, ThresholdCompressor
from dgc.optim import DGCSGD, DistributedOptimizer
from digits import BATCH_SIZE, Digits, network

parser = ArgumentParser()
parser.add_argument("method", choices=("dgc", "powersgd", "2bit"))
parser.add_argument("epochs", type=int, nargs="?", default=10)
arguments = parser.parse_args()
dgc.init()  # in place of hvd.init()
data, model = Digits(hvd.rank(), hvd.size()), network()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

compression: Compressor
sgd: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if arguments.method == "dgc":  # sends 1 % of the elements of each matrix, from the third epoch on
    compression = DGCCompressor(0.01, values="fp16", indices="int32", warmup_epochs=3)
    # DGC applies its momentum before compression, so it leaves it out
    sgd = DGCSGD(model.parameters(), lr=0.05, momentum=0.9)
elif arguments.method == "powersgd":  # sends each matrix as two factors of rank 2. Any torch optimizer fits
    # with 1, the default, a step sends only one of the two: here, with momentum 0.9, training becomes unstable
    compression = PowerSGDCompressor(rank=2, num_iters_per_step=2)
else:  # sends each element as -t, 0 or t. MXNet's t = 0.5 is for sums over the batch; PyTorch's are means
    compression = ThresholdCompressor(bits=2, threshold=0.5 / BATCH_SIZE)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)  # elements wait until they reach t: momentum would add delay
optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression)

losses = []
for epoch in range(arguments.epochs):
    optimizer.begin_epoch(epoch)
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # a bucket's exchange starts when its gradients are complete
        optimizer.step()
        total += loss.detach() / len(data.loader)
    losses.append(float(hvd.allreduce(total, name="loss")))
    accuracy = data.accuracy(model)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")

if hvd.rank() == 0:
    print(optimizer.meter.summary())
