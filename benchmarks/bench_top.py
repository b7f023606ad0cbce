"""Cost of publishing statistics for `bagua top`, per publication.

    python benchmarks/bench_top.py [--quick]

A rank that trains alone publishes the statistics of a module of so many buckets to a store in
another process, over and over; a job does that once a second (`BAGUA_TOP=1`), from a thread that
the training never waits for. What remains is the processor time of that thread, during which it
holds Python's lock. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua._watch.publisher import KEY, Publisher
from common import machine, write_results

LIMIT_SHARE = 0.001  # of one processor, at one publication a second


def serve(pipe):
    """The store, as torchrun's agent has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def module_of(buckets):
    """A wrapped module of so many buckets, after one step."""
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(4 * 64 * 64)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(buckets)])
    model.with_bagua([], bagua.algorithms.GradientAllReduceAlgorithm())
    model(torch.ones(1, 64)).sum().backward()
    assert len(model.bagua_buckets) == buckets
    return model


def measure(buckets, store, repeats):
    """Medians per publication: processor seconds of this thread, and seconds by the clock."""
    publisher = Publisher(1e6)
    model = module_of(buckets)
    publisher.add(model.bagua_ddp)
    processor, clock = [], []
    for _ in range(repeats):
        begun, began = time.thread_time(), time.perf_counter()
        store.set(KEY.format(rank=0), json.dumps(publisher.publication(ended=False)))
        processor.append(time.thread_time() - begun)
        clock.append(time.perf_counter() - began)
    written = json.loads(store.get(KEY.format(rank=0)))
    publisher.close()
    if written["rounds"] != 1 or written["number"] != repeats:
        raise SystemExit("the publication is not of this module")
    return {"processor_s": statistics.median(processor), "clock_s": statistics.median(clock)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    server.start()
    port = ours.recv()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    bagua.init_process_group(dist.HashStore(), 0, 1, 1)
    repeats = 200 if arguments.quick else 5000
    cases = {f"{n} bucket(s)": measure(n, store, repeats) for n in (1, 10, 100)}
    worst = max(case["processor_s"] for case in cases.values())
    payload = {
        "machine": machine(),
        "per_publication": cases,
        "share_of_a_processor": worst,
        "limit": LIMIT_SHARE,
        "within_limit": worst < LIMIT_SHARE,
    }
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_top", payload)
    bagua.destroy_process_group()
    ours.send(None)
    server.join()


if __name__ == "__main__":
    main()
