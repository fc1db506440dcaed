"""The exchange of a name."""

from dgc.compression.sparse.exchange.all_gather import AllGatherExchange
from dgc.compression.sparse.exchange.auto import AutoExchange
from dgc.compression.sparse.exchange.gtopk import GTopKExchange
from dgc.compression.sparse.exchange.protocol import SparseExchange
from dgc.compression.sparse.exchange.reduce_scatter import ReduceScatterExchange


def exchange_of(name: str) -> SparseExchange:
    """The exchange that the option `exchange` of a compressor names.

    Raises:
        ValueError: There is no exchange of this name.
    """
    match name:
        case "all_gather":
            return AllGatherExchange()
        case "reduce_scatter":
            return ReduceScatterExchange()
        case "gtopk":
            return GTopKExchange()
        case "auto":
            return AutoExchange()
    raise ValueError(f"exchange must be 'all_gather', 'reduce_scatter', 'gtopk' or 'auto', not {name!r}")
