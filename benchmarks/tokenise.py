"""What tokenising costs the gateway, apart from all else: memory of a tokenizer, latency of /v1/tokenize by size.

usage: benchmarks/tokenise.py [--rounds 30]      starts its own engine and gateway; prints a Markdown table
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.stack import Engine, Gateway  # noqa: E402


def pss_mb(pid: int) -> float:
    """Proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no Pss for {pid}")


def words(seed: int, size: int) -> str:
    """Text of about `size` bytes that no cache has seen."""
    draw = random.Random(seed)
    vocabulary = (ROOT / "benchmarks" / "engine" / "words.txt").read_text().split()
    return " ".join(draw.choices(vocabulary, k=size // 6))


def post(connection: http.client.HTTPConnection, path: str, body: object) -> tuple[float, dict[str, object]]:
    """Microseconds and answer of one call."""
    raw = json.dumps(body).encode()
    start = time.perf_counter()
    connection.request("POST", path, raw, {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    return (time.perf_counter() - start) * 1e6, answer


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    empty = Gateway(workers=[])
    engine = Engine()
    gateway = Gateway(workers=[f"grpc://{engine.address}"])
    try:
        gateway.wait_ready()
        time.sleep(1)
        bare, full = pss_mb(empty.process.child.pid), pss_mb(gateway.process.child.pid)
        print(f"gateway PSS: {bare:.1f} MB without a tokenizer, {full:.1f} MB with one of 49,152 entries\n")
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
        print("| prompt | tokens | p50 µs, fresh text | p50 µs, same chat prefix + new turn |\n|---|---|---|---|")
        for size in (200, 2_000, 32_000, 1_000_000):
            fresh, turns, count = [], [], 0
            history = [{"role": "user", "content": words(size, size)}, {"role": "assistant", "content": "yes"}]
            post(connection, "/v1/tokenize", {"messages": history})
            for index in range(rounds if size < 100_000 else 5):
                spent, answer = post(connection, "/v1/tokenize", {"prompt": words(index, size)})
                fresh.append(spent)
                count = int(str(answer["count"]))
                turn = {"role": "user", "content": words(1000 + index, 60)}
                turns.append(post(connection, "/v1/tokenize", {"messages": [*history, turn]})[0])
            print(f"| {size} B | {count} | {statistics.median(fresh):.0f} | {statistics.median(turns):.0f} |")
        print(f"\nafter that: PSS {pss_mb(gateway.process.child.pid):.1f} MB")
    finally:
        for part in (empty, gateway, engine):
            part.stop()


main()
