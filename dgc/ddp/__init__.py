"""Compression for torch.nn.parallel.DistributedDataParallel (DDP), as a communication hook.

    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = compress(model, PowerSGDCompressor(rank=4, num_iters_per_step=2), optimizer)
    for inputs, targets in batches:  # the usual loop
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()

DDP calls the hook once for each of its buckets, in the same order on every rank, when all gradients of the bucket
are computed. DDP changes its buckets after the first step. Error state must not depend on that. Gradients are
therefore exchanged in other buckets, those of DistributedOptimizer, which never change. Such a bucket starts when
all of its gradients are there. The hook of DDP's last bucket waits for all exchanges and writes the means into
DDP's buckets.
"""

from dgc.ddp.exchange import DDPExchange as DDPExchange
from dgc.ddp.exchange import compress as compress
