"""The sampling distribution is that of transformers' generate."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_eval.acceptance.sampling import Sampling, sampling_logprobs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2, 0.001])
def test_log_probabilities_are_those_of_transformers_warpers(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(40, 60, generator=generator)).round(decimals=1)  # with ties
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    wanted = warpers(None, logits.clone()).log_softmax(-1)
    for token in (0, 17, 59):
        tokens = torch.full((40,), token)
        ours = sampling_logprobs(logits.clone(), tokens, Sampling(temperature, top_k, top_p))
        torch.testing.assert_close(ours, wanted[:, token])
