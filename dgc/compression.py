"""Gradient compressors. The reference of the paper is in the docstring of each file or class."""

from dgc.codes.onebit_adam import OneBitAdamCompressor
from dgc.codes.signs import ScaledSignCompressor, SignSGDCompressor
from dgc.codes.threshold import ThresholdCompressor
from dgc.codes.two_phase import TwoPhaseCompressor
from dgc.codes.uniform import BlockwiseCompressor, QSGDCompressor
from dgc.core.dense import BF16Compressor, DenseCompressor, FP16Compressor
from dgc.core.ef21 import EF21Compressor
from dgc.core.error_feedback import ErrorFeedbackCompressor
from dgc.core.protocol import Compressor, StatelessCompressor
from dgc.core.results import DenseResult, NonFiniteGradientError, Reduced, Result, SparseResult
from dgc.core.route import Route, Rule
from dgc.lowrank.powersgd import PowerSGDCompressor
from dgc.sparse.chunks import ChunkCompressor
from dgc.sparse.compressor import SparseCompressor
from dgc.sparse.dgc import DGCCompressor
from dgc.sparse.dgc_adam import DGCAdamCompressor

__all__ = [
    "BF16Compressor",
    "BlockwiseCompressor",
    "ChunkCompressor",
    "Compressor",
    "DGCAdamCompressor",
    "DGCCompressor",
    "DenseCompressor",
    "DenseResult",
    "EF21Compressor",
    "ErrorFeedbackCompressor",
    "FP16Compressor",
    "NonFiniteGradientError",
    "OneBitAdamCompressor",
    "PowerSGDCompressor",
    "QSGDCompressor",
    "Reduced",
    "Result",
    "Route",
    "Rule",
    "ScaledSignCompressor",
    "SignSGDCompressor",
    "SparseCompressor",
    "SparseResult",
    "StatelessCompressor",
    "ThresholdCompressor",
    "TwoPhaseCompressor",
]
