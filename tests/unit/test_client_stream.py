"""The client's calls against a gRPC server that dies: whenever a call begins, it ends with what happened."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from charonia_client import Unavailable
from charonia_client.stream import Stream, stream_infer
from tritonclient.grpc import service_pb2 as pb

# Answers every request with responses without end.
SERVER = """
import asyncio
import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc as pb_grpc

class Server(pb_grpc.GRPCInferenceServiceServicer):
    async def ModelStreamInfer(self, requests, context):
        async for request in requests:
            while True:
                yield pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=request.id))
                await asyncio.sleep(0.002)

async def main():
    server = grpc.aio.server()
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""


@contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("attempt", range(5))
async def test_a_call_that_begins_while_the_server_dies_is_unavailable(attempt: int) -> None:
    with server() as (process, target):
        async with grpc.aio.insecure_channel(target) as channel:
            call = stream_infer(channel)
            flowing = [Stream(call(pb.ModelInferRequest(id="flowing")), target) for _ in range(8)]
            for stream in flowing:
                assert (await stream.next()).id == "flowing"
            process.kill()
            late = []
            while not any(stream.task.done() for stream in flowing):
                late += [Stream(call(pb.ModelInferRequest(id="late")), target) for _ in range(8)]
                await asyncio.sleep(0)
            for stream in flowing + late:
                with pytest.raises(Unavailable, match="cannot be reached or went away"):
                    while await stream.next() is not None:
                        pass
