"""A naive gateway: FastAPI for clients, httpx for the backend, a semaphore between them.

    python naive.py BACKEND_URL PORT

The benchmark compares our gateway with this one, so nothing here is tuned.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

MAX_CONCURRENT_REQUESTS = 100
QUEUE_WAIT_S = 60.0
REQUEST_S = 120.0


def create_app(backend: str) -> FastAPI:
    """The gateway in front of ``backend``."""
    permits = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
    client = httpx.AsyncClient(base_url=backend, timeout=REQUEST_S)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan)

    async def relay(body: dict[str, object]) -> AsyncIterator[bytes]:
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for chunk in answer.aiter_bytes():
                    yield chunk
        finally:
            permits.release()

    @app.get("/v1/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        try:
            await asyncio.wait_for(permits.acquire(), QUEUE_WAIT_S)
        except TimeoutError:
            raise HTTPException(503, "too many requests are waiting") from None
        if body.get("stream"):
            return StreamingResponse(relay(body), media_type="text/event-stream")
        try:
            answer = await client.post("/v1/chat/completions", json=body)
        finally:
            permits.release()
        return Response(answer.content, answer.status_code, media_type="application/json")

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(sys.argv[1]), port=int(sys.argv[2]), access_log=False)
