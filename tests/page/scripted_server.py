"""Serves the gateway's pages with responses that a test defines: `python scripted_server.py PORT`.

POST /_script sets the next responses, in order, and clears the list of received requests. It also sets whether the
server is not ready (reason), requires a key, rejects the page's origin (refused), or has other models. GET /_requests
returns the received bodies. A reply is {"status", "headers", "error", "code"}, {"status", "headers", "page"} with HTML,
like a proxy's, or {"pieces"}. A piece is a text, an OpenAI delta, {"sleep": seconds}, {"wait": true}, which waits for
POST /_release, {"cut": true}, which ends the stream too early, {"error": {...}}, or {"die": true}, which ends this
process. {"finish": reason} sets the finish reason. {"timings": {...}} and {"prompt_progress": {...}} are sent. Without
a script, the response is "Hello!".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import scripted_tools
import uvicorn
from charonia_gateway.pages import add_pages
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

CONTEXT = 100
PROMPT_TOKENS = 12
MODELS = ("first", "second/model")

app = FastAPI(openapi_url=None)
app.mount("/tools", scripted_tools.app)
script: list[dict[str, Any]] = []
seen: list[dict[str, Any]] = []
ready: dict[str, Any] = {
    "reason": None, "key": None, "refused": False, "models": MODELS, "accepts_tools": True, "tasks": {},
}  # fmt: skip
released = asyncio.Event()
health_asked = 0


def _refusal(request: Request) -> Response | None:
    if ready["key"] and request.headers.get("authorization") == "Bearer of-metrics":
        return JSONResponse({"error": {"message": "no access", "code": "access_denied"}}, 403)
    if ready["key"] and request.headers.get("authorization") != f"Bearer {ready['key']}":
        return JSONResponse({"error": {"message": "no such key", "type": "authentication_error"}}, 401)
    if ready["refused"] and request.method == "POST":
        return JSONResponse({"error": {"message": "not listed", "code": "origin_not_allowed"}}, 403)
    return None


def _event(choice: dict[str, Any], **fields: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}], **fields})}\n\n"


async def _events(pieces: list[Any]) -> AsyncIterator[str]:
    finish, count, measured = "stop", 0, {}
    for piece in pieces:
        if isinstance(piece, str):
            count += 1
            yield _event({"delta": {"content": piece}})
        elif "sleep" in piece:
            await asyncio.sleep(piece["sleep"])
        elif "wait" in piece:
            while not released.is_set():
                yield ": heartbeat\n\n"
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(released.wait(), 0.5)
        elif "die" in piece:
            os._exit(1)
        elif "cut" in piece:
            return
        elif "error" in piece:
            yield f"data: {json.dumps(piece)}\n\n"
        elif "finish" in piece:
            finish = piece["finish"]
        elif "timings" in piece:
            measured = piece
            yield _event({"delta": {}}, **measured)
        elif "prompt_progress" in piece:
            yield _event({"delta": {}}, **piece)
        else:
            count += 1
            yield _event({"delta": piece})
    yield _event({"delta": {}, "finish_reason": finish})
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}
    yield f"data: {json.dumps({'choices': [], 'usage': usage, **measured})}\n\n"
    yield "data: [DONE]\n\n"


@app.post("/v1/chat/completions")
async def answer(request: Request) -> Response:
    if refusal := _refusal(request):
        return refusal
    body = await request.json()
    seen.append({"path": request.url.path, **body})
    if body["model"] not in ready["models"]:
        return JSONResponse({"error": {"message": "no such model", "code": "model_not_found"}}, 404)
    reply = script.pop(0) if script else {"pieces": ["Hello", "!"]}
    if "status" in reply:
        if "page" in reply:
            return HTMLResponse(reply["page"], reply["status"], headers=reply.get("headers"))
        error = {"error": {"message": reply.get("error", "scripted"), "code": reply.get("code")}}
        return JSONResponse(error, reply["status"], headers=reply.get("headers"))
    return StreamingResponse(_events(reply["pieces"]), media_type="text/event-stream")


@app.get("/v1/models")
async def models(request: Request) -> Response:
    sampling = {"temperature": 0.6}
    tools = {"accepts_tools": ready["accepts_tools"]}
    found = [
        {
            "id": name,
            "task": ready["tasks"].get(name, "generate"),
            "max_model_len": CONTEXT,
            "default_sampling_parameters": sampling,
            **tools,
        }
        for name in ready["models"]
    ]
    if ready["key"] and request.headers.get("authorization") == "Bearer of-no-model":
        return JSONResponse({"object": "list", "data": []})
    return _refusal(request) or JSONResponse({"object": "list", "data": found})


@app.post("/models/load")
async def load(request: Request) -> Response:
    name, _, location = (await request.json())["model"].partition("=")
    if not location:
        return JSONResponse({"error": {"message": f"there is no model {name}", "code": "invalid_value"}}, 400)
    ready["models"] = [*ready["models"], name]
    return JSONResponse({"success": True, "message": "ready"})


@app.post("/tokenize")
async def tokenize(request: Request) -> Response:
    if refusal := _refusal(request):
        return refusal
    body = await request.json()
    tokens = list((body.get("prompt") or json.dumps(body.get("messages"))).encode())
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT})


@app.get("/health/ready")
async def health() -> Response:
    global health_asked
    health_asked += 1
    if ready["reason"]:
        return JSONResponse({"status": "not ready", "reason": ready["reason"]}, 503)
    return JSONResponse({"status": "ready"})


@app.post("/_script")
async def set_script(request: Request) -> None:
    body = await request.json()
    script[:] = body.get("replies", [])
    seen.clear()
    released.clear()
    ready.update(
        reason=body.get("reason"),
        key=body.get("key"),
        refused=body.get("refused", False),
        models=body.get("models", MODELS),
        accepts_tools=body.get("accepts_tools", True),
        tasks=body.get("tasks", {}),
    )


@app.post("/_release")
async def release() -> None:
    released.set()


@app.get("/_requests")
async def requests() -> list[dict[str, Any]]:
    return seen


@app.get("/_health_asked")
async def count_of_health() -> int:
    """Return the number of requests for /health/ready."""
    return health_asked


@app.get("/openapi.json")
def document(request: Request) -> Response:
    """Return the gateway's description of chat requests and models. Imports it only when it is requested."""
    from charonia_gateway.access import is_open
    from charonia_gateway.documentation import complete_schema
    from charonia_gateway.routes import chat
    from charonia_gateway.routes.models import router as models_router

    documented = FastAPI()
    documented.include_router(chat.router)
    documented.include_router(models_router)
    complete_schema(documented, MODELS[0], is_open if ready["key"] else None)
    return _refusal(request) or JSONResponse(documented.openapi())


def main() -> None:
    add_pages(app, chat=True)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
