"""Read requests of OpenAI's API: check each field, and name the one that is wrong or not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tersekv.serving.local.answers import Sampling

MOST_STOPS = 4
"""Stop strings that OpenAI's API allows."""

LEAST_TEMPERATURE = 0.001
"""Smaller ones are greedy, because logits divided by them overflow."""


class RequestError(Exception):
    """A request that is refused. status: of HTTP. field: name of the field that is wrong."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code

    def document(self) -> dict[str, Any]:
        """Return the body of the response, in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True)
class Request:
    """prompt: messages of a chat, a text, or token ids [1, T]."""

    prompt: list[dict[str, str]] | str | Tensor
    sampling: Sampling
    stream: bool
    usage_in_stream: bool


NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False, 0), "top_logprobs": (0,),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip
"""Fields that are not supported, with the values that ask for nothing."""


def read(body: Any, model: str, chat: bool, most_tokens: int) -> Request:
    """Return the request in a body. most_tokens: of the answer, where the request names no number.

    Raises:
        RequestError: a field is missing, wrong, or asks for something that is not supported.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is not a JSON object but {_kind(body)}")
    named = _field(body, "model", lambda v: isinstance(v, str) and bool(v), "the model's name as a string", model)
    if named != model:
        raise RequestError(
            f"the model {named!r} does not exist here; this server has {model!r}", "model", 404, "model_not_found"
        )
    for name, nothing in NOTHING.items():
        if body.get(name) is not None and body[name] not in nothing:
            raise RequestError(f"{name} is not supported by this server; leave it out", name)
    prompt = _messages(body) if chat else _prompt(body)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is not an object but {_kind(options)}", "stream_options")
    truth = "true or false"
    return Request(
        prompt,
        _sampling(body, most_tokens, chat),
        _field(body, "stream", lambda v: isinstance(v, bool), truth, False),
        _field(options, "include_usage", lambda v: isinstance(v, bool), truth, False),
    )


def _sampling(body: dict[str, Any], most_tokens: int, chat: bool) -> Sampling:
    def whole(least: int) -> Callable[[Any], bool]:
        return lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v < 2**63

    def number(least: float, most: float) -> Callable[[Any], bool]:
        return lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and least <= v <= most

    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    top_p = _field(body, "top_p", number(0, 1), "a number above 0 and up to 1", None)
    if top_p == 0:  # transformers needs a positive number; the most probable token alone is left either way
        top_p = 1e-6
    temperature = _field(body, "temperature", number(0, 2), "a number from 0 to 2", None)
    if temperature is not None:  # transformers takes no whole numbers
        temperature = float(temperature) if temperature >= LEAST_TEMPERATURE else 0.0
    return Sampling(
        _field(body, name, whole(1), "a whole number of at least 1", most_tokens),
        temperature,
        top_p,
        _field(body, "seed", whole(-(2**63)), "a whole number of 64 bits", None),
        _stop(body.get("stop")),
        continues=not chat,
    )


def _stop(given: Any) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop is not a text or a list of up to {MOST_STOPS} texts that are not empty", "stop")
    return tuple(stops)


def _prompt(body: dict[str, Any]) -> str | Tensor:
    given = body.get("prompt")
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        (given,) = given
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(v) is int and abs(v) < 2**63 for v in given):
        return torch.tensor([given])
    raise RequestError("prompt is not a text, a list with one text, or a list of token ids", "prompt")


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError("messages is not a list of at least one message", "messages")
    return [_message(one, f"messages[{i}]") for i, one in enumerate(given)]


def _message(given: Any, place: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise RequestError(f"{place} is not an object but {_kind(given)}", place)
    role, content = given.get("role"), given.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise RequestError(f"the role of {place} is {role!r}; give system, user or assistant", f"{place}.role")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise RequestError(f"the content of {place} is not a text or a list of parts", f"{place}.content")
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise RequestError(f"{place} has a part that is not text; only text is supported", f"{place}.content")
    # templates know the older name alone
    return {"role": "system" if role == "developer" else role, "content": "".join(part["text"] for part in parts)}


def _field(body: dict[str, Any], name: str, allowed: Callable[[Any], bool], what: str, default: Any) -> Any:
    """Return a field of a request, or the default where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not allowed(value):
        shown = repr(value) if isinstance(value, (int, float, str, bool)) else _kind(value)
        raise RequestError(f"{name} is {shown[:80]}; give {what}", name)
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
