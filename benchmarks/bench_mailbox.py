"""Costs of a mailbox: under kills, over a slow link, and to an island that comes.

    python benchmarks/bench_mailbox.py goodput [--mean 30] [--seconds 150]
    python benchmarks/bench_mailbox.py link [--rate 20] [--rtt 100]
    python benchmarks/bench_mailbox.py rejoin [--anchor 940] [--rate 1000]

goodput: four islands in a folder train while one of them is killed after drawn times of `--mean`
seconds, and is started again a second later; beside them four train that nobody kills. Steps count
up to the last round that has counted, and the figure is those with kills over those without.
`--torchft`: of replicas of torchft's DiLoCo (`pip install torchft`), in place of islands. link:
seconds per step of two islands in an S3 server, over those of a step without rounds. rejoin:
seconds of bagua.wrap of an island that finds an anchor of so many MB there, and of the same one
when it is killed and started again, and from the kill to the first round in which it counts; the
other island waits for it. `bytes_take`: seconds of the anchor's bytes. The last two need root,
/dev/net/tun, g++ and `make mailbox`. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from common import machine, write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ISLANDS = 4
PORT = 29700  # of the S3 server, inside its namespace
S3_SERVER = Path(__file__).parents[1] / "tests/support/processes/s3_server.py"


# An island, as a process.


def train(model, optimizer, options):
    """A step that takes `options["seconds"]`, or longer."""
    import torch

    began = time.monotonic()
    optimizer.zero_grad()
    model(torch.randn(options["rows"], options["width"])).square().mean().backward()
    time.sleep(max(0.0, options["seconds"] - (time.monotonic() - began)))
    optimizer.step()


def island(url, name, notes, options):
    """Train until the notes have a last round; note the seconds of the wrap, steps and rounds."""
    import bagua.torch_api as bagua
    import torch
    from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox, OuterSGD

    torch.set_num_threads(1)
    bagua.init_process_group()
    torch.manual_seed(0)
    width = options["width"]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    own = {"quorum": options["quorum"], "grace": options["grace"], "keep": 16}
    algorithm = DiLoCoAlgorithm(
        OuterSGD(0.7, 0.6),
        options["interval"],
        overlap_steps=options["overlap"],
        codec="int4_block",
        elastic=Mailbox(url, island=name, **own),
    )
    with open(notes, "a", buffering=1) as file:

        def note(**what):
            file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

        begin = time.monotonic()
        model = bagua.wrap(model, [optimizer], algorithm)
        outer, made = model.bagua_algorithm, model.bagua_algorithm.outer_rounds
        note(wrapped=time.monotonic() - begin)
        while not all(notes_of(each, "wrapped") for each in options["together"]):
            time.sleep(0.05)
        note(begins=True)
        for step in range(1, options["steps"] + 1):
            train(model, optimizer, options)
            if outer.outer_rounds > made:
                made = outer.outer_rounds
                late = model.bagua_stats()["outer"]["late_rounds"]
                note(step=step, round=made, late=late)
        note(ended=step)


def replica_of_torchft(lighthouse, name, notes, options):
    """As an island: rounds of torchft's DiLoCo."""
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options["width"]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.6, nesterov=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=options["quorum"],
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
    )
    rounds = DiLoCo(manager, [model], optimizer, outer, sync_every=options["interval"])
    with open(notes, "a", buffering=1) as file, rounds:
        made = 0
        for step in range(1, options["steps"] + 1):
            train(model, optimizer, options)
            if manager.current_step() > made:
                made = manager.current_step()
                file.write(json.dumps({"at": time.monotonic(), "step": step, "round": made}) + "\n")


@contextmanager
def lighthouse():
    """The address of a process by which replicas of torchft meet."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def start(url, name, notes, options, namespace=None, variables=None, kind="--island"):
    enter = [] if namespace is None else ["ip", "netns", "exec", namespace]
    argv = [*enter, sys.executable, __file__, kind, url, name, notes, json.dumps(options)]
    return subprocess.Popen([*map(str, argv)], env={**os.environ, **(variables or {})})


def notes_of(path, kind):
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [each for each in map(json.loads, lines) if kind in each]


# Under kills.


class Islands:
    """Four islands, or replicas of torchft, in a folder that goes with the stack."""

    def __init__(self, stack, options, torchft):
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._url = stack.enter_context(lighthouse()) if torchft else f"{self._folder}/mailbox"
        self._kind, self._options = "--replica" if torchft else "--island", options
        self._lives, self._living = [], {}
        stack.callback(self._end)
        for number in range(ISLANDS):
            self._begin(number)

    def _begin(self, number):
        self._lives.append(f"{self._folder}/{len(self._lives)}.jsonl")
        name, options = f"island-{number}", self._options
        self._living[number] = start(self._url, name, self._lives[-1], options, kind=self._kind)

    def _end(self):
        for process in self._living.values():
            process.kill()
            process.wait()

    def all_train(self):
        return all(notes_of(each, "step") for each in self._lives)

    def kill(self, number):
        """And start it again a second later."""
        self._living[number].kill()
        self._living[number].wait()
        time.sleep(1.0)
        self._begin(number)

    def useful_steps(self, began):
        """Steps since then that have counted."""
        total = 0
        for each in self._lives:
            notes = notes_of(each, "step")
            counted = [n["step"] for n in notes if n["at"] > began]
            before = [n["step"] for n in notes if n["at"] <= began]
            total += max(0, (counted or [0])[-1] - (before or [0])[-1])
        return total


def goodput(arguments):
    options = {"width": 64, "rows": 16, "interval": 100, "overlap": 50, "seconds": 0.05}
    options |= {"steps": 10**9, "quorum": 2, "grace": 2.0, "together": []}
    chance, kills = random.Random(1), 0
    with ExitStack() as stack:
        struck, calm = (Islands(stack, options, arguments.torchft) for _ in range(2))
        while not (struck.all_train() and calm.all_train()):
            time.sleep(0.1)
        began = time.monotonic()
        due = began + chance.expovariate(1 / arguments.mean)
        while time.monotonic() < began + arguments.seconds:
            time.sleep(0.05)
            if time.monotonic() > due:
                struck.kill(chance.randrange(ISLANDS))
                kills += 1
                due = time.monotonic() + chance.expovariate(1 / arguments.mean)
        steps, without = struck.useful_steps(began), calm.useful_steps(began)
    return {"kills": kills, "steps": steps, "without": without, "goodput": steps / without}


# Over links.


def over_a_link(rate, rtt, islands):
    """An S3 server in one namespace, and some for islands: (stack, URL, those, variables)."""
    from support.processes import s3_server, wide_area

    if reason := wide_area.why_unavailable():
        sys.exit(f"bench_mailbox: no wide area: {reason}")
    stack = ExitStack()
    link = stack.enter_context(wide_area.WideArea(1 + islands, rtt_ms=rtt, mbit=rate))
    command = ["ip", "netns", "exec", link.namespace(0), sys.executable, str(S3_SERVER)]
    place = {"S3_HOST": link.address(0), "S3_PORT": str(PORT), "MISHAPS": "0"}
    server = subprocess.Popen(
        command, env=os.environ | place, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stack.callback(server.wait)
    stack.callback(server.kill)
    server.stdout.readline()
    variables = s3_server.variables(PORT)
    variables |= {"AWS_ENDPOINT_URL": f"http://{link.address(0)}:{PORT}"}
    make = "import s3fs; s3fs.S3FileSystem().mkdir('run')"
    inside = ["ip", "netns", "exec", link.namespace(1), sys.executable, "-c", make]
    subprocess.run(inside, env=os.environ | variables, check=True)
    return stack, "s3://run/it", [link.namespace(1 + i) for i in range(islands)], variables


def ended_well(processes):
    for process in processes:
        if process.wait() != 0:
            sys.exit(f"bench_mailbox: an island ended with status {process.returncode}")


def link(arguments):
    options = {"width": 1024, "rows": 16, "interval": 500, "overlap": 400, "seconds": 0.027}
    options |= {"steps": 2100, "quorum": 2, "grace": None}
    stack, url, spaces, variables = over_a_link(arguments.rate, arguments.rtt, 2)
    found = []
    with stack, tempfile.TemporaryDirectory() as folder:
        alone = {**options, "steps": 499}  # before the first round

        def seconds_per_step(place, given):
            files = [f"{folder}/{place.rpartition('/')[2]}{i}.jsonl" for i in range(2)]
            own = {**given, "together": files}
            processes = [
                start(place, f"island-{i}", files[i], own, spaces[i], variables) for i in range(2)
            ]
            ended_well(processes)
            for each in files:
                (begin,), (end,) = notes_of(each, "begins"), notes_of(each, "ended")
                yield (end["at"] - begin["at"]) / given["steps"]
            found.extend(notes_of(each, "step") for each in files)

        without = statistics.mean(seconds_per_step(f"{url}-alone", alone))
        own = [*seconds_per_step(url, options)]
    late = [notes[-1]["late"] for notes in found if notes]
    return {"without": without, "seconds": own, "ratio": [s / without for s in own], "late": late}


def rejoin(arguments):
    parameters = arguments.anchor * 1e6 / 8  # anchor and momentum in float32
    options = {"width": int((parameters / 2) ** 0.5), "rows": 1, "interval": 4, "overlap": 0}
    options |= {"seconds": 0.0, "steps": 10**9, "quorum": 2, "grace": None, "together": []}
    stack, url, spaces, variables = over_a_link(arguments.rate, 1, 2)
    with stack, tempfile.TemporaryDirectory() as folder:

        def begin(name, notes, space):
            process = start(url, name, notes, options, space, variables)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def until(notes, kind, process):
            while not notes_of(notes, kind):
                if process.poll() is not None:
                    sys.exit(f"bench_mailbox: an island ended with status {process.returncode}")
                time.sleep(0.02)
            return notes_of(notes, kind)[0]

        notes = [f"{folder}/{number}.jsonl" for number in range(3)]
        first = begin("first", notes[0], spaces[0])
        until(notes[0], "wrapped", first)
        second = begin("second", notes[1], spaces[1])
        until(notes[1], "step", second)
        second.kill()
        second.wait()
        killed = time.monotonic()
        again = begin("second", notes[2], spaces[1])
        common = until(notes[2], "step", again)["at"] - killed
        wraps = [until(each, "wrapped", again)["wrapped"] for each in notes[1:]]
        wrapped = notes_of(notes[2], "wrapped")[0]["at"] - killed
    bytes_take = arguments.anchor * 8 / arguments.rate
    found = {"comes": wraps[0], "after_a_kill": wraps[1], "kill_to_wrapped": wrapped}
    most = 1.3 * bytes_take + 5
    return {"bytes_take": bytes_take, **found, "kill_to_round": common, "most": most}


def main():
    trains = {"--island": island, "--replica": replica_of_torchft}.get("".join(sys.argv[1:2]))
    if trains is not None:
        url, name, notes, options = sys.argv[2:]
        return trains(url, name, notes, json.loads(options))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = {"goodput": goodput, "link": link, "rejoin": rejoin}
    parser.add_argument("what", nargs="?", default="goodput", choices=ways)
    parser.add_argument("--mean", type=float, default=30, help="seconds between kills")
    parser.add_argument("--seconds", type=float, default=150, help="of goodput")
    parser.add_argument("--torchft", action="store_true", help="goodput of torchft's DiLoCo")
    parser.add_argument("--rate", type=float, help="Mbit/s; 20 of link, 1000 of rejoin")
    parser.add_argument("--rtt", type=float, default=100, help="milliseconds, of link")
    parser.add_argument("--anchor", type=float, default=940, help="MB, of rejoin")
    parser.add_argument("--quick", action="store_true", help="goodput of 20 seconds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mean, arguments.seconds = 8.0, 20.0
    arguments.rate = arguments.rate or (1000 if arguments.what == "rejoin" else 20)
    result = {"machine": machine(), **vars(arguments), **ways[arguments.what](arguments)}
    print(json.dumps(result, indent=2))
    write_results(f"mailbox_{arguments.what}", result)


if __name__ == "__main__":
    main()
