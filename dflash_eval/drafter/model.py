"""The DFlash drafter: Qwen3-style layers whose keys and values come from the target's features and the block.

The context's keys and values depend on the features and their positions alone, so they are computed once
for a sample (`DFlashDrafter.context`) and serve every block of it (`DFlashDrafter.forward`).

Module names are those of z-lab's checkpoints, so that a state dict loads as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.heads import CandidateSelector, GroupedCausalConv, MarkovHead

Context = list[tuple[Tensor, Tensor]]
"""Keys and values of a sample batch, one pair a layer, each [samples, kv_heads, positions, head_dim]."""


@dataclass(frozen=True)
class Group:
    """Consecutive samples of a context that have equally many blocks; `positions` is how much context they need."""

    samples: slice
    blocks: slice
    positions: int

    @property
    def owners(self) -> Tensor:
        """The sample of each block, [blocks of the group] int64."""
        samples = torch.arange(self.samples.start, self.samples.stop)
        return samples.repeat_interleave((self.blocks.stop - self.blocks.start) // len(samples))


@dataclass(frozen=True)
class Blocks:
    """What every layer needs to know of the blocks: [blocks, slots] positions, their RoPE, and how many slots of each
    are real ([blocks]; None: all)."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    lengths: Tensor | None
    groups: Sequence[Group]
    owners: Tensor  # [blocks] int64, each block's sample


class DFlashDrafter(nn.Module):
    """A drafter with randomly initialised weights; `checkpoint.load_drafter` fills them from a file.

    Input embedding and output head are the target's, unless it has its own.
    """

    def __init__(self, config: DrafterConfig, own_embedding: bool = False, own_head: bool = False) -> None:
        super().__init__()
        self.config = config
        size, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(size, hidden) if own_embedding else None
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size or size, bias=False) if own_head else None
        self.d2t: Tensor | None  # what is added to a draft token's id to make it the target's
        reduced = config.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(reduced, dtype=torch.int64) if reduced is not None else None)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = rotary_embedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def build_rotary(self, device: torch.device) -> None:
        """RoPE's frequencies are no weights: a drafter made on the meta device needs them from the config."""
        with device:
            self.rotary = rotary_embedding(self.config).to(device)

    def embedding(self, target: Tensor) -> Tensor:
        """The input embedding [vocabulary, hidden]: its own, or the target's."""
        return target if self.embed_tokens is None else self.embed_tokens.weight

    def output_head(self, target: Tensor) -> Tensor:
        """The output head [draft vocabulary, hidden]: its own, or the target's rows of its vocabulary."""
        if self.lm_head is not None:
            return self.lm_head.weight
        return target if self.d2t is None else target[self.target_ids(len(target))]

    def target_ids(self, size: int) -> Tensor | None:
        """The target's token id of each row of the output head, [draft vocabulary] int64; None where they are the
        target's `size` rows."""
        if self.d2t is not None:
            return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        if self.lm_head is None or len(self.lm_head.weight) == size:
            return None
        return torch.arange(len(self.lm_head.weight), device=self.lm_head.weight.device)

    def context(self, features: Tensor) -> Context:
        """Keys and values of the context, for every layer.

        features: [samples, positions, len(target_layer_ids) * hidden], positions 0, 1, ... Right padding is
        harmless: a block sees only positions before its anchor.
        """
        hidden = self.hidden_norm(self.fc(features))
        positions = torch.arange(features.shape[1], device=features.device)[None]
        cos, sin = self.rotary(hidden, positions)
        return [layer.self_attn.context(hidden, cos, sin) for layer in self.layers]  # type: ignore[operator,union-attr]

    def forward(self, block_embeds: Tensor, anchors: Tensor, context: Context) -> Tensor:
        """Draft the same number of blocks for every sample (training).

        block_embeds: [samples, blocks, slots, hidden]; anchors: [samples, blocks]. Returns block_embeds' shape.
        """
        samples, blocks = anchors.shape
        group = Group(slice(0, samples), slice(0, samples * blocks), context[0][0].shape[2])
        return self.draft(block_embeds.flatten(0, 1), anchors.flatten(), context, [group]).view(block_embeds.shape)

    def draft(
        self,
        block_embeds: Tensor,
        anchors: Tensor,
        context: Context,
        groups: Sequence[Group],
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Draft any number of blocks for each sample: the final norm's output at every slot, slot 0 the anchor's.

        block_embeds: [blocks, slots, hidden], input embeddings of [x[s], mask, mask, ...]. anchors: [blocks] int64,
        the position s of each block's slot 0. groups: which blocks belong to which samples of the context.
        lengths: [blocks] int64, slots of each block where some are shorter; what comes out past them means nothing.
        A block attends to the context before its anchor and to itself, never to another block.
        Returns [blocks, slots, hidden].
        """
        slots = torch.arange(block_embeds.shape[1], device=anchors.device)
        positions = anchors[:, None] + slots
        cos, sin = self.rotary(block_embeds, self.rope_positions(positions))
        owners = torch.cat([group.owners for group in groups]).to(anchors.device)
        blocks = Blocks(positions, cos, sin, lengths, groups, owners)
        hidden = block_embeds
        for layer, kv in zip(self.layers, context, strict=True):
            hidden = layer(hidden, blocks, kv)
        return self.norm(hidden)

    def rope_positions(self, positions: Tensor) -> Tensor:
        """The positions that RoPE gives the blocks' slots, [blocks, slots]: their own. A diagnosis tries others."""
        return positions

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """[..., hidden] and the target's head [vocabulary, hidden] → [..., vocabulary], in hidden's dtype."""
        return self.scale_logits(F.linear(hidden, lm_head))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What the config does to the head's output [..., vocabulary]; in place where it does anything."""
        if self.config.output_multiplier != 1.0:
            logits.mul_(self.config.output_multiplier)
        if self.config.final_logit_softcapping:
            cap = self.config.final_logit_softcapping
            logits.div_(cap).tanh_().mul_(cap)
        return logits


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, config.windows[index], config.causal[index])
        self.mlp = MLP(config)
        convolved = config.conv_kernel_size > 0
        self.attention_conv = GroupedCausalConv(config) if convolved else None
        self.mlp_conv = GroupedCausalConv(config) if convolved else None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, blocks: Blocks, kv: tuple[Tensor, Tensor]) -> Tensor:
        attend = lambda normed: self.self_attn(normed, blocks, kv)  # noqa: E731
        hidden = hidden + _around(self.attention_conv, attend, self.input_layernorm(hidden))
        return hidden + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))


def _around(conv: GroupedCausalConv | None, sublayer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    if conv is None:
        return sublayer(hidden)
    hidden, kernel = conv.before(hidden)
    return conv.after(sublayer(hidden), kernel)


class BlockAttention(nn.Module):
    def __init__(self, config: DrafterConfig, window: int | None, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window, self.causal, self.from_anchor = window, causal, config.window_from_anchor
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def context(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[samples, positions, hidden] → keys and values [samples, kv_heads, positions, head_dim]."""
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim)))
        value = self.v_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(key, cos, sin).transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()

    def forward(self, hidden: Tensor, blocks: Blocks, kv: tuple[Tensor, Tensor]) -> Tensor:
        """[blocks, slots, hidden] → the same shape."""
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim)))
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim)))
        value = self.v_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        query = rotate(query, blocks.cos, blocks.sin) * self.head_dim**-0.5
        key = rotate(key, blocks.cos, blocks.sin)
        if hidden.is_cuda and not torch.is_grad_enabled():
            return self.o_proj(self._attend_fused(query, key, value, blocks, kv))
        mixed = [self._attend(query, key, value, blocks, group, kv) for group in blocks.groups]
        return self.o_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))

    def _attend_fused(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, kv: tuple[Tensor, Tensor]
    ) -> Tensor:
        """All groups' attention at once, [blocks, slots, heads * head_dim]; has no backward."""
        from dflash_eval.drafter.fused import block_attention  # triton, which comes with torch for CUDA

        anchors, lengths = blocks.positions[:, 0], blocks.lengths
        if lengths is None:
            lengths = torch.full_like(anchors, query.shape[1])
        return block_attention(
            query, key, value, *kv, blocks.owners, anchors.contiguous(), lengths, self.window, self.causal,
            self.from_anchor,
        )  # fmt: skip

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, group: Group, kv: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One group's attention, [blocks of the group, slots, heads * head_dim].

        Scores against each sample's one context and against the block itself, then one softmax over both.
        """
        context_key, context_value = (x[group.samples, :, : group.positions] for x in kv)
        samples = len(context_key)

        def by_sample(x: Tensor) -> Tensor:
            return x[group.blocks].unflatten(0, (samples, -1))

        # [samples, kv_heads, query heads a kv head, blocks a sample, slots, head_dim]; keys and values have no third
        q = by_sample(query).unflatten(3, (self.kv_heads, -1)).permute(0, 3, 4, 1, 2, 5)
        k, v = (by_sample(x).permute(0, 3, 1, 2, 4)[:, :, None] for x in (key, value))
        shape = q.shape[2:5]

        to_context = (q.flatten(2, 4) @ context_key.transpose(2, 3)).unflatten(2, shape)
        to_block = q @ k.transpose(-1, -2)
        sees_context, sees_block = self._visible(by_sample(blocks.positions), group.positions)
        to_context = to_context.masked_fill(~sees_context[:, None, None], -torch.inf)
        if sees_block is not None:
            to_block = to_block.masked_fill(~sees_block, -torch.inf)
        if blocks.lengths is not None:
            itself = torch.eye(k.shape[-2], dtype=torch.bool, device=k.device)  # or a slot past the end sees nothing
            slots = torch.arange(k.shape[-2], device=k.device)
            real = by_sample(slots < blocks.lengths[:, None])[:, None, None, :, None] | itself
            to_block = to_block.masked_fill(~real, -torch.inf)
        weights = torch.cat([to_context, to_block], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
        on_context, on_block = weights.split([group.positions, k.shape[-2]], dim=-1)
        mixed = (on_context.flatten(2, 4) @ context_value).unflatten(2, shape) + on_block @ v
        return mixed.permute(0, 3, 4, 1, 2, 5).flatten(0, 1).flatten(2)

    def _visible(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """From positions [samples, blocks, slots]: masks [samples, blocks, slots, length] over the context and
        [slots, slots] over the block (None: all of it)."""
        context = torch.arange(length, device=positions.device)
        visible = context < positions[..., :1, None]
        slot = torch.arange(positions.shape[-1], device=positions.device)
        ahead = slot - slot[:, None]  # key - query
        if self.window is None:
            return visible.expand(*positions.shape, length), ahead <= 0 if self.causal else None
        if self.from_anchor:
            visible = visible & (positions[..., :1, None] - context <= self.window)
            return visible.expand(*positions.shape, length), ahead <= 0 if self.causal else None
        visible = visible & (positions[..., None] - context < self.window)
        within = ahead <= 0 if self.causal else ahead < self.window
        return visible, within & (-ahead < self.window)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.act(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(hidden)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """RoPE's plain frequencies, theta^(-2i / head_dim); made on the CPU: the meta device takes a second of imports."""

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [...] → cosine and sine [..., head_dim] in like's dtype, computed in float32."""
        angles = positions[..., None].float() * self.frequencies  # type: ignore[operator]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotary_embedding(config: DrafterConfig) -> nn.Module:
    """The config's RoPE; scaled kinds (yarn, llama3, linear, ...) are transformers' own."""
    rope = dict(config.rope_parameters)
    if rope["rope_type"] == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return RotaryEmbedding(rope.get("rope_theta") or 10000.0, config.head_dim)
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    described = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    rotary: nn.Module = Qwen3RotaryEmbedding(described)
    return rotary


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on NeoX halves: x [..., heads, head_dim], cos and sin [..., head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos[..., None, :] + torch.cat([-right, left], dim=-1) * sin[..., None, :]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
