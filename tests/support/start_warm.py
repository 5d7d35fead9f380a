"""Ask a server of `warm.py` to run what Python is told to run, and end as that does.

It imports next to nothing: it is what starts in place of a Python that imports torch.
"""

import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(server: str, arguments: list[str]) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    settings = [f"{name}={value}" for name, value in os.environ.items()]
    texts = [os.getcwd(), str(len(arguments)), *arguments, *settings]
    text = "\0".join(texts).encode(errors="surrogateescape")
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    socket.send_fds(connection, [len(text).to_bytes(4, "big")], [0, 1, 2, network])
    connection.sendall(text)
    answer = connection.recv(4)
    if not answer:
        sys.exit("the server that copies processes has ended; what it printed says why")
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:  # a signal
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(sys.argv[1], sys.argv[2:])
