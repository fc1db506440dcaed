"""Tokens per second of dense training and of outer steps, over a link of a limited rate.

    python -m benchmarks.outer_speed --hosts 2 --rate 100mbit --launcher torchrun

dense, fp16   all-reduce of gradients in every step
diloco        fp32 pseudo-gradients every H = 50 steps, with Nesterov's momentum
sparseloco    64 of each 4096 elements in 2 bits, every H = 30 steps
streaming     DiLoCo in fragments of 25 MB, H = 50; each is used --delay steps after its exchange began;
              streaming-fp16 sends them in 16 bits

Every rank trains the language model of benchmarks.train_step (27 million parameters) with AdamW. A method's window
has H steps after H + delay steps that are not measured, so it has each of its exchanges once, and nothing is in
flight at its ends. Dense methods have --steps steps. Before and after each window, --steps steps run without
communication: `share` is the speed compared with the mean of these two, so that a slow drift of the machine does
not count. All methods run in one launch. While the ranks compute, Horovod's thread moves the messages, and polls
for them. With --launcher torchrun Gloo's threads move them, which sleep until there is something to do. The output
is a table and a line of JSON for each network.
"""
