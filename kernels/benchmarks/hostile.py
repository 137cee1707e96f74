"""A server with one hostile client next to honest ones: python kernels/benchmarks/hostile.py --seconds 600.

Each client connects from an address of its own, as from a machine of its own. The hostile one sends schemas that
explode, infillings, more requests at once than the server takes, slow and idle connections, answers that it does not
read, and streams that it leaves. The honest ones ask alone before and after it, and next to it. The last line is JSON.
The exit status is 1 if one of these is false: all honest requests are answered, their median latency at most doubles,
memory is flat, the log has no traceback, SIGTERM takes at most five seconds.
"""

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE = "127.0.0.2"
HONEST = ("127.0.0.1", "127.0.0.3", "127.0.0.4", "127.0.0.5")  # half of the server's places
GROWTH = 64 << 20  # bytes of memory that caches may take after the first minute


class Peer:
    """A client at an address, which sends raw requests."""

    def __init__(self, address: str, port: int) -> None:
        self.address, self.port = address, port

    def connect(self, seconds: float = 60.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), seconds, source_address=(self.address, 0))

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection = self.connect()
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def ask(self, path: str, body: dict[str, Any]) -> int:
        """Return the status of a request after its whole answer has come."""
        with self.send(path, body) as connection:
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
        return int(answer[9:12] or 0)


def attacks(peer: Peer, name: str, source: random.Random) -> list[Callable[[], object]]:
    """Return what the hostile client does; each runs in a loop."""
    alphabet = "abcdefgh ijklmnop"

    def schema() -> None:
        text = "".join(source.choices(alphabet, k=source.choice((18_000, 41_000))))
        explode = {"type": "string", "pattern": f"^.*{source.choice(alphabet)}.{{{source.randint(12, 40)}}}$"}
        long = {"type": "string", "maxLength": source.randint(1_000, 19_999)}
        chosen = source.choice(({"enum": [text]}, explode, long))
        form = {"type": "json_schema", "json_schema": {"schema": chosen}}
        peer.ask("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 512, "response_format": form})

    def infill() -> None:
        tokens = source.choices(range(200, 300), k=400)
        connection = peer.send("/v1/infill", {"tokens": tokens, "holes": [[1, 390]], "seed": source.getrandbits(30)})
        time.sleep(source.random())
        connection.close()  # often before the answer

    def stream() -> None:
        body = {"model": name, "prompt": "a", "max_tokens": 512, "stream": True, "drafts": True}
        with peer.send("/v1/completions", body) as connection:
            connection.recv(source.choice((1, 1000)))

    def deaf() -> None:
        body = {"model": name, "prompt": "a", "max_tokens": 2000, "stream": True, "drafts": True}
        with peer.send("/v1/completions", body):
            time.sleep(20)

    def flood() -> None:
        body = {"model": name, "prompt": "a", "max_tokens": 512}
        connections = [peer.send("/v1/completions", body) for _ in range(100)]
        time.sleep(source.random())
        for connection in connections:
            connection.close()
        time.sleep(1)

    def slow() -> None:
        with peer.connect() as connection:
            for byte in b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n":
                connection.sendall(bytes([byte]))
                time.sleep(0.5)

    def idle() -> None:
        connections = []
        try:
            for _ in range(1_100):
                connections.append(peer.connect())
            time.sleep(5)
        finally:
            for connection in connections:
                connection.close()

    return [schema, schema, schema, infill, infill, infill, stream, stream, deaf, flood, slow, idle]


def repeat(work: Callable[[], object], end: float, counts: Counter[str]) -> None:
    while time.monotonic() < end:
        try:
            work()
            counts[work.__name__] += 1
        except OSError:
            counts[f"{work.__name__}, closed"] += 1
            time.sleep(0.05)


def attack(port: int, name: str, seconds: float) -> int:
    os.nice(10)  # a client on another machine would not take the server's CPU
    end, did = time.monotonic() + seconds, Counter[str]()
    works = attacks(Peer(HOSTILE, port), name, random.Random(0))
    run_together([(repeat, (work, end, did)) for work in works], lambda: None)
    print(json.dumps(did))
    return 0


def ask_honestly(peer: Peer, name: str, end: float, seconds: list[float], statuses: Counter[int]) -> None:
    seed = 0
    while time.monotonic() < end:
        start, seed = time.monotonic(), seed + 1
        try:
            status = peer.ask(
                "/v1/completions", {"model": name, "prompt": "Once", "max_tokens": 64, "steps": 8, "seed": seed}
            )
        except OSError:
            status = 0  # no answer
        statuses[status] += 1
        seconds.append(time.monotonic() - start)


def run_together(work: list[tuple[Callable[..., None], tuple[Any, ...]]], watch: Callable[[], None]) -> None:
    threads = [threading.Thread(target=function, args=arguments, daemon=True) for function, arguments in work]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        watch()


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dgemma/text")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--attack", type=int, metavar="PORT", help="be the hostile client of a server")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if arguments.attack is not None:
        return attack(arguments.attack, arguments.model, arguments.seconds)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = Path(tempfile.mkdtemp()) / "log"
    command = [sys.executable, "-m", "dgemma", "serve", "-m", arguments.model, "--port", str(port)]
    command += ["--batch-size", str(2 * len(HONEST)), "--max-seconds", "60"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))  # noqa: E731, as most systems have it
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=os.environ, stderr=file, preexec_fn=limit)
    peers = [Peer(address, port) for address in HONEST]
    while True:
        try:
            peers[0].connect().close()
            break
        except OSError:
            time.sleep(0.2)
    statuses: Counter[int] = Counter()
    alone: list[float] = []
    beside: list[float] = []
    memory: list[int] = []

    def honest(end: float, seconds: list[float]) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        return [(ask_honestly, (peer, arguments.model, end, seconds, statuses)) for peer in peers]

    run_together(honest(time.monotonic() + max(arguments.seconds / 10, 10), alone), lambda: None)
    end = time.monotonic() + arguments.seconds
    command = [sys.executable, __file__, "--attack", str(port), "--seconds", str(arguments.seconds)]
    hostile = subprocess.Popen([*command, "--model", arguments.model], stdout=subprocess.PIPE)
    run_together(honest(end, beside), lambda: memory.append(resident_bytes(process.pid)))
    did = json.loads(hostile.communicate()[0])
    run_together(honest(time.monotonic() + max(arguments.seconds / 10, 10), alone), lambda: None)
    left = [Peer(HOSTILE, port).send("/v1/infill", {"tokens": [200] * 400, "holes": [[1, 390]]}) for _ in range(8)]
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    stopped = time.monotonic() - start
    for connection in left:
        connection.close()
    text = log.read_text()
    early, late = memory[len(memory) // 10 : len(memory) // 2], memory[len(memory) // 2 :]
    growth = statistics.median(late) - statistics.median(early)
    report = {
        "honest": len(beside),
        "statuses": statuses,
        "alone_median_s": statistics.median(alone),
        "beside_median_s": statistics.median(beside),
        "alone_p95_s": sorted(alone)[int(0.95 * len(alone))],
        "beside_p95_s": sorted(beside)[int(0.95 * len(beside))],
        "memory_MiB": [round(size / 2**20) for size in (memory[0], max(memory), memory[-1])],
        "growth_MiB": round(growth / 2**20),
        "sigterm_s": stopped,
        "tracebacks": text.count("Traceback"),
        "hostile": did,
    }
    print(text[-2000:], file=sys.stderr)
    print(json.dumps(report))
    slower = report["beside_median_s"] > 2 * report["alone_median_s"]
    failed = set(statuses) != {200} or stopped > 5 or "Traceback" in text or growth > GROWTH
    return int(slower or failed)


if __name__ == "__main__":
    sys.exit(main())
