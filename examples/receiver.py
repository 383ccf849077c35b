"""Stores the callbacks of a node, and refuses those that it did not sign.

    POC_CALLBACK_SECRET=secret python3 receiver.py 9000     # the same secret as the node's

A node posts to URL/generated, URL/validated and URL/logged (docs/api has their schemas), and
repeats a callback, under the same Idempotency-Key, until the answer is 2xx: so answer 2xx only
once it is on disk, and count each key once.
"""

import hashlib
import hmac
import os
import sqlite3
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

SECRET = os.environ["POC_CALLBACK_SECRET"].encode()
STORE = sqlite3.connect(os.environ.get("STORE", "callbacks.sqlite"), isolation_level=None)
STORE.execute("CREATE TABLE IF NOT EXISTS callbacks (key TEXT PRIMARY KEY, endpoint, body)")
NAMES = ("Idempotency-Key", "X-Proofserve-Sequence", "X-Proofserve-Timestamp")


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        endpoint = self.path.rpartition("/")[2]
        key, sequence, sent_at = (self.headers.get(name, "") for name in NAMES)
        signed = f"v1\n{sent_at}\n{endpoint}\n{key}\n{sequence}\n".encode() + body
        expected = "v1=" + hmac.new(SECRET, signed, hashlib.sha256).hexdigest()
        signature = self.headers.get("X-Proofserve-Signature", "")
        is_signed = hmac.compare_digest(expected.encode(), signature.encode())
        # Without this, who recorded a callback could send it again for ever.
        if not (is_signed and abs(time.time() - int(sent_at)) < 300):
            self.send_error(401, "not signed with the secret in the last five minutes")
            return
        STORE.execute("INSERT OR IGNORE INTO callbacks VALUES (?, ?, ?)", (key, endpoint, body))
        self.send_response(204)
        self.end_headers()


HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
