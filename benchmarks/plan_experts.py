"""How long plans of mode experts take, and how near they are to the proved bound.

Plans Qwen3.5-122B-A10B over unlike nodes, drawn at random with a fixed seed. Seconds are those of
the processor: planning computes on one core and waits for nothing, so other work does not count.

    python benchmarks/plan_experts.py [--nodes 12 50 1000] [--draws 5] [--replicas 1] [--json]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linkcpp.model.presets import load_model
from linkcpp.planning.expert_planner import plan_experts
from linkcpp.planning.records import PlanMode, PlanOptions
from tests.planning.clusters import GIGABYTE, random_cluster

TARGET_SECONDS = 1.0
TARGET_GAP = 0.05
# Memory for the backbone and a few experts beside it.
COORDINATOR_BYTES = 16 * GIGABYTE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[12, 50, 1000])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = PlanOptions(mode=PlanMode.EXPERTS, replicas=arguments.replicas)
    rows = [measure(count, arguments.draws, options) for count in arguments.nodes]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)
    if any(row["median_seconds"] > TARGET_SECONDS for row in rows):
        sys.exit(f"planning took longer than {TARGET_SECONDS} s")
    if any(row["worst_gap"] > TARGET_GAP for row in rows):
        sys.exit(f"a plan may be more than {TARGET_GAP:.0%} above the optimum")


def measure(count: int, draws: int, options: PlanOptions) -> dict[str, Any]:
    model = load_model("122B")
    seconds, plans = [], []
    for seed in range(draws):
        where = random_cluster(count, seed=seed, coordinator_bytes=COORDINATOR_BYTES)
        start = time.process_time()
        plan = plan_experts(model, where, options)
        seconds.append(time.process_time() - start)
        if plan is not None:
            plans.append(plan)
    return {
        "nodes": count,
        "draws": draws,
        "planned": len(plans),
        "replicas": options.replicas,
        "median_seconds": statistics.median(seconds),
        "worst_seconds": max(seconds),
        "token_ms": [plan.expectation.token_ms for plan in plans],
        "worst_gap": max((plan.expectation.optimality_gap for plan in plans), default=0.0),
        "holders": [len(plan.expert_shares) for plan in plans],
    }


def show(rows: list[dict[str, Any]]) -> None:
    print("nodes  planned  median s  worst s  proved gap  holders  token ms (medians)")
    for row in rows:
        planned = f"{row['planned']:3} of {row['draws']:<2}"
        times = f"{row['median_seconds']:8.2f} {row['worst_seconds']:8.2f}"
        holders = statistics.median(row["holders"]) if row["holders"] else 0
        token = statistics.median(row["token_ms"]) if row["token_ms"] else float("nan")
        print(
            f"{row['nodes']:5}  {planned} {times} {row['worst_gap']:11.3%} "
            f"{holders:8.0f} {token:10.1f}"
        )


if __name__ == "__main__":
    main()
