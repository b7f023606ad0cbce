"""A mailbox in an S3 server, through the client that users have: `requirements-mailbox.txt`."""

import secrets
import threading

import pytest
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox.places import place_at
from deep.test_mailbox_jobs import EXAMPLE, outputs_of_one_anchor, run
from faults import mailbox_job
from support.processes import s3_server

pytest.importorskip("s3fs", reason="needs requirements-mailbox.txt")
pytest.importorskip("moto.server", reason="needs requirements-mailbox.txt")


@pytest.fixture
def bucket(monkeypatch):
    """The URL of an empty bucket."""
    import s3fs

    server = s3_server.made()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name, value in s3_server.variables(server.server_port).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{secrets.token_hex(4)}"  # moto keeps those of other tests
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/run"
    server.shutdown()
    thread.join()


def test_a_file_is_created_once_and_read_with_a_bound(bucket):
    place, made = place_at(bucket, "oslo"), []
    names = "round-000000000/manifest-0", "anchor-000000000"
    for name, size in zip(names, (9, 12 * 2**20), strict=True):  # the second one in parts
        threads = [
            threading.Thread(target=lambda i=i: made.append(place.create(name, contents[i])))  # noqa: B023
            for i in range(3)
        ]
        contents = [bytearray([i]) * size for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert place.read(name, size) in contents
        with pytest.raises(Damaged):
            place.read(name, size - 1)
    assert sorted(made) == [False] * 4 + [True] * 2
    place.create("round-000000000/empty", bytearray())
    assert place.read("round-000000000/empty", 9) == b""
    assert place.names("round-000000000") == ["empty", "manifest-0"]
    assert place.names("") == ["anchor-000000000", "round-000000000"]
    place.remove("round-000000000", ["empty", "manifest-0", "gone"])
    assert place.names("round-000000000") == []
    assert place.read("round-000000000/manifest-0", 9) is None


def test_islands_meet_in_a_bucket_and_end_with_one_anchor(bucket):
    options = "--url", bucket, "--rounds", "4", "--secret", "of two islands in S3"
    islands = [run(EXAMPLE, *options, "--island", name) for name in ("oslo", "paris")]
    outputs = outputs_of_one_anchor(islands, rounds=4)
    assert "nothing" not in "".join(outputs)  # the credentials


@pytest.mark.timeout(600)
def test_random_faults_of_islands_and_of_the_server_leave_equal_anchors():
    mailbox_job.check(3, seed=1, s3=True)
