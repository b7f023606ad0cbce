"""Costs of a mailbox: under kills, over a slow link, and to an island that comes.

    python benchmarks/bench_mailbox.py goodput [--mean 30] [--seconds 150]
    python benchmarks/bench_mailbox.py link [--rate 20] [--rtt 100]
    python benchmarks/bench_mailbox.py rejoin [--anchor 940] [--rate 1000]

goodput: four islands in a folder train without a fault, then while one of them is killed after
drawn times of `--mean` seconds, and is started again a second later. Steps count up to the last
round that has counted, and the figure is those with kills over those without. link: seconds per
step of two islands in an S3 server, over those of a step without rounds. rejoin: seconds of
bagua.wrap of an island that finds an anchor of so many MB there, and of the same one after it was
killed, over the time that the bytes take. The last two need root, /dev/net/tun, g++ and
requirements-mailbox.txt. Prints JSON and keeps it under build/benchmarks/.
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
from contextlib import ExitStack
from pathlib import Path

from common import machine, write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ISLANDS = 4
PORT = 29700  # of the S3 server, inside its namespace
S3_SERVER = Path(__file__).parents[1] / "tests/support/processes/s3_server.py"


# An island, as a process.


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
            began = time.monotonic()
            optimizer.zero_grad()
            model(torch.randn(options["rows"], width)).square().mean().backward()
            time.sleep(max(0.0, options["seconds"] - (time.monotonic() - began)))
            optimizer.step()
            if outer.outer_rounds > made:
                made = outer.outer_rounds
                late = model.bagua_stats()["outer"]["late_rounds"]
                note(step=step, round=made, late=late)
        note(ended=step)


def start(url, name, notes, options, namespace=None, variables=None):
    enter = [] if namespace is None else ["ip", "netns", "exec", namespace]
    argv = [*enter, sys.executable, __file__, "--island", url, name, notes, json.dumps(options)]
    return subprocess.Popen([*map(str, argv)], env={**os.environ, **(variables or {})})


def notes_of(path, kind):
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [each for each in map(json.loads, lines) if kind in each]


# Under kills.


def useful_steps(mean, seconds, options, seed=1):
    """Steps that have counted of four islands in that time, and kills."""
    chance, kills, lives = random.Random(seed), 0, []
    with tempfile.TemporaryDirectory() as folder:
        url, living = f"{folder}/mailbox", {}

        def begin(number):
            lives.append(f"{folder}/{len(lives)}.jsonl")
            living[number] = start(url, f"island-{number}", lives[-1], options)

        for number in range(ISLANDS):
            begin(number)
        while not all(notes_of(each, "step") for each in lives):
            time.sleep(0.1)
        began = time.monotonic()
        due = began + chance.expovariate(1 / mean) if mean else float("inf")
        while time.monotonic() < began + seconds:
            time.sleep(0.05)
            if time.monotonic() > due:
                victim, kills = chance.randrange(ISLANDS), kills + 1
                living[victim].kill()
                living[victim].wait()
                time.sleep(1.0)
                begin(victim)
                due = time.monotonic() + chance.expovariate(1 / mean)
        for process in living.values():
            process.kill()
            process.wait()
        total = 0
        for each in lives:
            counted = [0] + [n["step"] for n in notes_of(each, "step") if n["at"] > began]
            before = [n["step"] for n in notes_of(each, "step") if n["at"] <= began]
            total += max(0, counted[-1] - (before or [0])[-1])
        return total, kills


def goodput(arguments):
    options = {"width": 64, "rows": 16, "interval": 100, "overlap": 50, "seconds": 0.05}
    options |= {"steps": 10**9, "quorum": 2, "grace": 2.0, "together": []}
    without, _ = useful_steps(None, arguments.seconds, options)
    steps, kills = useful_steps(arguments.mean, arguments.seconds, options)
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
    options = {"width": int((parameters / 2) ** 0.5), "rows": 1, "interval": 1000, "overlap": 0}
    options |= {"seconds": 0.0, "steps": 1, "quorum": 1, "grace": 1.0, "together": []}
    stack, url, (space,), variables = over_a_link(arguments.rate, 1, 1)
    seconds = []
    with stack, tempfile.TemporaryDirectory() as folder:
        for number, steps in enumerate((1, 10**9, 1)):
            notes, given = f"{folder}/{number}.jsonl", {**options, "steps": steps}
            name = "first" if number == 0 else "second"
            process = start(url, name, notes, given, space, variables)
            if steps > 1:
                while not notes_of(notes, "wrapped") and process.poll() is None:
                    time.sleep(0.1)
                process.kill()
                process.wait()
            else:
                ended_well([process])
            seconds.append(notes_of(notes, "wrapped")[0]["wrapped"])
    bytes_take = arguments.anchor * 8 / arguments.rate
    return {"bytes_take": bytes_take, "comes": seconds[1], "after_a_kill": seconds[2]}


def main():
    if sys.argv[1:2] == ["--island"]:
        url, name, notes, options = sys.argv[2:]
        return island(url, name, notes, json.loads(options))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = {"goodput": goodput, "link": link, "rejoin": rejoin}
    parser.add_argument("what", nargs="?", default="goodput", choices=ways)
    parser.add_argument("--mean", type=float, default=30, help="seconds between kills")
    parser.add_argument("--seconds", type=float, default=150, help="of each of the two runs")
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
