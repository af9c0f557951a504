"""API keys of the gateway: authentication, permissions, and the owners of sessions and responses."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from charonia_gateway import access, files, keys
from charonia_gateway.app import create_app
from charonia_gateway.settings import Settings
from gateway_in_process import MODEL, gateway
from key_files import FUTURE, PAST, KeyFile
from starlette.routing import Mount
from triton_double import Double, error, input_number, input_text, part, says
from tritonclient.grpc import service_pb2 as pb
from waiting import until

CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
INTERACTIVE = "/v1/chat/interactive"
Parts = AsyncIterator[Any]

# Each route with a request that a valid key may send.
ROUTES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/completions"): {"model": MODEL, "prompt": "hi"},
    ("POST", "/v1/responses"): RESPONSE,
    ("GET", "/v1/responses/{id}"): None,
    ("DELETE", "/v1/responses/{id}"): None,
    ("POST", "/v1/responses/{id}/cancel"): None,
    ("POST", "/v1/files"): {},
    ("GET", "/v1/files"): None,
    ("GET", "/v1/files/{id}"): None,
    ("GET", "/v1/files/{id}/content"): None,
    ("DELETE", "/v1/files/{id}"): None,
    ("POST", "/v1/batches"): {},
    ("GET", "/v1/batches"): None,
    ("GET", "/v1/batches/{id}"): None,
    ("POST", "/v1/batches/{id}/cancel"): None,
    ("POST", INTERACTIVE): {"prompt": "hi", "session_id": 7, "interactive_mode": True},
    ("POST", "/v1/messages"): MESSAGES,
    ("POST", "/v1/messages/count_tokens"): {"model": MODEL, "messages": MESSAGES["messages"]},
    ("POST", "/v1/embeddings"): {"model": MODEL, "input": "hi"},
    ("POST", "/v1/rerank"): {"model": MODEL, "query": "hi", "documents": ["ho"]},
    ("POST", "/v1/score"): {"model": MODEL, "text_1": "hi", "text_2": "ho"},
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{model:path}"): None,
    ("POST", "/models/load"): {"model": MODEL},
    ("POST", "/models/unload"): {"model": MODEL},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "sql", "lora_path": "/sql"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "sql"},
    ("POST", "/v1/replay"): {"path": "/v1/completions", "body": json.dumps({"model": MODEL, "prompt": "hi"})},
    ("POST", "/tokenize"): {"prompt": "hi"},
    ("POST", "/detokenize"): {"tokens": [72]},
    ("GET", "/tokenizer_info"): None,
    ("GET", "/metrics"): None,
    ("GET", "/version"): None,
    ("GET", "/openapi.json"): None,
}
# Routes that need no key. One file represents all files of the pages.
PAGE_FILE = "/page/chat.css"
OPEN = {("GET", path) for path in ("/health/live", "/health/ready", "/health", "/ping", "/", "/docs", PAGE_FILE)}
BATCHES = {path for _, path in ROUTES if path.startswith(("/v1/files", "/v1/batches"))}
# These routes have no model.
OF_NO_MODEL = {
    "/metrics",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    *BATCHES,
    "/v1/models",
    "/openapi.json",
    "/version",
}


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(
        tmp_path / "keys.json",
        alice={"access": ("inference", "metrics", "admin")},
        bob={},
        expired={"expires": PAST},
        revoked={"revoked": PAST},
        elsewhere={"models": ("another-model",)},
        prometheus={"access": ("metrics",)},
    )


@asynccontextmanager
async def guarded(file: KeyFile, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Double]]:
    async with gateway(keys_file=file.path, **settings) as both:
        yield both


def routes_of(routes: Any) -> set[tuple[str, str]]:
    found = set()
    for route in routes:
        if not hasattr(route, "path"):  # an included router with its own routes
            found |= routes_of(route.routes if hasattr(route, "routes") else route.original_router.routes)
            continue
        methods = (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}
        path = PAGE_FILE if isinstance(route, Mount) else route.path
        found |= {(method, path) for method in methods}
    return found


def address(path: str, id: str = "resp_none") -> str:
    return path.replace("{id}", id).replace("{model:path}", MODEL)


def test_every_route_is_one_that_was_thought_of(file: KeyFile) -> None:
    """A new route requires a key. It must be in this file's table, or in access.OPEN_PATHS and in OPEN."""
    found = routes_of(create_app(Settings(_env_file=None, keys_file=file.path)).routes)
    assert found == set(ROUTES) | OPEN
    assert {route for route in found if access.is_open(*route)} == OPEN


@pytest.mark.parametrize("key", ["none", "wrong", "expired", "revoked"])
async def test_no_route_answers_without_a_key_that_holds(file: KeyFile, key: str) -> None:
    sent: dict[str, dict[str, str]] = {"none": {}, "wrong": {"Authorization": f"Bearer {keys.new_key()[0]}"}}
    headers = sent[key] if key in sent else file.bearer(key)
    async with guarded(file) as (web, server):
        for (method, path), body in ROUTES.items():
            answer = await web.request(method, address(path), json=body, headers=headers)
            assert answer.status_code == 401, (method, path)
            problem = answer.json()
            if path.startswith("/v1/messages"):
                assert problem["error"]["type"] == "authentication_error" and problem["type"] == "error"
            else:
                assert problem["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert key in ("none", "wrong") or key in answer.text
        for method, path in OPEN:
            assert (await web.request(method, path)).status_code in (200, 503)
        for method, path in (
            ("OPTIONS", "/v1/models"),
            ("PUT", "/"),
            ("GET", "/page"),
            ("POST", "/health/live"),
            ("GET", "/nothing"),
        ):
            assert (await web.request(method, path)).status_code == 401
        assert not server.requests and not server.actions


async def test_a_page_of_the_gateways_own_needs_a_key_under_any_host_name(file: KeyFile) -> None:
    """With keys, a foreign page gains nothing by a DNS name that leads to the gateway. Without keys it would."""
    own = {"Host": "myserver:23333", "Origin": "http://myserver:23333", "Sec-Fetch-Site": "same-origin"}
    foreign = {**own, "Origin": "http://evil.example:23333"}
    key = file.bearer("alice")
    async with guarded(file) as (web, _):
        for headers, status in (({**own, **key}, 200), (own, 401), ({**foreign, **key}, 403), (foreign, 403)):
            assert (await web.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == status
    async with gateway() as (web, _):
        refused = await web.post("/v1/chat/completions", json=CHAT, headers={**own, **key})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("host_name", ["GPUbox", "GPUbox.lab.example"])
async def test_page_under_a_name_of_the_machine_is_accepted_unless_local(
    monkeypatch: pytest.MonkeyPatch, host_name: str
) -> None:
    """A gateway on loopback rejects it: the network may have chosen the machine's domain."""
    monkeypatch.setattr("socket.gethostname", lambda: host_name)
    monkeypatch.setattr("socket.getfqdn", lambda: "gpubox.lab.example")

    async def status(web: httpx.AsyncClient, name: str) -> int:
        headers = {"Host": f"{name}:23333", "Origin": f"http://{name}:23333"}
        return (await web.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code

    async with gateway(host="0.0.0.0") as (web, _):
        for name, accepted in (("gpubox", 200), ("gpubox.local", 200), ("gpubox.evil.example", 403), ("other", 403)):
            assert await status(web, name) == accepted, name

        async def knows_full_name() -> bool:
            return await status(web, "gpubox.lab.example") == 200

        await until(knows_full_name)
    async with gateway(host="127.0.0.1") as (web, _):
        for name in ("gpubox", "gpubox.local", "gpubox.lab.example"):
            assert await status(web, name) == 403, name


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
async def test_a_valid_key_reaches_every_route_in_either_header(file: KeyFile, header: str) -> None:
    headers = file.bearer("alice") if header == "Authorization" else {header: file.texts["alice"]}
    beyond = {
        **dict.fromkeys(BATCHES, 404),
        "/v1/responses/{id}": 404,
        "/v1/responses/{id}/cancel": 404,
        "/tokenizer_info": 500,
        "/detokenize": 200,
    }
    beyond |= dict.fromkeys(("/models/load", "/models/unload"), 503)  # charonia serve does not run
    async with guarded(file) as (web, _):
        for (method, path), body in ROUTES.items():
            answer = await web.request(method, address(path), json=body, headers=headers)
            assert answer.status_code in (200, beyond.get(path)), (method, path, answer.text)


async def test_white_space_around_a_key_is_ignored(file: KeyFile) -> None:
    async with guarded(file) as (web, _):
        for headers in ({"x-api-key": f"{file.texts['bob']} "}, {"Authorization": f"bearer  {file.texts['bob']}\t"}):
            assert (await web.get("/v1/models", headers=headers)).status_code == 200
        assert (await web.get("/v1/models", headers={"x-api-key": " "})).status_code == 401


async def test_key_uses_only_its_models_and_its_access(file: KeyFile) -> None:
    async with guarded(file) as (web, server):
        for (method, path), body in ROUTES.items():
            if path in OF_NO_MODEL:
                continue
            answer = await web.request(method, address(path), json=body, headers=file.bearer("elsewhere"))
            assert answer.status_code == 403, (method, path)
            assert answer.json()["error"]["type"] == "permission_error"
        assert not server.requests
        assert (await web.get("/v1/models", headers=file.bearer("elsewhere"))).json()["data"] == []
        assert (await web.get("/metrics", headers=file.bearer("elsewhere"))).status_code == 403
        assert (await web.get("/metrics", headers=file.bearer("prometheus"))).status_code == 200
        refused = await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("prometheus"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "access_denied")


async def test_openapi_names_the_routes_that_need_a_key(file: KeyFile) -> None:
    async with guarded(file) as (web, _):
        document = (await web.get("/openapi.json", headers=file.bearer("bob"))).json()
    (name,) = document["components"]["securitySchemes"]
    assert document["components"]["securitySchemes"][name]["scheme"] == "bearer"
    assert document["security"] == [{name: []}]
    operations = [(path, one) for path, of_path in document["paths"].items() for one in of_path.values()]
    assert {path for path, one in operations if one.get("security") == []} == {
        "/health/live",
        "/health/ready",
        "/health",
        "/ping",
    }
    assert all(one.get("security", []) == [] for _, one in operations)
    async with gateway() as (web, _):
        assert "security" not in (await web.get("/openapi.json")).json()


@pytest.mark.parametrize("path", ["/metrics", "/%6detrics", "/metrics%0A"])
async def test_however_the_path_is_written_the_metrics_need_their_own_access(file: KeyFile, path: str) -> None:
    async with guarded(file) as (web, _):
        assert (await web.get(path, headers=file.bearer("bob"))).status_code == 403
        assert (await web.get(path, headers=file.bearer("prometheus"))).status_code == 200


@pytest.mark.parametrize("path", ["/models/load", "/%6dodels/load", "/models/unload%0A"])
async def test_however_the_path_is_written_loading_models_needs_its_own_access(file: KeyFile, path: str) -> None:
    async with guarded(file) as (web, _):
        for name, status in (("bob", 403), ("prometheus", 403), ("alice", 503)):
            answer = await web.post(path, json={"model": MODEL}, headers=file.bearer(name))
            assert answer.status_code == status, answer.text


async def test_stored_responses_belong_to_their_key(file: KeyFile) -> None:
    async with guarded(file) as (web, _):
        stored = {**RESPONSE, "store": True}
        id = (await web.post("/v1/responses", json=stored, headers=file.bearer("alice"))).json()["id"]
        for method in ("GET", "DELETE"):
            answer = await web.request(method, f"/v1/responses/{id}", headers=file.bearer("bob"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            absent = await web.request(method, "/v1/responses/resp_none", headers=file.bearer("bob"))
            assert absent.text.replace("resp_none", id) == answer.text, "as if there were none"
        on = {**stored, "previous_response_id": id}
        answer = await web.post("/v1/responses", json=on, headers=file.bearer("bob"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert (await web.post("/v1/responses", json=on, headers=file.bearer("alice"))).status_code == 200
        assert (await web.get(f"/v1/responses/{id}", headers=file.bearer("alice"))).status_code == 200


@pytest.mark.parametrize(
    "act", [{"cancel": True}, {"stop": True}, {"interactive_mode": False, "request_output_len": 0}]
)
async def test_sessions_of_two_keys_are_two_whatever_they_are_called(file: KeyFile, act: dict[str, Any]) -> None:
    async with guarded(file) as (web, server):
        ids: dict[str, set[str]] = {}
        for name in ("alice", "bob"):
            turn = {"prompt": "hi", "session_id": 7, "interactive_mode": True}
            await web.post(INTERACTIVE, json=turn, headers=file.bearer(name))
            await web.post("/v1/chat/completions", json={**CHAT, "session_id": "7"}, headers=file.bearer(name))
            ids[name] = {input_text(request, "session_id") for request in server.requests}
            server.requests.clear()
            server.actions.clear()
            answer = await web.post(INTERACTIVE, json={"session_id": 7, **act}, headers=file.bearer(name))
            assert answer.status_code == 200
            ids[name] |= {session for _, session in server.actions}
            assert len(server.actions) == 1 and len(ids[name]) == 1, "all routes of a key share its sessions"
        # The engine's name of a key's session is a different session for another key.
        (whole,) = ids["alice"]
        await web.post(INTERACTIVE, json={"prompt": "hi", "session_id": whole}, headers=file.bearer("bob"))
        ids["forged"] = {input_text(server.requests[-1], "session_id")}
    assert len(set.union(*ids.values())) == 3
    assert all(len(id.encode()) <= 256 for found in ids.values() for id in found)


async def test_each_key_has_a_prefix_cache_of_its_own_whatever_salt_it_sends(file: KeyFile) -> None:
    async with guarded(file) as (web, server):
        for name in ("alice", "bob"):
            for salt in (None, "ours", "s" * 256):
                for path, body in ROUTES.items():
                    if path[1] in (
                        "/v1/chat/completions",
                        "/v1/completions",
                        "/v1/responses",
                        "/v1/messages",
                        INTERACTIVE,
                    ):
                        sent = body if salt is None else {**body, "cache_salt": salt}
                        answer = await web.post(path[1], json=sent, headers=file.bearer(name))
                        assert answer.status_code == 200 and "charonia-ignored-fields" not in answer.headers
        salts = [input_text(request, "cache_salt") for request in server.requests]
        # Knowing the engine's name of another key's session gives no access to it.
        await web.post("/v1/chat/completions", json={**CHAT, "cache_salt": salts[0]}, headers=file.bearer("bob"))
        forged = input_text(server.requests[-1], "cache_salt")
    assert len(salts) == 2 * 15 and len(set(salts)) == 6 and forged not in salts
    assert not set(salts[:15]) & set(salts[15:]) and len(set(salts[:5])) == 1
    assert all(0 < len(salt.encode()) <= 256 for salt in [*salts, forged])


async def test_keys_share_the_prefix_cache_if_a_setting_allows_it(file: KeyFile) -> None:
    async with guarded(file, cache_by_key=False) as (web, server):
        for body in (CHAT, {**CHAT, "cache_salt": "ours"}):
            for name in ("alice", "bob"):
                await web.post("/v1/chat/completions", json=body, headers=file.bearer(name))
    plain, _, salted, other = server.requests
    assert "cache_salt" not in [tensor.name for tensor in plain.inputs]
    assert input_text(salted, "cache_salt") == input_text(other, "cache_salt") == "ours"


async def test_a_request_names_its_key_or_its_address_as_owner(file: KeyFile) -> None:
    async with guarded(file, cache_by_key=False) as (web, server):
        for name in ("alice", "bob", "alice"):
            await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer(name))
        alice, bob, again = (input_text(request, "owner") for request in server.requests)
    assert alice == again != bob and file.texts["alice"] not in alice
    async with gateway() as (web, server):
        await web.post("/v1/chat/completions", json=CHAT)
        assert input_text(server.requests[0], "owner") not in ("", "127.0.0.1")


async def test_an_error_names_a_session_as_its_client_does(file: KeyFile) -> None:
    async def fails(request: pb.ModelInferRequest) -> Parts:
        yield error(f"[400] session_id: {input_text(request, 'session_id')} is busy")

    async with guarded(file) as (web, server):
        server.behaviour = fails
        body = {**CHAT, "session_id": "mine"}
        answer = await web.post("/v1/chat/completions", json=body, headers=file.bearer("alice"))
    assert answer.status_code == 400 and "mine is busy" in answer.text


@pytest.mark.parametrize(("asked", "sent"), [(None, 3), (9, 3), (-2, -2)])
async def test_a_keys_priority_is_the_highest_of_its_requests(file: KeyFile, asked: int | None, sent: int) -> None:
    file.add("low", priority=3)
    async with guarded(file) as (web, server):
        body = CHAT if asked is None else {**CHAT, "priority": asked}
        await web.post("/v1/chat/completions", json=body, headers=file.bearer("low"))
        assert input_number(server.requests[0], "priority") == sent % 2**32


async def test_metrics_have_the_expiry_of_keys_that_are_not_revoked(file: KeyFile) -> None:
    file.add("temporary", expires=FUTURE)
    file.add("withdrawn", expires=FUTURE)
    file.revoke("withdrawn")
    async with guarded(file) as (web, _):
        text = (await web.get("/metrics", headers=file.bearer("prometheus"))).text
    found = re.findall(r'^charonia_gateway_key_expiry_seconds{key="(\w+)"} (\S+)$', text, re.MULTILINE)
    assert {key: float(value) for key, value in found} == pytest.approx(
        {"expired": PAST.timestamp(), "temporary": FUTURE.timestamp()}
    )


async def test_without_a_file_no_key_is_asked_for_and_ids_are_the_clients() -> None:
    async with gateway() as (web, server):
        answer = await web.post("/v1/chat/completions", json={**CHAT, "session_id": "mine", "cache_salt": "ours"})
        assert answer.status_code == 200 and not [name for name in answer.headers if "ratelimit" in name]
        assert input_text(server.requests[0], "session_id") == "mine"
        assert input_text(server.requests[0], "cache_salt") == "ours"


async def test_a_web_page_that_may_asks_with_its_key_and_reads_the_limits(file: KeyFile) -> None:
    friend = "https://chat.example.com"
    file.add("page", requests_per_minute=5)
    preflight = {
        "Origin": friend,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with guarded(file, allowed_origins=friend) as (web, _):
        allowed = await web.options("/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == friend
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        answer = await web.post("/v1/chat/completions", json=CHAT, headers={"Origin": friend, **file.bearer("page")})
        assert answer.status_code == 200
        assert "x-ratelimit-remaining-requests" in answer.headers["access-control-expose-headers"]
        unknown = await web.post("/v1/chat/completions", json=CHAT, headers={"Origin": friend})
        assert unknown.status_code == 401 and unknown.headers["access-control-allow-origin"] == friend
        stranger = await web.options("/v1/chat/completions", headers={**preflight, "Origin": "https://evil.example"})
        assert stranger.status_code == 400 and "access-control-allow-origin" not in stranger.headers
    async with guarded(file) as (web, _):
        closed = await web.options("/v1/chat/completions", headers=preflight)
        assert closed.status_code == 401 and "access-control-allow-origin" not in closed.headers


async def test_no_log_has_a_key_or_a_prompt_and_the_access_log_has_the_keys_name(
    file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, secret = keys.new_key()[0], "what-the-prompt-says"

    break_off = says(part("x"), error("[503] the engine ends"))

    with caplog.at_level("DEBUG"):
        async with guarded(file, access_log=True) as (web, server):
            for headers in (file.bearer("alice"), {"x-api-key": wrong}, {"Authorization": f"Bearer {wrong}"}):
                await web.post("/v1/chat/completions", json={**CHAT, "messages": secret}, headers=headers)
            server.behaviour = break_off
            body = {**CHAT, "messages": secret, "stream": True}
            await web.post("/v1/chat/completions", json=body, headers=file.bearer("alice"))
    lines = [json.dumps({**record.__dict__, "text": record.getMessage()}, default=str) for record in caplog.records]
    logged = "\n".join(lines)
    assert wrong not in logged and file.texts["alice"] not in logged and secret not in logged
    named = [record.__dict__.get("key") for record in caplog.records if record.name == "charonia_gateway.access"]
    assert named == ["alice", None, None, "alice"]


def test_a_file_that_changes_is_read_again_and_a_bad_one_is_not(
    file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    ring = keys.KeyRing(file.path)
    late = file.add("late")
    assert ring.find(late) is None
    ring.refresh()
    assert ring.find(late) is not None
    whole = file.path.read_text()
    for bad in ("", whole[: len(whole) // 2], '{"version": 2, "keys": []}', whole.replace('"late"', '"alice"')):
        file.path.write_text(bad)
        caplog.clear()
        ring.refresh()
        ring.refresh()
        assert ring.find(late) is not None and len(caplog.records) == 1, "the keys stay, and it is said once"
    file.path.unlink()
    ring.refresh()
    assert ring.find(late) is not None
    file.path.write_text('{"version": 1, "keys": []}')
    ring.refresh()
    assert ring.find(late) is None


def test_a_file_that_could_not_be_read_for_a_while_is_read_later(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example if the process had too many open files, or if the file's permissions are corrected."""
    ring = keys.KeyRing(file.path)
    late = file.add("late")

    def fails(path: Path) -> keys.KeysFile:
        raise keys.KeysError(f"{path} cannot be read: Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(keys, "read_keys", fails)
        ring.refresh()
        ring.refresh()
    assert ring.find(late) is None and len(caplog.records) == 1
    ring.refresh()
    assert ring.find(late) is not None


def test_pipe_is_rejected_as_a_keys_file_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(keys.KeysError, match=f"{path} is not a file"):
            keys.KeyRing(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_file_that_root_changes_stays_its_owners(file: KeyFile) -> None:
    os.chown(file.path, 1234, 4321)
    file.path.chmod(0o640)
    file.revoke("bob")
    after = file.path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode & 0o777) == (1234, 4321, 0o640)


async def test_a_key_that_is_revoked_holds_no_more_without_a_restart(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECK_INTERVAL_S", 0.01)
    async with guarded(file) as (web, _):

        async def is_refused() -> bool:
            return (await web.get("/v1/models", headers=file.bearer("bob"))).status_code == 401

        assert not await is_refused()
        file.revoke("bob")
        await until(is_refused)
        assert (await web.get("/v1/models", headers=file.bearer("alice"))).status_code == 200


def test_threads_do_not_read_the_files_at_the_same_time(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow thread would replace newer keys with older ones."""
    ring = keys.KeyRing(file.path)
    second = threading.Thread(target=ring.refresh)
    reading, read_keys = [0], keys.read_keys

    def read(path: Path) -> keys.KeysFile:
        reading[0] += 1
        if reading[0] == 1:
            second.start()
            second.join(0.2)  # a second reader would end
        return read_keys(path)

    late = file.add("late")
    monkeypatch.setattr(keys, "read_keys", read)
    ring.refresh()
    second.join()
    assert ring.find(late) is not None and reading[0] == 1
