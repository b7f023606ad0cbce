"""Runs a function on ranks that are threads of this process."""

import threading
import time
import traceback

from bagua import _C


def run_threads(n, function):
    """Runs `function(rank)` on n threads; AssertionError with the tracebacks of those that fail."""
    failures = {}

    def run(rank):
        try:
            function(rank)
        except BaseException:  # noqa: BLE001 - reported below
            failures[rank] = traceback.format_exc()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise AssertionError("\n".join(f"--- rank {r}\n{failures[r]}" for r in sorted(failures)))


def errors_of_threads(n, function):
    """The exception, or None, of `function(rank)` on each of n threads."""
    errors = [None] * n

    def run(rank):
        try:
            function(rank)
        except Exception as error:  # noqa: BLE001 - the tests look at it
            errors[rank] = error

    run_threads(n, run)
    return errors


def run_thread_ranks(n, function, *args, timeout=20.0):
    """Call `function(communicator, *args)` on n thread ranks; returns the n results by rank.

    timeout: seconds that one call of a communicator waits for the others. Raises AssertionError
    with the traceback of every rank that raised.
    """
    hub = _C.ThreadHub(n, timeout)
    results = [None] * n

    def run(rank):
        communicator = _C.ThreadCommunicator(hub, rank)
        try:
            results[rank] = function(communicator, *args)
        except BaseException as error:
            communicator.abort(f"{type(error).__name__}: {error}")
            raise

    run_threads(n, run)
    return results


def wait_until(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.0005)
