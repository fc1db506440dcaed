"""Trains on handwritten digits with Stochastic Gradient Push: ranks average models with neighbours, not gradients.

    torchrun --nproc-per-node 2 examples/train_gossip.py [EPOCHS]
    mpirun -np 2 --bind-to none python examples/train_gossip.py [EPOCHS]

Under mpirun it needs Horovod and MPI, which carries the messages between two ranks. horovodrun --gloo has no MPI.
"""

import sys

import torch
from torch.nn.functional import cross_entropy

from dgc.comm import all_reduce
from dgc.comm.connect import connect
from dgc.gossip import SGP, n_peer_exponential
from dgc.optim import LocalOptimizer, broadcast_parameters
from digits import Digits, network

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
transport = connect(point_to_point=True)  # torch.distributed or Horovod, by the launcher
data, model = Digits(transport.rank, transport.size), network()
broadcast_parameters(model.state_dict(), transport=transport)

sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = LocalOptimizer(sgd, model.named_parameters(), SGP(n_peer_exponential), transport=transport)

losses = []
for epoch in range(epochs):
    optimizer.begin_epoch(epoch)
    total = torch.zeros(())
    for images, labels in data.epoch(epoch):
        optimizer.zero_grad()  # also adds the models that neighbours sent: before each forward pass
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach() / len(data.loader)
    losses.append(float(all_reduce(transport, total, "mean", "loss")))
    with optimizer.consensus():  # inside, every rank's parameters are the mean over all ranks
        accuracy = data.accuracy(model)
        final = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # the model to save
    if transport.rank == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1f} %")

if transport.rank == 0:
    print(f"this rank's model is {optimizer.consensus_distance:.2g} from the mean of all (L2 norm)")
optimizer.close()  # waits for all ranks: the first one to exit ends MPI
