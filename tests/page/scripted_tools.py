"""An MCP server (Streamable HTTP) for the tests of the chat page, as a part of scripted_server.py: POST /tools/mcp.

It needs the token "secret" or "other", and a session that began with the same token. The session "old" ends with the
first call. With the token "silent" it does not respond.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse

app = FastAPI(openapi_url=None)
app.add_middleware(
    CORSMiddleware, allow_origins=["*"], allow_headers=["*"], expose_headers=["Mcp-Session-Id"], allow_methods=["POST"]
)
sessions = iter(["old", *(f"new {number}" for number in range(100))])
owners: dict[str, str] = {}  # token by session
calls: list[dict[str, Any]] = []
lists: dict[str, int] = {}  # the last status for a list of tools, by token


def _tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}", "inputSchema": {"type": "object"}}


@app.post("/mcp")
async def answer(request: Request) -> Response:
    token = request.headers.get("authorization", "")
    if token == "Bearer silent":
        while not await request.is_disconnected():
            await asyncio.sleep(0.1)
    if token not in ("Bearer secret", "Bearer other"):
        return JSONResponse({"error": "no token"}, 401)
    message = await request.json()
    method, params, session = message["method"], message.get("params", {}), request.headers.get("mcp-session-id")

    def result(content: dict[str, Any], **headers: str) -> Response:
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": content}, headers=headers)

    if method == "initialize":
        owners[begun := next(sessions)] = token
        return result({"protocolVersion": "2025-06-18", "capabilities": {}}, **{"Mcp-Session-Id": begun})
    if session is None or owners[session] != token or request.headers.get("mcp-protocol-version") != "2025-06-18":
        lists[token] = 400
        return JSONResponse({"error": "no session"}, 400)
    if method == "notifications/initialized":
        return Response(status_code=202)
    if method == "tools/list":
        lists[token] = 200
        if "cursor" in params:
            return result({"tools": [{"name": 7}, "none", {"name": "no_schema"}, _tool("weather.today")]})
        return result({"tools": [_tool("clock")], "nextCursor": "2"})
    if session == "old":
        return Response(status_code=404)
    calls.append(params)
    text = f"{params['name']}: {json.dumps(params['arguments'])}"
    done = {"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": text}]}}
    own = {"jsonrpc": "2.0", "id": message["id"], "method": "ping"}  # a request of the server, with an id of its own
    events = "".join(f"data: {json.dumps(one)}\n\n" for one in (own, done))
    return Response(events, media_type="text/event-stream")


@app.get("/_lists")
async def listed() -> dict[str, int]:
    return lists


@app.get("/_calls")
async def received() -> list[dict[str, Any]]:
    return calls
