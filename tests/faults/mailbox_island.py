"""An island of a mailbox, of one process: `mailbox_island.py FOLDER ROUNDS`.

Trains and notes as `elastic_rank.py` does. ISLAND is its number, MAILBOX the URL, PLAN arguments of
the algorithm and GRACE that of the mailbox, as JSON. At SIGUSR1 it kills itself in the next call of
what FOLDER/<island>.death names, such as "before Box.decide".
"""

import datetime
import functools
import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import bagua.torch_api as bagua
from bagua._outer.mailbox import claims, store
from bagua._outer.mailbox.box import Box
from bagua._outer.mailbox.claims import Claim
from bagua._outer.mailbox.rounds import MailboxRanks
from bagua._outer.mailbox.store import Folder, Remote
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox
from faults.elastic_rank import EXIT_OF_AN_ERROR, INTERVAL, RATE, die, ended, train_until_ended
from torch import nn

TIMEOUT = 600.0  # longer than the judge waits
LEAVE_WITHIN = 60.0
SILENCE = 3.0
KEEP = 4
claims._BEAT, claims._SILENCE = 0.3, SILENCE
Remote.pause = 0.05, 0.5
store._SECONDS_OF_A_CALL = 10.0
#: Calls in which an island may die.
PLACES = {
    "Box.contribute": Box,
    "Box.decide": Box,
    "Box.put_anchor": Box,
    "Box.forget": Box,
    "Claim._letter": Claim,
    "MailboxRanks.receive": MailboxRanks,
    "Folder._written": Folder,
    "Folder.remove": Folder,
}
_doomed = []  # where this process dies


def may_die_in(place):
    """Have a call kill the process before or after it, once that is told."""
    owner, method = PLACES[place], place.partition(".")[2]
    original = getattr(owner, method)

    @functools.wraps(original)
    def call(*args, **options):
        if f"before {place}" in _doomed:
            die()
        result = original(*args, **options)
        if f"after {place}" in _doomed:
            die()
        return result

    setattr(owner, method, call)


def end_at_the_last_round(folder, rounds):
    """Have an island that was late for the last round launch no other, to which nobody comes."""
    gathered = MailboxRanks.gathered

    def call(self, part):
        due = gathered(self, part)
        return due and not ended(folder, self._known_loop().state.outer_rounds, rounds)

    MailboxRanks.gathered = call


def train(folder, rounds):
    island = os.environ["ISLAND"]
    signal.signal(
        signal.SIGUSR1, lambda *_: _doomed.append((folder / f"{island}.death").read_text())
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    mailbox = Mailbox(
        os.environ["MAILBOX"],
        island=f"island-{island}",
        grace=json.loads(os.environ["GRACE"]),
        keep=KEEP,
        leave_within=LEAVE_WITHIN,
        secret="of islands that fail",
    )
    plan = json.loads(os.environ["PLAN"])
    algorithm = DiLoCoAlgorithm(interval=INTERVAL, elastic=mailbox, **plan)
    model.with_bagua([optimizer], algorithm)
    train_until_ended(folder, rounds, island, model, optimizer)


def main():
    torch.set_num_threads(1)
    for place in PLACES:
        may_die_in(place)
    bagua.init_process_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    try:
        folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
        end_at_the_last_round(folder, rounds)
        train(folder, rounds)
    except bagua.BaguaError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(EXIT_OF_AN_ERROR)


if __name__ == "__main__":
    main()
