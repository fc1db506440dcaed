"""The methods by name, each as words of train.py: config files to stack after an experiment, then changes of keys.

The advisor, the demonstration and all benchmarks take methods from this table. `build` makes the object of a
method: a compressor of gradients, a gossip algorithm, or one that exchanges models every so many steps.
"""

from typing import Any

from omegaconf import OmegaConf

from dgc_training.config import instantiate, load

Words = tuple[str, ...]
EXPERIMENT = "configs/digits/cnn.py"  # SGD with a momentum of 0.9
COMPRESSION, LOCAL = "--configs.train.compression", "--configs.train.local"
SELECTORS = "radix exact predicted sampled trimmed laplace".split()

FP32 = ("configs/dgc/wm5.py",)
DGC = (*FP32, "configs/dgc/fp16.py", "configs/dgc/int32.py")
NO_WARM_UP = ("configs/dgc/wm0.py", *DGC[1:])
PACKED = (*FP32, "configs/dgc/fp16.py", "configs/dgc/packed.py")
SIGN_RICE = (*FP32, "configs/dgc/sign.py", "configs/dgc/rice.py")
# At the rate of dense training, short runs need a limit of each rank's gradients (section 3.2 of DGC's paper).
CLIPPED = (
    "configs/dgc/wm0.py",
    "configs/dgc/int32.py",
    f"{COMPRESSION}.memory.gradient_clipping._target_=dgc.memory.ClipByNorm",
    f"{COMPRESSION}.memory.gradient_clipping.max_norm=0.5",
)


def powersgd(rank: int) -> dict[str, Words]:
    file = f"configs/powersgd/rank{rank}.py"
    half = f"{COMPRESSION}.num_iters_per_step=1"
    return {
        f"powersgd-{rank}": (file,),
        f"powersgd-{rank}-half": (file, half),
        f"powersgd-{rank}-paper": (file, "configs/powersgd/paper.py"),
    }


def threshold(name: str) -> dict[str, Words]:
    """MXNet's quantization, also with a fixed place where the codes of all ranks are summed."""
    file = f"configs/threshold/{name}.py"
    return {
        name: (file,),
        **{f"{name}-{wire}": (file, f"{COMPRESSION}.wire={wire}") for wire in ("gather", "scatter")},
    }


def every(steps: int) -> str:
    return f"{LOCAL}.average_every={steps}"


def sparse(of: int, steps: int) -> Words:
    """The 16 largest of each `of` elements, or 64 of each 4096."""
    chunk = 4096 if of == 64 else 16 * of
    chosen = (f"{LOCAL}.compression.compress_ratio={1 / of}", f"{LOCAL}.compression.selector.chunk_size={chunk}")
    return "configs/local/sparseloco.py", *chosen, every(steps)


ZERO_ONE_ADAM = ("configs/adam/__init__.py", "configs/contrib/zero_one_adam.py")


def zero_one(updates: int, clipper: int) -> Words:
    """The second moment is updated in fp16 during the first 200 steps. Gaps then double every 50 steps."""
    settings = {"var_freeze_step": 200, "local_step_scaler": 50, "var_update_scaler": updates}
    words = (f"{LOCAL}.{key}={value}" for key, value in {**settings, "local_step_clipper": clipper}.items())
    return *ZERO_ONE_ADAM, "configs/adam/fp16.py", *words


MOMENTUM = (
    f"{LOCAL}.outer._target_=dgc.local.Nesterov",
    f"{LOCAL}.outer.outer_lr=0.7",
    f"{LOCAL}.outer.momentum=0.8",
)
STREAMING = ("configs/local/streaming.py", f"{LOCAL}.fragment_mb=0.13", every(10))

COMPRESSORS: dict[str, Words] = {
    "dense": (),
    "fp16": ("configs/dense/fp16.py",),
    "bf16": ("configs/dense/bf16.py",),
    "dgc": DGC,
    "dgc-1-percent": (*DGC, f"{COMPRESSION}.compress_ratio=0.01"),
    "dgc-no-warm-up": NO_WARM_UP,
    "dgc-no-masking": (*DGC, "configs/dgc/nm.py"),
    "dgc-reduce-scatter": (*DGC, "configs/dgc/reduce_scatter.py"),
    "dgc-no-warm-up-reduce-scatter": (*NO_WARM_UP, "configs/dgc/reduce_scatter.py"),
    "dgc-clipped": (*CLIPPED, f"{COMPRESSION}.warmup_epochs=1", f"{COMPRESSION}.warmup_coeff=[0.01]"),
    "dgc-clipped-no-warm-up": CLIPPED,
    "dgc-fp32-int64": FP32,
    "dgc-fp32-rice": (*FP32, "configs/dgc/rice.py"),
    "dgc-fp16-packed": PACKED,
    "dgc-bf16-packed": (*FP32, "configs/dgc/bf16.py", "configs/dgc/packed.py"),
    "dgc-int8-rice": (*FP32, "configs/dgc/int8.py", "configs/dgc/rice.py"),
    "dgc-2-bits-rice": (*FP32, "configs/dgc/twobit.py", "configs/dgc/rice.py"),
    "dgc-sign-rice": SIGN_RICE,
    "dgc-sign-rice-dense-fp32": (*SIGN_RICE, "configs/dgc/dense_fp32.py"),
    "chunks": ("configs/chunks/wm5.py",),
    **{name: (*DGC, f"configs/selection/{name}.py") for name in SELECTORS},
    **{f"dgc:{name}": (*PACKED, f"configs/selection/{name}.py") for name in SELECTORS},
    **powersgd(1),
    **powersgd(2),
    **powersgd(4),
    "powersgd-2-fp16": ("configs/powersgd/rank2.py", "configs/powersgd/fp16.py"),
    "powersgd-2-square": ("configs/powersgd/rank2.py", "configs/powersgd/square.py"),
    "powersgd-adaptive": ("configs/contrib/accordion.py",),
    **threshold("2bit"),
    **threshold("1bit"),
    "2bit-adaptive": ("configs/threshold/adaptive.py",),
    "signsgd": ("configs/quant/signsgd.py",),
    "signum": ("configs/quant/signum.py",),
    "scaled-sign": ("configs/quant/scaled_sign.py",),
    "onebit": ("configs/contrib/onebit.py",),
    "double-squeeze": ("configs/contrib/double_squeeze.py",),
    "qsgd": ("configs/quant/qsgd.py",),
    "terngrad": ("configs/contrib/terngrad.py",),
    "natural": ("configs/contrib/natural.py",),
    "blockwise": ("configs/quant/blockwise.py",),
    "bf16-two-phases": ("configs/quant/bf16.py",),
    "int8": ("configs/quant/int8.py",),
    "int4": ("configs/quant/int4.py",),
    "int4-hadamard": ("configs/quant/int4.py", f"{COMPRESSION}.hadamard=True"),
    "topk": ("configs/sparse/topk.py",),
    "threshold-v": ("configs/sparse/threshold_v.py",),
    "random-k": ("configs/contrib/random_k.py",),
    "gtopk": ("configs/contrib/gtopk.py",),
    "random-block": ("configs/contrib/random_block.py",),
    "svd": ("configs/contrib/svd.py",),
    "atomo": ("configs/contrib/atomo.py",),
}
WITH_ADAM: dict[str, Words] = {
    "dgc-residual": ("configs/adam/dgc.py",),
    "dgc-residual-0.1-percent": ("configs/adam/dgc.py", f"{COMPRESSION}.compress_ratio=0.001"),
    "dgc-adam": ("configs/adam/dgc_adam.py",),
    "dgc-adam-0.1-percent": ("configs/adam/dgc_adam.py", f"{COMPRESSION}.compress_ratio=0.001"),
    "onebit-adam": ("configs/adam/onebit_adam.py",),
    "zero-one-adam": ZERO_ONE_ADAM,
    "zero-one-h10": zero_one(8, 10),
    "zero-one-h6": zero_one(4, 6),
}
FP32_MATRICES = "--configs.train.optimizer.ns_precision=fp32"  # for CPUs without instructions for bf16
MULOCO = ("configs/muon/muloco.py", FP32_MATRICES)
MUON_LOCAL = ("configs/muon/local.py", FP32_MATRICES)
WITH_MUON: dict[str, Words] = {
    "muon": ("configs/muon/muon.py", FP32_MATRICES),
    "muon-8-bits": ("configs/muon/muon.py", "configs/quant/int8.py", FP32_MATRICES),
    "muon-4-bits": ("configs/muon/fourbit.py", FP32_MATRICES),
    "muon-powersgd-4": ("configs/muon/powersgd.py", FP32_MATRICES),
    "muon-ef21": ("configs/muon/ef21.py", FP32_MATRICES),
    "muloco-h10": (*MULOCO, every(10)),
    "muloco-2-bits-h10": ("configs/local/twobit.py", *MULOCO, every(10)),
    "muloco-sign-h32": ("configs/local/sign.py", *MULOCO, every(32)),
    "muloco-streaming-h10": ("configs/muon/muloco.py", *STREAMING, FP32_MATRICES, f"{LOCAL}.outer.momentum=0.8"),
    "muon-local-h10": MUON_LOCAL,
    "muon-local-momentum-h10": ("configs/local/momentum.py", *MUON_LOCAL),
    "muon-local-momentum-h20": ("configs/local/momentum.py", *MUON_LOCAL, every(20)),
    "muon-local-4-bits-h10": ("configs/local/fourbit.py", *MUON_LOCAL),
    "muon-local-2-bits-h10": ("configs/local/twobit.py", *MUON_LOCAL),
    "muon-local-2-bits-h20": ("configs/local/twobit.py", *MUON_LOCAL, every(20)),
    "muon-local-sign-h10": ("configs/local/sign.py", *MUON_LOCAL),
    "muon-local-sign-h32": ("configs/local/sign.py", *MUON_LOCAL, every(32)),
    "muon-local-sign-h64": ("configs/local/sign.py", *MUON_LOCAL, every(64)),
    "muon-local-sparse16-h10": ("configs/muon/local.py", *sparse(16, 10), FP32_MATRICES),
}
GOSSIP: dict[str, Words] = {
    "ar": ("configs/gossip/ar.py",),
    "sgp": ("configs/gossip/sgp.py",),
    "sgp-fp16": ("configs/gossip/sgp.py", "configs/gossip/fp16.py"),
    "sgp-int8": ("configs/gossip/sgp.py", "configs/gossip/int8.py"),
    "osgp": ("configs/gossip/osgp.py",),
    "osgp-4-steps": ("configs/gossip/osgp.py", "--configs.train.gossip.synch_freq=4"),
    "dpsgd": ("configs/gossip/dpsgd.py",),
    "choco": ("configs/contrib/choco.py",),
    "powergossip": ("configs/contrib/powergossip.py",),
    "adpsgd": ("configs/gossip/adpsgd.py",),  # not simulated, and not under torchrun
}
LOCAL_STEPS: dict[str, Words] = {
    "pga": ("configs/gossip/sgp.py", "configs/local/pga.py"),
    "slowmo": ("configs/gossip/sgp.py", "configs/local/slowmo.py"),
    "local-sgd": ("configs/local/local_sgd.py",),
    "local-h10": ("configs/local/local_sgd.py", every(10)),
    "diloco": ("configs/local/diloco.py",),
    "diloco-h10": ("configs/local/diloco.py", every(10)),
    "diloco-h20": ("configs/local/diloco.py", every(20)),
    "diloco-h40": ("configs/local/diloco.py", every(40)),
    "sparseloco": ("configs/local/sparseloco.py",),
    "sparse4-h10": sparse(4, 10),
    "sparse16-h4": sparse(16, 4),
    "sparse16-h10": sparse(16, 10),
    "sparse16-h20": sparse(16, 20),
    "sparse64-h10": sparse(64, 10),
    "powersgd4-h10": ("configs/local/powersgd.py", every(10)),
    "sign-h10": ("configs/local/sign.py", every(10)),
    "sign-h32-momentum": ("configs/local/sign.py", every(32), *MOMENTUM),
    "2bit-h10": ("configs/local/twobit.py", every(10)),
    "streaming": ("configs/local/streaming.py",),
    "streaming-fp16": (
        "configs/local/streaming.py",
        f"{LOCAL}.compression._target_=dgc.compression.FP16Compressor",
    ),
    "streaming-1": (*STREAMING, f"{LOCAL}.delay=1"),
    "streaming-2": (*STREAMING, f"{LOCAL}.delay=2"),
}
METHODS = {**COMPRESSORS, **WITH_ADAM, **WITH_MUON, **GOSSIP, **LOCAL_STEPS}


def files_of(name: str) -> Words:
    """The config files of a method."""
    return tuple(word for word in METHODS[name] if not word.startswith("--"))


def changes_of(name: str) -> Words:
    """The changes of single keys that follow them."""
    return tuple(word for word in METHODS[name] if word.startswith("--"))


def build(name: str, ratio: float | None = None, **changes: Any) -> Any:
    """Make the object of a method, as train.py does for an experiment with SGD, but without a ratio warm-up.

    Args:
        name: of METHODS.
        ratio: the share of elements that is sent, unless the method has none or the table has one for it.
        changes: other arguments of its constructor.

    Returns:
        What `train.local`, `train.gossip` or `train.compression` of the config describes.
    """
    tree = load([EXPERIMENT, *files_of(name)], changes_of(name))
    OmegaConf.set_readonly(tree, False)
    node = tree.train.local or tree.train.gossip or tree.train.compression
    if ratio is not None and "compress_ratio" in node and not any("compress_ratio=" in w for w in METHODS[name]):
        node.compress_ratio = ratio
    if "warmup_epochs" in node:
        node.warmup_epochs = 0
    for key, value in changes.items():
        node[key] = value
    return instantiate(node)
