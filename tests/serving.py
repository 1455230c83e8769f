"""An inference server over real HTTP for the tests: the APIs of vLLM, SGLang and llama.cpp, with faults on demand."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Answer = Callable[[list[int], int], list[int]]  # prompt ids, most new tokens → completion ids
IDS = ("vllm", "sglang", "old vllm", "llama.cpp", "pieces", "none")  # how token ids are told


def greedy(folder: Path) -> Answer:
    """The target's own answers, token by token with nothing remembered: the slow loop."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stops, lock = model.generation_config.eos_token_id, threading.Lock()

    def answer(prompt: list[int], most: int) -> list[int]:
        ids = list(prompt)
        with torch.inference_mode(), lock:
            while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] not in stops):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return answer


class Serving:
    """Runs while its context is open. `faults` is told the text of each completion request and how often it came."""

    def __init__(
        self,
        tokenizer: Any,
        answer: Answer,
        stops: list[int],
        *,
        models: tuple[str, ...] = ("target",),
        ids: str = "vllm",
        faults: Callable[[str, int], str | None] = lambda text, times: None,
        refuse: tuple[str, ...] = (),
        key: str | None = None,
        reasoning: tuple[str, str] | None = None,
        change: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply,
        delay: float = 0.0,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.tokenizer, self.answer, self.stops = tokenizer, answer, stops
        self.models, self.ids, self.faults, self.refuse, self.key = models, ids, faults, refuse, key
        self.reasoning, self.change, self.delay = reasoning, change, delay
        self.cycles = 0  # verification steps of the pretended speculative decoding, three tokens a step; 0 is none
        self.drafts = self.accepted = 0
        self.average: float | None = None  # of SGLang's /server_info
        self.asked: Counter[str] = Counter()  # completion requests by text, those of the client's check left out
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that leave are part of the tests
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Serving:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        serving = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def send(self, status: int, content: Any, **headers: str) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def error(self, status: int, words: str, **headers: str) -> None:
                self.send(status, {"error": {"message": words}}, **headers)

            def denied(self) -> bool:
                if serving.key and self.headers.get("Authorization") != f"Bearer {serving.key}":
                    self.error(401, f"Incorrect API key: {self.headers.get('Authorization')}")
                    return True
                return False

            def do_GET(self) -> None:
                if self.denied():
                    return
                if self.path == "/v1/models" and serving.models:
                    self.send(200, {"data": [{"id": name, "root": name} for name in serving.models]})
                elif self.path == "/metrics" and serving.cycles:
                    counts = {"drafts": serving.drafts, "accepted_tokens": serving.accepted, "draft_tokens": 99}
                    lines = [f'vllm:spec_decode_num_{k}_total{{engine="0"}} {float(v)}' for k, v in counts.items()]
                    self.send(200, "\n".join(["# HELP x", *lines, ""]).encode())
                elif self.path == "/server_info" and serving.average:
                    self.send(200, {"internal_states": [{"avg_spec_accept_length": serving.average}]})
                else:
                    self.error(404, "Not Found")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.denied():
                    return
                with serving.lock:
                    serving.busy += 1
                    serving.most_busy = max(serving.busy, serving.most_busy)
                try:
                    serving.respond(self, body)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                finally:
                    with serving.lock:
                        serving.busy -= 1

        return Handler

    def respond(self, handler: Any, body: dict[str, Any]) -> None:
        if handler.path not in ("/v1/chat/completions", "/v1/completions", "/generate"):
            handler.error(404, "Not Found")
            return
        native = handler.path == "/generate"
        most = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        text = str(body.get("messages", body.get("prompt", body.get("input_ids"))))
        if "messages" in body:
            text = body["messages"][-1]["content"]
        check = most == 4  # the client's check
        with self.lock:
            self.bodies.append(body)
            if not check:
                self.asked[text] += 1
        if not native and self.models and body["model"] not in self.models:
            handler.error(404, f"The model `{body['model']}` does not exist.")
            return
        for field in self.refuse:
            if body.get(field):
                handler.error(400, f"{field} is not supported")
                return
        time.sleep(0 if check else self.delay)
        fault = None if check else self.faults(text, self.asked[text])
        if fault == "429":
            handler.error(429, "too many requests", Retry_After="0")
        elif fault == "429 for a second":
            handler.error(429, "too many requests", Retry_After="1")
        elif fault in ("400", "500", "503"):
            handler.error(int(fault), "something of the server's own")
        elif fault == "hang":
            self.closing.wait(30)
            handler.close_connection = True
        else:
            if native:
                prompt = body["input_ids"]
            elif "messages" in body:
                prompt = self.tokenizer.apply_chat_template(
                    body["messages"],
                    add_generation_prompt=True,
                    return_dict=False,
                    **body.get("chat_template_kwargs", {}),
                )
            else:
                prompt = self.tokenizer(body["prompt"])["input_ids"]
            data = json.dumps(self.change(self._reply(handler.path, body, prompt, most))).encode()
            if fault == "no choices":
                data = b'{"choices": [], "meta_info": 3}'
            elif fault == "truncated":
                data = data[: len(data) // 2]
            if fault == "reset":
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data[: len(data) // 2])
                handler.wfile.flush()
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                handler.connection.close()
                handler.close_connection = True
                raise ConnectionResetError
            handler.send(200, data)

    def _reply(self, path: str, body: dict[str, Any], prompt: list[int], most: int) -> dict[str, Any]:
        ids = self.answer(prompt, most)
        stopped = ids[-1] in self.stops
        shown = ids[:-1] if stopped else ids
        text = self.tokenizer.decode(shown, skip_special_tokens=True)
        verified = -(-(len(ids) - 1) // 3)  # three tokens a step
        with self.lock:
            if most != 4:
                self.drafts += verified * (self.ids == "vllm" and self.cycles)
                self.accepted += (len(ids) - 1 - verified) * (self.ids == "vllm" and self.cycles)
        meta = {"spec_verify_ct": verified, "spec_accept_length": len(ids) / max(1, verified)} if self.cycles else {}
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if path == "/generate":
            kind = {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": most}
            reply = {"text": text, "meta_info": {"finish_reason": kind, **counts, **meta}}
            if self.ids == "sglang":
                reply["output_ids"] = ids
            elif body.get("return_logprob"):
                reply["meta_info"]["output_token_logprobs"] = [[-0.1, token, None] for token in ids]
            return reply
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length"}
        reply = {"model": body["model"], "choices": [choice], "usage": counts}
        if path == "/v1/completions":
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", "content": text}
            if self.reasoning:
                field, end = self.reasoning
                thought, _, rest = text.partition(end)
                choice["message"] = {"role": "assistant", "content": rest, field: thought}
        pieces = [self.tokenizer.decode([token]) for token in ids]
        if body.get("return_token_ids") and self.ids in ("vllm", "sglang"):
            choice["token_ids"] = ids
            (reply if self.ids == "vllm" else choice)["prompt_token_ids"] = prompt
            if body.get("return_meta_info") and self.ids == "sglang":
                choice["meta_info"] = meta
        if body.get("logprobs") and self.ids == "old vllm" and body.get("return_tokens_as_token_ids"):
            choice["logprobs"] = {"content": [{"token": f"token_id:{token}"} for token in ids]}
        if body.get("logprobs") and self.ids == "llama.cpp":
            entries = zip(ids, pieces, strict=True)
            choice["logprobs"] = {"content": [{"id": token, "token": piece} for token, piece in entries]}
        if body.get("logprobs") and self.ids == "pieces":
            if path == "/v1/completions":
                choice["logprobs"] = {"tokens": pieces}
            else:
                choice["logprobs"] = {"content": [{"token": piece} for piece in pieces]}
        return reply
