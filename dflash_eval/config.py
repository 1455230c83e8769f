from pathlib import Path
from typing import Any, Literal
import yaml
from pydantic import BaseModel, ConfigDict, Field
class M(BaseModel):
    model_config=ConfigDict(extra="forbid",frozen=True)
class TargetConfig(M):
    model:str; revision:str|None=None; dtype:str="bfloat16"; device:str="auto"; device_map:str|None=None
    require_kernels:list[str]=[]; trust_remote_code:bool=False
class PromptsConfig(M):
    source:str="builtin:coding-10"; limit:int|None=None; system:str|None=None; enable_thinking:bool=False
class CompletionsConfig(M):
    source:str="generate"; file:Path|None=None; server:dict={}; max_new_tokens:int=512; temperature:float=0.; seed:int=0
class ExtractConfig(M):
    layers:Any="auto"; extra_layers:list[int]=[]; target_stats:bool=True; max_batch_tokens:int=8192; shard_bytes:int=2**31; save_head:bool=True
class DrafterOverrides(M):
    block_size:int|None=None; mask_token_id:int|None=None; target_layer_ids:tuple[int,...]|None=None; sliding_window:int|None=None; is_causal:bool|None=None; rope_theta:float|None=None
class DrafterSpec(M):
    name:str; checkpoint:str; reference:bool=False; overrides:DrafterOverrides=DrafterOverrides()
class EvaluateConfig(M):
    device:str="auto"; dtype:str="float32"; width:int=8; budgets:tuple[int,...]=(4,8,16,32,64,128,256,512,1024); bootstrap:int=10000; seed:int=0
class Config(M):
    name:str; target:TargetConfig; prompts:PromptsConfig=PromptsConfig(); completions:CompletionsConfig=CompletionsConfig(); extract:ExtractConfig=ExtractConfig(); drafters:list[DrafterSpec]=[]; evaluate:EvaluateConfig=EvaluateConfig(); cache_dir:Path=None; results_dir:Path=None
def load_config(path,overrides=()):
    r=yaml.safe_load(open(path)); r.setdefault("cache_dir",f"cache/{r['name']}"); r.setdefault("results_dir",f"results/{r['name']}")
    return Config(**r)
