"""Words that strangers write into the store where ranks of `bagua doctor` read."""

import argparse
import json
import threading

import pytest
import torch.distributed as dist
from bagua._tools.doctor import examine, verdict

WORDS = (
    *("3", "-1", "1e999", "NaN", "9" * 400, "[" * 9000, "{", "\x1b[2J", '"\\u001b[2J"', "null"),
    *('"' + "x" * 10**6 + '"', "[]", "{}", '{"7": 3}', '{"0": null}', "[[0]]", "[[0, 9]]", "[3]"),
    json.dumps({"latency": 1, "ahead": 0, "sent": -1, "received": 10**400}),
    json.dumps({"exact": {"error": 0.0, "seconds": 0.0, "digest": "a"}}),
    json.dumps({"exact": 1, "8-bit": {"error": "", "seconds": None, "digest": []}}),
)
LEGAL = {"measured": '"', "sums": '"', "connected": "{}", "round": ("null", "[]")}
OF_RANK_0 = "secret", "round/0", "reduce", "code"
OF_RANK_1 = "card/1", "connected/1", "measured/0/1", "sums/1"
ARGUMENTS = argparse.Namespace(
    timeout=0.5, tolerance=4.0, at_least=0.0, device="cpu", millions=1.0, compute=1.0
)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(examine, "_GRACE", 0.5)
    monkeypatch.setattr(examine, "_MOST_BYTES", 2**10)
    result = {"error": 0.0, "seconds": 0.0, "digest": "a"}
    sums = {"exact": result, "8-bit": result}
    monkeypatch.setattr(examine, "reduce_everywhere", lambda *_: sums)
    card = verdict.own_card("cpu")._replace(address="127.0.0.1")
    monkeypatch.setattr(examine, "own_card", lambda _: card)


def examined(key="", word=""):
    """Exit codes of two ranks, of which `word` stands under `key` in place of what is written."""
    store, codes = dist.HashStore(), {}

    def run(rank):
        examination = examine._Examination(rank, 2, store, ARGUMENTS)
        write = examination._meeting.write

        def changed(name, own):
            if name == key:
                store.set(name, word)
            else:
                write(name, own)

        examination._meeting.write = changed
        codes[rank] = examination.run()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def test_any_word_leaves_the_doctor_with_a_verdict_that_names_the_key(quick, capfd):
    assert examined() == {0: 0, 1: 0}
    for number, key in enumerate(OF_RANK_1 + OF_RANK_0):
        for word in WORDS[number % 7 :: 7]:
            capfd.readouterr()
            codes = examined(key, word)
            told = capfd.readouterr()
            assert set(codes) == {0, 1}, (key, word[:50])
            assert "Traceback" not in told.err, (key, word[:50], told.err)
            text = " ".join((told.out + told.err).split())
            assert "\x1b" not in text
            assert len(text) < 5000
            if not word.startswith(LEGAL.get(key.partition("/")[0], "none")):
                assert f"under '{key}', which is not of the form" in text, (word[:50], text)
                assert "docs/security.md" in text
