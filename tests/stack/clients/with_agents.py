"""OpenAI's agents SDK: a tool in a loop and a structured response, with both of its models, complete and streamed.

with_agents.py GATEWAY MODEL: the model is the parrot of test_clients.py.
"""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

GATEWAY, MODEL = sys.argv[1:]
ran: list[int] = []


class Sum(BaseModel):
    a: int


@function_tool
def add(a: int) -> str:
    """Adds."""
    ran.append(a)
    return "<|text1|>"


@function_tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    ran.append(days)
    return "sunny"


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{GATEWAY}/v1", api_key="none", max_retries=0) as openai:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=MODEL, openai_client=openai)
            for choice in (None, "required", "add"):
                settings = ModelSettings(temperature=0, tool_choice=choice)
                agent = Agent("agent", instructions="Add.", model=model, tools=[add], model_settings=settings)
                done = await Runner.run(agent, "<|text2|>")
                assert (done.final_output, ran) == ("It is sunny.", [7]), (kind, choice, done)
                ran.clear()
                streamed = Runner.run_streamed(agent, "<|text2|>")
                kinds = {event.type async for event in streamed.stream_events()}
                assert (streamed.final_output, ran) == ("It is sunny.", [7]), (kind, choice, streamed)
                assert {"raw_response_event", "run_item_stream_event"} <= kinds
                ran.clear()
            # The client sends reasoning back with the calls.
            thinks = Agent("agent", model=model, tools=[get_weather, add], model_settings=ModelSettings(temperature=0))
            done = await Runner.run(thinks, "<|text0|>")
            assert (done.final_output, sorted(ran)) == ("It is sunny.", [1, 3]), (kind, done)
            assert {item.type for item in done.new_items} >= {"tool_call_item", "tool_call_output_item"}
            assert kind is OpenAIChatCompletionsModel or "reasoning_item" in {item.type for item in done.new_items}
            ran.clear()
            structured = Agent("agent", model=model, output_type=Sum, model_settings=ModelSettings(temperature=0))
            assert (await Runner.run(structured, "<|text3|>")).final_output == Sum(a=7)


asyncio.run(main())
print("done")
