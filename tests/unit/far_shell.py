"""A stand-in for ssh and its server: commands run below a process that is nobody's descendant here.

    python far_shell.py serve SOCKET          the far machine
    python far_shell.py run SOCKET COMMAND    the client: runs COMMAND there by a shell

As with ssh without a terminal, the far command is sent no signal when the client goes: its
standard input ends, no more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading


def serve(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_one, args=(client,), daemon=True).start()


def _one(client: socket.socket) -> None:
    size = int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big")
    command = client.recv(size, socket.MSG_WAITALL).decode()
    child = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=client.fileno(),
        stderr=client.fileno(),
        start_new_session=True,
    )
    threading.Thread(target=_feed, args=(client, child), daemon=True).start()
    code = child.wait()
    with contextlib.suppress(OSError):
        client.sendall(f"\nexit {code}\n".encode())
        client.shutdown(socket.SHUT_RDWR)


def _feed(client: socket.socket, child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        while data := client.recv(4096):
            child.stdin.write(data)
            child.stdin.flush()
    child.stdin.close()


def run(path: str, command: str) -> int:
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    told = command.encode()
    link.sendall(len(told).to_bytes(4, "big") + told)
    threading.Thread(target=_forward, args=(link,), daemon=True).start()
    last = b""
    while data := link.recv(65536):
        os.write(1, data)
        last = (last + data)[-200:]
    return int(last.rpartition(b"exit ")[2] or 255) if b"exit " in last else 255


def _forward(link: socket.socket) -> None:
    while data := os.read(0, 4096):
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(run(sys.argv[2], sys.argv[3]))
