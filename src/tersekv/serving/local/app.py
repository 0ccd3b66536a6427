"""An OpenAI-compatible server for one model, as a Starlette application.

    GET  /v1/models            the model
    POST /v1/chat/completions  answers of a chat, streamed or whole
    POST /v1/completions       continuations of a text

Requests are answered one after the other, in one thread. A request whose client leaves is stopped
before the next layer.

`transformers serve` can run with our cache, and is not used. In transformers 5.23 it ignores the
temperature of models that are greedy by default. It keeps no prompt, and answers wrong requests with
status 500. Its classes are no public interface either.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tersekv.errors import UserError
from tersekv.serving.local.answers import Answer, Stop, Stopped, Write
from tersekv.serving.local.engine import Engine
from tersekv.serving.local.requests import Request, RequestError, read

log = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between looks whether a client is still there."""

GRACE = 1
"""Seconds in which the last bytes are sent when the server is ended."""


class Server:
    """The routes of one model. name: as clients call it. most_tokens: of an answer, where a request
    names no number."""

    def __init__(self, name: str, engine: Engine, most_tokens: int) -> None:
        self.name, self._engine, self._most = name, engine, most_tokens
        self._thread = ThreadPoolExecutor(1, "answers")
        self._running: dict[Stop, asyncio.Future[Answer]] = {}
        self._ended = False
        self._created = int(time.time())

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {RequestError: _refuse, HTTPException: _refuse_route}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.end()
        self._thread.shutdown(cancel_futures=True)

    def end(self) -> None:
        """Stop all answers. Their clients get an error at once, without waiting for the running layer."""
        self._ended = True
        for stop, running in self._running.items():
            stop.set()
            running.cancel()

    async def _finished(self, running: asyncio.Future[Answer]) -> Answer:
        """Wait for an answer.

        Raises:
            Stopped: its client has left.
            RequestError: the answer failed, or the server was ended before.
        """
        try:
            return await running
        except asyncio.CancelledError as error:
            if not self._ended:
                raise
            raise RequestError("the server was ended before the end of the answer", status=503) from error
        except Stopped:
            raise
        except Exception as error:
            log.error("an answer failed", exc_info=error)
            text = f"the answer failed: {type(error).__name__}: {str(error)[:300]}"
            raise RequestError(text, status=500) from error

    async def models(self, request: HttpRequest) -> Response:
        """Answer a request for all models, or for one."""
        one = {"id": self.name, "object": "model", "created": self._created, "owned_by": "tersekv"}
        asked = request.path_params.get("name")
        if asked not in (None, self.name):
            raise RequestError(f"the model {asked!r} does not exist here", "model", 404, "model_not_found")
        return JSONResponse({"object": "list", "data": [one]} if asked is None else one)

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a request for a chat's next message."""
        return await self._complete(request, Form("chatcmpl-", "chat.completion", self.name))

    async def completions(self, request: HttpRequest) -> Response:
        """Answer a request for a text's continuation."""
        return await self._complete(request, Form("cmpl-", "text_completion", self.name))

    async def _complete(self, http: HttpRequest, form: Form) -> Response:
        try:
            body = json.loads(await http.body())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {str(error)[:100]}") from error
        request = read(body, self.name, form.is_chat, self._most)
        try:
            ids = self._engine.ids(request.prompt)
        except UserError as error:
            raise RequestError(str(error), "messages" if form.is_chat else "prompt") from error
        if request.stream:
            return StreamingResponse(self._events(http, form, request, ids), media_type="text/event-stream")
        async with self._answering(http, request, ids, lambda text: None) as running:
            try:
                answer = await self._finished(running)
            except Stopped:
                return Response(status_code=499)  # nobody reads it
        return JSONResponse(form.whole(answer, ids.shape[1]))

    async def _events(self, http: HttpRequest, form: Form, request: Request, ids: Any) -> AsyncIterator[str]:
        """Yield the events of a streamed answer."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def write(text: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, text)

        async with self._answering(http, request, ids, write) as running:
            running.add_done_callback(lambda _: pieces.put_nowait(None))
            if form.is_chat:
                yield _event(form.piece("", role=True))
            while (text := await pieces.get()) is not None:
                yield _event(form.piece(text))
            try:
                answer = await self._finished(running)
            except Stopped:
                return
            except RequestError as error:  # the status has been sent, so the error is an event
                yield _event(error.document())
                return
        yield _event(form.piece("", finish=_finish(answer)))
        if request.usage_in_stream:
            yield _event(form.document([], ".chunk") | {"usage": _usage(answer, ids.shape[1])})
        yield "data: [DONE]\n\n"

    @contextlib.asynccontextmanager
    async def _answering(
        self, http: HttpRequest, request: Request, ids: Any, write: Write
    ) -> AsyncIterator[asyncio.Future[Answer]]:
        """Run a request in the thread; stop it when its client leaves or nobody waits for it any more."""
        stop = Stop()

        async def watch() -> None:
            while not await http.is_disconnected():
                await asyncio.sleep(POLL)
            stop.set()

        watcher = asyncio.create_task(watch())
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, self._engine.answer, ids, request.sampling, write, stop)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits
        self._running[stop] = running
        try:
            yield running
        finally:
            stop.set()
            watcher.cancel()
            self._running.pop(stop)


class Web(uvicorn.Server):
    """uvicorn with the routes of a server. It ends answers first, because it waits for open requests."""

    def __init__(self, server: Server) -> None:
        super().__init__(uvicorn.Config(server.app(), log_level="warning", timeout_graceful_shutdown=GRACE))
        self._server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, then close the connections."""
        self._server.end()
        await super().shutdown(sockets)


class Form:
    """Form of the answers to one request. prefix: of its id. kind: value of `object`."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.kind, self._model = kind, model
        self._id, self._created = prefix + uuid.uuid4().hex, int(time.time())

    @property
    def is_chat(self) -> bool:
        """True for messages, False for a text's continuation."""
        return self.kind == "chat.completion"

    def document(self, choices: list[Any], suffix: str = "") -> dict[str, Any]:
        """Return a document with the given choices."""
        kind = self.kind + (suffix if self.is_chat else "")
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def whole(self, answer: Answer, prompt_tokens: int) -> dict[str, Any]:
        """Return the document of an answer that is not streamed."""
        text = {"message": {"role": "assistant", "content": answer.text}} if self.is_chat else {"text": answer.text}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": _finish(answer)}
        return self.document([choice]) | {"usage": _usage(answer, prompt_tokens)}

    def piece(self, text: str, role: bool = False, finish: str | None = None) -> dict[str, Any]:
        """Return the document of an event."""
        delta = {"role": "assistant", "content": text} if role else {"content": text} if text else {}
        choice = {"delta": delta} if self.is_chat else {"text": text}
        return self.document([{"index": 0, **choice, "logprobs": None, "finish_reason": finish}], ".chunk")


def _finish(answer: Answer) -> str:
    return "stop" if answer.ended else "length"


def _usage(answer: Answer, prompt_tokens: int) -> dict[str, Any]:
    new = len(answer.ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _event(document: Any) -> str:
    return f"data: {json.dumps(document)}\n\n"


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.document(), error.status)


async def _refuse_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}; this server has /v1/models, /v1/chat/completions "
    refused = RequestError(f"{text}and /v1/completions", status=error.status_code)
    return JSONResponse(refused.document(), error.status_code, headers=error.headers)
