"""OpenAI's files and batches: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from charonia_gateway.batches.store import BatchStore, StoredBatch, StoredFile
from charonia_gateway.body import parse, read_body
from charonia_gateway.context import Gateway, GatewayState
from charonia_gateway.documentation import describe, describe_errors
from charonia_gateway.errors import ApiError
from charonia_gateway.record import current_key, record_of
from charonia_gateway.schemas.batches import BatchBody, BatchList, BatchRequest, DeletedFile, FileBody, FileList

router = APIRouter(tags=["OpenAI"])
Entry = TypeVar("Entry", StoredFile, StoredBatch)

PURPOSE = "batch"
_DAY_S = 86_400
_COPY_BYTES = 1 << 20
_MAX_FORM_BYTES = 1 << 16  # of the form around the file
_ABSENT = describe_errors({404: "there is no such file or batch of this key, or the server has no folder for them"})
_WRONG = describe_errors({400: "a parameter is wrong"})
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                    },
                }
            }
        },
    }
}
Limit = Annotated[int, Query(ge=1, le=10_000, description="at most so many entries")]
After = Annotated[str | None, Query(description="only entries after this id, for the next page")]


def _store(gateway: Gateway) -> BatchStore:
    if gateway.batches is None:
        raise ApiError(
            404,
            "this server has no files and batches: its operator can set CHARONIA_GATEWAY_BATCH_DIR",
            code="no_batches",
        )
    return gateway.batches


def _owner() -> str | None:
    key = current_key()
    return key.id if key else None


@router.post(
    "/v1/files",
    summary="Upload a file of requests",
    responses={
        200: {"model": FileBody},
        **_ABSENT,
        **describe_errors(
            {
                400: "a field is wrong",
                413: "the file is too large",
                415: "it is not a form",
                429: "a limit of the key is reached, or there is no more room for its files",
            }
        ),
    },
    openapi_extra=_UPLOAD,
)
async def upload_file(request: Request, gateway: GatewayState) -> JSONResponse:
    """A file with one request per line, for a batch."""
    store, owner = _store(gateway), _owner()
    free = await asyncio.to_thread(store.free_bytes, owner)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(
            415, "send the file as multipart/form-data, with the fields file and purpose", code="content_type"
        )
    body = _limited(request, free, store, owner)
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=10)
    async with aclosing(body):
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:
            raise _wrong("file", f"the form cannot be read ({error}): send multipart/form-data") from None
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise _wrong("file", "send a file")
            if purpose != PURPOSE:
                raise _wrong("purpose", f"send {PURPOSE!r}: files are for batches only")
            made = await asyncio.to_thread(_add, store, file, owner)
        finally:
            await form.close()
    return JSONResponse(made.to_json())


async def _limited(request: Request, free: int, store: BatchStore, owner: str | None) -> AsyncGenerator[bytes, None]:
    """The body, until it and other uploads of the key are larger than the room for files. Raises ApiError 413."""
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            store.arriving[owner] += len(chunk)
            if store.arriving[owner] > free + _MAX_FORM_BYTES:
                text = (
                    f"the file, with others that arrive now, is larger than the {max(0, free)} bytes that are free of "
                    f"the {store.max_bytes} for files: "
                )
                raise ApiError(413, text + "delete files, or send a smaller one", param="file", code="too_large")
            yield chunk
    finally:
        store.arriving[owner] -= size


def _add(store: BatchStore, file: UploadFile, owner: str | None) -> StoredFile:
    path = store.new_path()
    name = Path(file.filename or "file").name[:200].encode("utf-8", "replace").decode()
    try:
        with path.open("wb") as copy:
            while piece := file.file.read(_COPY_BYTES):
                copy.write(piece)
        return store.add_upload(path, owner, name, PURPOSE)
    finally:
        path.unlink(missing_ok=True)


@router.get("/v1/files", summary="List the files", responses={200: {"model": FileList}, **_ABSENT, **_WRONG})
async def list_files(
    gateway: GatewayState,
    purpose: Annotated[str | None, Query(description="only files with this purpose")] = None,
    limit: Limit = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="by the time of upload")] = "desc",
    after: After = None,
) -> JSONResponse:
    found = await asyncio.to_thread(_store(gateway).files, _owner())
    chosen = [file for file in found if purpose in (None, file.purpose)]
    return _page(chosen if order == "asc" else chosen[::-1], after, limit)


@router.get("/v1/files/{id}", summary="Describe a file", responses={200: {"model": FileBody}, **_ABSENT})
async def get_file(id: str, gateway: GatewayState) -> JSONResponse:
    return JSONResponse((await asyncio.to_thread(_store(gateway).file, id, _owner())).to_json())


@router.get("/v1/files/{id}/content", summary="The content of a file", response_class=Response, responses=_ABSENT)
async def get_content(id: str, gateway: GatewayState) -> FileResponse:
    store = _store(gateway)
    file = await asyncio.to_thread(store.file, id, _owner())
    return FileResponse(store.content(file), media_type="application/octet-stream")


@router.delete(
    "/v1/files/{id}",
    summary="Delete a file",
    responses={200: {"model": DeletedFile}, **_ABSENT, **describe_errors({409: "a batch still reads it"})},
)
async def delete_file(id: str, gateway: GatewayState) -> JSONResponse:
    store = _store(gateway)
    await asyncio.to_thread(lambda: store.delete_file(store.file(id, _owner())))
    return JSONResponse({"id": id, "object": "file", "deleted": True})


@router.post(
    "/v1/batches",
    summary="Run the requests of a file",
    **describe(
        BatchRequest,
        BatchBody,
        {"chats": {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}},
        stream=None,
        errors={404: "there is no such file of this key, or the server has no folder for files"},
    ),
)
async def create_batch(request: Request, gateway: GatewayState) -> JSONResponse:
    """The requests run when no other requests wait. Their answers are in a file when the batch has ended."""
    store, owner = _store(gateway), _owner()
    body = parse(BatchRequest, await read_body(request, gateway.settings.max_body_bytes))
    file = await asyncio.to_thread(store.file, body.input_file_id, owner)
    if file.purpose != PURPOSE:
        raise _wrong("input_file_id", f"this file has the purpose {file.purpose!r}: send one with {PURPOSE!r}")
    now = int(time.time())
    made = StoredBatch(
        f"batch_{uuid.uuid4().hex}",
        owner,
        record_of(request.scope).address,
        body.endpoint,
        file.id,
        now,
        now + _DAY_S,
        file.num_lines,
        metadata=body.metadata,
    )
    await asyncio.to_thread(store.add_batch, made)
    gateway.wake_batches()
    return JSONResponse(made.to_json())


@router.get("/v1/batches", summary="List the batches", responses={200: {"model": BatchList}, **_ABSENT, **_WRONG})
async def list_batches(gateway: GatewayState, limit: Limit = 20, after: After = None) -> JSONResponse:
    """The newest first."""
    found = await asyncio.to_thread(_store(gateway).batches, _owner())
    return _page(found[::-1], after, limit)


@router.get("/v1/batches/{id}", summary="Describe a batch", responses={200: {"model": BatchBody}, **_ABSENT})
async def get_batch(id: str, gateway: GatewayState) -> JSONResponse:
    return JSONResponse((await asyncio.to_thread(_store(gateway).batch, id, _owner())).to_json())


@router.post(
    "/v1/batches/{id}/cancel",
    summary="Cancel a batch",
    responses={200: {"model": BatchBody}, **_ABSENT, **describe_errors({409: "it has ended"})},
)
async def cancel_batch(id: str, gateway: GatewayState) -> JSONResponse:
    """The answers that exist stay in its file."""
    store, owner = _store(gateway), _owner()
    batch = await asyncio.to_thread(store.batch, id, owner)
    if batch.has_ended:
        raise ApiError(409, f"the batch {id} has ended: it is {batch.status}", param="id", code="batch_has_ended")
    await asyncio.to_thread(store.cancel, batch)
    gateway.wake_batches()
    return JSONResponse((await asyncio.to_thread(store.batch, id, owner)).to_json())


def _page(entries: Sequence[Entry], after: str | None, limit: int) -> JSONResponse:
    if after is not None:
        place = next((at for at, one in enumerate(entries) if one.id == after), None)
        if place is None:
            raise _wrong("after", f"there is no entry {after[:100]!r} in this list")
        entries = entries[place + 1 :]
    shown: list[dict[str, Any]] = [one.to_json() for one in entries[:limit]]
    ids = [one["id"] for one in shown]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": len(entries) > limit,
        }
    )


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
