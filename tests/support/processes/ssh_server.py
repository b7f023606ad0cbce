"""OpenSSH's server on a port of its choice, for one user with a key: Debian's openssh-server."""

import contextlib
import os
import pathlib
import socket
import subprocess
import time

SSHD, SFTP, KEYGEN = "/usr/sbin/sshd", "/usr/lib/openssh/sftp-server", "/usr/bin/ssh-keygen"
CONFIGURATION = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {home}/.ssh/authorized_keys
AuthenticationMethods publickey
PasswordAuthentication no
UsePAM no
StrictModes no
Subsystem sftp {sftp}
"""


def there_is_none():
    return not all(pathlib.Path(each).exists() for each in (SSHD, SFTP, KEYGEN))


@contextlib.contextmanager
def serving(folder):
    """(start of URLs, HOME of a user who has the key and knows the server's)."""
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in (folder / "host", home / ".ssh/id_ed25519"):
        subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", name], check=True)
    (home / ".ssh/id_ed25519.pub").rename(home / ".ssh/authorized_keys")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
    configuration = folder / "sshd_config"
    configuration.write_text(CONFIGURATION.format(port=port, folder=folder, home=home, sftp=SFTP))
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where its unprivileged part is confined
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", configuration], stderr=(folder / "log").open("wb")
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.02)
        yield f"sftp://127.0.0.1:{port}", home
    finally:
        server.terminate()
        server.wait()
