"""Completions from a server: real HTTP, every API and way of telling token ids, and everything that goes wrong."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import END, PROMPTS, TEMPLATE, tiny_tokenizer, write_config
from serving import IDS, Serving, greedy

from dflash_eval import cache as cachefile
from dflash_eval import server as client
from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.errors import RunError, UserError
from dflash_eval.extract import extract
from dflash_eval.fetching import fetch
from dflash_eval.prompts import RenderedPrompt
from dflash_eval.replies import Reply, to_sample, with_reasoning

TOKENIZER = tiny_tokenizer()


def canned(prompt: list[int], most: int) -> list[int]:
    """An answer that belongs to its prompt alone."""
    said = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[: 5 + sum(prompt) % 20]
    return [*TOKENIZER.encode(said), END][:most]


def stops_of(tiny) -> list[int]:
    return json.loads((tiny.target / "generation_config.json").read_text())["eos_token_id"]


def right(prompt: str, most: int = 40) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return canned(TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False), most)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF_S", 0.01)


@pytest.fixture
def configured(tiny, tmp_path):
    """configured(url, **server settings and sections): a config of its own that asks that server."""

    def make(url: str, prompts: list | None = None, sections: dict | None = None, **server):
        if prompts is not None:
            rows = [row if isinstance(row, dict) else {"id": f"p{i}", "prompt": row} for i, row in enumerate(prompts)]
            (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        server = {"base_url": url, "timeout_s": 5, **server}
        completions = {"source": "server", "server": server}
        changes = {**(sections or {}), "completions": {**completions, **(sections or {}).get("completions", {})}}
        return load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], **changes))

    return make


def fetched(config, **options) -> tuple[list, dict, list[str]]:
    said: list[str] = []
    folder = fetch(config, say=said.append, **options)
    return cachefile.read_completions(folder), cachefile.read_completions_record(folder)["provenance"], said


def problem(config, kind=UserError, **options) -> str:
    with pytest.raises(kind) as error:
        fetched(config, **options)
    message = str(error.value)
    assert 1 <= len(message.splitlines()) <= 3
    return message


# What comes back


@pytest.mark.parametrize(("api", "ids"), [("openai", "vllm"), ("sglang", "sglang")])
def test_the_server_of_the_target_gives_what_the_target_generates_here(tiny, configured, api, ids):
    with Serving(TOKENIZER, greedy(tiny.target), stops_of(tiny), ids=ids) as serving:
        samples, provenance, _ = fetched(configured(serving.url, PROMPTS, api=api))
    local = Cache(tiny.folder / "cache").samples
    assert [s.completion_ids for s in samples] == [s.completion_ids for s in local]
    for ours, theirs in zip(samples, local, strict=True):
        assert (ours.id, ours.prompt_ids, ours.prompt) == (theirs.id, theirs.prompt_ids, theirs.prompt)
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
    assert provenance["token_ids"] == {"server": len(PROMPTS)}
    assert provenance["prompts_differ"] == 0


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("raw", [False, True])
def test_however_the_ids_are_told_they_are_the_same(configured, ids, raw):
    with Serving(TOKENIZER, canned, [END], ids=ids) as serving:
        samples, provenance, said = fetched(configured(serving.url, PROMPTS, {"prompts": {"raw": raw}}))
    wanted = [canned(TOKENIZER(p)["input_ids"], 40) if raw else right(p) for p in PROMPTS]
    assert [sample.completion_ids for sample in samples] == wanted
    told = {"pieces": "logprobs", "none": "text"}.get(ids, "server")
    assert provenance["token_ids"] == {told: len(PROMPTS)}
    assert any("tokenised again" in line for line in said) == (told == "text")
    assert provenance["differ"] == 0


@pytest.mark.parametrize("ids", ["sglang", "none"])
def test_sglangs_own_api_gives_ids_by_output_ids_or_by_logprobs(configured, ids):
    with Serving(TOKENIZER, canned, [END], ids=ids) as serving:
        samples, provenance, _ = fetched(configured(serving.url, PROMPTS, api="sglang"))
    assert [sample.completion_ids for sample in samples] == [right(p) for p in PROMPTS]
    assert provenance["token_ids"] == {"server": len(PROMPTS)}
    assert all(body["input_ids"] for body in serving.bodies)


def test_text_that_does_not_give_its_tokens_back_is_counted_and_said(configured):
    """The answers hold a byte that is no UTF-8 by itself: two tokens become a replacement character's three."""
    broken = [TOKENIZER.convert_tokens_to_ids("é"), TOKENIZER.encode("a")[0]]
    with Serving(TOKENIZER, lambda prompt, most: [*broken, END][:most], [END], ids="none") as serving:
        samples, provenance, said = fetched(configured(serving.url, PROMPTS))
    assert provenance["differ"] == len(PROMPTS)
    assert any(f"in {len(PROMPTS)}, tokens and text do not match" in line for line in said)
    assert all(sample.served["differs"] for sample in samples)


def test_logprobs_that_are_refused_leave_the_text(configured):
    refuse = ("return_token_ids", "logprobs")
    with Serving(TOKENIZER, canned, [END], ids="llama.cpp", refuse=refuse) as serving:
        samples, provenance, _ = fetched(configured(serving.url, PROMPTS))
    assert [sample.completion_ids for sample in samples] == [right(p) for p in PROMPTS]
    assert provenance["token_ids"] == {"text": len(PROMPTS)}


def test_a_server_that_fails_on_a_field_it_does_not_know_is_asked_another_way_before_long(configured):
    with Serving(TOKENIZER, canned, [END], ids="llama.cpp") as serving:
        respond = serving.respond

        def failing(handler, body):
            if body.get("return_token_ids"):
                serving.bodies.append(body)
                handler.error(500, "unexpected field")
            else:
                respond(handler, body)

        serving.respond = failing
        samples, provenance, _ = fetched(configured(serving.url, PROMPTS))
    assert [sample.completion_ids for sample in samples] == [right(p) for p in PROMPTS]
    assert provenance["token_ids"] == {"server": len(PROMPTS)}
    assert sum("return_token_ids" in body for body in serving.bodies) == 2 * (1 + client.CHECK_RETRIES)


THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m.reasoning_content is defined %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>OPENING{% endif %}"
)


@pytest.mark.parametrize("opening", ["", "<think>\n"])
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_comes_before_the_answer_with_the_templates_tags(tiny, configured, tmp_path, opening, field):
    """The server's parser took the tags and the blank lines away; what the target really said comes back."""
    target = tmp_path / "thinking"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING.replace("OPENING", opening)
    tokenizer.save_pretrained(target)
    (target / "config.json").write_text((tiny.target / "config.json").read_text())
    whole = f"{'' if opening else '<think>' + chr(10)}well, so\n</think>\n\nforty-two"
    ids = [*tokenizer.encode(whole), END]

    def parsed(reply):
        reply["choices"][0]["message"] = {"role": "assistant", "content": "forty-two", field: "well, so"}
        return reply

    with Serving(tokenizer, lambda _, most: ids[:most], [END], ids="none", models=("thinking",), change=parsed) as s:
        sections = {"target": {"model": str(target)}, "completions": {"max_new_tokens": 80}}
        samples, provenance, _ = fetched(configured(s.url, ["what?"], sections))
    assert samples[0].text == whole
    assert samples[0].completion_ids == ids
    assert provenance["differ"] == 0


@pytest.mark.parametrize(
    ("template", "reply", "text"),
    [
        (THINKING, Reply("", "cut while thin", finish="length"), "<think>\ncut while thin"),
        (THINKING, Reply("42 ", "so", finish="stop"), "<think>\nso\n</think>\n\n42 "),
        (THINKING, Reply("so", "so", finish="stop"), "<think>\nso\n</think>\n\nso"),
        (TEMPLATE + "{# </think> #}", Reply("42", "so"), "<think>\nso\n</think>\n\n42"),
        (TEMPLATE.replace("<|assistant|>{% endif", "<think>\n{% endif") + "{# </think> #}", Reply("42", "so"),
         "so\n</think>\n\n42"),
        (TEMPLATE + "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{# </think> #}",
         Reply("42", "so"), "<think>\nso\n</think>\n\n42"),
    ],
)  # fmt: skip
def test_reasoning_finds_its_place_in_what_the_template_offers(template, reply, text):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template.replace("OPENING", "")
    assert with_reasoning(tokenizer, [{"role": "user", "content": "so"}], {}, reply) == text


def test_reasoning_without_a_place_is_told():
    with pytest.raises(UserError, match="shows no place for it"):
        with_reasoning(TOKENIZER, [{"role": "user", "content": "?"}], {}, Reply("42", "so"))


@pytest.mark.parametrize(
    ("reply", "ids"),
    [
        (Reply("ab", ids=[64, 65, 77], completion_tokens=3), [64, 65, 77]),  # a stop token that is not known here
        (Reply("ab", ids=[64, 65], completion_tokens=3), [64, 65, END]),  # the server counts it and keeps it back
        (Reply("ab", ids=[64, 65, END], completion_tokens=3), [64, 65, END]),
        (Reply("ab", ids=[64, 65], completion_tokens=2, finish="length"), [64, 65]),
        (Reply("ab", completion_tokens=2), [64, 65, END]),  # text: a server may count the stop token or not
        (Reply("ab", reasoning="\n", completion_tokens=3), [64, 65, END]),
    ],
)
def test_a_completion_has_its_stop_token_once(reply, ids):
    prompt = RenderedPrompt("p", "?", [1, 2])
    sample = to_sample(reply, prompt, [], {}, TOKENIZER, [END], 40)
    assert sample.completion_ids == ids


def test_a_conversation_is_asked_turn_by_turn_with_the_targets_own_answers(configured, tiny):
    rows = [{"id": "c", "turns": ["one", "two", "three"], "category": "chat"}, {"id": "s", "prompt": "zip"}]
    with Serving(TOKENIZER, canned, [END]) as serving:
        config = configured(serving.url, rows)
        samples, _, _ = fetched(config)
    assert [sample.id for sample in samples] == ["c/turn-1", "c/turn-2", "c/turn-3", "s"]
    assert [sample.category for sample in samples] == ["chat"] * 3 + [None]
    chat: list[dict] = []
    for turn, sample in zip(rows[0]["turns"], samples, strict=False):
        chat.append({"role": "user", "content": turn})
        prompt = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert sample.prompt_ids == prompt
        assert sample.completion_ids == canned(prompt, 40)
        chat.append({"role": "assistant", "content": sample.text})


def test_prompts_that_the_server_renders_otherwise_are_the_servers_and_are_counted(configured):
    """Its template is another: with token ids the sample holds what it read, without them the count gives it away."""
    other = tiny_tokenizer()
    other.chat_template = "<|user|>Be brief. " + other.chat_template
    for ids in ("vllm", "sglang", "none"):
        with Serving(other, canned, [END], ids=ids) as serving:
            samples, provenance, said = fetched(configured(serving.url, PROMPTS), force=True)
        assert provenance["prompts_differ"] == len(PROMPTS)
        assert any("6 of 6 prompts otherwise than the target's chat template" in line for line in said)
        read = [other.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True,
                                          return_dict=False) for p in PROMPTS]  # fmt: skip
        assert ([sample.prompt_ids for sample in samples] == read) == (ids != "none")


def test_sampling_and_thinking_are_asked_for_and_every_prompt_has_its_own_seed(configured, tiny, tmp_path):
    target = tmp_path / "target"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking %}<|user|>{% endif %}"
    tokenizer.save_pretrained(target)
    (target / "config.json").write_text((tiny.target / "config.json").read_text())
    sections = {
        "target": {"model": str(target)},
        "completions": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 5},
        "prompts": {"enable_thinking": True},
    }
    with Serving(tokenizer, canned, [END], ids="sglang") as serving:
        _, provenance, _ = fetched(configured(serving.url, PROMPTS, sections))
        chats = [body for body in serving.bodies if body["max_tokens"] == 40]
        serving.bodies.clear()
        fetched(configured(serving.url, PROMPTS, sections, api="sglang"), force=True)
    assert provenance["prompts_differ"] == 0
    for body in chats:
        assert (body["temperature"], body["top_k"], body["top_p"]) == (0.7, 20, 0.9)
        assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert sorted(body["seed"] for body in chats) == [5, 6, 7, 8, 9, 10]
    native = [body["sampling_params"] for body in serving.bodies]
    native = [sampling for sampling in native if sampling["max_new_tokens"] == 40]
    assert sorted(sampling["sampling_seed"] for sampling in native) == [5, 6, 7, 8, 9, 10]
    assert {(s["temperature"], s["top_k"], s["top_p"]) for s in native} == {(0.7, 20, 0.9)}


# Faults


def test_200_prompts_at_32_at_once_with_a_fifth_of_faults_arrive_once_each_and_in_order(configured):
    """Every request fails with probability 0.2; the most that one prompt meets in a row are five. Default retries."""
    draw = random.Random(0)
    kinds = ["429", "500", "503", "hang", "reset", "truncated", "no choices"]
    prompts = [f"prompt number {i}" for i in range(200)]
    planned: dict[str, list[str]] = {prompt: [] for prompt in prompts}
    for own in planned.values():
        while draw.random() < 0.2:
            own.append(draw.choice(kinds))
    expected = sum(map(len, planned.values()))
    assert 0.18 < expected / (200 + expected) < 0.22
    assert {kind for own in planned.values() for kind in own} == set(kinds)
    assert max(map(len, planned.values())) == 5

    def faults(text, times):
        return planned[text][times - 1] if times <= len(planned[text]) else None

    with Serving(TOKENIZER, canned, [END], faults=faults, delay=0.1) as serving:
        config = configured(serving.url, prompts, concurrency=32, timeout_s=3)
        samples, provenance, _ = fetched(config)
    assert [sample.id for sample in samples] == [f"p{i}" for i in range(200)]
    assert [sample.completion_ids for sample in samples] == [right(prompt) for prompt in prompts]
    # On a busy machine a request may run out of time without a fault of the server's, and is tried again as well.
    assert all(serving.asked[prompt] >= 1 + len(planned[prompt]) for prompt in prompts)
    assert provenance["tries_again"] >= serving.asked.total() - 200 >= expected
    assert serving.most_busy > 16
    assert len((config.cache_dir / "completions.jsonl").read_text().splitlines()) == 200


def test_by_default_a_fifth_of_faults_loses_a_prompt_of_200_in_less_than_one_run_of_a_hundred(configured):
    tries = configured("http://127.0.0.1:1").completions.server.retries + 1
    assert 1 - (1 - 0.2**tries) ** 200 < 0.01


def test_retry_after_is_kept_to(configured):
    with Serving(TOKENIZER, canned, [END], faults=lambda _, n: "429 for a second" if n == 1 else None) as serving:
        start = time.monotonic()
        fetched(configured(serving.url, ["zip"]))
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2015 07:28:00 GMT", "soon", "-3"])
def test_a_strange_retry_after_is_no_wait(value):
    assert client._retry_after(value) == 0


def test_a_prompt_whose_tries_all_fail_leaves_the_others_and_the_rerun_asks_for_it_alone(configured):
    failing = {"add"}
    with Serving(TOKENIZER, canned, [END], faults=lambda text, _: "500" if text in failing else None) as serving:
        config = configured(serving.url, PROMPTS, retries=1)
        message = problem(config, RunError)
        assert "prompt 'p2': 500 something of the server's own (2 tries)" in message
        assert "1 completions are missing, the others are kept" in message
        failing.clear()
        before = serving.asked.copy()
        samples, _, _ = fetched(config)
        assert serving.asked - before == {"add": 1}
    assert [sample.completion_ids for sample in samples] == [right(p) for p in PROMPTS]


def test_a_killed_run_goes_on_where_it_stopped(configured):
    """SIGKILL of the real command in the middle: what was written is not asked for again."""
    prompts = [f"prompt number {i}" for i in range(60)]
    with Serving(TOKENIZER, canned, [END], delay=0.1) as serving:
        config = configured(serving.url, prompts, concurrency=4)
        path, lines = config.cache_dir.parent / "config.yaml", config.cache_dir / "completions.jsonl"
        command = [sys.executable, "-m", "dflash_eval", "completions", "-c", str(path)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and (not lines.exists() or lines.read_bytes().count(b"\n") < 10):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        lines.write_bytes(lines.read_bytes() + b'{"id": "p59", "prom')  # as a kill in mid-write leaves it
        kept = {sample.id for sample in cachefile.read_completions(config.cache_dir)}
        assert 10 <= len(kept) < 60
        time.sleep(0.3)
        before = serving.asked.copy()
        serving.delay = 0
        samples, _, _ = fetched(config)
        again = serving.asked - before
    assert again == {prompt: 1 for i, prompt in enumerate(prompts) if f"p{i}" not in kept}
    assert [sample.completion_ids for sample in samples] == [right(prompt) for prompt in prompts]


# What the user must mend


def test_no_server_is_told_with_the_url_that_was_tried(configured):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert f"{url}/v1/models: no server answers there" in problem(configured(url, PROMPTS))


def certificate(folder: Path) -> tuple[Path, Path]:
    pair = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-out", pair[0], "-keyout", pair[1]], check=True, capture_output=True)
    return pair


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make a certificate with")
def test_a_certificate_that_nobody_vouches_for_is_a_tls_error(configured, tmp_path):
    with Serving(TOKENIZER, canned, [END], tls=certificate(tmp_path)) as serving:
        assert "TLS error" in problem(configured(serving.url, PROMPTS))


def test_tls_to_a_server_without_is_a_tls_error(configured):
    with Serving(TOKENIZER, canned, [END]) as serving:
        assert "TLS error" in problem(configured(serving.url.replace("http", "https"), PROMPTS))


def test_a_wrong_path_is_told_with_what_base_url_is(configured):
    with Serving(TOKENIZER, canned, [END]) as serving:
        message = problem(configured(f"{serving.url}/api", PROMPTS))
        assert f"{serving.url}/api/v1/chat/completions: 404" in message
        assert "the server's root" in message
        assert len(fetched(configured(f"{serving.url}/v1/", PROMPTS))[0]) == len(PROMPTS)


def test_a_model_that_is_not_the_target_is_refused_unless_it_is_named(configured):
    with Serving(TOKENIZER, canned, [END], models=("other/model", "third")) as serving:
        message = problem(configured(serving.url, PROMPTS))
        assert f"{serving.url} serves other/model, third, target.model is " in message
        assert "completions.server.model: other/model" in message
        assert "not 'fourth'" in problem(configured(serving.url, PROMPTS, model="fourth"))
        _, provenance, _ = fetched(configured(serving.url, PROMPTS, model="third"))
        assert provenance["model"] == "third"
        assert {body["model"] for body in serving.bodies} == {"third"}


@pytest.mark.parametrize("name", ["Some/Target", "/models/TARGET/"])
def test_a_model_under_another_folders_name_is_known(configured, name):
    with Serving(TOKENIZER, canned, [END], models=(name,)) as serving:
        assert fetched(configured(serving.url, PROMPTS))[1]["model"] == name


def test_a_server_that_does_not_say_what_it_serves_is_taken_and_that_is_said(configured):
    with Serving(TOKENIZER, canned, [END], models=()) as serving:
        _, provenance, said = fetched(configured(serving.url, PROMPTS))
    assert provenance["model_checked"] is False
    assert any("does not say which model it serves" in line for line in said)


def test_a_completion_longer_than_asked_is_refused(configured):
    with Serving(TOKENIZER, lambda _, most: right("x" * 9) * 9, [END]) as serving:
        message = problem(configured(serving.url, PROMPTS))
    assert "completions.max_new_tokens is 40" in message
    assert "it does not keep to max_tokens" in message


def test_a_completion_that_ends_at_once_is_its_stop_token(configured):
    with Serving(TOKENIZER, lambda *_: [END], [END], ids="none") as serving:
        samples, _, _ = fetched(configured(serving.url, PROMPTS))
    assert {tuple(sample.completion_ids) for sample in samples} == {(END,)}


def test_an_empty_completion_is_asked_for_again_and_then_told(configured):
    def empty(reply):
        reply["choices"][0] |= {"message": {"content": ""}, "finish_reason": "length"}
        reply["usage"] = {}
        return reply

    with Serving(TOKENIZER, canned, [END], ids="none", change=empty) as serving:
        assert "the completion is empty (2 tries)" in problem(configured(serving.url, PROMPTS, retries=1), RunError)


def test_text_that_a_parser_keeps_is_told(configured):
    def hidden(reply):
        reply["choices"][0]["message"] = {"content": None, "tool_calls": [{"id": "x"}]}
        return reply

    with Serving(TOKENIZER, canned, [END], ids="none", change=hidden) as serving:
        assert "keeps the text of the completion" in problem(configured(serving.url, PROMPTS))


def test_token_ids_of_another_tokenizer_are_told(configured):
    def other(reply):
        reply["choices"][0]["token_ids"] = [5, 99999]
        return reply

    with Serving(TOKENIZER, canned, [END], change=other) as serving:
        assert "beyond the target's 260: another tokenizer" in problem(configured(serving.url, PROMPTS))


def test_a_prompt_of_a_megabyte_goes_through_and_one_that_is_refused_is_named(configured):
    long = "<|mask|>" * 2**17  # of few tokens, for the tests' time
    sent = set()
    with Serving(TOKENIZER, canned, [END], ids="none", faults=lambda text, _: sent.add(text)) as serving:
        samples, _, _ = fetched(configured(serving.url, ["zip", long]))
    assert len(samples[1].prompt_ids) > 2**17
    assert sent == {"zip", long}
    fault = lambda text, _: "400" if text == "add" else None  # noqa: E731
    with Serving(TOKENIZER, canned, [END], faults=fault) as serving:
        message = problem(configured(serving.url, PROMPTS), force=True)
    assert "the server refuses prompt 'p2': 400 something of the server's own" in message


def test_the_key_comes_from_the_environment_and_is_in_no_message_or_file(configured, monkeypatch, tmp_path):
    key = "sk-" + "0123456789abcdef" * 2
    with Serving(TOKENIZER, canned, [END], key=key) as serving:
        assert "refuses a request without a key (401" in problem(configured(serving.url, PROMPTS))
        named = configured(serving.url, PROMPTS, api_key_env="SOME_KEY")
        monkeypatch.delenv("SOME_KEY", raising=False)
        assert "environment variable SOME_KEY is not set" in problem(named)
        monkeypatch.setenv("SOME_KEY", "sk-wrong-one")
        message = problem(named)
        assert "refuses the key in SOME_KEY (401" in message
        assert "sk-wrong-one" not in message
        monkeypatch.setenv("SOME_KEY", key)
        _, _, said = fetched(named)
    written = [path.read_text() for path in named.cache_dir.iterdir()]
    assert not any(key in text for text in (*written, *said))


def test_a_key_in_place_of_its_variables_name_is_refused_and_not_shown(configured):
    with pytest.raises(UserError, match="must be the name of an environment variable") as error:
        configured("http://127.0.0.1:1", PROMPTS, api_key_env="sk-secret")
    assert "sk-secret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://", "http://host:port", "http://host:99999", "http://[::1"])
def test_a_url_that_is_none_is_refused_with_the_config(configured, url):
    with pytest.raises(UserError, match=r"completions\.server\.base_url must b"):
        configured(url, PROMPTS)


def test_a_password_in_the_url_is_not_shown(configured):
    with Serving(TOKENIZER, canned, [END]) as serving:
        _, provenance, said = fetched(configured(serving.url.replace("//", "//me:hidden@"), PROMPTS))
    assert provenance["server"] == serving.url
    assert "hidden" not in " ".join(said)


def test_completions_of_something_else_are_refused_and_fetched_anew_with_force(configured):
    with Serving(TOKENIZER, canned, [END]) as serving:
        fetched(configured(serving.url, PROMPTS))
        other = configured(serving.url, PROMPTS, {"completions": {"max_new_tokens": 8}})
        assert "completions.max_new_tokens: the cache has 40, the config gives 8" in problem(other)
        samples, _, _ = fetched(other, force=True)
    assert [sample.completion_ids for sample in samples] == [right(p, 8) for p in PROMPTS]


def test_the_step_needs_a_server_in_the_config(tiny):
    assert "completions.source is generate" in problem(tiny.config)


# Before and after


def test_extract_goes_on_from_fetched_completions_and_keeps_who_gave_them(tiny, configured):
    with Serving(TOKENIZER, greedy(tiny.target), stops_of(tiny)) as serving:
        serving.cycles = 1
        config = configured(serving.url, PROMPTS)
        fetched(config)
    cache = Cache(extract(config, say=lambda _: None))  # the server is gone by now
    assert [s.completion_ids for s in cache.samples] == [s.completion_ids for s in Cache(tiny.folder / "cache").samples]
    assert cache.greedy_agreement() == 1.0
    provenance = cache.manifest.provenance["completions"]
    assert provenance["server"] == serving.url
    assert provenance["served_tau"]["tau_micro"] == pytest.approx(
        sum(len(s.completion_ids) - 1 for s in cache.samples)
        / sum(-(-(len(s.completion_ids) - 1) // 3) for s in cache.samples)
    )


def test_extract_fetches_what_is_absent_and_refuses_what_is_of_another_config(tiny, configured):
    with Serving(TOKENIZER, canned, [END]) as serving:
        config = configured(serving.url, PROMPTS[:2])
        cache = Cache(extract(config, say=lambda _: None))
        assert [sample.completion_ids for sample in cache.samples] == [right(p) for p in PROMPTS[:2]]
        assert cache.greedy_agreement() < 1  # not the target's text, and it shows
        cachefile.delete_states(config.cache_dir)
        other = configured(serving.url, PROMPTS[:2], {"completions": {"max_new_tokens": 8}})
        with pytest.raises(UserError, match="holds the completions of something else"):
            extract(other, say=lambda _: None)
        assert len(Cache(extract(other, say=lambda _: None, force=True)).samples) == 2


def test_sglangs_verification_steps_give_its_own_tau_by_completion(configured):
    with Serving(TOKENIZER, canned, [END], ids="sglang") as serving:
        serving.cycles = 1
        samples, provenance, _ = fetched(configured(serving.url, PROMPTS, api="sglang"))
        again = configured(serving.url, PROMPTS, {"cache_dir": "unused"}, api="openai")
        _, by_chat, _ = fetched(again.model_copy(update={"cache_dir": again.results_dir.parent / "chats"}))
    rates = [(len(s.completion_ids) - 1) / -(-(len(s.completion_ids) - 1) // 3) for s in samples]
    assert provenance["served_tau"]["tau"] == pytest.approx(sum(rates) / len(rates))
    assert provenance["served_tau"]["completions"] == len(PROMPTS)
    assert by_chat["served_tau"] == provenance["served_tau"]


def test_an_sglang_that_tells_no_steps_tells_its_average(configured):
    with Serving(TOKENIZER, canned, [END], ids="none") as serving:
        serving.average = 3.25
        _, provenance, _ = fetched(configured(serving.url, PROMPTS))
    assert provenance["served_tau"]["tau_micro"] == 3.25
    assert "since the server started" in provenance["served_tau"]["from"]


def test_a_server_without_speculative_decoding_has_no_tau(configured):
    with Serving(TOKENIZER, canned, [END]) as serving:
        assert fetched(configured(serving.url, PROMPTS))[1]["served_tau"] is None


def test_a_server_on_the_gpus_that_extraction_needs_must_be_stopped(configured, monkeypatch):
    monkeypatch.setattr("dflash_eval.fetching.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("dflash_eval.gpu_memory.torch.cuda.mem_get_info", lambda _: (1000, 1 << 35))
    monkeypatch.setattr("dflash_eval.machine.torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("dflash_eval.gpu_memory.gpu_processes", lambda: None)
    with Serving(TOKENIZER, canned, [END]) as serving:
        config = configured(serving.url, PROMPTS, {"target": {"device": "auto"}})
        _, _, said = fetched(config)
        assert any("stop it now" in line and "nvidia-smi" in line for line in said)
        with pytest.raises(UserError, match=r"stop the server at .* now") as error:
            extract(config, say=lambda _: None)
    assert "the completions are kept" in str(error.value)
