"""Expected τ under rejection sampling, exactly: a dynamic programme over the anchors of a sampled completion."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def acceptance_probabilities(drafter: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """min(1, q / p) of log-probabilities q and p of the tokens that were emitted, same shapes.

    The probability that the x which a rejection-sampling step emitted was an accepted draft: x is proposed with q(x)
    and accepted with min(1, p(x) / q(x)) (Leviathan et al. 2023, arXiv:2211.17192), and it is emitted with p(x).
    -inf, a token that is never drawn: 0 where the drafter's is, whatever the target's.
    """
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(drafter), 0.0, np.exp(np.minimum(0.0, drafter - target)))


def expected_cycles(accepted: NDArray[np.float64], start: int, end: int) -> float:
    """V(start): the expected number of cycles from anchor `start` until the completion's last token is committed.

    accepted: [anchors, slots], row s - start holds, for anchor s, the probability that the draft at slot 1, 2, ... is
    accepted once those before it are; 0 where nothing is drafted. end: N; the walk ends at N - 1.
    V(s) = 1 + sum over a of P(a | s) V(min(s + a + 1, N - 1)), V(N - 1) = 0.
    """
    left = np.zeros(end - start)  # V(start) ... V(N - 1)
    slots = accepted.shape[1]
    for s in range(end - 2, start - 1, -1):
        row = s - start
        reach = np.concatenate([[1.0], np.cumprod(accepted[row])])  # P(at least a drafts are accepted)
        exactly = reach - np.concatenate([reach[1:], [0.0]])
        stops = np.minimum(row + 1 + np.arange(slots + 1), end - 1 - start)
        left[row] = 1.0 + exactly @ left[stops]
    return float(left[0])
