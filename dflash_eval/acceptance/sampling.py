"""The distribution that a token is sampled from: temperature, top-k and top-p, as transformers' generate has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature above 0; top_k 0 and top_p 1 keep every token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def sampling_logprobs(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Log-probability of each row's token under the sampling distribution, -inf for one that is never drawn.

    logits: [rows, vocabulary] float32, overwritten; tokens: [rows] int64. First the temperature, then the top_k most
    probable tokens (and their equals), then of what is left the fewest most probable ones that hold top_p.
    """
    logits.div_(sampling.temperature)
    if 0 < sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits.masked_fill_(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=False)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        dropped[:, -1] = False
        logits.masked_fill_(dropped.scatter(1, order, dropped), -torch.inf)
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)
