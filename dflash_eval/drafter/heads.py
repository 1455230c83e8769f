"""What some drafters add to the body: DFlash 2's convolutions and candidate selector, DSpark's Markov head.

Selector and Markov head make a slot's prediction depend on the token before it. Module names are the checkpoints'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_eval.drafter.config import DrafterConfig


class GroupedCausalConv(nn.Module):
    """DFlash 2's pair of short convolutions over a block's slots, one before a sublayer and one after it.

    A tap's weight is a learned base [hidden] plus a part that the sublayer's input projects to, one for each group of
    `conv_group_size` channels.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        self.groups = config.hidden_size // self.group_size
        base = torch.zeros(2, self.taps, config.hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, slots, hidden] → the sublayer's input, and the dynamic kernel that `after` takes."""
        first, second = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, self.groups)).unbind(-3)
        return self._convolve(hidden, first, self.base_kernel[0]), second

    def after(self, hidden: Tensor, kernel: Tensor) -> Tensor:
        return self._convolve(hidden, kernel, self.base_kernel[1])

    def _convolve(self, hidden: Tensor, kernel: Tensor, base: Tensor) -> Tensor:
        """hidden: [blocks, slots, hidden]; kernel: [blocks, slots, taps, groups]; base: [taps, hidden]."""
        grouped = hidden.unflatten(-1, (self.groups, self.group_size))
        weights = base.unflatten(-1, (self.groups, self.group_size)) + kernel[..., None]
        mixed = weights[:, :, 0] * grouped
        for tap in range(1, min(self.taps, hidden.shape[1])):
            mixed[:, tap:] += weights[:, tap:, tap] * grouped[:, :-tap]
        return mixed.flatten(2)


class CandidateSelector(nn.Module):
    """DFlash 2's choice among a slot's `selector_top_k` most probable tokens, given the token before it:

    logit(c) + sum over ranks of predecessor(previous) * projection(hidden) * successor(c).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, hidden: Tensor, previous: Tensor, logits: Tensor, candidates: Tensor) -> Tensor:
        """Scores after each of some previous tokens: [..., previous, k], in float32.

        hidden: [..., hidden]; previous: [..., previous] token ids; logits: [..., k] up to a constant; candidates:
        [..., k] token ids.
        """
        before = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)[..., None, :]
        return logits[..., None, :] + (before @ F.embedding(candidates, self.successor_codebook).mT).float()


class MarkovHead(nn.Module):
    """DSpark's low-rank addition to a slot's logits, `markov_w2(features)`, from the token before it.

    vanilla: features are markov_w1's row of that token; gated: times a sigmoid gate of hidden state and row; rnn: from
    a state that runs along the block.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[blocks, drafts, rank] from hidden [blocks, drafts, hidden] and the token before each, [blocks, drafts]."""
        rows = self.markov_w1(previous)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, rows], dim=-1))) * rows
        if self.kind == "rnn":
            state, outputs = torch.zeros_like(rows[:, 0]), []
            for slot in range(rows.shape[1]):
                joint = self.joint_proj(torch.cat([state, rows[:, slot], hidden[:, slot]], dim=-1))
                gate, candidate, output = joint.chunk(3, dim=-1)
                state = torch.sigmoid(gate) * state + torch.sigmoid(-gate) * torch.tanh(candidate)
                outputs.append(torch.tanh(output))
            return torch.stack(outputs, dim=1)
        return rows
