"""client/charonia_client/delivery.py, and the encoding of deliveries by the engine."""

from __future__ import annotations

from pathlib import Path

from charonia_client.delivery import Chunk, Delivery
from charonia_client.tensors import decode_with_logprobs
from charonia_client.types import Timings, TopToken

GOLDEN = Path(__file__).resolve().parents[2] / "engine" / "tests" / "delivery.hex"


def test_delivery_the_engines_encoding_is_protobufs() -> None:
    """engine/tests/outbox_test.cpp compares the engine's encoder with the same file."""
    expected = Delivery(
        number=1,
        chunks=[
            Chunk(
                subscription_key=2**63,
                sequence_index=2,
                finish_reason=2,
                text_output=[b"prompt", "bé".encode()],
                output_ids=[1, 300, 70000],
                token_bytes=[b" b", b"", "é.".encode()],
                text_begin=1,
                text_end=4,
                in_reasoning=True,
                num_input_tokens=1000,
                num_output_tokens=3,
                num_cached_tokens=512,
                num_session_tokens=20,
                queue_ms=0.5,
                first_token_ms=20.25,
                total_ms=1e6,
                cum_log_probs=-70301,
                output_log_probs=[-1, -300, -70000],
                top_log_prob_ids=[-1, 3000, 700000],
                top_log_probs=[-10, -3000, -700000],
                prompt_ids=[7, 8, 9],
                prompt_log_probs=[-1.5, -2],
                prompt_top_log_prob_ids=[4, 5],
                prompt_top_log_probs=[-0.25, -0.5],
                top_token_bytes=[b"", b"top", b"top"],
                prompt_token_bytes=[b"<s>", b"top", b"top"],
                prompt_token_special=[True, False, False],
                prompt_top_token_bytes=[b"top", b"top"],
                pooled=[0.5, -2],
            ),
            Chunk(subscription_key=5),
            Chunk(subscription_key=6, finish_reason=4, text_output=[b"[504] late"]),
        ],
    )
    assert Delivery.FromString(bytes.fromhex(GOLDEN.read_text())) == expected
    assert len(expected.SerializeToString()) == len(GOLDEN.read_text()) // 2, "nothing is encoded twice"
    part = decode_with_logprobs(expected.chunks[0])
    assert (part.text, part.token_ids, part.finish_reason, part.index) == ("promptbé", (1, 300, 70000), "length", 2)
    assert (part.text_span, part.tokens) == ((1, 4), [b"b", b"", "é".encode()])
    assert part.timings == Timings(0.5, 20.25, 1e6)
    tops = [TopToken(-1, -10), TopToken(3000, -3000, b"top"), TopToken(700000, -700000, b"top")]
    assert part.top_logprobs == [[top] for top in tops]
    assert (part.prompt_ids, part.prompt_logprobs) == ((7, 8, 9), (-1.5, -2))
    assert (part.prompt_tokens, part.prompt_special) == ([b"<s>", b"top", b"top"], [True, False, False])
    assert part.prompt_top_logprobs == [[TopToken(4, -0.25, b"top")], [TopToken(5, -0.5, b"top")]]


def test_delivery_the_proto_file_is_read_completely() -> None:
    numbers = {field.number: field.name for field in Chunk.DESCRIPTOR.fields}
    assert sorted(numbers) == list(range(1, 33))
    reason = Chunk.DESCRIPTOR.fields_by_name["finish_reason"].enum_type
    assert [value.name for value in reason.values] == ["NONE", "STOP", "LENGTH", "CANCELLED", "ERROR"]
