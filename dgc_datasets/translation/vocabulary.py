"""The subwords of a pair of languages: byte-pair encoding with one vocabulary for both, by sentencepiece.

Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, https://arxiv.org/abs/1508.07909.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any

# Token numbers that are the same in every vocabulary.
PADDING, UNKNOWN, BEGIN, END = range(4)


class Vocabulary:
    """Text to tokens and back.

    Args:
        model: the content of a sentencepiece model whose special tokens have the numbers above.

    Raises:
        ValueError: if it is not such a model.
    """

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor: Any = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"the vocabulary is not a sentencepiece model: {error}") from error
        own = self._processor
        if (own.pad_id(), own.unk_id(), own.bos_id(), own.eos_id()) != (PADDING, UNKNOWN, BEGIN, END):
            raise ValueError(
                f"the vocabulary numbers its padding, unknown, begin and end tokens otherwise than {PADDING}, "
                f"{UNKNOWN}, {BEGIN}, {END}. Train it with --pad_id=0 --unk_id=1 --bos_id=2 --eos_id=3"
            )

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The tokens of each sentence, without BEGIN and END."""
        found: list[list[int]] = self._processor.encode(list(sentences))
        return found

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sentence."""
        return [self._processor.decode(list(sentence)) for sentence in tokens]


def train_vocabulary(sentences: Iterable[str], size: int, character_coverage: float) -> bytes:
    """The content of a sentencepiece model of `size` tokens. The same sentences give the same model.

    Raises:
        ValueError: if the text does not have as many subwords, or more characters.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=character_coverage,
            pad_id=PADDING,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
            num_threads=1,
            minloglevel=2,
        )
    # Its messages are lines of its source code, with the reason in the last words.
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"dataset.vocabulary_size is {size}, which is not possible with this text: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return model.getvalue()
