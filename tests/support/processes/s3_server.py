"""A server that speaks S3, with conditional writes: moto's, of requirements-mailbox.txt.

`python s3_server.py` serves in a process, until its input ends, and prints the port; S3_HOST and
S3_PORT in the environment choose where, instead of any port of this machine. Each request
whose number is a multiple of MISHAPS in the environment has a mishap: it is refused with status
503, or done and answered with 500, in turn; 0: none has.
"""

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import urllib.request

#: For clients, without the port.
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def made():
    """A server, whose `serve_forever` is to be called."""
    from moto import server
    from werkzeug import serving

    app = server.DomainDispatcherApplication(server.create_backend_app)
    host, port = os.environ.get("S3_HOST", "127.0.0.1"), int(os.environ.get("S3_PORT", "0"))
    return serving.make_server(host, port, Mishaps(app), threaded=True)


def variables(port):
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **VARIABLES}


@contextlib.contextmanager
def bucket(mishaps):
    """(process of a server, URL of a run in an empty bucket, variables of clients)."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | {"MISHAPS": str(mishaps)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        port = int(process.stdout.readline())
        there = urllib.request.Request(f"http://127.0.0.1:{port}/islands", method="PUT")
        urllib.request.urlopen(there, timeout=60).close()
        yield process, "s3://islands/run", variables(port)
    finally:
        process.kill()
        process.communicate()


class Mishaps:
    """Has some requests fail, before or after they are done.

    moto looks for a key and writes it in two steps, so requests are done one after the other, but
    only when they are there: a client that is stopped as it sends does not stop the server.
    """

    def __init__(self, app):
        self._app, self._requests, self._one = app, 0, threading.Lock()
        self._every = int(os.environ.get("MISHAPS", "0"))

    def __call__(self, environ, start_response):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        with self._one:
            self._requests += 1
            number, rest = divmod(self._requests, self._every) if self._every else (0, 1)
            if rest:
                return list(self._app(environ, start_response))
            if number % 2:
                return _failed(start_response, "503 Slow Down", "SlowDown")
            b"".join(self._app(environ, lambda *_: None))
            return _failed(start_response, "500 Internal Server Error", "InternalError")


def _failed(start_response, status, code):
    body = f"<Error><Code>{code}</Code></Error>".encode()
    start_response(status, [("Content-Length", str(len(body)))])
    return [body]


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
    s3 = made()
    print(s3.server_port, flush=True)
    threading.Thread(target=s3.serve_forever, daemon=True).start()
    sys.stdin.read()
