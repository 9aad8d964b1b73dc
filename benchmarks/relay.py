"""What the gateway costs, beside other ways to carry the same bytes.

    python benchmarks/relay.py [--edges 1,16,200] [--megabytes 512] [--rounds 3]

Raw TCP over loopback, a relay of plain TCP over asyncio, the gateway without and with end-to-end
encryption, and websockify of PyPI, in turns, round by round, best of all rounds. Sender and
receiver are processes of their own; MB/s and CPU seconds of the relay per GB count payload. Bulk
goes one way; round trips go both. ``--idle N`` keeps N paired edges besides on each gateway.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

from relay_ends import End, answer, drain, echo, pump, round_trips
from relay_kinds import Gateway, Kind, PlainRelay, SealedGateway, Websockify

from linkcpp.common.descriptors import raise_descriptor_limit

SIZES = (12 * 1024, 98 * 1024, 2**20)
ROUND_TRIP_SIZES = (64, 12 * 1024)
ROUND_TRIPS = 2000
Numbers = dict[str, float]
Results = dict[str, dict[str, Numbers]]
_FORK = multiprocessing.get_context("fork")


def in_process(work: Callable[..., object], *arguments: object) -> Callable[[], object]:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=answer, args=(theirs, work, *arguments))
    process.start()
    theirs.close()

    def result() -> object:
        value = ours.recv()
        process.join()
        return value

    return result


def close(pairs: list[tuple[End, End]]) -> None:
    for pair in pairs:
        for end in pair:
            end.socket.close()


def bulk(kind: Kind, size: int, edges: int, total_bytes: int) -> Numbers:
    messages = max(4, total_bytes // size // edges)
    carried = messages * size * edges
    pairs = [kind.open_pair() for _ in range(edges)]
    cpu = kind.cpu_seconds()
    receiving = in_process(drain, [receiver for _, receiver in pairs], messages * size)
    begin = time.monotonic()
    sending = in_process(pump, [sender for sender, _ in pairs], os.urandom(size), messages)
    sending()
    took = float(str(receiving())) - begin
    cpu = kind.cpu_seconds() - cpu
    close(pairs)
    return {"mb_per_second": carried / took / 1e6, "cpu_seconds_per_gb": cpu / carried * 1e9}


def latency(kind: Kind, size: int) -> Numbers:
    pair = kind.open_pair()
    payload = os.urandom(size)
    echoing = in_process(echo, pair[1], payload, ROUND_TRIPS)
    seconds = round_trips(pair[0], payload, ROUND_TRIPS)
    echoing()
    close([pair])
    return {
        "p50_us": statistics.median(seconds) * 1e6,
        "p99_us": statistics.quantiles(seconds, n=100)[98] * 1e6,
    }


def best(old: Numbers | None, new: Numbers) -> Numbers:
    if old is None:
        return new
    return {
        key: (max if key == "mb_per_second" else min)(value, old[key]) for key, value in new.items()
    }


def measure(kinds: list[Kind], edges: list[int], total_bytes: int, rounds: int) -> Results:
    results: Results = {kind.name: {} for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            found = results[kind.name]
            for size in SIZES:
                for count in edges:
                    if count > kind.max_edges:
                        continue
                    name = f"{size // 1024} KiB, {count} edges"
                    found[name] = best(found.get(name), bulk(kind, size, count, total_bytes))
            for size in ROUND_TRIP_SIZES:
                name = f"round trip, {size} bytes"
                found[name] = best(found.get(name), latency(kind, size))
    return results


def print_table(results: Results) -> None:
    for name in next(iter(results.values())):
        print(name)
        for kind, found in results.items():
            if name not in found:
                continue
            numbers = found[name]
            words = [f"{key} {value:.4g}" for key, value in numbers.items()]
            if "mb_per_second" in numbers:
                plain = results[PlainRelay.name][name]["mb_per_second"]
                words.append(f"{numbers['mb_per_second'] / plain:.2f} of the plain relay")
            else:
                raw = results[Kind.name][name]
                words += [f"added {key} {numbers[key] - raw[key]:.4g}" for key in numbers]
            print(f"  {kind:20}", "; ".join(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", default="1,16,200")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    edges = [int(word) for word in arguments.edges.split(",")]
    raise_descriptor_limit(20_000)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    kinds = [Kind(), PlainRelay(), Gateway(), SealedGateway(), Websockify()]
    try:
        idle = [kind.open_pair() for kind in kinds[2:4] for _ in range(arguments.idle)]
        results = measure(kinds, edges, arguments.megabytes * 2**20, arguments.rounds)
        close(idle)
    finally:
        for kind in kinds:
            kind.stop()
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
