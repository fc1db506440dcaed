"""Gradient compressors. The reference of the paper is in the docstring of each file or class."""

from dgc.compression.adam import DGCAdamCompressor as DGCAdamCompressor
from dgc.compression.adam import OneBitAdamCompressor as OneBitAdamCompressor
from dgc.compression.chunks import ChunkCompressor as ChunkCompressor
from dgc.compression.dense import BF16Compressor as BF16Compressor
from dgc.compression.dense import DenseCompressor as DenseCompressor
from dgc.compression.dense import FP16Compressor as FP16Compressor
from dgc.compression.dgc import DGCCompressor as DGCCompressor
from dgc.compression.ef21 import EF21Compressor as EF21Compressor
from dgc.compression.error_feedback import ErrorFeedbackCompressor as ErrorFeedbackCompressor
from dgc.compression.powersgd import PowerSGDCompressor as PowerSGDCompressor
from dgc.compression.protocol import Compressor as Compressor
from dgc.compression.protocol import DenseResult as DenseResult
from dgc.compression.protocol import NonFiniteGradientError as NonFiniteGradientError
from dgc.compression.protocol import Reduced as Reduced
from dgc.compression.protocol import Result as Result
from dgc.compression.protocol import SparseResult as SparseResult
from dgc.compression.protocol import StatelessCompressor as StatelessCompressor
from dgc.compression.route import Route as Route
from dgc.compression.route import Rule as Rule
from dgc.compression.signs import ScaledSignCompressor as ScaledSignCompressor
from dgc.compression.signs import SignSGDCompressor as SignSGDCompressor
from dgc.compression.sparse import SparseCompressor as SparseCompressor
from dgc.compression.threshold import ThresholdCompressor as ThresholdCompressor
from dgc.compression.two_phase import TwoPhaseCompressor as TwoPhaseCompressor
from dgc.compression.uniform import BlockwiseCompressor as BlockwiseCompressor
from dgc.compression.uniform import QSGDCompressor as QSGDCompressor
