"""How long planning takes, and how near its plans are to the best.

Plans Qwen3.5-122B-A10B over unlike nodes, drawn at random with a fixed seed, and prints seconds,
predicted time of a token, the gap that the planner proved, and the distance from the exact optimum
where integer programming finds that in reasonable time.

    python benchmarks/plan.py [--nodes 5 50 1000] [--draws 3] [--json]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linkcpp.model.presets import load_model
from linkcpp.planning import placing, solver
from linkcpp.planning.planner import find_plan
from linkcpp.planning.problem import Problem, Solution
from linkcpp.planning.records import Plan, PlanOptions
from tests.planning.clusters import GIGABYTE, random_cluster

TARGET_SECONDS = 1.0
TARGET_GAP = 0.01
OPTIONS = PlanOptions(context_tokens=8192)
LARGEST_EXACT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 8, 50, 1000])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    find_plan(load_model("122B"), random_cluster(5, seed=0, coordinator_bytes=GIGABYTE), OPTIONS)
    rows = [measure(count, arguments.draws) for count in arguments.nodes]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)
    if any(row["median_seconds"] > TARGET_SECONDS for row in rows):
        sys.exit(f"planning took longer than {TARGET_SECONDS} s")
    if any(row["worst_gap"] > TARGET_GAP for row in rows):
        sys.exit(f"a plan may be more than {TARGET_GAP:.0%} above the optimum")


def measure(count: int, draws: int) -> dict[str, Any]:
    model = load_model("122B")
    seconds, plans, distances = [], [], []
    for seed in range(draws):
        where = random_cluster(count, seed=seed, coordinator_bytes=16 * GIGABYTE, major=7)
        start = time.perf_counter()
        plan = find_plan(model, where, OPTIONS)
        seconds.append(time.perf_counter() - start)
        if plan is None:
            continue
        plans.append(plan)
        if count <= LARGEST_EXACT:
            with mock.patch.object(placing, "solve", solve_to_the_end):
                exact = find_plan(model, where, OPTIONS)
            assert exact is not None
            distances.append(distance(plan, exact))
    return {
        "nodes": count,
        "draws": draws,
        "planned": len(plans),
        "median_seconds": statistics.median(seconds),
        "worst_seconds": max(seconds),
        "token_ms": [plan.expectation.token_ms for plan in plans],
        "worst_gap": max((plan.expectation.optimality_gap for plan in plans), default=0.0),
        "worst_distance_from_exact": max(distances, default=None),
    }


def solve_to_the_end(problem: Problem, **limits: Any) -> Solution | None:
    """Find the exact optimum: no gap is accepted, and the search has no limit."""
    with (
        mock.patch.object(solver, "ACCEPTED_GAP", 0.0),
        mock.patch.object(solver, "_MAX_TREE_NODES", None),
    ):
        return solver.solve_exactly(problem, below=limits.get("below", float("inf")))


def distance(plan: Plan, exact: Plan) -> float:
    best = exact.expectation.token_ms
    return (plan.expectation.token_ms - best) / best


def show(rows: list[dict[str, Any]]) -> None:
    print("nodes  planned  median s  worst s  proved gap  from exact  token ms (median)")
    for row in rows:
        exact = row["worst_distance_from_exact"]
        told = "-" if exact is None else f"{exact:.3%}"
        token = statistics.median(row["token_ms"]) if row["token_ms"] else float("nan")
        planned = f"{row['nodes']:5}  {row['planned']:3} of {row['draws']:<2}"
        times = f"{row['median_seconds']:8.2f} {row['worst_seconds']:8.2f}"
        print(f"{planned} {times} {row['worst_gap']:11.3%} {told:>11} {token:10.1f}")


if __name__ == "__main__":
    main()
