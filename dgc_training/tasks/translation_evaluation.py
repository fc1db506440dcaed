"""Evaluation of a translation model: every pair of every split but 'train' is translated once, by one rank.

Results of a split, for example test:

    translation/test_exact_match   percent of translations that are equal to their reference
    translation/test_bleu          BLEU, with sacrebleu's tokens
    translation/test_char_bleu     BLEU of characters, for languages that write long words
    translation/test_nll           mean negative log-likelihood of a reference's token, without label smoothing

A translation has at most 2 * n + 10 tokens for a source of n tokens, and at most the model's `max_length`. Each
sentence has its own limit, so that no result depends on the batches, which change with the number of ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dgc.comm import Transport, all_gather_object, all_reduce
from dgc_datasets.translation import BEGIN, END, PADDING, ParallelText
from dgc_models.decoding import beam_search, greedy
from dgc_models.transformer import Transformer
from dgc_training.config import ConfigError
from dgc_training.tasks.translation_batches import evaluation_batches, gather

RESULTS = ("exact_match", "bleu", "char_bleu", "nll")


class TranslationEvaluation:
    """Evaluates a model on every split but 'train'. All methods are collective.

    Args:
        dataset: the sentence pairs, equal on every rank.
        transport: connects the ranks.
        device: where the model is.
        max_tokens: the most tokens of a batch.
        beams: beams of the search; 1: greedy.
        length_penalty: of the search with several beams.
        num_samples: translations to keep as text, of the first pairs of each split.

    Raises:
        ConfigError: if the vocabularies of the ranks differ.
    """

    def __init__(
        self,
        dataset: ParallelText,
        transport: Transport,
        device: torch.device,
        *,
        max_tokens: int,
        beams: int = 1,
        length_penalty: float = 0.6,
        num_samples: int = 8,
    ) -> None:
        check_same_vocabulary(dataset, transport)
        self.dataset = dataset
        self.transport = transport
        self.device = device
        self.max_tokens = max_tokens
        self.beams = beams
        self.length_penalty = length_penalty
        self.num_samples = num_samples
        self.splits = [split for split in dataset if split != "train"]
        self.names = [f"translation/{split}_{result}" for split in self.splits for result in RESULTS]
        # Of the last evaluation: a Markdown table by split, on every rank.
        self.texts: dict[str, str] = {}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Returns results by name, equal on every rank."""
        assert isinstance(model, Transformer)
        training = model.training
        model.eval()
        results: dict[str, float] = {}
        for split in self.splits:
            found = self._evaluate(model, split)
            results |= {f"translation/{split}_{result}": found[result] for result in RESULTS}
        model.train(training)
        return results

    @torch.no_grad()
    def _evaluate(self, model: Transformer, split: str) -> dict[str, float]:
        pairs, (sources, references) = self.dataset[split], self.dataset.texts(split)
        quality, samples = TranslationQuality(), dict[int, str]()
        sums = {"nll": 0.0, "tokens": 0.0}
        rank, size = self.transport.rank, self.transport.size
        for indices in evaluation_batches(pairs, self.max_tokens, rank=rank, size=size):
            source, target = gather(pairs, indices, self.device)
            translations = self.dataset.vocabulary.decode(self._translate(model, source))
            quality.update(translations, [references[index] for index in indices])
            nll, tokens = negative_log_likelihood(model, source, target)
            sums["nll"] += nll
            sums["tokens"] += tokens
            samples |= {i: text for i, text in zip(indices, translations, strict=True) if i < self.num_samples}
        total = {**quality.data(), **sums}
        values = torch.tensor(list(total.values()), dtype=torch.float64, device=self.device)
        values = all_reduce(self.transport, values, op="sum", name="translation")
        total = dict(zip(total, values.tolist(), strict=True))
        quality.set({key: total[key] for key in quality.data()})
        merged: dict[int, str] = {}
        for own in all_gather_object(self.transport, samples, name="samples"):
            merged |= own
        self.texts[f"translations/{split}"] = table(
            [(sources[i], references[i], merged[i]) for i in sorted(merged)]
        )
        return {**quality.results(), "nll": total["nll"] / max(1, total["tokens"])}

    def _translate(self, model: Transformer, source: Tensor) -> list[list[int]]:
        # Twice as long as the source is enough for any pair of languages, and 10 more for short sentences.
        limits = (2 * (source != PADDING).sum(1) + 10).clamp(max=model.max_length)
        # A model may have more tokens than the vocabulary, which cannot decode them.
        vocabulary = len(self.dataset.vocabulary)
        if self.beams == 1:
            return greedy(model, source, begin=BEGIN, end=END, max_length=limits, vocabulary=vocabulary)
        return beam_search(
            model,
            source,
            begin=BEGIN,
            end=END,
            max_length=limits,
            vocabulary=vocabulary,
            beams=self.beams,
            length_penalty=self.length_penalty,
        )


def negative_log_likelihood(model: Transformer, source: Tensor, target: Tensor) -> tuple[float, int]:
    """(sum over the references' tokens of -log p, number of these tokens)."""
    logits = model(source, target[:, :-1]).float()
    labels = target[:, 1:]
    nll = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")
    return float(nll), int((labels != PADDING).sum())


def check_same_vocabulary(dataset: ParallelText, transport: Transport) -> None:
    """Raises ConfigError on every rank if their vocabularies differ. Machines train them separately."""
    fingerprints = all_gather_object(transport, dataset.fingerprint, name="vocabulary")
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            raise ConfigError(
                f"rank {rank} has another vocabulary than rank 0: the files in dataset.root or the versions of "
                "sentencepiece differ. Copy the folder of rank 0's machine, with its tokens-* folder, to others"
            )


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """A Markdown table of sources, references and translations."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(["| source | reference | translation |", "| --- | --- | --- |", *(f"| {x} |" for x in lines)])


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
    """Counts exact matches, and BLEU of words and of characters as sacrebleu computes it.

    Papineni et al., BLEU: a Method for Automatic Evaluation of Machine Translation, ACL 2002. BLEU is a function
    of sums over sentences: of the n-grams that occur and that match, for n from 1 to 4, and of the lengths. Each
    rank counts its sentences. `data` returns plain sums, which `set` replaces by the sums over all ranks: they
    give exactly the BLEU of all sentences.
    """

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
