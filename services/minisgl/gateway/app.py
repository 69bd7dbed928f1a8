"""The routes of the API."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from minisgl.gateway.answers import ChatWording, CompletionWording, Wording
from minisgl.gateway.calls import Call
from minisgl.gateway.edge import App, Edge
from minisgl.gateway.errors import ApiError, bad_request, model_not_found
from minisgl.gateway.request import Prompt
from minisgl.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    check_vocabulary,
    describe,
)
from minisgl.gateway.service import Service
from minisgl.gateway.sse import Answer
from minisgl.messages import SamplingParams, pack_ids

WRITE_GRACE_SECONDS = 60.0
"""After a request's own time limit its client has this long to read the rest."""
SEED_BITS = 63


def build_app(service: Service) -> App:
    """The ASGI application of one gateway."""
    app = FastAPI(
        title="MiniSGLang",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_error_handlers(app)
    _add_probes(app, service)
    _add_tokens(app, service)
    _add_generation(app, service)
    config = service.config
    return Edge(app, service.keys, config.root_path, config.max_body_bytes)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: HttpRequest, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            said = {
                404: f"There is no {request.method} {request.url.path} here.",
                405: f"{request.url.path} does not take {request.method}.",
                400: "The body cannot be read as JSON in UTF-8.",
            }.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, said, headers=error.headers)
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: HttpRequest, error: RequestValidationError) -> Response:
        return bad_request(*describe(error.errors()[0])).response()

    @app.exception_handler(Exception)
    async def own_error(request: HttpRequest, error: Exception) -> Response:
        # The server closes the connection after this one; a client must not send into it again.
        close = {"Connection": "close"}
        return ApiError(500, "The gateway failed; its log says why.", headers=close).response()


def _add_probes(app: FastAPI, service: Service) -> None:
    # Some load balancers ask by HEAD. (FastAPI cannot describe two methods of one route.)
    probe = partial(app.api_route, methods=["GET", "HEAD"], include_in_schema=False)

    @probe("/health")
    async def health() -> Response:
        """Whether this process takes requests: the readiness of its pod."""
        if service.draining:
            return ApiError(503, "This gateway is shutting down.", code="shutting_down").response()
        return _json({"status": "ok"})

    @probe("/ready")
    async def ready() -> Response:
        """Whether a request would be served now."""
        error = service.missing()
        return _json({"status": "ready"}) if error is None else error.response()

    @probe("/metrics")
    async def metrics() -> Response:
        """The metrics of this gateway and of all groups, for Prometheus."""
        return Response(
            service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _add_tokens(app: FastAPI, service: Service) -> None:
    # One at a time: megabytes of text take seconds and, while they are at it, gigabytes.
    encoder = ThreadPoolExecutor(1, "tokenize")

    async def encoded(encode: Callable[..., list[int]], *args: Any) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(encoder, encode, *args)

    def card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "minisgl",
            "max_model_len": service.fleet.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        """The model that is served, by its id."""
        if model != service.model:
            raise model_not_found(model, service.model)
        return _json(card())

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        service.check_model(body.model)
        try:
            if body.messages is not None:
                messages = [message.plain() for message in body.messages]
                ids = await encoded(service.tokenizer.encode_chat, messages)
            else:
                special = body.add_special_tokens is not False
                ids = await encoded(service.tokenizer.encode, body.prompt or "", special)
        except ValueError as error:
            param = "prompt" if body.messages is None else "messages"
            raise bad_request(param, str(error)) from None
        limit = service.fleet.max_model_len
        return _json({"tokens": ids, "count": len(ids), "max_model_len": limit})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        check_vocabulary("tokens", body.tokens, service.vocabulary)
        return _json(
            {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens, False)}
        )


def _add_generation(app: FastAPI, service: Service) -> None:
    def prepare(body: GenerationRequest) -> list[SamplingParams]:
        """The parameters of each choice: choice i uses the seed + i."""
        service.check_model(body.model)
        body.check(service.vocabulary)
        seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
        return [body.sampling(seed + i) for i in range(body.choices)]

    def answer(call: Call, wording: Wording, body: GenerationRequest) -> Response:
        limit = service.config.request_timeout_seconds + WRITE_GRACE_SECONDS
        return Answer(
            call, wording, stream=bool(body.stream), limit=limit, close=lambda: service.end(call)
        )

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        """The assistant's next message."""
        samplings = prepare(body)
        prompt = Prompt(messages=[message.plain() for message in body.messages])
        call = service.start("chatcmpl", [prompt], samplings)
        return answer(
            call, ChatWording(call, service.model, service.tokenizer, body.wants_usage), body
        )

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        """What follows on each prompt."""
        samplings = prepare(body)
        prompts = [
            Prompt(text=given) if isinstance(given, str) else Prompt(ids=pack_ids(given))
            for given in body.prompt
        ]
        echoes = []
        if body.echo:
            decode = service.tokenizer.decode
            echoes = [
                given if isinstance(given, str) else await asyncio.to_thread(decode, given, False)
                for given in body.prompt
            ]
        call = service.start("cmpl", prompts, samplings)
        wording = CompletionWording(call, service.model, service.tokenizer, body.wants_usage)
        wording.echoes = echoes
        return answer(call, wording, body)
