"""A small OpenAI-like server that misbehaves on request, to test its clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

MAX_MODEL_LEN = 100


class SseServer:
    """Streams one chunk a token. `fault`: what goes wrong in each stream."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = 0
        self.most_open = 0
        self.url = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"data": [{"id": "first"}, {"id": "second"}]}

        @app.post("/tokenize")
        def tokenize(body: dict[str, Any]) -> Response:
            if self.fault == "no tokenize":
                return JSONResponse({"error": "what?"}, 404)
            return JSONResponse({"tokens": [5, 6, 7, 5], "max_model_len": MAX_MODEL_LEN})

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization"))
            if self.fault == "refusal":
                return JSONResponse({"error": {"message": "no room"}}, 429)
            return StreamingResponse(self._stream(body["max_tokens"]))

        return app

    async def _stream(self, tokens: int) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield b": keep-alive\n\n"
            for _ in range(tokens):
                await asyncio.sleep(0)
                yield event(choices=[{"text": "\u00e9", "finish_reason": None}])
                if self.fault == "error":
                    yield event(error={"message": "lost"})
                if self.fault == "broken off":
                    return
            told = tokens - 1 if self.fault == "one token less" else tokens
            # Cut in the middle of an event: chunks of HTTP are not events.
            usage = event(choices=[], usage={"completion_tokens": told, "prompt_tokens": 3})
            yield usage[:9]
            await asyncio.sleep(0)
            yield usage[9:] + b"data: [DONE]\n\n"
        finally:
            self.open -= 1

    async def __aenter__(self) -> "SseServer":
        config = uvicorn.Config(self.app(), port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        await self._task


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"
