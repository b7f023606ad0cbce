"""A mailbox on a server of SFTP: encrypted, with keys, through OpenSSH and the real client.

Needs Debian's openssh-server, and requirements-mailbox.txt.
"""

import os
import subprocess
import sys
import threading

import pytest
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox.places import place_at
from deep.test_mailbox_jobs import EXAMPLE, outputs_of_one_anchor, run
from support.processes import ssh_server

pytest.importorskip("paramiko", reason="needs requirements-mailbox.txt")
pytestmark = pytest.mark.skipif(ssh_server.there_is_none(), reason="needs openssh-server")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """(start of URLs, folder on the server); this process is its user."""
    with ssh_server.serving(tmp_path) as (url, home):
        monkeypatch.setenv("HOME", str(home))
        folder = tmp_path / "mailbox"
        folder.mkdir()
        yield url, folder


def at_once(count, function):
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append((i, function(i)))) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for _, result in sorted(results)]


def test_a_file_is_created_once_and_read_with_a_bound(server):
    url, folder = server
    places = [place_at(f"{url}{folder}/run", f"island-{i}") for i in range(3)]
    for number, size in enumerate((0, 9, 3 * 2**20)):
        name = f"round-{number:09d}/manifest-0"
        contents = [bytearray([i]) * size for i in range(3)]
        made = at_once(3, lambda i: places[i].create(name, contents[i]))  # noqa: B023
        assert sum(made) == (1 if size else 3), "an empty one is equal to the others'"
        winner = made.index(True)
        assert places[0].read(name, size) == contents[winner]
        assert places[1].size(name) == size
        assert places[winner].create(name, contents[winner]), "a try whose answer was lost"
        if size:
            with pytest.raises(Damaged):
                places[0].read(name, size - 1)
    place = places[0]
    place.replace("islands/oslo-1", bytearray(b"one"))
    place.replace("islands/oslo-1", bytearray(b"other"))
    assert place.read("islands/oslo-1", 9) == b"other"
    (folder / "run/tmp/island-0.left").write_bytes(b"by a killed process")
    place.clear()
    assert place.names("tmp") == []
    assert place.names("") == ["islands", *(f"round-{n:09d}" for n in range(3)), "tmp"]
    place.remove("islands", ["oslo-1", "gone"])
    assert place.names("islands") == []
    assert place.read("islands/oslo-1", 9) is None


def test_a_connection_that_is_lost_is_replaced(server):
    url, folder = server
    place = place_at(f"{url}{folder}/run", "oslo")
    place.create("anchor-000000000", bytearray(b"there"))
    for client in place._idle:
        client.client.get_transport().sock.close()
    with pytest.raises(OSError, match=r"EOFError|ocket"):
        place.read("anchor-000000000", 9)
    assert place.read("anchor-000000000", 9) == b"there"


def test_a_server_whose_key_is_not_known_is_refused(server, monkeypatch, tmp_path):
    url, folder = server
    known = tmp_path / "home/.ssh/known_hosts"
    known.write_text("")
    with pytest.raises(OSError, match=r"ssh-ed25519 key of .* is not in .*known_hosts"):
        place_at(f"{url}{folder}/run", "oslo")


def test_islands_meet_on_a_server_of_sftp_and_end_with_one_anchor(server):
    url, folder = server
    options = "--url", f"{url}{folder}/run", "--rounds", "6", "--secret", "of two islands over SSH"
    islands = [run(EXAMPLE, *options, "--island", name) for name in ("oslo", "paris")]
    outputs_of_one_anchor(islands, rounds=6)
    assert list(folder.glob("run/islands/*")) == []  # both have given their names back
    command = [sys.executable, "-m", "bagua", "mailbox", options[1], "--once"]
    secret = {"BAGUA_MAILBOX_SECRET": options[-1]}
    shown = subprocess.run(command, env=os.environ | secret, capture_output=True, text=True)
    assert "6 round(s)" in shown.stdout, shown
