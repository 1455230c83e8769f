"""report.html: whole in itself, every number and text in it, nothing that a name or a completion could smuggle in."""

from __future__ import annotations

import random
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from conftest import tiny_tokenizer
from test_evaluate import beside
from test_report import results as results

from dflash_eval.cache import Cache, Sample
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.html import html_report
from dflash_eval.html.charts import linear_ticks
from dflash_eval.html.cycles import chosen_prompts, coloured
from dflash_eval.texts import piece_decoder, pieces, write_tokenizer

VOID = {"meta", "input", "br"}
SHAPES = {"path", "circle", "rect", "polyline"}


class Checked(HTMLParser):
    """Fails for tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.used: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.used.add(tag)
        self.links += [value for key, value in attributes if key in ("href", "src", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in SHAPES

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(page: str) -> Checked:
    checked = Checked()
    checked.feed(page)
    assert not checked.open
    return checked


def samples(results: dict, prompt: str = "ask") -> list[Sample]:
    """Completions of as many tokens as the results' cycles commit; what was rejected is added to the results."""
    texts = []
    for place, sample in enumerate(results["drafters"][0]["samples"]):
        tokens = sum(sample["acceptance_lengths"]) + 1
        texts.append(Sample(sample["id"], prompt, [1], list(range(tokens)), "", "stop"))
        for entry in results["drafters"]:
            own = entry["samples"][place]
            count = len(own["acceptance_lengths"])
            own |= {"rejected_drafts": [7] * (count - 1) + [None], "rejected_ranks": [3] * (count - 1) + [None]}
    return texts


def words(ids) -> list[str]:
    return [f"w{token} " for token in ids]


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(results):
    page = html_report(results, samples(results), words)
    checked = parsed(page)
    assert all(link.startswith("#text-") for link in checked.links)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp", page)
    assert {"svg", "table", "details"} <= checked.used
    for entry in results["drafters"]:
        interval = entry["tau_ci95"]
        assert f"{entry['tau']:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]" in page
        assert f"{entry['name']}: budget 1024, τ {entry['ddtree_budget'][-1]['tau']:.2f}" in page
    assert 'class="reference"><th scope="row">z-lab' in page


def test_names_prompts_and_texts_are_text_whatever_they_hold(results):
    evil = '"><script>alert(1)</script><img src=x onerror=y>'
    results["name"] = results["drafters"][1]["name"] = results["drafters"][0]["samples"][0]["id"] = evil
    page = html_report(results, samples(results, evil), lambda ids: [evil] * len(ids))
    checked = parsed(page)
    assert "img" not in checked.used
    assert page.count("<script>") == 1


def test_a_coloured_text_is_the_completion_in_runs_of_what_each_cycle_commits():
    sample = {"acceptance_lengths": [3, 1, 2], "rejected_drafts": [9, 8, None], "rejected_ranks": [2, 0, None]}
    page = coloured(["<a>", "b ", "c\n", "d", "\nf", "g", "h"], sample, lambda token: f"said{token}")
    assert unescape(re.sub("<[^>]*>", "", page.replace("&lt;a&gt;", "<a>".replace("<", "&lt;")))) == "<a>b c\nd\nfgh"
    runs = re.findall(r'<i class="k(\d)">(.*?)</i>', page, flags=re.DOTALL)
    assert [tint for tint, _ in runs] == ["1", "0", "1"]
    assert runs[0][1] == 'b c\n<b data-d="said9" data-r="2">d</b>'
    assert runs[1][1] == '<b class="n" data-d="said8" data-r="0">\nf</b>'
    assert runs[2][1] == "gh"


@pytest.mark.parametrize("text", ["naïve 🙂🙂 日本語 x = [1]\n\n\treturn", "a" * 40, ""])
def test_pieces_join_to_the_text_and_a_letter_comes_with_its_last_byte(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    own = pieces(ids, lambda some: tokenizer.decode(some))
    assert len(own) == len(ids)
    assert "".join(own) == text


def test_the_report_shows_the_cached_texts(tiny, tmp_path):
    config = beside(tiny, tmp_path)
    evaluate(config)
    page = unescape((config.results_dir / "report.html").read_text())
    drawn = [re.sub("<[^>]*>", "", text) for text in re.findall(r'<p class="t">(.*?)</p>', page, flags=re.DOTALL)]
    decode = piece_decoder(config.cache_dir, config.target)
    assert (config.cache_dir / "tokenizer.json").exists()
    for sample, text in zip(Cache(config.cache_dir).samples, drawn, strict=True):
        plain = re.sub("<[^>]*>", "", "".join(decode(sample.completion_ids)))
        assert text == plain


def test_without_a_tokenizer_ids_are_shown_and_a_damaged_one_is_named(tiny, tmp_path):
    elsewhere = tiny.config.target.model_copy(update={"model": "some/hub-model"})
    assert piece_decoder(tmp_path, elsewhere)([5, 7]) == ["5 ", "7 "]
    write_tokenizer(tmp_path, tiny_tokenizer())
    assert piece_decoder(tmp_path, elsewhere)(tiny_tokenizer().encode("ab")) == ["a", "b"]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a readable tokenizer"):
        piece_decoder(tmp_path, elsewhere)


def test_the_texts_of_a_large_report_are_those_where_most_is_lost(results):
    reference, candidate = results["drafters"][:2]
    for place, sample in enumerate(reference["samples"]):
        sample["acceptance_lengths"] = [8] * 4
        candidate["samples"][place]["acceptance_lengths"] = [2 if place in (3, 6) else 7] * 4
    assert chosen_prompts(results["drafters"][:2], 16) == [3, 6]
    assert chosen_prompts(results["drafters"][:2], 10**6) == list(range(10))
    assert len(chosen_prompts(results["drafters"][:2], 0)) == 1


def large(results: dict, prompts: int = 164, drafters: int = 20) -> list[Sample]:
    draw = random.Random(0)
    first = results["drafters"][0]
    results["drafters"] = [{**first, "name": f"step-{n}", "reference": n == 0, "samples": []} for n in range(drafters)]
    for place in range(prompts):
        for entry in results["drafters"]:
            lengths = []
            while sum(lengths) < 511:
                lengths.append(min(draw.randint(1, 6), 511 - sum(lengths)))
            entry["samples"].append({"id": f"p{place}", "acceptance_lengths": lengths})
    return samples(results, "Write a function. " * 20)


def test_164_prompts_of_20_drafters_are_below_10_mb(results):
    page = html_report(results, large(results), words)
    assert 1e6 < len(page.encode()) < 10e6
    assert parsed(page)


def test_where_no_prompt_has_a_cycle_the_page_is_there_all_the_same(results):
    for entry in results["drafters"]:
        entry |= {"tau": None, "tau_ci95": None, "tau_micro": None, "cycles": 0, "position_acceptance": []}
        entry["ddtree_width"] |= {"tau": None, "tau_ci95": None}
        for row in entry["ddtree_budget"]:
            row |= {"tau": None, "tau_ci95": None}
        for sample in entry["samples"]:
            sample |= {"acceptance_lengths": [], "rejected_drafts": [], "rejected_ranks": []}
    results["comparisons"] = []
    texts = [Sample(sample["id"], "ask", [1], [2], "", "stop") for sample in results["drafters"][0]["samples"]]
    page = html_report(results, texts, words)
    assert parsed(page)
    assert "None" not in re.sub(r"<pre.*</pre>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize(("high", "ticks"), [(1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (6.9, [0, 2, 4, 6, 8])])
def test_ticks_are_round_and_reach_the_top(high, ticks):
    assert linear_ticks(0, high) == ticks
