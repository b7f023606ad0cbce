"""One process of the pool: waits for calls, runs them, sends back what they returned.

Started by pool.py as `worker.py <file for stacks>`, its connection in place of stdin. A call is a
dict: a pickled function and its arguments, the environment and whether to make the default process
group. SIGUSR1 writes the stacks of all threads into the file.
"""

import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


def call_function(call):
    for entry in reversed(call["sys_path"]):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    function, args = pickle.loads(call["work"])
    if call["init"]:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=call["timeout"]))
        dist.barrier()  # or a rank that returns at once closes what another is connecting to
    return pickle.dumps(function(*args))


def run(call):
    """Returns ("returned", pickled result) or ("raised", traceback)."""
    before = dict(os.environ)
    os.environ.update(call["env"])
    torch.manual_seed(0)
    try:
        answer = ("returned", call_function(call))
    except BaseException:  # noqa: BLE001 - SystemExit too: everything is reported
        answer = ("raised", traceback.format_exc())
    try:
        bagua = sys.modules.get("bagua.torch_api.communication")
        if bagua is not None and bagua.is_initialized():  # as an aggregation makes by itself
            bagua.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - reported
        answer = ("raised", traceback.format_exc())
    os.environ.clear()
    os.environ.update(before)
    return answer


def main():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with Connection(connection) as calls, open(sys.argv[1], "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                call = calls.recv()
            except EOFError:
                return
            calls.send(run(call))


if __name__ == "__main__":
    main()
