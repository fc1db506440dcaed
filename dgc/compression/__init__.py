"""Gradient compressors: one small file per algorithm. Each file begins with the reference of its paper."""

from dgc.compression.dense import BF16Compressor as BF16Compressor
from dgc.compression.dense import DenseCompressor as DenseCompressor
from dgc.compression.dense import FP16Compressor as FP16Compressor
from dgc.compression.lowrank.powersgd import PowerSGDCompressor as PowerSGDCompressor
from dgc.compression.lowrank.svd import AtomoCompressor as AtomoCompressor
from dgc.compression.lowrank.svd import SVDCompressor as SVDCompressor
from dgc.compression.protocol import Compressor as Compressor
from dgc.compression.protocol import DenseResult as DenseResult
from dgc.compression.protocol import NonFiniteGradientError as NonFiniteGradientError
from dgc.compression.protocol import Result as Result
from dgc.compression.protocol import SparseResult as SparseResult
from dgc.compression.quantized.blockwise import BlockwiseCompressor as BlockwiseCompressor
from dgc.compression.quantized.natural import NaturalCompressor as NaturalCompressor
from dgc.compression.quantized.onebit import OneBitCompressor as OneBitCompressor
from dgc.compression.quantized.qsgd import QSGDCompressor as QSGDCompressor
from dgc.compression.quantized.scaled_sign import ScaledSignCompressor as ScaledSignCompressor
from dgc.compression.quantized.signsgd import SignSGDCompressor as SignSGDCompressor
from dgc.compression.quantized.terngrad import TernGradCompressor as TernGradCompressor
from dgc.compression.quantized.threshold import ThresholdCompressor as ThresholdCompressor
from dgc.compression.route import Route as Route
from dgc.compression.route import Rule as Rule
from dgc.compression.sparse.dgc import DGCCompressor as DGCCompressor
from dgc.compression.sparse.random_k import RandomBlockCompressor as RandomBlockCompressor
from dgc.compression.sparse.random_k import RandomKCompressor as RandomKCompressor
from dgc.compression.sparse.sparse import SparseCompressor as SparseCompressor
