"""Any text that other ranks send or put in the store is refused by name, or harmless."""

import io
import json

import pytest
import torch
import torch.distributed as dist
from bagua import BaguaError, BaguaMismatchError
from bagua._core.eager import objects as _objects
from bagua._core.group import rendezvous as _rendezvous
from bagua._core.state import initial_state as _initial_state
from bagua._tools import top
from bagua._tools.doctor import links, sums, verdict
from bagua._tools.meeting import made
from support.mutations import attempt, chances, changed_bytes, json_of
from support.options import StrangeSGD

INPUTS = 4000
SEED = 20


def adam():
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return optimizer


def lbfgs():
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer


def strange():
    return StrangeSGD(torch.nn.Linear(5, 3).parameters(), 2, state=True)


def text_of(optimizer):
    return _initial_state.describe_optimizer(optimizer)[0]


@pytest.mark.parametrize("make", [adam, lbfgs, strange])
def test_a_description_is_read_back(make):
    optimizer = make()
    text = text_of(optimizer)
    states, others, groups, _ = _initial_state.read_description(text.encode(), optimizer)
    assert {"state": states, "others": others, "groups": groups} == json.loads(text)


@pytest.mark.parametrize("make", [adam, lbfgs, strange])
def test_any_description_of_an_optimizer_is_refused_by_name_or_fits_in_memory(make):
    optimizer = make()
    text = text_of(optimizer)
    whole = json.loads(text)
    refused = 0
    for number, chance in chances(INPUTS, SEED):
        if chance.random() < 0.5:
            data = changed_bytes(chance, text.encode())
        else:
            data = json_of(chance, whole)
        read, message = attempt(
            BaguaMismatchError, _initial_state.read_description, data, optimizer
        )
        if read is None:
            refused += 1
            assert "was refused: " in message, number
            continue
        states, others, groups, reader = read
        assert [len(states), len(groups)] == [2, 1], number
        for entry in [*filter(None, states), others, *groups]:
            reader.value(entry)
        assert sum(tensor.nbytes for tensor in reader.tensors) < 2**25, number
    assert INPUTS * 0.4 < refused < INPUTS


BYTES = {"tensor": "uint8", "shape": [0], "device": "cpu"}
HOSTILE = {
    "too_large": ({"tensor": "float32", "shape": [2**40], "device": "cpu"}, "bytes, more than"),
    "many_dimensions": ({"tensor": "float32", "shape": [1] * 65, "device": "cpu"}, "no shape"),
    "zero_but_huge": ({"tensor": "int8", "shape": [0, 2**62], "device": "cpu"}, "bytes, more than"),
    "negative": ({"tensor": "float32", "shape": [-1], "device": "cpu"}, "no shape"),
    "no_integer": ({"tensor": "float32", "shape": [True], "device": "cpu"}, "no shape"),
    "attribute": ({"tensor": "load", "shape": [1], "device": "cpu"}, "the dtype 'load'"),
    "device": ({"tensor": "float32", "shape": [1], "device": "cuda:9"}, "is on 'cuda:9'"),
    "code": ({"pickle": "gASV"}, "is not a tensor, value"),
    "more": ({"value": 1, "tensor": "float32"}, "is not a tensor, value"),
    "object": ({"value": {"a": 1}}, "is not a plain value"),
    "import": ({"own": "os.system"}, "needs 'os.system', which this rank's own optimizer does not"),
    "made": ({"own": "bytearray", "fields": [{"value": 2**40}]}, "needs 'bytearray'"),
    "number": ({"bytearray": 2**40}, "is not a valid bytearray"),
    "array": ({"array": "<f8", "shape": [2**40], "bytes": BYTES}, "is not an array of shape"),
    "wide": ({"array": "<U0", "shape": [2**40], "bytes": BYTES}, "is not an array of shape"),
    "objects": ({"array": "|O8", "shape": [1], "bytes": BYTES}, "is of no dtype of numpy"),
    "text": ({"scalar": "<U999999999", "hex": ""}, "is not a valid scalar"),
    "key": ({"dict": [[{"list": []}, {"value": 1}]]}, "has a key that cannot be one"),
    "set": ({"set": [{"tuple": [{"list": []}]}]}, "is a set of what cannot be in one"),
    "dtype": ({"torch": "load"}, "is not a valid torch"),
}


@pytest.mark.parametrize(("entry", "why"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_entry_is_refused_with_the_reason(entry, why):
    optimizer = adam()
    described = json.loads(text_of(optimizer))
    for pair in described["state"][1]["dict"]:
        if pair[0] == {"value": "exp_avg"}:
            pair[1] = {"list": [entry]} if "value" in entry else entry
    with pytest.raises(BaguaMismatchError, match=r"state\[1\]\['exp_avg'\]") as raised:
        _initial_state.read_description(json.dumps(described).encode(), optimizer)
    assert why in str(raised.value)


WHOLE = {
    "parameters": (
        lambda d: d["groups"][0]["dict"].append([{"value": "params"}, {"list": []}]),
        "the entry 'params'",
    ),
    "rows": (lambda d: d["state"].pop(), "'state' has 1 rows, this rank's optimizer has 2"),
    "names": (lambda d: d.update(more=[]), "'state', 'others' and 'groups'"),
}


@pytest.mark.parametrize(("change", "why"), WHOLE.values(), ids=WHOLE.keys())
def test_a_description_of_another_optimizer_is_refused(change, why):
    optimizer = adam()
    described = json.loads(text_of(optimizer))
    change(described)
    with pytest.raises(BaguaMismatchError, match="came from another rank was refused") as raised:
        _initial_state.read_description(json.dumps(described).encode(), optimizer)
    assert why in str(raised.value)


def test_deep_nesting_and_long_numbers_are_refused():
    for text in (b"[" * 100000, b'{"state": ' + b"9" * 5000 + b"}", b"\xff\xfe", b""):
        with pytest.raises(BaguaMismatchError, match="it is not a JSON text"):
            _initial_state.read_description(text, adam())
    entry = {"value": 0}
    for _ in range(20):
        entry = {"list": [entry]}
    groups = [{"dict": [[{"value": "deep"}, entry]]}]
    text = json.dumps({"state": [None, None], "others": {"dict": []}, "groups": groups}).encode()
    with pytest.raises(BaguaMismatchError, match="nested deeper"):
        _initial_state.read_description(text, adam())


def test_any_bytes_of_an_object_are_an_object_or_an_error():
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": [1, "x", (2.5, None)]}, buffer)
    refused = 0
    for number, chance in chances(600, SEED):
        data = bytearray(changed_bytes(chance, buffer.getvalue()))
        _, message = attempt(BaguaError, _objects._read, data, 3, "a call")
        if message:
            refused += 1
            assert "that came from rank 3 cannot be read" in message, number
            assert "a call: the " in message
    assert refused > 300


def test_older_formats_of_torch_are_not_read():
    buffer = io.BytesIO()
    torch.save([1], buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(BaguaError, match="not an archive of torch"):
        _objects._read(bytearray(buffer.getvalue()), 0, "a call")


def stored(value):
    store = dist.HashStore()
    store.set("key", value)
    return store


def test_any_value_of_the_store_is_a_number_or_refused():
    for number, chance in chances(INPUTS, SEED):
        data = changed_bytes(chance, b"1234567")
        read, message = attempt(BaguaError, _rendezvous.stored_number, stored(data), "key", 2**31)
        expected = "under 'key', which is not a number from 0 to"
        assert expected in message if read is None else 0 <= read < 2**31, number


def test_any_value_of_the_store_is_lines_or_refused():
    lines = ["bagua 1.0", "parameter weight: (3, 5) torch.float32 cpu"]
    for number, chance in chances(INPUTS, SEED):
        data = changed_bytes(chance, json.dumps(lines).encode())
        read, message = attempt(BaguaError, _rendezvous.stored_lines, stored(data), "key")
        if read is None:
            assert "under 'key', which is not a list of lines" in message, number
        else:
            assert all(isinstance(line, str) for line in read), number


CARD = verdict.own_card("cpu")._asdict()
MEASURED = {"latency": 1e-4, "ahead": -0.5, "sent": 1e6, "received": 2e6}
SUMS = {key: {"error": 0.5, "seconds": 1.0, "digest": "ab"} for key in ("exact", "8-bit")}
NUMBERS = dict.fromkeys((*top._NUMBERS, *top.TIMES, "at", "every"), 1)
PUBLICATION = NUMBERS | {"world": 2, "host": "a", "ended": False}
#: What tools read from the store: a word, and what it is read by.
READ_BY_TOOLS = {
    "card": (CARD, lambda word: made(verdict.card_from(word))),
    "failures": ({"1": "refused"}, lambda word: links.failures_from(word, 2)),
    "pairs": ([[0, 1], [2, 3]], lambda word: links.pairs_from(word, 4)),
    "measured": (MEASURED, links.measured_from),
    "sums": (SUMS, sums.sums_from),
    "publication": (PUBLICATION, lambda word: top._of_rank(1, word)),
}


def test_any_word_for_a_tool_is_usable_or_refused_with_its_key():
    card = verdict.Card(**CARD)._replace(address="127.0.0.1")
    page = {0: card, 1: card}
    for what, (whole, form) in READ_BY_TOOLS.items():
        for number, chance in chances(INPUTS // 4, SEED):
            text = json.dumps(whole).encode()
            data = changed_bytes(chance, text) if number % 2 else json_of(chance, whole)
            read, message = attempt(BaguaError, _rendezvous.value_in, data, "key", form, 2**20)
            if read is None:
                assert "under 'key', which is not of the form" in message or data == b"null", number
                assert message.isprintable()
            elif what == "publication":
                rows = top.rows_of({1: read}, {1: read | {"at": 0.0}}, {1: 0.0})
                assert all(line.isprintable() for line in top.table(rows, 2, "")), number
            elif what == "sums":
                assert isinstance(sums.findings_of_sums({0: read, 1: SUMS}), list)
            elif what == "failures":
                unreachable = {(0, other): reason for other, reason in read.items()}
                verdict.findings_of_links(page, unreachable, {}, {}, 4.0, 0.0)
