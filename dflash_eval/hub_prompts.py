"""Prompt sets from the Hugging Face hub; the well-known ones in the wording that drafters are compared with.

The wordings are those of z-lab's `dflash.benchmark` and of DeepSpec's `convert_eval_datasets_to_jsonl.py`, which agree
where both have a set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_eval.errors import UserError, reason

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LIVECODEBENCH = """\
You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct \
Python program that matches the specification and passes all tests. You will NOT return anything except for the program

### Question:
{question}

### Format: {format}
```python
{code}
```

### Answer: (use the provided format with backticks)"""


@dataclass(frozen=True)
class HubSet:
    dataset: str
    turns: Callable[[dict[str, Any]], list[str]]
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()  # JSONL in the repository, where there is a loading script instead of data files


def _alpaca(row: dict[str, Any]) -> list[str]:
    given = row["input"]
    return [f"{row['instruction']}\n\nInput:\n{given}" if given else row["instruction"]]


def _humaneval(row: dict[str, Any]) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: dict[str, Any]) -> list[str]:
    code = row["starter_code"]
    style = "Use the following code structure:" if code else "Write your code in the following format:"
    return [LIVECODEBENCH.format(question=row["question_content"], format=style, code=code or "# YOUR CODE HERE")]


HUB_SETS = {
    "humaneval": HubSet("openai/openai_humaneval", _humaneval),
    "mbpp": HubSet("google-research-datasets/mbpp", lambda row: [row["prompt"]], config="sanitized"),
    "gsm8k": HubSet("openai/gsm8k", lambda row: [row["question"] + STEP_BY_STEP], config="main"),
    "math500": HubSet("HuggingFaceH4/MATH-500", lambda row: [row["problem"] + STEP_BY_STEP]),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", lambda row: list(row["prompt"]), split="train"),
    "alpaca": HubSet("tatsu-lab/alpaca", _alpaca, split="train"),
    "livecodebench": HubSet(
        "livecodebench/code_generation_lite",
        _livecodebench,
        files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
    ),
}


def hub_rows(source: str) -> Iterator[tuple[str, Any, str]]:
    """Of each row of hf:<set> or hf:<dataset>[:<split>]: where it stands, the row, and the id where it has none.

    <set> is a key of HUB_SETS; of another dataset the rows are as they are, of the only split or else of `test`.
    Raises UserError for what cannot be loaded.
    """
    name, _, split = source.removeprefix("hf:").partition(":")
    known = HUB_SETS.get(name)
    rows = _known_rows(source, known) if known else _dataset_rows(source, name, split)
    for number, row in enumerate(rows, 1):
        place = f"{source} row {number}"
        if known:
            try:
                row = {"turns": known.turns(row), "category": row.get("category")}
            except (KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{place}: not a row of {known.dataset} as it was known: {error!r}") from None
        yield place, row, f"{name.split('/')[-1]}-{number:03d}"


def _known_rows(source: str, known: HubSet) -> Iterator[Any]:
    if not known.files:
        yield from _load(source, known.dataset, known.config, known.split)
        return
    from huggingface_hub import hf_hub_download

    for name in known.files:
        try:
            path = hf_hub_download(known.dataset, filename=name, repo_type="dataset")
        except Exception as error:  # hub or network
            raise UserError(_cannot(source, error)) from None
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())


def _dataset_rows(source: str, name: str, split: str) -> Iterator[Any]:
    data = _load(source, name, None, split or None)
    if not split:
        if len(data) > 1 and "test" not in data:
            splits = ", ".join(f"{source}:{split}" for split in data)
            raise UserError(f"prompts.source {source}: which split? {splits}")
        data = data["test"] if "test" in data else next(iter(data.values()))
    yield from data


def _load(source: str, name: str, config: str | None, split: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"prompts.source {source}: not without a package: pip install datasets\n"
            f"names of their own are {', '.join(f'hf:{name}' for name in HUB_SETS)}"
        ) from None
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # hub, network, parser: whatever it is, the user asked for this data set
        raise UserError(_cannot(source, error)) from None


def _cannot(source: str, error: Exception) -> str:
    return f"prompts.source {source}: the data set cannot be loaded: {reason(error)}"
