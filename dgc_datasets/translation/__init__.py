"""Sentence pairs for translation, as tokens of a vocabulary that both languages share."""

from dgc_datasets.translation.batches import TokenBatches as TokenBatches
from dgc_datasets.translation.number_words import NumberWords as NumberWords
from dgc_datasets.translation.parallel_text import ParallelText as ParallelText
from dgc_datasets.translation.parallel_text import SentencePairs as SentencePairs
from dgc_datasets.translation.parallel_text import collate as collate
from dgc_datasets.translation.vocabulary import BEGIN as BEGIN
from dgc_datasets.translation.vocabulary import END as END
from dgc_datasets.translation.vocabulary import PADDING as PADDING
from dgc_datasets.translation.vocabulary import Vocabulary as Vocabulary
