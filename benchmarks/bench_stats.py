"""Cost of statistics per bucket and step, measured alone.

    python benchmarks/bench_stats.py [--quick]

Measured are counting each call of a communicator and each message that is handled as it arrives
(the time of calls that move next to nothing, with and without the decorator that counts), and
looking for NaN and infinity in the result, in host memory. The last depends on the size of the
bucket; the limit is for the others. Not measured: reading clocks and counters before and after a
bucket's operations. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import json

import torch
from bagua import _C
from common import machine, timed_in_turns, write_results

# Calls of communicators per bucket; messages per bucket that are handled one by one as they arrive
# (a bucket of 10 MiB with a second rank).
CASES = {
    "gradient_allreduce": (1, 0),
    "bytegrad": (2, 4),
    "bytegrad, hierarchical, leader": (4, 4),
}
MESSAGES = 8
LIMIT_NS = 1000.0


def alone():
    return _C.ThreadCommunicator(_C.ThreadHub(1, 60.0), 0)


def counting():
    return _C.CountingCommunicator(alone())


def check():
    """The counter counts: a program that measured nothing would be fast."""
    hub = _C.ThreadHub(1, 60.0)
    counted = _C.CountingCommunicator(_C.ThreadCommunicator(hub, 0))
    counted.all_reduce(torch.ones(1 << 16), _C.ReduceOp.SUM)
    if counted.traffic()["wire_ns"] <= 0:
        raise SystemExit("the counter does not count")


def added_by_counting(messages, repeats, rounds):
    """Nanoseconds that counting adds to a call with so many messages of a rank to itself."""
    parts = [(torch.zeros(1), 0) for _ in range(messages)]

    def many(communicator):
        def run():
            for _ in range(repeats):
                communicator.exchange(parts, parts)

        return run

    arms = {"plain": many(alone()), "counting": many(counting())}
    seconds = timed_in_turns(arms, rounds, warmup=1)
    return 1e9 * (seconds["counting"]["median"] - seconds["plain"]["median"]) / repeats


def looking_ns(mib, repeats):
    """Cost of looking through a bucket of `mib` MiB."""
    flat = torch.ones(mib * 2**18)
    seconds = timed_in_turns({"looking": lambda: _C.all_finite(flat)}, repeats, warmup=1)
    return 1e9 * seconds["looking"]["median"]


def measure(repeats, rounds):
    """Medians, in nanoseconds."""
    call = added_by_counting(0, repeats // 10, rounds)
    message = (added_by_counting(MESSAGES, repeats // 50, rounds) - call) / MESSAGES
    cases = {name: calls * call + messages * message for name, (calls, messages) in CASES.items()}
    return {
        "per_call_ns": call,
        "per_message_ns": message,
        "per_bucket_ns": cases,
        "looking_ns": {f"{mib} MiB": looking_ns(mib, repeats // 2000) for mib in (1, 10, 64)},
        "limit_ns": LIMIT_NS,
        "within_limit": max(cases.values()) < LIMIT_NS,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check()
    repeats, rounds = (20_000, 3) if arguments.quick else (1_000_000, 15)
    payload = {"machine": machine(), **measure(repeats, rounds)}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_stats", payload)


if __name__ == "__main__":
    main()
