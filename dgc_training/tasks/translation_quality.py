"""How good translations are: exact match, and BLEU of words and of characters as sacrebleu computes it.

Papineni et al., BLEU: a Method for Automatic Evaluation of Machine Translation, ACL 2002. BLEU is a function of
sums over sentences: of the n-grams that occur and that match, for n from 1 to 4, and of the lengths. Each rank
counts its sentences, and the sums over the ranks give exactly the BLEU of all sentences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

NGRAMS = 4
# sacrebleu's tokenizers: words as in mteval-v13a, and characters.
TOKENIZERS = {"bleu": "13a", "char_bleu": "char"}


def bleu_sums(tokenizer: str, translations: Sequence[str], references: Sequence[str]) -> list[float]:
    """The sums that BLEU is computed from: n-grams that match, n-grams, length, length of the references."""
    if not translations:
        return [0.0] * (2 * NGRAMS + 2)
    from sacrebleu.metrics.bleu import BLEU

    # force: no warning if sentences look as if they were in tokens.
    found = BLEU(tokenize=tokenizer, force=True).corpus_score(translations, [references])
    return [float(value) for value in (*found.counts, *found.totals, found.sys_len, found.ref_len)]


def bleu_of(sums: Sequence[float]) -> float:
    """BLEU from 0 to 100, with sacrebleu's default smoothing; NaN if nothing was counted."""
    if not sums[-1]:
        return float("nan")
    from sacrebleu.metrics.bleu import BLEU

    whole = [int(value) for value in sums]
    matches, ngrams, (length, reference_length) = whole[:NGRAMS], whole[NGRAMS:-2], whole[-2:]
    # compute_bleu has another default than BLEU(): none.
    score: Any = BLEU.compute_bleu(matches, ngrams, length, reference_length, smooth_method="exp")
    return float(score.score)


class TranslationQuality:
    """Counts translations. `data` returns plain sums, which `set` replaces by the sums over all ranks."""

    def __init__(self) -> None:
        self._sums = {key: 0.0 for key in ("sentences", "exact")}
        self._sums |= {f"{name}{i}": 0.0 for name in TOKENIZERS for i in range(2 * NGRAMS + 2)}

    def update(self, translations: Sequence[str], references: Sequence[str]) -> None:
        """Counts sentences, each with its one reference."""
        matches = [a == b for a, b in zip(translations, references, strict=True)]
        self._sums["sentences"] += len(matches)
        self._sums["exact"] += sum(matches)
        for name, tokenizer in TOKENIZERS.items():
            for i, value in enumerate(bleu_sums(tokenizer, translations, references)):
                self._sums[f"{name}{i}"] += value

    def data(self) -> dict[str, float]:
        """The sums so far. The keys are equal on every rank."""
        return dict(self._sums)

    def set(self, data: Mapping[str, float]) -> None:
        """Replaces the sums by those over all ranks."""
        self._sums = dict(data)

    def results(self) -> dict[str, float]:
        """exact_match in percent, bleu and char_bleu from 0 to 100; NaN if nothing was counted."""
        sentences = self._sums["sentences"]
        exact = 100 * self._sums["exact"] / sentences if sentences else float("nan")
        return {"exact_match": exact} | {
            name: bleu_of([self._sums[f"{name}{i}"] for i in range(2 * NGRAMS + 2)]) for name in TOKENIZERS
        }
