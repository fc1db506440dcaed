"""Tags and descriptions of a run's scalars in TensorBoard. docs/bytes.md defines payload, wire and dense.

The results of an evaluation have the names of their meters in the config: acc/test_top1 for acc/{}_top1.
"""

X_AXIS = "Horizontal axis: training samples seen by all ranks together (tokens in language tasks)."
OF_MODELS = {
    "weight": "Push-sum weight of rank 0's model; 1 in algorithms without one.",
    "staleness": "Rounds by which the newest message that rank 0 has is late.",
    "averagings": "Averagings that rank 0 has taken part in.",
    "consensus_distance": "L2 distance of rank 0's model to the mean of all ranks' models.",
}
TAGS = {
    "train/loss": "Training loss, mean over all ranks and over the steps since the last point (train.log_every).",
    "train/lr": "Learning rate of the first parameter group.",
    "train/steps": "Optimizer steps since the run's first start.",
    "train/dropped_steps": "Steps dropped since the run's first start because a gradient was not finite.",
    "compression/compress_ratio": "Share of the elements (or of the bytes) of a compressed tensor that is sent.",
    "compression/dense_share": "Share of the elements of sparse compressors that is sent dense, with fewer bytes.",
    "compression/error_norm": "L2 norm of rank 0's residual: the unsent part of its gradients.",
    "bytes/payload_per_step": "Bytes per step that one rank contributes to collectives and messages.",
    "bytes/wire_per_step": "Bytes per step that one rank sends to carry its payload.",
    "bytes/cross_wire_per_step": "Those of them that go to other machines.",
    "bytes/dense_wire_per_step": "Bytes per step that one rank would send in a dense fp32 all-reduce.",
    "bytes/wire_over_dense": "wire_per_step / dense_wire_per_step.",
    "bytes/wire": "Bytes that one rank has sent since the run's first start.",
    "bytes/dense_wire": "Bytes that one rank would have sent since then in dense fp32 all-reduces.",
    **{f"{key}/{name}": text for key in ("gossip", "local") for name, text in OF_MODELS.items()},
    "time/samples_per_second": "Training samples per second of all ranks, without evaluation and checkpoints.",
    "time/tokens_per_second": "Training tokens per second of all ranks, without evaluation and checkpoints.",
    "time/elapsed": "Seconds of training since the run's first start, without evaluation and checkpoints.",
    "time/data": "Seconds per step of rank 0: waiting for data.",
    "time/forward_backward": "Seconds per step of rank 0: forward and backward, with compression during backward.",
    "time/compress": "Seconds per step of rank 0: work that ends in a message.",
    "time/launch": "Seconds per step of rank 0: handing messages to the transport.",
    "time/wait": "Seconds per step of rank 0: waiting for other ranks.",
    "time/decode": "Seconds per step of rank 0: work after the last reply.",
    "time/step": "Seconds per step of rank 0: the optimizer's own work.",
}
# Always 0 in some configurations: one rank sends nothing, the ranks of one machine send nothing to another one, a
# method may have no residual. Such a tag is written from its first other value on, with the zeros before.
OFTEN_ZERO = {
    *("compression/dense_share", "compression/error_norm", "gossip/staleness", "local/staleness"),
    *("bytes/wire_per_step", "bytes/cross_wire_per_step", "bytes/dense_wire_per_step", "bytes/dense_wire"),
    *(f"time/{phase}" for phase in ("compress", "launch", "wait", "decode", "step")),
}
# Charts of TensorBoard's page "Custom Scalars".
LAYOUT = {
    "bytes": {"wire and dense, per step": ["Multiline", ["bytes/wire_per_step", "bytes/dense_wire_per_step"]]},
    "time": {"seconds per step": ["Multiline", ["time/(data|forward_backward|compress|launch|wait|decode|step)"]]},
}


def describe(tag: str) -> str:
    """The description that TensorBoard shows for a tag."""
    meaning = TAGS.get(tag, "Result of the evaluation after an epoch, by the meter of this name (train.meters).")
    return f"{meaning} {X_AXIS}"
