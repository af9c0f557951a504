"""Receives several responses on one gRPC stream from Triton: python client/examples/subscription.py [HOST:PORT]"""

from __future__ import annotations

import asyncio
import sys

from charonia_client import Client, GenerateRequest


async def answer(client: Client, question: str) -> str:
    request = GenerateRequest(messages=[{"role": "user", "content": question}], temperature=0, max_tokens=32)
    return "".join([part.text async for part in client.generate(request)])


async def main(target: str) -> None:
    countries = ("France", "Italy", "Spain", "Japan")
    async with Client(target) as client:
        answers = [answer(client, f"What is the capital of {country}?") for country in countries]
        for text in await asyncio.gather(*answers):
            print(text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["localhost:33337"]))
