"""Time of whole training steps, with real forward and backward passes that overlap with the exchange.

    python -m benchmarks.train_step --hosts 4 --rate 100mbit 1gbit --model resnet50
    python -m benchmarks.train_step --hosts 4 --rate 1gbit --model lstm --methods noop dense fp16 2bit
    python -m benchmarks.train_step --ranks 2 --model lm --methods noop ddp-fp16 dgc-sign-rice dgc-sign-rice@ddp

The models are those of torchvision, with images; `lm`, a Transformer, and `lstm`, that of the PowerSGD study, with
tokens.

NAME             a method of benchmarks.exchange, in DistributedOptimizer or LocalOptimizer over Horovod
NAME@ddp         the same compressor as a communication hook of DistributedDataParallel (DDP), over Gloo
noop, ddp-noop   nothing is exchanged: a lower bound for all methods over Horovod and for DDP
horovod(-fp16)   horovod.torch.DistributedOptimizer, with its default fusion and cycle time
ddp, ddp-fp16, ddp-bf16, ddp-powersgd    DDP's all-reduce of fp32, and torch's own hooks; PowerSGD has rank 2

Methods over Horovod run under mpirun, those of DDP under torchrun, Horovod's own in a launch of their own. Repeats
are interleaved over the methods of a launch. `step` is the time from zero_grad until the parameters are updated,
of the slowest rank, as the median over repeats. `wait` is the part of it in which a rank waits for replies, if
the method is ours. The other columns are those of benchmarks.exchange; `faster` compares with the fastest of
`ddp-fp16`, `ddp-bf16`, `horovod-fp16` and `fp16`. For DDP and its own hooks the bytes are those of the link alone.

All ranks share the cores of this machine: with 4 ranks on 2 cores, forward and backward take about twice as long
as on hosts with a core each, so that more of an exchange hides behind them. The output is a table and a line of
JSON for each network.
"""
