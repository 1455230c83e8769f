"""A running inference server, asked over HTTP: the model it serves, completions, what its speculative decoding reaches.

Requests that meet a busy server or a bad line are tried again; what cannot be mended by that is one plain error.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import ssl
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from dflash_eval.config import ServerConfig
from dflash_eval.errors import RunError, UserError, reason
from dflash_eval.replies import ASK_FOR_IDS, BadReply, Reply, read_reply

T = TypeVar("T")
BACKOFF_S = 1.0  # before the first further try; doubles with each
LONGEST_WAIT_S = 300.0
CONNECT_S = 10.0
CHECK_RETRIES = 3  # a server that answers 500 to a field it does not know does so at each way of asking
BUSY = {408, 425, 429, 500, 502, 503, 504, 529}
REFUSED = {400, 413, 414, 415, 422, 501}
SPEC_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


class Refused(UserError):
    """The server does not take this request."""


class Broken(RunError):
    """The server fails on this request each time (500)."""


class Server:
    """Use as an async context. `check` first: it finds out the model's name and how token ids are given."""

    def __init__(self, config: ServerConfig, target: str, chat: bool) -> None:
        """target: the model that it should serve; chat: prompts are chats, not plain text."""
        self.config, self.target = config, target
        parts = urlsplit(config.base_url.rstrip("/"))
        self.url = urlunsplit((parts.scheme, parts.netloc, parts.path.removesuffix("/v1"), "", ""))
        self.shown = shown_url(config)
        self.path = "/generate" if config.api == "sglang" else "/v1/chat/completions" if chat else "/v1/completions"
        self.key = _key(config.api_key_env)
        self.model = config.model or target
        self.served: dict[str, str] = {}
        self.ask: dict[str, Any] = {}  # what is asked for beside a completion, to have its token ids
        self.tries_again = 0

    async def __aenter__(self) -> Server:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = httpx.Timeout(self.config.timeout_s, connect=min(CONNECT_S, self.config.timeout_s))
        limits = httpx.Limits(max_connections=self.config.concurrency + 1)
        # A proxy of the environment is not for this machine's own servers.
        self.client = httpx.AsyncClient(
            headers=headers, timeout=timeout, limits=limits, trust_env=not is_local(self.config)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.aclose()

    async def check(self, body: dict[str, Any]) -> None:
        """Raises UserError unless the server serves the target; finds the way to be given token ids.

        body: a request, of which a few tokens are asked in each way until one gives their ids.
        """
        self.served = await self._served_models()
        self.model = _choose(self.served, self.config.model, self.target, self.shown)
        short = {**body, "max_tokens": 4}
        if self.path == "/generate":
            short = {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 4}}
        *ways, self.ask = ASK_FOR_IDS[self.path]
        for way in ways:
            try:
                reply = await self.complete({**short, **way}, "of the check", lambda reply: reply, CHECK_RETRIES)
            except (Refused, Broken):  # perhaps for what is asked beside; the plain request tells
                continue
            if reply.ids or reply.pieces:
                self.ask = way
                return
        await self.complete(short, "of the check", lambda reply: reply)

    async def complete(
        self, body: dict[str, Any], name: str, accept: Callable[[Reply], T], most: int | None = None
    ) -> T:
        """One completion, as `accept` takes it from the reply or, by BadReply, asks for another try; most: retries,
        where they are fewer than the config's.

        Raises UserError for a request that the server refuses and RunError when no try succeeds.
        """
        body = {**body, **self.ask} | ({} if self.path == "/generate" else {"model": self.model})
        status, problem = 0, ""
        retries = self.config.retries if most is None else min(most, self.config.retries)
        for attempt in range(retries + 1):
            wait = BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5)
            status = 0
            try:
                response = await self._post(body)
                status = response.status_code
                if status == 200:
                    return accept(read_reply(self.path, _json(response)))
                if status not in BUSY:
                    raise self._refusal(response, name)
                problem = f"{status} {self._words(response)}"
                wait = max(wait, _retry_after(response.headers.get("Retry-After", "0")))
            except (BadReply, RunError) as error:
                problem = str(error)
            if attempt < retries:
                self.tries_again += 1
                await asyncio.sleep(min(wait, LONGEST_WAIT_S))
        kind = Broken if status == 500 else RunError
        raise kind(f"{self.shown}{self.path}: prompt {name!r}: {problem} ({retries + 1} tries)")

    async def spec_counters(self) -> tuple[float, float] | None:
        """vLLM's counts of drafts and of accepted draft tokens since it started; None where it offers none."""
        try:
            response = await self.client.get(f"{self.url}/metrics", timeout=CONNECT_S)
        except httpx.HTTPError:
            return None
        counts = []
        for name in SPEC_COUNTERS:
            pattern = rf"^{name}(?:_total)?(?:\{{[^}}]*\}})?\s+(\S+)"
            values = re.findall(pattern, response.text if response.status_code == 200 else "", flags=re.MULTILINE)
            counts.append(sum(map(float, values)) if values else None)
        drafts, accepted = counts
        return None if drafts is None or accepted is None else (drafts, accepted)

    async def average_accept_length(self) -> float | None:
        """SGLang's average since it started, over all that it served; None where it offers none."""
        for path in ("/server_info", "/get_server_info"):
            try:
                response = await self.client.get(self.url + path, timeout=CONNECT_S)
                states = response.json()["internal_states"] if response.status_code == 200 else []
                lengths = [float(state["avg_spec_accept_length"]) for state in states]
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                continue
            if lengths:
                return sum(lengths) / len(lengths)
        return None

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Raises RunError for a line that fails or is too slow, UserError for one that never will do."""
        try:
            return await asyncio.wait_for(self.client.post(self.url + self.path, json=body), self.config.timeout_s)
        except (httpx.TimeoutException, asyncio.TimeoutError):
            raise RunError(f"no answer in {self.config.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            self._check_tls(error)
            raise RunError(f"the connection failed: {reason(error)}") from None

    async def _served_models(self) -> dict[str, str]:
        """Names of the served models, those of the files they came from among them → the name to ask for."""
        names: dict[str, str] = {}
        for path in ("/v1/models", "/get_model_info"):
            try:
                response = await self.client.get(self.url + path, timeout=min(30.0, self.config.timeout_s))
            except httpx.HTTPError as error:
                self._check_tls(error)
                raise UserError(
                    f"{self.shown}{path}: no server answers there: {reason(error)}\n"
                    "start it, or mend completions.server.base_url"
                ) from None
            if response.status_code in (401, 403):
                raise self._refusal(response, "")
            try:
                payload = response.json() if response.status_code == 200 else {}
                rows = payload.get("data") or [] if path == "/v1/models" else [payload]
                for row in rows:
                    name = str(row.get("id") or row["model_path"])
                    names |= {alias: name for alias in (name, row.get("root")) if isinstance(alias, str)}
            except (ValueError, KeyError, AttributeError):  # not such a list
                continue
            if names:
                break
        return names

    def _check_tls(self, error: BaseException) -> None:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLError) or "SSL" in str(cause):
                raise UserError(
                    f"{self.shown}: TLS error: {reason(error)}\n"
                    "a server without TLS has http:// in completions.server.base_url; SSL_CERT_FILE names a CA of yours"
                ) from None
            cause = cause.__cause__ or cause.__context__

    def _refusal(self, response: httpx.Response, name: str) -> UserError:
        url, status, words = f"{self.shown}{self.path}", response.status_code, self._words(response)
        if status in (401, 403):
            what = f"the key in {self.config.api_key_env}" if self.key else "a request without a key"
            return UserError(
                f"{url}: the server refuses {what} ({status} {words})\n"
                "completions.server.api_key_env names the environment variable that holds the key"
            )
        if status in (404, 405) or 300 <= status < 400:
            return UserError(
                f"{url}: {status} {words}\n"
                "completions.server.base_url is the server's root, as http://127.0.0.1:30000; api: openai or sglang; "
                f"model: {self.model!r} was asked for"
            )
        kind = Refused if status in REFUSED else UserError
        return kind(f"{url}: the server refuses prompt {name!r}: {status} {words}")

    def _words(self, response: httpx.Response) -> str:
        """What the server says of an error, on one line, without the key."""
        words = " ".join(response.text.split())
        try:
            payload = json.loads(response.text)
            inner = payload.get("error", payload)
            words = str(inner.get("message", words) if isinstance(inner, dict) else inner)
        except (ValueError, AttributeError):
            pass
        words = " ".join((words or response.reason_phrase).split())[:300]
        return words.replace(self.key, "***") if self.key else words


def shown_url(config: ServerConfig) -> str:
    """The server's root for people to read: without a password."""
    parts = urlsplit(config.base_url.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.removesuffix("/v1"), "", ""))


def is_local(config: ServerConfig) -> bool:
    """Whether the server runs on this machine."""
    host = urlsplit(config.base_url).hostname or ""
    return host in {"localhost", "0.0.0.0", "::1", socket.gethostname(), socket.getfqdn()} or host.startswith("127.")


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"the environment variable {variable} is not set; completions.server.api_key_env names it")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {variable} holds characters that no API key has")
    return key


def _choose(served: dict[str, str], named: str | None, target: str, url: str) -> str:
    """The name to ask for: the one that the config gives, or the served one that is the target's."""
    if not served or named in served:
        return named or target
    names = ", ".join(list(served)[:5])
    if named is not None:
        raise UserError(f"{url} serves {names}, not {named!r}, which completions.server.model names")
    for alias, name in served.items():
        if alias == target or _last_part(alias) == _last_part(target):
            return name
    raise UserError(
        f"{url} serves {names}, target.model is {target}\n"
        f"if that is the same model, say so: completions.server.model: {next(iter(served))}"
    )


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise BadReply("the reply is not JSON: cut off or damaged") from None


def _retry_after(value: str) -> float:
    """Seconds that a server asks to wait: a number, or a date."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (when - datetime.now(timezone.utc if when.tzinfo else None)).total_seconds())
