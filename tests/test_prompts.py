"""Prompts: the sets, the two row forms, the chat template, and what ends an answer."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash_eval.config import PromptsConfig
from dflash_eval.errors import UserError
from dflash_eval.prompts import Prompt, has_chat_template, load_prompts, render_prompt, stop_token_ids

SPECIAL = ["<s>", "</s>", "<user>", "<assistant>", "<system>", "<end>", "<think>"]
WORDS = ["[UNK]", "hello", "world", "be", "brief", "question"]
TURN = "{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}"
TEMPLATE = (
    "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
REFUSAL = "{{ raise_exception('no system role') }}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}" + REFUSAL + "{% endif %}" + TEMPLATE


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    start = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=template)


def ids(*tokens: str) -> list[int]:
    return tokenizer().convert_tokens_to_ids(list(tokens))


def render(template: str | None = TEMPLATE, system: str | None = None, thinking: bool = False) -> list[int]:
    prompt = Prompt("p", ("hello world", "a second turn that is not asked"))
    return render_prompt(tokenizer(template), prompt, system=system, enable_thinking=thinking)


def load(tmp_path, *rows, limit: int | None = None, name: str = "set.jsonl") -> list[Prompt]:
    path = tmp_path / name
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return load_prompts(PromptsConfig(source=str(path), limit=limit))


def error(call, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_coding_10_is_ten_prompts_each_with_its_own_id_and_one_turn():
    prompts = load_prompts(PromptsConfig())
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 10
    assert {"fizzbuzz", "binary-search", "linked-list-reversal"} < {prompt.id for prompt in prompts}
    assert all(len(prompt.turns) == 1 and len(prompt.turns[0]) < 200 for prompt in prompts)


def test_both_row_forms_are_read_blank_lines_passed_and_missing_ids_made_from_stem_and_line(tmp_path):
    rows = [{"id": 7, "prompt": "one"}, "", {"turns": ["two", "then"]}, {"id": None, "prompt": "three"}]
    assert load(tmp_path, *rows, name="humaneval.jsonl") == [
        Prompt("7", ("one",)),
        Prompt("humaneval-003", ("two", "then")),
        Prompt("humaneval-004", ("three",)),
    ]


def test_a_line_ends_at_a_newline_only(tmp_path):
    assert load(tmp_path, '{"prompt": "a\u2028b"}\r')[0].turns == ("a\u2028b",)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    assert load(tmp_path, '\ufeff{"prompt": "a"}')[0].turns == ("a",)


def test_limit_takes_the_first_rows_and_looks_no_further(tmp_path):
    prompts = load(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "not JSON", limit=2)
    assert [prompt.turns[0] for prompt in prompts] == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, "{"], "set.jsonl:2: not JSON: "),
        (["[1]"], "set.jsonl:1: not a JSON object"),
        ([{"text": "a", "id": 1}], 'set.jsonl:1: neither "prompt" nor "turns" among its keys (text, id)'),
        ([{"prompt": " \n"}], 'set.jsonl:1: "prompt" is empty'),
        ([{"turns": []}], 'set.jsonl:1: "turns" is empty'),
        ([{"turns": ["a", ""]}], 'set.jsonl:1: "turns" is empty'),
        ([{"prompt": ["a"]}], 'set.jsonl:1: "prompt" must be text'),
        ([{"turns": "a"}], 'set.jsonl:1: "turns" must be a list of texts'),
        ([{"turns": [1]}], 'set.jsonl:1: "turns" must be a list of texts'),
        (['{"prompt": "\\ud83d"}'], 'set.jsonl:1: "prompt" holds half of a surrogate pair'),
        ([{"prompt": "a", "id": ""}], 'set.jsonl:1: "id" must be text or a whole number'),
        ([{"prompt": "a", "id": [1]}], 'set.jsonl:1: "id" must be text or a whole number'),
        ([{"prompt": "a", "id": 1}, "", {"prompt": "b", "id": "1"}], "set.jsonl:3: id '1' stands at "),
        ([], "set.jsonl: no prompts in it"),
        (["", " "], "set.jsonl: no prompts in it"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, rows, message):
    assert error(load, tmp_path, *rows).replace(f"{tmp_path}/", "").startswith(message)


def test_a_source_that_cannot_be_read_is_refused_with_what_would_do(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    for source, message in [
        (f"{tmp_path}/none.jsonl", "none.jsonl: no such file; prompts.source is builtin:<set>, "),
        (str(tmp_path), "the prompts cannot be read: Is a directory"),
        (f"{tmp_path}/latin.jsonl", "latin.jsonl:2: not UTF-8 text"),
        ("builtin:humaneval", "builtin:humaneval: no such set; there is builtin:coding-10"),
    ]:
        assert message in error(load_prompts, PromptsConfig(source=source))


HUB = {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}, {"id": "x", "turns": ["c"]}]}


def load_from_hub(monkeypatch, splits: dict, split: str = "") -> list[Prompt]:
    """Through a stand-in for `datasets`, of which only load_dataset is used."""

    def load_dataset(name, split):
        assert name == "owner/some-set"
        return splits[split] if split else splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return load_prompts(PromptsConfig(source=f"hf:owner/some-set{split}"))


def test_of_a_hub_set_the_test_split_is_taken_unless_another_is_named(monkeypatch):
    assert load_from_hub(monkeypatch, HUB) == [Prompt("some-set-001", ("b",)), Prompt("x", ("c",))]
    assert load_from_hub(monkeypatch, HUB, ":train")[0].turns == ("a",)


def test_of_several_splits_without_a_test_one_must_be_named(monkeypatch):
    assert load_from_hub(monkeypatch, {"train": [{"prompt": "a"}]})
    said = error(load_from_hub, monkeypatch, {"train": [], "dev": []})
    assert said.endswith("which split? hf:owner/some-set:train, hf:owner/some-set:dev")


def test_a_hub_set_that_cannot_be_had_is_told_in_one_line(monkeypatch):
    assert "row 1: neither" in error(load_from_hub, monkeypatch, {"test": [{"q": 1}]})
    assert "cannot be loaded: 'dev'" in error(load_from_hub, monkeypatch, HUB, ":dev")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in error(load_prompts, PromptsConfig(source="hf:owner/some-set"))


def test_a_prompt_is_rendered_as_a_chat_up_to_where_the_assistant_begins():
    user = ("<user>", "hello", "world", "<end>")
    assert render() == ids(*user, "<assistant>")
    assert render(system="be brief") == ids("<system>", "be", "brief", "<end>", *user, "<assistant>")
    assert all(type(token) is int for token in render())


def test_enable_thinking_reaches_only_a_template_that_knows_the_word(monkeypatch):
    assert render(thinking=True) == [*render(), *ids("<think>")]
    seen = []
    apply = PreTrainedTokenizerFast.apply_chat_template
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "apply_chat_template", lambda *a, **k: seen.append(k) or apply(*a, **k)
    )
    render(thinking=False)
    render(template="{% for m in messages %}" + TURN + "{% endfor %}", thinking=True)
    assert [call.get("enable_thinking") for call in seen] == [False, None]


def test_without_a_chat_template_the_text_goes_in_plain_with_the_tokenizers_own_special_tokens():
    assert has_chat_template(tokenizer())
    assert not has_chat_template(tokenizer(None))
    assert render(None) == ids("<s>", "hello", "world")
    assert render(None, system="be brief") == ids("<s>", "be", "brief", "hello", "world")


def test_the_default_of_several_named_templates_is_used():
    named = tokenizer()
    named.chat_template = {"default": TEMPLATE, "tool_use": NO_SYSTEM}
    assert has_chat_template(named)
    assert render_prompt(named, Prompt("p", ("hello world",)), system=None, enable_thinking=False) == render()


def test_a_template_that_refuses_is_told_with_its_own_words():
    assert render(NO_SYSTEM) == render()
    said = error(render, NO_SYSTEM, system="be brief")
    assert said.endswith("refuses prompts.system (try prompts.system: null): no system role")
    assert "refuses prompt 'p': never" in error(render, "{{ raise_exception('never') }}")


@pytest.mark.parametrize("named", [None, 3, [3, 5], ()])
def test_stop_tokens_join_the_generation_config_the_end_of_sequence_and_the_end_of_turn(named):
    own = named if isinstance(named, list | tuple) else [named] if named else []
    wanted = {*own, *ids("</s>", "<end>")}
    assert stop_token_ids(tokenizer(), SimpleNamespace(eos_token_id=named)) == sorted(wanted)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages if m['role'] == 'user' %}" + TURN + "{% endfor %}",
        "{{ raise_exception('never') }}",
        "{{ messages[0]['nothing']['at_all'] }}",
        "{% syntax error",
    ],
)
def test_a_template_without_an_end_of_turn_leaves_the_other_stop_tokens(template):
    assert stop_token_ids(tokenizer(template), None) == ids("</s>")


def test_no_stop_token_at_all_is_an_empty_list():
    bare = tokenizer(None)
    bare.eos_token = None
    assert stop_token_ids(bare, SimpleNamespace()) == []
