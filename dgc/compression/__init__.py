"""Gradient compressors: one small file per algorithm. Each file begins with the reference of its paper."""

from dgc.compression.dense import BF16 as BF16
from dgc.compression.dense import FP16 as FP16
from dgc.compression.dense import Dense as Dense
from dgc.compression.lowrank.powersgd import PowerSGDCompressor as PowerSGDCompressor
from dgc.compression.lowrank.svd import SVD as SVD
from dgc.compression.lowrank.svd import Atomo as Atomo
from dgc.compression.protocol import Compressor as Compressor
from dgc.compression.protocol import DenseResult as DenseResult
from dgc.compression.protocol import NonFiniteGradientError as NonFiniteGradientError
from dgc.compression.protocol import Result as Result
from dgc.compression.protocol import SparseResult as SparseResult
from dgc.compression.quantized.blockwise import Blockwise as Blockwise
from dgc.compression.quantized.natural import Natural as Natural
from dgc.compression.quantized.onebit import OneBit as OneBit
from dgc.compression.quantized.qsgd import QSGD as QSGD
from dgc.compression.quantized.scaled_sign import ScaledSign as ScaledSign
from dgc.compression.quantized.signsgd import SignSGD as SignSGD
from dgc.compression.quantized.terngrad import TernGrad as TernGrad
from dgc.compression.quantized.threshold import Threshold as Threshold
from dgc.compression.route import Route as Route
from dgc.compression.route import Rule as Rule
from dgc.compression.sparse.dgc import DGCCompressor as DGCCompressor
from dgc.compression.sparse.random_k import RandomBlock as RandomBlock
from dgc.compression.sparse.random_k import RandomK as RandomK
from dgc.compression.sparse.sparse import SparseCompressor as SparseCompressor
