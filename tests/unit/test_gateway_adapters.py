"""LoRA adapters in the gateway: names, servers that do not answer, and adapters that are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_in_process import MODEL, gateway
from key_files import KeyFile
from triton_double import Double, input_text

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def ask(web: httpx.AsyncClient, model: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return await web.post("/v1/completions", json={"model": model, "prompt": "hi"}, headers=headers)


async def listed(web: httpx.AsyncClient) -> dict[str, Any]:
    return {one["id"]: one["parent"] for one in (await web.get("/v1/models")).json()["data"]}


def names(server: Double) -> list[str]:
    return [input_text(request, "lora_name") for request in server.requests]


async def test_known_adapters_stay_while_the_server_lists_none() -> None:
    async with gateway() as (web, server):
        server.adapters["engine"] = {"sql": "/sql"}
        assert await listed(web) == {MODEL: None, "sql": MODEL}
        server.adapters_error = "[503] busy"
        assert await listed(web) == {MODEL: None, "sql": MODEL}
        assert (await ask(web, "sql")).status_code == 200 and names(server) == ["sql=of/sql"]
        unknown = await ask(web, "new")
        assert unknown.status_code == 503 and "'new'" in unknown.json()["error"]["message"]
        server.adapters_error = ""
        assert (await ask(web, "new")).status_code == 404


async def test_replaced_adapter_has_another_fingerprint() -> None:
    async with gateway() as (web, server):
        server.adapters["engine"] = {"sql": "/sql"}
        found = [(await ask(web, name)).json()["system_fingerprint"] for name in (MODEL, "sql")]
        server.adapters["engine"] = {"sql": "/new"}
        found.append((await ask(web, "sql")).json()["system_fingerprint"])
        assert names(server) == ["", "sql=of/sql", "sql=of/sql", "sql=of/new"] and len(set(found)) == 3
        del server.adapters["engine"]["sql"]
        gone = await ask(web, "sql")
        assert gone.status_code == 404 and "'sql'" in gone.json()["error"]["message"]


async def test_lost_adapter_is_named_as_the_client_named_it() -> None:
    """Also while a server that was started again does not list its adapters yet."""
    async with gateway() as (web, server):
        server.adapters["engine"] = {"sql": "/sql"}
        await listed(web)
        server.adapters.clear()
        server.adapters_error = "[503] busy"
        error = (await ask(web, "sql")).json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "the LoRA adapter 'sql' is not loaded any more" in error["message"] and "of/sql" not in error["message"]


async def test_adapter_that_is_loaded_for_another_model_is_found() -> None:
    async with gateway(model_name="a", more_models="b") as (web, server):
        server.adapters["engine"] = {"sql": "/sql"}
        assert (await ask(web, "sql")).status_code == 200
        server.adapters = {"engine.b": {"sql": "/sql"}}
        assert (await ask(web, "sql")).status_code == 200
        assert [one.model_name for one in server.requests] == ["ensemble", "ensemble", "ensemble.b"]


async def test_name_in_use_is_refused_and_keeps_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(tmp_path / "keys.json", admin={"access": ("inference", "admin")})
    async with gateway(keys_file=file.path, model_name="a", more_models="b") as (web, server):
        web.headers = httpx.Headers(file.bearer("admin"))
        of_b = {"lora_name": "sql", "lora_path": "/sql", "base_model_name": "b"}
        assert (await web.post(LOAD, json=of_b)).status_code == 200
        again = await web.post(LOAD, json={**of_b, "base_model_name": "a"})
        assert again.status_code == 400 and "'b'" in again.json()["error"]["message"]
        assert (await web.post("/models/load", json={"model": "sql=x"})).status_code == 400
        assert (await web.post(LOAD, json={**of_b, "lora_name": "a"})).status_code == 400
        server.adapters["engine"] = {"sql": "/sql", "b": "/b"}
        for _ in range(2):
            assert await listed(web) == {"a": None, "b": None, "sql": "b"}
        hidden = [record.args for record in caplog.records if "cannot be used" in record.message]
        assert sorted(map(str, hidden)) == ["('b', 'a')", "('sql', 'a')"]


async def test_error_of_an_order_names_its_field(tmp_path: Path) -> None:
    """In other requests the name of an adapter is `model`."""
    file = KeyFile(tmp_path / "keys.json", admin={"access": ("inference", "admin")})
    async with gateway(keys_file=file.path) as (web, server):
        web.headers = httpx.Headers(file.bearer("admin"))
        unknown = await web.post(UNLOAD, json={"lora_name": "sql"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lora_name")
        server.adapters_error = "[400] lora_name = '  ' is not a name"
        refused = await web.post(LOAD, json={"lora_name": "  ", "lora_path": "/sql"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
        server.adapters_error = ""
        server.adapters["engine"] = {"sql": "/sql"}
        await listed(web)
        del server.adapters["engine"]["sql"]
        gone = await ask(web, "sql")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")


async def test_adapter_gives_no_access_to_its_model(tmp_path: Path) -> None:
    access = ("inference", "admin")
    file = KeyFile(
        tmp_path / "keys.json", sql={"models": ("sql",), "access": access}, b={"models": ("b",), "access": access}
    )
    async with gateway(keys_file=file.path, model_name="a", more_models="b") as (web, server):
        server.adapters["engine"] = {"sql": "/sql"}
        assert (await ask(web, "sql", file.bearer("sql"))).status_code == 200
        for key, base, status in (("sql", "sql", 404), ("sql", "a", 403), ("b", None, 403), ("b", "b", 200)):
            order = {"lora_name": "new", "lora_path": "/new", "base_model_name": base}
            assert (await web.post(LOAD, json=order, headers=file.bearer(key))).status_code == status, (key, base)
        assert (await web.post(UNLOAD, json={"lora_name": "sql"}, headers=file.bearer("b"))).status_code == 403
        assert server.adapters == {"engine": {"sql": "/sql"}, "engine.b": {"new": "/new"}}


async def test_session_of_a_stored_response_is_ended_after_its_adapter_is_gone() -> None:
    async with gateway() as (web, server):
        server.adapters["engine"] = {"sql": "/sql"}
        made = (await web.post("/v1/responses", json={"model": "sql", "input": "hi", "store": True})).json()
        server.adapters.clear()
        await listed(web)
        assert (await web.delete(f"/v1/responses/{made['id']}")).status_code == 200
        assert server.actions == [("end_session", input_text(server.requests[0], "session_id"))]
