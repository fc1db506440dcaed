"""Batches of about equally many tokens, of sentences of about equal length.

Sentence pairs are sorted by length and cut into batches such that, with padding, none has more than `max_tokens`:

    pairs in the batch * tokens of its longest sentence <= max_tokens

Which of several pairs of one length come together is drawn anew for each epoch, and so is the order of the
batches. The sorted lengths are the same in each epoch, so the number of batches is too.
"""

import numpy as np
import torch


class TokenBatches:
    """The batches of all ranks together.

    Args:
        lengths: int64 [pairs], tokens of the longer sentence of each pair.
        max_tokens: the most tokens of a batch.

    Raises:
        ValueError: if a pair has more than `max_tokens` tokens.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int) -> None:
        if len(lengths) and max_tokens < lengths.max():
            raise ValueError(
                f"max_tokens is {max_tokens}, fewer than the {lengths.max()} tokens of one sentence in the data"
            )
        self.lengths = lengths
        cuts = [0]
        for position, length in enumerate(np.sort(lengths).tolist()):
            if (position + 1 - cuts[-1]) * length > max_tokens:
                cuts.append(position)
        self._cuts = np.array([*cuts, len(lengths)])

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def epoch(self, seed: int) -> list[list[int]]:
        """The batches in the order of one epoch: indices of pairs. Every pair is in one of them."""
        generator = torch.Generator().manual_seed(seed)
        ties = torch.randperm(len(self.lengths), generator=generator).numpy()
        order = np.lexsort((ties, self.lengths))
        batches = torch.randperm(len(self), generator=generator).tolist()
        return [order[self._cuts[batch] : self._cuts[batch + 1]].tolist() for batch in batches]
