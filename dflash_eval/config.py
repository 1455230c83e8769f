"""The config: one YAML file that ties the two phases together. First its schema, then how a file is read."""

from __future__ import annotations

import difflib
import json
import os.path
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from dflash_eval.errors import UserError
from dflash_eval.sources import step_checkpoints


def _problem(message: str, *at: str | int) -> PydanticCustomError:
    """An error that reads "<dotted key> <message>"; `at` leads from what is being validated to the key."""
    return PydanticCustomError("config", "{message}", {"message": message, "at": at})


def _folder_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
        rule = 'up to 100 letters, digits, ".", "_" or "-", the first not "."'
        raise _problem(f"must be a folder name ({rule}), not {_shown(value)}")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise _problem(f"must be auto, cpu, cuda or cuda:<number>, not {_shown(value)}")
    return value


def _url(value: str) -> str:
    try:
        whole = bool(urlsplit(value).hostname) and urlsplit(value).port != 0
    except ValueError:
        whole = False
    if not whole:  # not shown: it may hold a password
        raise _problem("must be the URL of a server, as http://127.0.0.1:30000")
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):  # not shown: it may be the key itself
        raise _problem("must be the name of an environment variable, not the key itself")
    return value


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Index = Annotated[int, Field(ge=0, lt=2**63)]
Nodes = Annotated[int, Field(ge=1, le=10**6)]  # more take hours
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Device = Annotated[str, AfterValidator(_device)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Literal["bfloat16", "float16", "float32"]
# YAML has lists and strings where the schema has tuples and paths: these two alone are converted.
Layers = Annotated[tuple[Index, ...], Field(strict=False)]
Budgets = Annotated[
    tuple[Nodes, ...], Field(strict=False, min_length=1), AfterValidator(lambda n: tuple(sorted(set(n))))
]
File = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(os.path.expanduser(path)))]


class Section(BaseModel):
    """Unknown keys are errors, types are not coerced, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class TargetConfig(Section):
    """The LLM that a drafter drafts for."""

    model: Text
    """Hugging Face id, local folder, or package:<module>/<file.gguf>."""
    revision: Text | None = None
    dtype: Dtype = "bfloat16"
    device: Device = "auto"
    device_map: Literal["auto"] | None = None
    """"auto" shards a large target over this machine's GPUs."""
    require_kernels: Annotated[tuple[Literal["fla", "causal_conv1d"], ...], Field(strict=False)] = ()
    """Refuse to extract where one of these would be replaced by a fallback."""
    kernels: Literal["auto", "torch", "fla"] = "auto"
    """auto: what transformers finds installed; torch: its fallbacks all the same; fla: not without fla."""
    trust_remote_code: bool = False

    def required(self) -> tuple[str, ...]:
        """The packages without whose kernels nothing is to be extracted."""
        if self.kernels == "torch":
            return ()
        return tuple(dict.fromkeys((*self.require_kernels, *(("fla",) if self.kernels == "fla" else ()))))


class PromptsConfig(Section):
    """What the target is asked."""

    source: Text = "builtin:coding-10"
    """builtin:<set>, a JSONL path, hf:<set> as humaneval or mt-bench, or hf:<dataset>[:<split>]."""
    limit: Count | None = None
    """Only the first so many prompts."""
    system: str | None = None
    enable_thinking: bool = False
    """Passed to a chat template that knows the word."""
    raw: bool = False
    """The texts go in as they are, without the chat template."""

    @model_validator(mode="after")
    def _raw_has_no_system(self) -> PromptsConfig:
        if self.raw and self.system is not None:
            raise _problem("must be false: prompts.system needs the chat template", "raw")
        return self


class ServerConfig(Section):
    """An inference server to ask for completions."""

    base_url: Annotated[str, Field(pattern=r"^https?://\S+$"), AfterValidator(_url)] = "http://127.0.0.1:30000"
    api: Literal["openai", "sglang"] = "openai"
    """openai: /v1/chat/completions (/v1/completions for raw prompts); sglang: /generate, token ids in and out."""
    model: Text | None = None
    """The name that the server knows the target by, where it is not target.model."""
    api_key_env: Annotated[str, AfterValidator(_variable)] | None = None
    """The environment variable that holds the API key."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    concurrency: Count = 8
    """Requests under way at once."""
    retries: Index = 6
    """Of a request that met 429, 5xx, a timeout, a dropped connection or a damaged answer. With six, and a wait that
    doubles from 1 s, a server may be gone for a minute; where one request in five fails, one in 80,000 is given up."""


class CompletionsConfig(Section):
    """Where the target's answers come from."""

    source: Literal["generate", "server", "file"] = "generate"
    """generate: here, in batches; server: from a running engine; file: read."""
    file: File | None = None
    """JSONL: id, prompt_ids, completion_ids (or text)."""
    server: ServerConfig = ServerConfig()
    max_new_tokens: Count = 512
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0 is greedy."""
    top_k: Index = 0
    """Of a temperature above 0: sample among the so many most probable tokens; 0 is all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of a temperature above 0: sample among the fewest most probable tokens that hold this probability."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _file_is_named(self) -> CompletionsConfig:
        if self.source == "file" and self.file is None:
            raise _problem("is missing, and completions.source: file reads it", "file")
        return self


class ExtractConfig(Section):
    """What of the target's run is kept."""

    layers: Literal["auto"] | Layers = "auto"
    """auto is the union over the drafters' target layers; else a list of layers, counted from 0."""
    extra_layers: Literal["neighbours"] | Layers = ()
    """Kept beside `layers`, for drafters to come; neighbours are those one below and one above each of the others,
    which `diagnose` tries."""
    target_stats: bool = True
    """Also keep argmax and log-probability of each completion token."""
    store: Literal["bfloat16", "float8"] | None = None
    """Smaller than the target's dtype: float8 is e4m3 with a scale for each token and layer."""
    max_batch_tokens: Count = 8192
    shard_bytes: Count = 2**31
    save_head: bool = True
    """Copy embedding, final norm and LM head, so that evaluate never needs the target."""

    @field_validator("layers", "extra_layers", mode="before")
    @classmethod
    def _word_or_list(cls, value: Any, info: ValidationInfo) -> Any:
        word = "auto" if info.field_name == "layers" else "neighbours"
        listed = isinstance(value, list | tuple) and all(type(layer) is int and layer >= 0 for layer in value)
        if listed or value == word:
            return value
        raise _problem(f'must be "{word}" or a list of layer numbers from 0 up, not {_shown(value)}')


class DrafterOverrides(Section):
    """What a checkpoint's own config gets wrong or leaves out."""

    block_size: Annotated[int, Field(ge=2)] | None = None
    mask_token_id: Index | None = None
    target_layer_ids: Annotated[tuple[Index, ...], Field(strict=False, min_length=1)] | None = None
    sliding_window: Count | None = None
    is_causal: bool | None = None
    """Of the sliding-window layers, inside the block."""
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class DrafterSpec(Section):
    """One drafter to judge."""

    name: Text
    checkpoint: Text
    """Hugging Face id, local folder or file, or package:<module>/<folder>; runs/mine/step-* is a drafter a match."""
    reference: bool = False
    """The others are compared with this one; at most one."""
    overrides: DrafterOverrides = DrafterOverrides()


class CostConfig(Section):
    """What a cycle costs, batch size 1; `dflash-eval bench cost` measures it."""

    draft_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Of one block."""
    verify_ms: Annotated[dict[Count, Milliseconds], Field(min_length=2)]
    """Of the target, by the tokens that it reads at once: {1: 20, 16: 21, 65: 23}; lines between."""

    @field_validator("verify_ms")
    @classmethod
    def _tells_plain_decoding(cls, value: dict[int, float]) -> dict[int, float]:
        if 1 not in value:
            raise _problem("must tell what 1 token takes: that is plain decoding")
        return value


class EvaluateConfig(Section):
    """How the drafters are judged."""

    device: Device = "auto"
    dtype: Dtype = "float32"
    """What the drafter computes in."""
    anchors: Literal["auto", "replay", "all"] = "auto"
    """Draft where the walks stand, round by round, or everywhere; auto is all on a GPU. The walks are the same."""
    width: Count = 8
    """K of DDTree-K: a slot accepts a token among the K most probable."""
    budgets: Budgets = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Nodes of the best-first trees; kept sorted, each once."""
    cost: CostConfig | None = None
    """Tell tokens a second and the best budget."""
    bootstrap: Annotated[int, Field(ge=100, le=10**6)] = 10_000
    """Resamples behind an interval."""
    seed: Seed = 0


class Config(Section):
    """A target, its prompts and completions, what to cache, and the drafters to judge from the cache."""

    name: Annotated[str, AfterValidator(_folder_name)]
    target: TargetConfig
    prompts: PromptsConfig = PromptsConfig()
    completions: CompletionsConfig = CompletionsConfig()
    extract: ExtractConfig = ExtractConfig()
    drafters: Annotated[tuple[DrafterSpec, ...], Field(strict=False)] = ()
    evaluate: EvaluateConfig = EvaluateConfig()
    cache_dir: File = Path("cache")
    """cache/<name> where the file does not say."""
    results_dir: File = Path("results")
    """results/<name> where the file does not say."""

    @model_validator(mode="before")
    @classmethod
    def _default_folders(cls, data: dict[str, Any]) -> dict[str, Any]:
        name = str(data.get("name"))
        return {"cache_dir": Path("cache", name), "results_dir": Path("results", name), **data}

    @field_validator("drafters")
    @classmethod
    def _one_reference_and_own_names(cls, drafters: tuple[DrafterSpec, ...]) -> tuple[DrafterSpec, ...]:
        names: dict[str, int] = {}
        for i, drafter in enumerate(drafters):
            if names.setdefault(drafter.name, i) != i:
                twin = names[drafter.name]
                raise _problem(f"{_shown(drafter.name)} is the name of drafters.{twin} too", i, "name")
        first, *more = [i for i, drafter in enumerate(drafters) if drafter.reference] or [0]
        if more:
            raise _problem(f"must be false: drafters.{first} is the reference already", more[0], "reference")
        return drafters

    @model_validator(mode="after")
    def _something_to_extract(self) -> Config:
        if self.extract.layers == "auto" and not self.drafters:
            raise _problem(
                'is "auto", but there are no drafters; list the layers or add a drafter', "extract", "layers"
            )
        if not self.extract.layers and self.extract.extra_layers in ((), "neighbours"):
            raise _problem("must not be empty", "extract", "layers")
        return self

    def states_dtype(self) -> str:
        """What a cache's states are read as; stored they are smaller where extract.store is float8."""
        return "bfloat16" if self.extract.store == "bfloat16" else self.target.dtype

    def cache_settings(self) -> dict[str, Any]:
        """What a cache must agree with this config on, as far as the config alone tells."""
        kept = {"source", "max_new_tokens", "temperature", "top_k", "top_p", "seed"}
        return {
            "target": self.target.model_dump(mode="json", include={"model", "revision", "dtype", "kernels"}),
            "prompts": self.prompts.model_dump(mode="json"),
            "completions": self.completions.model_dump(mode="json", include=kept),
            "extract": self.extract.model_dump(mode="json", include={"store"}),
        }


Keys = tuple[str | int, ...]  # the way to a value: ("drafters", 1, "checkpoint")
Places = dict[Keys, str]  # where a value was given: "configs/demo.yaml:12" or "--set evaluate.width=4"

PROBLEMS = {
    "missing": "is missing",
    "model_type": "must be a section with keys of its own",
    "tuple_type": "must be a list",
    "path_type": "must be a path",
    "int_type": "must be a whole number",
    "string_type": "must be text (quote it)",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_pattern_mismatch": "must begin with http:// or https://",
}
SHOWN_ERRORS = 3


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and lay `dotted.key=value` overrides over it, in order; their values are YAML too.

    Raises UserError, a line for each of the first three errors: file and line (or the override), dotted key,
    what is wrong, and for an unknown key the nearest known one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        reason = "a folder, not a YAML file" if path.is_dir() else (error.strerror or str(error))
        raise UserError(f"{path}: the config cannot be read: {reason}") from None
    data, lines = _parse(text, lambda line: f"{path}:{line}")
    if not isinstance(data, dict):
        raise UserError(
            f"{path}: {'empty' if data is None else 'not a mapping'}; a config begins with name: and target:"
        )
    places: Places = {(): str(path)} | {keys: f"{path}:{line}" for keys, line in lines.items()}
    for override in overrides:
        data, places = _override(data, places, override)
    try:
        return _with_steps(Config.model_validate(data), places)
    except ValidationError as error:
        held = {detail["loc"][:-1] for detail in error.errors()}  # a list with a wrong entry is not too short as well
        details = [detail for detail in error.errors() if detail["type"] != "too_short" or detail["loc"] not in held]
        details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
        messages = [_message(detail, places) for detail in details]
        if len(messages) > SHOWN_ERRORS:
            messages[SHOWN_ERRORS - 1] += f" (and {len(messages) - SHOWN_ERRORS} more errors)"
        raise UserError("\n".join(messages[:SHOWN_ERRORS])) from None


def load_overrides(overrides: Sequence[str]) -> DrafterOverrides:
    """`key=value` overrides of a checkpoint's own config, in order. Raises UserError as `load_config` does."""
    data: Any = {}
    places: Places = {(): "--set"}
    for override in overrides:
        data, places = _override(data, places, override)
    try:
        return DrafterOverrides.model_validate(data)
    except ValidationError as error:
        raise UserError(
            "\n".join(_message(detail, places, DrafterOverrides) for detail in error.errors()[:3])
        ) from None


class _Loader(yaml.SafeLoader):
    """As in YAML 1.2, 1e6 is a number and 2026-01-31 is text (YAML 1.1: text and a date)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse(text: str, place: Callable[[int], str]) -> tuple[Any, dict[Keys, int]]:
    """The data, and the line of every key and list entry; `place` names a line in errors."""
    lines: dict[Keys, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _collect_lines(loader, node, (), lines, place)
        return loader.construct_document(node), lines
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{place(line)}: not valid YAML: a control character") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{place(line)}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise UserError(f"{place(1)}: not a config: nested too deeply, or an anchor holds itself") from None


def _collect_lines(
    loader: _Loader, node: yaml.Node, keys: Keys, lines: dict[Keys, int], place: Callable[[int], str]
) -> None:
    if isinstance(node, yaml.ScalarNode):
        try:
            loader.construct_object(node)
        except (ValueError, LookupError, AttributeError):  # what PyYAML raises for !!int x and the like
            kind = node.tag.rpartition(":")[2]
            raise UserError(f"{place(node.start_mark.line + 1)}: {_shown(node.value)} is no {kind}") from None
    elif isinstance(node, yaml.SequenceNode):
        for i, entry in enumerate(node.value):
            lines[(*keys, i)] = entry.start_mark.line + 1
            _collect_lines(loader, entry, (*keys, i), lines, place)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            tags = (":int",) if keys[-1:] == ("verify_ms",) else (":str", ":merge")
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(tags):
                raise UserError(f"{place(line)}: a key must be {'a whole number' if ':int' in tags else 'text'}")
            own = (*keys, key.value)
            if own in lines:
                raise UserError(f"{place(line)}: {_dotted(own)} stands on line {lines[own]} already")
            lines[own] = line
            _collect_lines(loader, value, own, lines, place)


def _with_steps(config: Config, places: Places) -> Config:
    """Every drafter whose checkpoint is a pattern replaced by one for each match, named after its step."""
    drafters: list[DrafterSpec] = []
    for i, spec in enumerate(config.drafters):
        if not re.search(r"[*?\[]", spec.checkpoint) or os.path.exists(os.path.expanduser(spec.checkpoint)):
            drafters.append(spec)
            continue
        place = f"{_place(places, ('drafters', i, 'checkpoint'))}: drafters.{i}"
        try:
            matches = step_checkpoints(spec.checkpoint)
        except UserError as error:
            raise UserError(f"{place}.checkpoint {error}") from None
        if spec.reference and len(matches) > 1:
            raise UserError(f"{place}.reference must be false, or its checkpoint one: it matches {len(matches)}")
        drafters += [
            spec.model_copy(update={"name": f"{spec.name}-{step}", "checkpoint": path}) for step, path in matches
        ]
    names = [spec.name for spec in drafters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{_place(places, ('drafters',))}: {_shown(twice)} is the name of two drafters, by their steps")
    return config.model_copy(update={"drafters": tuple(drafters)})


def _override(data: Any, places: Places, override: str) -> tuple[Any, Places]:
    place = f"--set {override}"
    name, equals, text = override.partition("=")
    keys = tuple(int(key) if re.fullmatch("[0-9]{1,6}", key) else key for key in name.strip().split("."))
    if not equals or "" in keys:
        raise UserError(f"{place}: not of the form dotted.key=value")
    value, _ = _parse(text, lambda _: place)
    kept = {known: where for known, where in places.items() if known[: len(keys)] != keys}
    return _replaced(data, keys, value, place), {**kept, keys: place}


def _replaced(node: Any, keys: Keys, value: Any, place: str) -> Any:
    """`node` with the value at `keys` replaced; sections that are not there yet are made."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(key, int):
        entries = node if isinstance(node, list) else []
        if key >= len(entries):
            raise UserError(f"{place}: no entry {key}: the file lists {len(entries)} there, counted from 0")
        return [*entries[:key], _replaced(entries[key], rest, value, place), *entries[key + 1 :]]
    if node is not None and not isinstance(node, dict):
        kind = "a list: put an entry's number between" if isinstance(node, list) else "a value, not a section"
        raise UserError(f"{place}: what stands before {_shown(key)} is {kind}")
    section = node or {}
    return {**section, key: _replaced(section.get(key), rest, value, place)}


def _message(error: ErrorDetails, places: Places, model: type[BaseModel] = Config) -> str:
    kind, context = error["type"], error.get("ctx", {})
    keys = (*error["loc"], *context.get("at", ()))
    place = _place(places, keys)
    if kind == "extra_forbidden":
        return f"{place}: unknown key {_shown(_dotted(keys))}; {_known_keys(keys, model)}"
    problem = PROBLEMS.get(kind) or error["msg"].replace("Input should be", "must be").replace("'", '"')
    problem = problem.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if kind not in ("config", "missing", "string_too_short", "too_short"):
        problem += f", not {_shown(error['input'])}"
    return f"{place}: {_dotted(keys)} {problem}"


def _place(places: Places, keys: Keys) -> str:
    """Where the value at `keys` was given, or what holds it."""
    return next(places[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in places)


def _known_keys(keys: Keys, model: type[BaseModel]) -> str:
    """What could have been meant by the last of `keys`, which begin at `model`."""
    for key in keys[:-1]:
        if isinstance(key, str):
            annotation = model.model_fields[key].annotation
            types = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            model = next(kind for kind in types if issubclass(kind, BaseModel))
    near = difflib.get_close_matches(str(keys[-1]), model.model_fields, n=1)
    if near:
        return f"did you mean {_shown(_dotted((*keys[:-1], near[0])))}?"
    return f"known here: {', '.join(model.model_fields)}"


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
