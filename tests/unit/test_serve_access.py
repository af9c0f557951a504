"""Warnings of `charonia serve` about access to its ports."""

from __future__ import annotations

from pathlib import Path

from charonia.serve.access import curl_options, gateway_url, warnings
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


def test_curl_is_given_what_the_gateway_asks_for() -> None:
    plain = ServeSettings(host="0.0.0.0", gateway_port=1234)
    assert (gateway_url(plain), curl_options(plain)) == ("http://127.0.0.1:1234", [])
    closed = plain.model_copy(update={"gateway_keys_file": Path("keys"), "gateway_tls_cert": Path("/a b/cert.pem")})
    assert gateway_url(closed) == "https://127.0.0.1:1234"
    assert curl_options(closed) == ['-H "Authorization: Bearer $CHARONIA_API_KEY"', "--cacert '/a b/cert.pem'"]
    own = closed.model_copy(update={"gateway_tls_client_ca": Path("ca.pem")})
    assert "--cert YOUR_CERTIFICATE --key ITS_KEY" in curl_options(own)
