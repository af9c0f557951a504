#!/usr/bin/python3 -IS
"""health PORT PATH: exit code 0 when http://127.0.0.1:PORT/PATH answers 200, for the health checks of the images."""

import http.client
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=4)
try:
    connection.request("GET", sys.argv[2])
    answer = connection.getresponse()
except OSError as error:
    sys.exit(f"port {sys.argv[1]} does not answer: {error}")
if answer.status != 200:
    sys.exit(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
