"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally: ICLR 2018, arXiv 1712.01887, Algorithm 1).
`dgc.paper.dgc` has the algorithm as the paper writes it.

On each of N ranks, with local gradient g, momentum u, velocity v and ratio D:

    g = clip(g);  u = m u + g;  v = v + u          memory: momentum correction, accumulation
    S = the D n largest |v_i| of every tensor      selector: exact, or a sampled threshold
    send v_S;  v_S = 0;  u_S = 0                   memory: momentum factor masking
    result = 1/N * sum over ranks                  the optimizer's step adds no momentum of its own

Differences from the paper and the original code: The momentum of dense steps is also corrected locally, which by
linearity equals ordinary momentum. Rounding errors of the payload stay in v. Sums are taken in rank order.
"""

from collections.abc import Sequence

from dgc.core.arguments import FLAG, NOTHING, NUMBER, WHOLE, require
from dgc.sparse.compressor import SparseCompressor
from dgc.sparse.memories import Memory
from dgc.sparse.payloads import IndexFormat, ValueFormat
from dgc.sparse.selectors import Exact, Sampled, Selector
from dgc.warn import warn


class DGCCompressor(SparseCompressor):
    """Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): `SparseCompressor` with the original's
    keywords.

    Args:
        sample_ratio (float, optional), strided_sample, compress_upper_bound, compress_lower_bound,
            max_adaptation_iters, resample: the original's sampled threshold, see `Sampled`. None: exact top-k.
        fp16_values (bool): send values as fp16 instead of fp32.
        int32_indices (bool): send indices as int32 instead of int64.
        selector, values, indices: as in `SparseCompressor`, in place of what the keywords above choose.
        compress_ratio, memory, and all others: as in `SparseCompressor`.

    Raises:
        ValueError: if an argument has a wrong type or is out of range; the message names it.

    Example:
        >>> compression = DGCCompressor(0.001, values="sign", indices="rice", warmup_epochs=5)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    def __init__(
        self,
        compress_ratio: float,
        memory: Memory | str = "dgc",
        sample_ratio: float | None = None,
        strided_sample: bool = True,
        compress_upper_bound: float = 1.3,
        compress_lower_bound: float = 0.8,
        max_adaptation_iters: int = 10,
        resample: bool = True,
        fp16_values: bool = False,
        int32_indices: bool = False,
        warmup_epochs: int = -1,
        warmup_coeff: float | Sequence[float] | None = None,
        seed: int = 0,
        *,
        selector: Selector | str | None = None,
        values: ValueFormat | str | None = None,
        indices: IndexFormat | str | None = None,
        dense_values: str | None = None,
        vectors: str = "dense",
        vector_ratio: float | None = None,
        exchange: str = "all_gather",
    ):
        require("None or a number", NUMBER + NOTHING, sample_ratio=sample_ratio)
        require("a number", NUMBER, compress_upper_bound=compress_upper_bound)
        require("a number", NUMBER, compress_lower_bound=compress_lower_bound)
        require("a whole number", WHOLE, max_adaptation_iters=max_adaptation_iters)
        require("True or False", FLAG, strided_sample=strided_sample, resample=resample)
        require("True or False", FLAG, fp16_values=fp16_values, int32_indices=int32_indices)
        for name, given, keyword in (
            ("selector", selector, sample_ratio),
            ("values", values, fp16_values),
            ("indices", indices, int32_indices),
        ):
            if given is not None and keyword:
                warn(f"{name}={given} is used; the original's keyword for it has no effect")
        if selector is None and sample_ratio is not None:
            bounds = (compress_upper_bound, compress_lower_bound)
            sampled = Sampled(sample_ratio, strided_sample, *bounds, max_adaptation_iters, resample)
            selector = Exact() if sample_ratio == 1 else sampled
        super().__init__(
            compress_ratio,
            memory,
            selector,
            values or ("fp16" if fp16_values else "fp32"),
            indices or ("int32" if int32_indices else "int64"),
            warmup_epochs=warmup_epochs,
            warmup_coeff=warmup_coeff,
            seed=seed,
            dense_values=dense_values,
            vectors=vectors,
            vector_ratio=vector_ratio,
            exchange=exchange,
        )
