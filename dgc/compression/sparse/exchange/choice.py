"""The exchange of a name."""

from dgc.compression.sparse.exchange.all_gather import AllGatherExchange
from dgc.compression.sparse.exchange.protocol import SparseExchange


def exchange_of(name: str) -> SparseExchange:
    """The exchange that the option `exchange` of a compressor names.

    Raises:
        ValueError: There is no exchange of this name.
    """
    match name:
        case "all_gather":
            return AllGatherExchange()
    raise ValueError(f"exchange must be 'all_gather', not {name!r}")
