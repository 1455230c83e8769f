import json
from dataclasses import dataclass
@dataclass(frozen=True)
class Prompt:
    id:str; turns:tuple
def load_prompts(c):
    r=[json.loads(l) for l in open(c.source)]
    return [Prompt(x["id"],(x["prompt"],)) for x in r]
def has_chat_template(t): return bool(t.chat_template)
def render_prompt(t,p,*,system,enable_thinking):
    return list(t.apply_chat_template([{"role":"user","content":p.turns[0]}],add_generation_prompt=True,return_dict=False))
def stop_token_ids(t,g):
    e=g.eos_token_id; return sorted(e if isinstance(e,list) else [e])
