"""Prompts: the sets, the row forms, conversations, the chat template, and what ends an answer."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash_eval.config import PromptsConfig
from dflash_eval.errors import UserError
from dflash_eval.hub_prompts import HUB_SETS
from dflash_eval.prompts import (
    Prompt,
    has_chat_template,
    is_chat,
    load_prompts,
    prompt_id,
    render_prompt,
    render_turn,
    stop_token_ids,
    visible,
)

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
    prompt = Prompt("p", ("hello world", "a second turn that is not asked yet"))
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


def test_chats_keep_the_users_turns_and_the_system_message_and_leave_out_the_answers(tmp_path):
    messages = [("system", "brief"), ("user", "one"), ("assistant", "not asked for"), ("user", "two")]
    share = [("human", "one"), ("gpt", "not asked for"), ("human", "two")]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in messages], "category": "maths"},
        {"id": "s", "conversations": [{"from": role, "value": text} for role, text in share]},
    ]
    assert load(tmp_path, *rows) == [
        Prompt("set-001", ("one", "two"), "maths", "brief"),
        Prompt("s", ("one", "two")),
    ]


def test_every_turn_is_a_sample_whose_prompt_holds_the_conversation_so_far():
    assert Prompt("p", ("a",)).sample_ids == ["p"]
    prompt = Prompt("p", ("hello", "world"), "greetings", "be brief")
    assert prompt.sample_ids == ["p/turn-1", "p/turn-2"]
    assert [prompt_id(sample_id) for sample_id in (*prompt.sample_ids, "p", "p/turn-one")] == [
        "p",
        "p",
        "p",
        "p/turn-one",
    ]
    start = ["<system>", "be", "brief", "<end>", "<user>", "hello", "<end>", "<assistant>"]
    config = PromptsConfig(system="another that the row's own goes before")
    first, second = (render_turn(tokenizer(), prompt, config, answers) for answers in ([], ["question"]))
    assert (first.id, first.text, first.category) == ("p/turn-1", "hello", "greetings")
    assert first.ids == ids(*start)
    assert (second.id, second.text) == ("p/turn-2", "world")
    assert second.ids == ids(*start, "question", "<end>", "<user>", "world", "<end>", "<assistant>")


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("hello", "hello"),
        ("<think>\nwell\n</think>\n\nhello", "hello"),
        ("well</think>hello", "hello"),
        ("<think>cut", "<think>cut"),
    ],
)
def test_the_next_turn_does_not_see_what_was_thought(answer, kept):
    assert visible(answer) == kept


def test_raw_prompts_go_in_as_they_are(tmp_path):
    config = PromptsConfig(source="unused", raw=True)
    assert not is_chat(tokenizer(), config)
    assert render_turn(tokenizer(), Prompt("p", ("hello world",)), config).ids == ids("<s>", "hello", "world")
    (tmp_path / "set.jsonl").write_text(json.dumps({"turns": ["a", "b"]}))
    source = str(tmp_path / "set.jsonl")
    assert "set.jsonl:1: prompts.raw takes a single text" in error(load_prompts, PromptsConfig(source=source, raw=True))


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
        (
            [{"text": "a", "id": 1}],
            'set.jsonl:1: neither "prompt" nor "turns" nor "messages" nor "conversations" among its keys (text, id)',
        ),
        ([{"prompt": "a", "category": 3}], 'set.jsonl:1: "category" must be text'),
        ([{"messages": []}], 'set.jsonl:1: "messages" is empty'),
        ([{"messages": "hi"}], 'set.jsonl:1: "messages" must be a list of objects with "role" and "content"'),
        ([{"conversations": ["hi"]}], 'set.jsonl:1: "conversations" must be a list of objects with "from" and "value"'),
        (
            [{"prompt": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}],
            'set.jsonl:2: "messages" begins with the assistant; the user must ask first',
        ),
        (
            [{"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "a"}]}],
            'set.jsonl:1: "conversations" begins with the assistant; the user must ask first',
        ),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}],
            "set.jsonl:1: \"messages\" message 2 has the role 'tool'; known are system, user, assistant",
        ),
        ([{"messages": [{"content": "a"}]}], 'set.jsonl:1: "messages" message 1 has the role None'),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
            'set.jsonl:1: "messages" message 1 has no text in "content"',
        ),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}]}],
            'set.jsonl:1: "messages" message 2 is a system message; only the first can be one',
        ),
        ([{"messages": [{"role": "system", "content": "s"}]}], 'set.jsonl:1: "messages" is empty'),
        (
            [{"id": "a", "turns": ["x", "y"]}, {"id": "a/turn-2", "prompt": "z"}],
            "set.jsonl:2: id 'a/turn-2' stands at ",
        ),
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
        ("builtin:humaneval", "builtin:humaneval: no such set; there is builtin:coding-10, builtin:functions-10"),
    ]:
        assert message in error(load_prompts, PromptsConfig(source=source))


HUB = {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}, {"id": "x", "turns": ["c"]}]}


def load_from_hub(monkeypatch, splits: dict, split: str = "") -> list[Prompt]:
    """Through a stand-in for `datasets`, of which only load_dataset is used."""

    def load_dataset(name, config, split):
        assert (name, config) == ("owner/some-set", None)
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


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:"
EVAL_ROWS = {  # a row as the hub has it, and the turn that z-lab and DeepSpec make of it
    "gsm8k": ({"question": "How much?", "answer": "3"}, f"How much?{BOXED}"),
    "math500": ({"problem": "Solve."}, f"Solve.{BOXED}"),
    "humaneval": ({"prompt": "def f():\n"}, f"{TESTED}\n```python\ndef f():\n\n```"),
    "mbpp": ({"prompt": "Write a function.", "code": "x"}, "Write a function."),
    "alpaca": ({"instruction": "Sum it up.", "input": "A text."}, "Sum it up.\n\nInput:\nA text."),
}


@pytest.mark.parametrize("name", EVAL_ROWS)
def test_a_well_known_set_has_the_wording_that_others_use(monkeypatch, name):
    row, turn = EVAL_ROWS[name]
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return [row]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_prompts(PromptsConfig(source=f"hf:{name}")) == [Prompt(f"{name}-001", (turn,))]
    known = HUB_SETS[name]
    assert asked == [(known.dataset, known.config, known.split)]


def test_mt_bench_keeps_both_turns_and_the_category(monkeypatch):
    row = {"prompt": ["one", "two"], "category": "writing"}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: [row, {"text": "x"}]))
    assert load_prompts(PromptsConfig(source="hf:mt-bench", limit=1)) == [
        Prompt("mt-bench-001", ("one", "two"), "writing")
    ]
    assert "row 2: not a row of HuggingFaceH4/mt_bench_prompts as it was known" in error(
        load_prompts, PromptsConfig(source="hf:mt-bench")
    )


def test_livecodebench_is_read_from_its_files(monkeypatch, tmp_path):
    def download(dataset, filename, repo_type):
        path = tmp_path / filename
        path.write_text(json.dumps({"question_content": f"Q of {filename}", "starter_code": ""}) + "\n")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    prompts = load_prompts(PromptsConfig(source="hf:livecodebench"))
    assert len(prompts) == 6
    assert "### Question:\nQ of test.jsonl\n\n### Format: Write your code in" in prompts[0].turns[0]
    assert "```python\n# YOUR CODE HERE\n```" in prompts[0].turns[0]

    def refuse(*_, **__):
        raise OSError("no such host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    assert "cannot be loaded: no such host" in error(load_prompts, PromptsConfig(source="hf:livecodebench"))


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
