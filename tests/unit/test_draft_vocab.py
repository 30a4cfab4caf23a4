"""The reduced draft vocabulary and its two layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_specx.draft.vocab import DraftVocab, VocabError, count_tokens


def test_most_frequent_first_and_truncated() -> None:
    counts = np.array([5, 0, 9, 1, 9, 2], np.int64)
    vocab = DraftVocab.most_frequent(counts, 4)
    assert vocab.token_ids.tolist() == [2, 4, 0, 5]
    assert vocab.truncated(2).token_ids.tolist() == [2, 4]
    assert vocab.coverage(np.array([2, 2, 1, 0])) == 0.75


def test_both_layouts_name_the_same_tokens() -> None:
    counts = count_tokens([np.random.default_rng(0).integers(0, 500, 3000)], 500)
    vocab = DraftVocab.most_frequent(counts, 64).sorted()
    eagle = vocab.d2t()
    assert torch.equal(DraftVocab.from_d2t(eagle["d2t"], 500).token_ids, vocab.token_ids)
    assert torch.equal(eagle["t2d"].nonzero()[:, 0], vocab.token_ids)
    assert torch.equal(vocab.token_map()["token_map"], vocab.token_ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 1]), "more than once"),
        (torch.tensor([1, 10]), "has the id 10"),
        (torch.tensor([-1, 1]), "another target"),
        (torch.tensor([[1]]), "shape"),
        (torch.arange(11), "1 to 10"),
    ],
)
def test_a_map_that_is_none(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(VocabError, match=message):
        DraftVocab(ids, 10)


def test_no_more_than_there_is() -> None:
    with pytest.raises(VocabError, match="at most"):
        DraftVocab(torch.arange(4), 10).truncated(5)
    with pytest.raises(VocabError, match="cannot be taken"):
        DraftVocab.most_frequent(np.ones(3, np.int64), 4)
