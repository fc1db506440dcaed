"""One small file per algorithm, each beside its paper."""

from dgc.compression.dense import BF16 as BF16
from dgc.compression.dense import FP16 as FP16
from dgc.compression.dense import Dense as Dense
from dgc.compression.dgc import DGCCompressor as DGCCompressor
from dgc.compression.protocol import Compressor as Compressor
from dgc.compression.protocol import DenseResult as DenseResult
from dgc.compression.protocol import NonFiniteGradientError as NonFiniteGradientError
from dgc.compression.protocol import Result as Result
from dgc.compression.protocol import SparseResult as SparseResult
from dgc.compression.route import Route as Route
from dgc.compression.route import Rule as Rule
