"""The target LLM: load it, capture its decoder layers, say which kernels it really calls."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from dflash_eval.cache import DTYPES
from dflash_eval.config import TargetConfig
from dflash_eval.errors import RunError, Stopped, UserError
from dflash_eval.machine import pick_device, rank_devices
from dflash_eval.sources import fingerprint, resolve

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
MODEL_FILES = (*TEXT_FILES, "*.safetensors")
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}  # what pip calls the packages


@dataclass
class Target:
    model: Any
    layers: nn.ModuleList
    device: torch.device
    kernels: dict[str, str]

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def head(self) -> dict[str, Tensor]:
        """`embed_tokens.weight`, `lm_head.weight` (absent when tied) and the final `norm.weight` (where found)."""
        embedding = self.model.get_input_embeddings().weight
        tensors = {"embed_tokens.weight": embedding}
        head = self.model.get_output_embeddings().weight
        if head is not embedding and not (head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape):
            tensors["lm_head.weight"] = head
        norm = final_norm(self.model, self.layers)
        if norm is not None:
            tensors["norm.weight"] = norm.weight
        return tensors


@dataclass(frozen=True)
class TargetFiles:
    """Where a target's files lie; known without loading it."""

    folder: Path
    gguf: str | None

    @classmethod
    def find(cls, config: TargetConfig, weights: bool = True) -> TargetFiles:
        """Without `weights` a hub's are not fetched: enough for the tokenizer and the configs."""
        path = resolve(config.model, config.revision, MODEL_FILES if weights else TEXT_FILES)
        if path.is_dir():
            return cls(path, None)
        if path.suffix != ".gguf":
            raise UserError(f"{config.model}: a target is a model folder, a hub id or a .gguf file")
        return cls(path.parent, path.name)

    def fingerprint(self) -> str:
        return fingerprint(self.folder / self.gguf if self.gguf else self.folder)

    def check_weights(self) -> None:
        """Raises UserError naming the safetensors file that is missing or not whole, before minutes go into reading."""
        index = self.folder / "model.safetensors.index.json"
        there = sorted(path for path in self.folder.glob("*.safetensors") if path.is_file())
        try:
            listed = set(map(str, json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except FileNotFoundError:
            listed = set()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{index}: not a list of weights; fetch the target again") from None
        for path in [self.folder / name for name in sorted(listed)] or there:
            try:
                with safe_open(path, framework="pt"):
                    pass
            except FileNotFoundError:
                raise UserError(f"{path}: missing, though {index.name} lists it; fetch the target again") from None
            except SafetensorError as error:
                raise UserError(f"{path}: truncated or damaged ({error}); fetch the target again") from None

    def arguments(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf} if self.gguf else {}


def load_tokenizer(files: TargetFiles, config: TargetConfig) -> Any:
    with load_errors(config):
        return AutoTokenizer.from_pretrained(
            files.folder, trust_remote_code=config.trust_remote_code, **files.arguments()
        )


def load_generation_config(files: TargetFiles) -> Any:
    """The target's generation defaults; None where it has none of its own."""
    if files.gguf or not (files.folder / "generation_config.json").exists():
        return None
    with suppress(OSError, ValueError):
        return GenerationConfig.from_pretrained(files.folder)
    return None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, sorted(tokenizer.all_special_ids)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def load_target(files: TargetFiles, config: TargetConfig) -> Target:
    """Load a causal LM, or the language model of a multimodal one, for inference.

    Raises UserError for what cannot be loaded, weights that do not fit the config among it.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = pick_device(config.device)
    restore_kernels()
    with load_errors(config):
        if not files.gguf:
            files.check_weights()
        auto = AutoModelForCausalLM if files.gguf else _model_class(files, config)[0]  # a GGUF's config is slow to read
        model, report = auto.from_pretrained(
            files.folder,
            dtype=DTYPES[config.dtype],
            **_placement(config, device),
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,  # said below, with names
            output_loading_info=True,
            **files.arguments(),
        )
        _check_fitting(model, report, config)
    model.eval()
    if config.kernels == "torch":
        use_fallbacks(model)
    return Target(model, find_layers(model), model.get_input_embeddings().weight.device, kernels_of(model))


def _check_fitting(model: Any, report: dict[str, Any], config: TargetConfig) -> None:
    """Raises UserError for parameters that the weights did not give: transformers fills them with random numbers."""
    wrong = [(key, "is missing") for key in sorted(report["missing_keys"])]
    wrong += [(key, f"is {list(there)}, not {list(asked)}") for key, there, asked in sorted(report["mismatched_keys"])]
    if wrong and not getattr(model.config, "quantization_config", None):  # whose tensors go by other names
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{config.model}: the weights do not fit config.json: {wrong[0][0]} {wrong[0][1]}{more}; "
            "fetch the target again"
        )


def skeleton(files: TargetFiles, config: TargetConfig) -> Any:
    """The target without weights, on the meta device."""
    restore_kernels()
    with load_errors(config):
        auto, described = _model_class(files, config)
        with torch.device("meta"):
            return auto.from_config(described, trust_remote_code=config.trust_remote_code)


def layer_count(files: TargetFiles, config: TargetConfig) -> int:
    """How many decoder layers the target's config says it has; no weights are read."""
    with load_errors(config):
        layers: int = _model_class(files, config)[1].get_text_config().num_hidden_layers
    return layers


def _model_class(files: TargetFiles, config: TargetConfig) -> tuple[Any, Any]:
    """The transformers class that loads the target, and the target's config."""
    described = AutoConfig.from_pretrained(
        files.folder, trust_remote_code=config.trust_remote_code, **files.arguments()
    )
    remote = config.trust_remote_code and hasattr(described, "auto_map")
    if type(described) in AutoModelForCausalLM._model_mapping or remote:
        return AutoModelForCausalLM, described
    return AutoModelForImageTextToText, described


def _placement(config: TargetConfig, device: torch.device) -> dict[str, Any]:
    if config.device_map is None or device.type != "cuda":
        return {"device_map": {"": device}}
    mine = {gpu.index for gpu in rank_devices()}  # ranks of one machine share out its GPUs
    room = {i: torch.cuda.mem_get_info(i)[0] if i in mine else 0 for i in range(torch.cuda.device_count())}
    return {"device_map": config.device_map} | ({"max_memory": room} if len(mine) < len(room) else {})


@contextmanager
def load_errors(config: TargetConfig) -> Iterator[None]:
    """Turn what transformers says about unreadable model files, in exceptions of any kind, into one plain error."""
    try:
        yield
    except (UserError, RunError, Stopped, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{config.model}: cannot be loaded as a target: {said[:300]}") from error


def find_layers(model: Any) -> nn.ModuleList:
    """The decoder layers: the module list as long as the text config says. Raises UserError naming the lists seen."""
    count = model.config.get_text_config().num_hidden_layers
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = [name for name, module in lists.items() if len(module) == count]
    decoder = [name for name in fitting if not any(part in name for part in ("visual", "vision", "audio", "encoder"))]
    if len(decoder) != 1:
        seen = ", ".join(f"{name} ({len(module)})" for name, module in list(lists.items())[:8]) or "none"
        raise UserError(f"{type(model).__name__}: cannot tell its {count} decoder layers; module lists seen: {seen}")
    return lists[decoder[0]]


def final_norm(model: Any, layers: nn.ModuleList) -> Any:
    """The norm that stands beside the decoder layers."""
    for module in model.modules():
        if any(child is layers for child in module.children()):
            for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm"):
                if hasattr(module, name):
                    return getattr(module, name)
    return None


def kernels_of(model: Any, device: torch.device | None = None) -> dict[str, str]:
    """Which implementation each of the target's exchangeable functions is bound to, e.g.

    {"attention": "sdpa", "chunk_gated_delta_rule": "fla 0.6.0", "causal_conv1d_fn": "torch"}. transformers binds such
    a function to its package when the modelling file is imported, and calls it on the devices that it knows the package
    to run on; the binding is read, not guessed from what is installed. device: where the model is to run, if not where
    it is.
    """
    found = {"attention": str(getattr(model.config, "_attn_implementation", "?"))}
    for name, (_, package) in _bound_functions(model, device or model.device).items():
        found[name] = f"{package} {_version(package)}" if package else "torch"
    return found


def _bound_functions(model: Any, device: torch.device) -> dict[str, tuple[str, str | None]]:
    """name → (package that offers a kernel, package that is really called or None for the torch fallback)."""
    return {name.removeprefix("torch_"): packages for _, name, _, packages in _bindings(model, device)}


def _bindings(model: Any, device: torch.device) -> Iterator[tuple[Any, str, Any, tuple[str, str | None]]]:
    """(modelling module, the function's name there, the function, packages as in `_bound_functions`)."""
    for module in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, bound in list(vars(module).items()):
            function = _plain(bound)
            outer = _closure(function)
            implementation, package = outer.get("implementation"), outer.get("package")
            if callable(implementation) and isinstance(package, str):
                root = implementation.__module__.partition(".")[0]
                devices = outer.get("supported_devices")  # since transformers 5.25; None: all
                called = root == package and (devices is None or device.type in devices)
                yield module, name, function, (package, package if called else None)


def _plain(bound: Any) -> Any:
    """The function that transformers made, which the package kernels, where installed, puts into a module of its own,
    and `shield_kernels` behind another."""
    bound = getattr(bound, "_torchdynamo_orig_callable", bound)
    return _closure(type(bound).forward).get("func") if isinstance(bound, nn.Module) else bound


def _closure(function: Any) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals if getattr(function, "__closure__", None) else {}


def shield_kernels(model: Any) -> None:
    """Make torch.compile call the kernels that the target's functions are bound to, rather than look into them.

    transformers takes the torch fallback where a function is traced for an export, and torch 2.11 says so of every
    compilation: the compiled target would silently run without its kernels.
    """
    for module, name, function, (_, called) in _bindings(model, model.device):
        if called and not hasattr(getattr(module, name), "_torchdynamo_orig_callable"):
            setattr(module, name, torch.compiler.disable(function))


REPLACED: dict[tuple[str, str], Any] = {}  # (modelling module, name) → what `use_fallbacks` put aside


def use_fallbacks(model: Any) -> None:
    """Bind the target's exchangeable functions to their torch fallbacks, until a target is loaded again."""
    for module, name, function, (package, called) in _bindings(model, model.device):
        if called:
            REPLACED[module.__name__, name] = getattr(module, name)
            setattr(module, name, _fallback(inspect.unwrap(function), package))


def _fallback(implementation: Callable[..., Any], package: str) -> Callable[..., Any]:
    """As transformers binds it where `package`, which offers a kernel, is not installed; `_bindings` reads both."""
    known = tuple(inspect.signature(implementation).parameters)

    def bound(*arguments: Any, **named: Any) -> Any:
        assert package  # holds it in the closure
        return implementation(*arguments, **{key: value for key, value in named.items() if key in known})

    return bound


def restore_kernels() -> None:
    """Undo `use_fallbacks`."""
    for (module, name), function in REPLACED.items():
        setattr(sys.modules[module], name, function)
    REPLACED.clear()


def fallbacks(model: Any, required: Sequence[str], device: torch.device) -> dict[str, list[str]]:
    """Package → the target's functions that it offers and that would run on the torch fallback on `device` instead."""
    found: dict[str, list[str]] = {}
    for name, (offered, called) in sorted(_bound_functions(model, device).items()):
        if offered in required and called is None:
            found.setdefault(offered, []).append(name)
    return dict(sorted(found.items()))


def how_to_have(packages: Iterable[str]) -> str:
    """What makes these packages' kernels run."""
    absent = [package for package in packages if _version(package) == "?"]
    if not absent:
        return "they run on a GPU alone: set target.device"
    return f"install what is missing (pip install {' '.join(DISTRIBUTIONS[package] for package in absent)})"


def require_kernels(model: Any, config: TargetConfig) -> None:
    """Raises UserError for a required kernel that the target would not run on."""
    missing = fallbacks(model, config.required(), pick_device(config.device))
    if missing:
        functions = ", ".join(name for names in missing.values() for name in names)
        raise UserError(
            f"{config.model}: {functions} would run on the torch fallback, but the config asks for "
            f"{', '.join(missing)}\n{how_to_have(missing)} "
            "or set target.require_kernels: [] and target.kernels: auto"
        )


def _version(package: str) -> str:
    try:
        return version(DISTRIBUTIONS.get(package, package))
    except PackageNotFoundError:
        return "?"
