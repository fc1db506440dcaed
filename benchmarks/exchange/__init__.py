"""Time of one exchange of a model's gradients, for all methods in one run: here, or on a network of limited rate.

    python -m benchmarks.exchange --ranks 4 --model resnet50 --methods noop dense fp16 dgc dgc-sign-rice
    python -m benchmarks.exchange --hosts 4 --rate 100mbit 1gbit --methods noop horovod-fp16 dgc powersgd sgp

Gradients are ready at the start and applied at the end, without forward and backward. `exchange` is the time from
the start of the first bucket until the last reply is decoded. `step` adds the update of the parameters. `noop`
exchanges nothing, and `update` only updates u and v of momentum correction: lower bounds for dense methods and for
`dgc`. Each time is that of the slowest rank, as the median over repeats, which are interleaved over the methods of
a launch. `wait` is the time for which a rank waits for replies. `horovod` and `horovod-fp16` are Horovod's own
all-reduce of each tensor, with its default fusion and cycle time: they have a launch of their own.

Bytes are those that one rank contributes (payload) and sends (wire) in a step, by the meter. With --hosts, each
host is a network namespace with a link of the given rate (benchmarks/netlab), and the bytes that its interface has
sent in a step stand beside the meter's. From these, 66 bytes of Ethernet, IP and TCP headers are taken for each
packet, and what Horovod sends all the time, for as long as the step took; `noop` measures it. `bound` is the time
of the wire bytes at the rate that one TCP connection reached. `faster` compares with the faster one of `fp16` and
`horovod-fp16`.

Without --hosts, all ranks share this machine: they compete for its cores, and the "network" is memory. That shows
the cost of compression, not its gain on a slow network. With --hosts, they still share its cores. The output is a
table and a line of JSON for each network; benchmarks/exchange/figure.py draws these lines.
"""
