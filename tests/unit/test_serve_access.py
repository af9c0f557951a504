"""What `charonia serve` warns of because of who may reach its ports."""

from __future__ import annotations

from pathlib import Path

from charonia.serve.access import warnings
from charonia.settings import ServeSettings


def test_inference_over_http_is_warned_of_on_this_machine_too() -> None:
    assert list(warnings(ServeSettings(triton_address="127.0.0.1", host="127.0.0.1"))) == []
    (warning,) = warnings(ServeSettings(triton_address="127.0.0.1", host="127.0.0.1", http_inference=True))
    assert "web page" in warning and "CHARONIA_HTTP_INFERENCE" in warning


def test_a_gateway_that_asks_for_keys_over_tls_is_not_warned_of() -> None:
    (warning,) = warnings(ServeSettings(triton_address="127.0.0.1", host="0.0.0.0"))
    assert "without a key" in warning and "CHARONIA_GATEWAY_KEYS_FILE" in warning
    keys = Path("keys.json")
    settings = ServeSettings(triton_address="127.0.0.1", host="0.0.0.0", gateway_keys_file=keys)
    (warning,) = warnings(settings)
    assert "without TLS" in warning and "CHARONIA_GATEWAY_TLS_CERT" in warning
    assert list(warnings(settings.model_copy(update={"gateway_tls_cert": Path("cert.pem")}))) == []
