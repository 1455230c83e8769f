"""DFlash 2 and DSpark: the heads that make a slot depend on the token before it, against public code and slow loops."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch
from conftest import MASK, VOCABULARY, save_drafter
from drafters import EVALUATE, deepspec_json, head_of, load, slow_walks, train_shifted, walks
from safetensors.torch import load_file
from torch.nn import functional as F

from dflash_eval.acceptance.expected import expected_cycles
from dflash_eval.acceptance.lattice import lattice_order
from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.acceptance.tree import accepted_within
from dflash_eval.cache import Cache
from dflash_eval.drafter.path import path_scorer
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.judge import judges

TOP_K = 5


def heap_orders(first, steps, path, n: int) -> list[float]:
    """When the best-first tree takes in each prefix of `path`, grown node by node; costs of lists of lists."""
    heap = [(-lp, (c,)) for c, lp in enumerate(first)]
    heapq.heapify(heap)
    taken: dict[tuple[int, ...], int] = {}
    while heap and len(taken) < n:
        cost, nodes = heapq.heappop(heap)
        taken[nodes] = len(taken)
        if len(nodes) <= len(steps):
            for c, lp in enumerate(steps[len(nodes) - 1][nodes[-1]]):
                heapq.heappush(heap, (cost - lp, (*nodes, c)))
    return [taken.get(tuple(path[: i + 1]), math.inf) for i in range(len(path))]


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0])
def test_the_lattice_holds_what_a_heap_takes_in(sharpness):
    generator = torch.Generator().manual_seed(3)
    anchors, depth, k, budgets = 30, 5, 6, [1, 2, 5, 17, 60]
    first = (sharpness * torch.randn(anchors, k, generator=generator)).log_softmax(-1)
    steps = (sharpness * torch.randn(anchors, depth - 1, k, k, generator=generator)).log_softmax(-1)
    path = torch.randint(0, k + 1, (anchors, depth), generator=generator)
    path[:10] = path[:10].clamp_max(k - 1)
    path[:5, 0] = first[:5].argmax(-1)
    slots = torch.randint(0, depth + 1, (anchors,), generator=generator)
    ours = accepted_within(lattice_order(first, steps, path, slots, max(budgets)), budgets).tolist()
    for a in range(anchors):
        real = int(slots[a])
        orders = heap_orders(
            first[a].double().tolist(), steps[a, : max(real - 1, 0)].double().tolist(), path[a, :real].tolist(), 60
        )
        orders = orders if real else []
        expected = [next((i for i, order in enumerate(orders) if order >= n), len(orders)) for n in budgets]
        assert ours[a] == expected


# DFlash 2


@pytest.fixture(scope="module")
def second(tiny, tmp_path_factory):
    """A trained drafter, its convolutions a little off the identity, its selector with a say of its own."""
    torch.manual_seed(21)
    raw = {**tiny.raw, "architectures": ["DFlash2DraftModel"]}
    raw["dflash_config"] = {
        **raw["dflash_config"],
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": TOP_K,
    }
    state = load_file(tiny.drafter / "model.safetensors")
    for layer in (0, 1):
        for conv in ("attention_conv", "mlp_conv"):
            base = 0.05 * torch.randn(2, 3, 32)
            base[:, 0] += 1
            state[f"layers.{layer}.{conv}.base_kernel"] = base
            state[f"layers.{layer}.{conv}.kernel_projection.weight"] = 0.02 * torch.randn(2 * 3 * 4, 32)
    state["candidate_selector.predecessor_codebook"] = torch.randn(VOCABULARY, 4)
    state["candidate_selector.successor_codebook"] = torch.randn(VOCABULARY, 4)
    state["candidate_selector.hidden_projection.weight"] = 0.3 * torch.randn(4, 32)
    return save_drafter(tmp_path_factory.mktemp("second") / "d", raw, state)


@pytest.fixture(scope="module")
def public(second):
    module = pytest.importorskip("dflash.model", reason="the public dflash package is not installed (make setup)")
    from transformers import Qwen3Config

    config = Qwen3Config.from_pretrained(second)
    return module.DFlash2DraftModel.from_pretrained(second, config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("slots", [6, 3, 2])
def test_convolutions_give_the_public_classs_hidden_states(tiny, second, public, slots):
    cache, drafter = Cache(tiny.folder / "cache"), load(second)
    sample, anchor = cache.samples[0], 20
    features = cache.features(sample.id, (0, 2, 4))[None]
    embeds = F.embedding(torch.tensor([[sample.input_ids[anchor]] + [MASK] * (slots - 1)]), cache.head()[0])
    with torch.inference_mode():
        theirs = public(
            position_ids=torch.arange(anchor + slots)[None], noise_embedding=embeds, target_hidden=features[:, :anchor]
        )
        ours = drafter(embeds[None], torch.tensor([[anchor]]), drafter.context(features))[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dflash2_walks_as_the_public_loop_decodes(tiny, second, public):
    import oracles

    cache, target = Cache(tiny.folder / "cache"), oracles.load_target(tiny.target)
    plain = [sample[0] for sample in walks(tiny, load(tiny.drafter))]
    found = [sample[0] for sample in walks(tiny, load(second))]
    for sample, lengths in zip(cache.samples, found, strict=True):
        text, theirs = oracles.public_loop(target, public, sample.prompt_ids, 40, target.generation_config.eos_token_id)
        assert text == sample.completion_ids
        assert lengths == theirs
    assert found != plain
    assert max(map(max, found)) >= 3


def test_dflash2_width_and_budgets_are_those_of_a_tree_of_the_selectors_scores(tiny, second, public):
    """Grown node by node from the public class's logits and selector, at every anchor that the walks visit."""
    cache = Cache(tiny.folder / "cache")
    embedding, head = cache.head()
    selector = public.candidate_selector
    for sample, rules in zip(cache.samples[:3], walks(tiny, load(second))[:3], strict=True):
        ids, start = sample.input_ids, len(sample.prompt_ids)
        features = cache.features(sample.id, (0, 2, 4))[None]
        known = {}
        for rule, lengths in enumerate(rules[1:]):
            s = start
            for length in lengths:
                if s not in known:
                    slots = max(2, min(6, start + 40 - s))  # the public class cannot take one; then none is drafted
                    block = torch.tensor([[ids[s]] + [MASK] * (slots - 1)])
                    with torch.inference_mode():
                        hidden = public(
                            position_ids=torch.arange(s + slots)[None], noise_embedding=F.embedding(block, embedding),
                            target_hidden=features[:, :s],
                        )[0, 1:]  # fmt: skip
                        known[s] = selected(
                            selector, hidden, hidden @ head.T, ids[s], ids[s + 1 : min(s + slots, start + 40)]
                        )
                assert length == min(known[s][rule] + 1, len(ids) - s - 1)
                s += length


def selected(selector, hidden, logits, anchor: int, truth: list[int]) -> list[int]:
    """Accepted drafts [width, budgets] of one block."""
    unary, candidates = logits.topk(TOP_K)
    hidden = selector.hidden_projection(hidden)

    def after(token: int, slot: int) -> torch.Tensor:
        before = selector.predecessor_codebook.weight[token] * hidden[slot]
        return unary[slot] + selector.successor_codebook.weight[candidates[slot]] @ before

    among, previous = 0, anchor
    for slot, token in enumerate(truth):
        best = candidates[slot][after(previous, slot).topk(EVALUATE.width).indices].tolist()
        if token not in best:
            break
        among, previous = among + 1, token
    if not len(hidden):
        return [0] * (1 + len(EVALUATE.budgets))
    first = after(anchor, 0).double().log_softmax(-1).tolist()
    steps = [
        [after(int(token), slot).double().log_softmax(-1).tolist() for token in candidates[slot - 1]]
        for slot in range(1, len(hidden))
    ]
    path = []
    for slot, token in enumerate(truth):
        place = (candidates[slot] == token).nonzero()
        if not len(place):
            break
        path.append(int(place))
    orders = heap_orders(first, steps, path, max(EVALUATE.budgets))
    return [among, *(sum(order < n for order in orders) for n in EVALUATE.budgets)]


def test_the_selector_samples_among_its_candidates_by_temperature(tiny, second, public):
    cache, drafter = Cache(tiny.folder / "cache"), load(second)
    _, head = cache.head()
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, 5, 32, generator=generator)
    previous = torch.randint(0, VOCABULARY, (4, 5), generator=generator)
    logits = hidden @ head.T
    tokens = logits.topk(7).indices[..., 3]
    tokens[0] = logits.topk(7).indices[0, :, 6]  # beyond the candidates
    with torch.inference_mode():
        path = path_scorer(drafter, Scorer(drafter, head, 8))
        ours = path.own_logprobs(hidden, tokens, previous, Sampling(0.7))
        for a in range(4):
            for slot in range(5):
                unary, candidates = logits[a, slot].topk(TOP_K)
                selector = public.candidate_selector
                before = selector.predecessor_codebook.weight[previous[a, slot]] * selector.hidden_projection(
                    hidden[a, slot]
                )
                scores = (unary + selector.successor_codebook.weight[candidates] @ before) / 0.7
                own = scores.log_softmax(-1)[candidates == tokens[a, slot]]
                expected = own[0] if len(own) else torch.tensor(-torch.inf)
                torch.testing.assert_close(ours[a, slot], expected, rtol=1e-4, atol=1e-5)


# DSpark


@pytest.fixture(scope="module")
def shifted(tiny):
    return {**train_shifted(tiny), **head_of(tiny)}


def markov(state: dict, kind: str, rank: int = 3) -> dict:
    torch.manual_seed(31)
    head = {"markov_w1.weight": torch.randn(VOCABULARY, rank), "markov_w2.weight": 0.8 * torch.randn(VOCABULARY, rank)}
    if kind == "gated":
        head |= {"gate_proj.weight": torch.randn(rank, 32 + rank), "gate_proj.bias": torch.randn(rank)}
    if kind == "rnn":
        head |= {
            "joint_proj.weight": torch.randn(3 * rank, 2 * rank + 32) / 4,
            "joint_proj.bias": torch.randn(3 * rank),
        }
    return {**state, **{f"markov_head.{name}": tensor for name, tensor in head.items()}}


def biases(head: dict, kind: str):
    """DeepSpec's head, a step at a time: (token before, hidden state) → what is added to the logits."""
    state = torch.zeros(3)

    def step(token: int, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal state
        row = head["markov_head.markov_w1.weight"][token]
        if kind == "gated":
            joined = torch.cat([hidden, row])
            row = (
                torch.sigmoid(head["markov_head.gate_proj.weight"] @ joined + head["markov_head.gate_proj.bias"]) * row
            )
        if kind == "rnn":
            joined = torch.cat([state, row, hidden])
            gate, new, out = (
                head["markov_head.joint_proj.weight"] @ joined + head["markov_head.joint_proj.bias"]
            ).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
            row = out.tanh()
        return head["markov_head.markov_w2.weight"] @ row

    return step


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_drafts_left_to_right(tiny, shifted, tmp_path, kind):
    state = markov(shifted, kind)
    folder = save_drafter(tmp_path / "d", deepspec_json(tiny.raw, markov_rank=3, markov_head_type=kind), state)

    def propose(hidden, logits, anchor):
        step, drafts = biases(state, kind), [anchor]
        for row, own in zip(hidden, logits, strict=True):
            drafts.append(int((own + step(drafts[-1], row)).argmax()))
        return drafts[1:]

    drafter = load(folder)
    expected = slow_walks(tiny, drafter, propose)
    assert [sample[0] for sample in walks(tiny, drafter)] == expected
    without = slow_walks(tiny, drafter, lambda hidden, logits, anchor: logits.argmax(-1).tolist())
    assert expected != without
    assert max(map(max, expected)) >= 3


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_heads_probabilities_are_those_after_the_sequences_own_tokens(tiny, shifted, tmp_path, kind):
    state = markov(shifted, kind)
    drafter = load(save_drafter(tmp_path / "d", deepspec_json(tiny.raw, markov_rank=3, markov_head_type=kind), state))
    head = Cache(tiny.folder / "cache").head()[1]
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 6, 32, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    with torch.inference_mode():
        path = path_scorer(drafter, Scorer(drafter, head, 8))
        ours = path.own_logprobs(hidden, tokens[:, 1:], tokens[:, :-1], Sampling(0.9, top_k=VOCABULARY))
    for row in range(3):
        step = biases(state, kind)
        for slot in range(6):
            logits = head @ hidden[row, slot] + step(int(tokens[row, slot]), hidden[row, slot])
            expected = (logits / 0.9).log_softmax(-1)[tokens[row, slot + 1]]
            torch.testing.assert_close(ours[row, slot], expected, rtol=1e-4, atol=1e-4)


def test_expected_tau_takes_the_probabilities_after_the_sequences_own_tokens(tiny, shifted, tmp_path):
    """Of the rnn head, at every anchor of a sample, from the public class's hidden states and a step at a time."""
    state = markov(shifted, "rnn")
    drafter = load(save_drafter(tmp_path / "d", deepspec_json(tiny.raw, markov_rank=3, markov_head_type="rnn"), state))
    cache = Cache(tiny.folder / "cache")
    embedding, head = cache.head()
    scorer = Scorer(drafter, head, 64)
    [(indices, judge)] = judges(drafter, cache, drafter.embedding(embedding), scorer, EVALUATE, lambda _: None)
    logprobs = [cache.logprobs(cache.samples[i].id) for i in indices]
    ours = judge.expected_tau(logprobs, Sampling(1.0))

    row = max(range(len(indices)), key=lambda row: len(cache.samples[indices[row]].completion_ids))
    sample = cache.samples[indices[row]]
    ids, start, end = sample.input_ids, len(sample.prompt_ids), len(sample)
    context = drafter.context(cache.features(sample.id, (0, 2, 4))[None])
    accepted = np.zeros((end - 1 - start, 6))
    for s in range(start, end - 1):
        block = F.embedding(torch.tensor([[[ids[s]] + [MASK] * 5]]), embedding)
        with torch.inference_mode():
            hidden = drafter(block, torch.tensor([[s]]), context)[0, 0]
        step = biases(state, "rnn")
        for slot in range(min(6, end - 1 - s)):
            logits = head @ hidden[slot] + step(ids[s + slot], hidden[slot])
            q, p = logits.softmax(-1)[ids[s + slot + 1]], math.exp(logprobs[row][s + slot + 1 - start])
            accepted[s - start, slot] = min(1.0, float(q) / p)
    assert ours[row] == pytest.approx((end - 1 - start) / expected_cycles(accepted, start, end), rel=1e-4)


def test_an_rnn_head_that_does_not_begin_at_the_anchor_is_refused(tiny, shifted, tmp_path):
    from dflash_eval.errors import UserError

    raw = deepspec_json(tiny.raw, markov_rank=3, markov_head_type="rnn", sample_from_anchor=False)
    with pytest.raises(UserError, match="no public loop says where its state begins"):
        load(save_drafter(tmp_path / "d", raw, shifted))
