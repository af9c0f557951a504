#!/usr/bin/python3 -IS
"""health PORT PATH: exit code 0 when http://127.0.0.1:PORT/PATH answers 200, for the health checks of the images.

With CHARONIA_GATEWAY_TLS_CERT the gateway is asked by https. With CHARONIA_GATEWAY_TLS_CLIENT_CA it asks for a client's
certificate, which this has not: the exit code is 0 when it shows its own.
"""

import http.client
import os
import ssl
import sys

port = int(sys.argv[1])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
of_gateway = port == int(os.environ.get("CHARONIA_GATEWAY_PORT", "23333"))
if of_gateway and os.environ.get("CHARONIA_GATEWAY_TLS_CERT"):
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=context)
try:
    connection.connect()
    if of_gateway and os.environ.get("CHARONIA_GATEWAY_TLS_CLIENT_CA"):
        sys.exit(0)
    connection.request("GET", sys.argv[2])
    answer = connection.getresponse()
except OSError as error:
    sys.exit(f"port {sys.argv[1]} does not answer: {error}")
if answer.status != 200:
    sys.exit(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
