#!/usr/bin/python3 -IS
"""health PORT PATH: exit code 0 if http://127.0.0.1:PORT/PATH returns 200, for the health checks of the images.

With CHARONIA_GATEWAY_TLS_CERT it uses https for the gateway. With CHARONIA_GATEWAY_TLS_CLIENT_CA the gateway requires a
client certificate, which this program does not have: then the exit code is 0 if the TLS handshake succeeds.
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
    sys.exit(f"port {sys.argv[1]} does not respond: {error}")
if answer.status != 200:
    sys.exit(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
