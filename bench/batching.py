"""What continuous batching and prefix caching are worth: one engine, the same requests, in turn.

    python bench/batching.py static    continuous against static batching
    python bench/batching.py prefix    prefix caching on against off

static: 64 requests at once, lengths from the shipped Azure conversation sample divided by --scale,
16 rows. Under `static` a group is admitted into an empty batch and served until its last member has
ended; beside its figures stand the tokens that padding would have added (our batches are ragged,
so even this baseline does not pay for them).

prefix: 32 requests with one 512-token system prompt and 32 tokens of their own, 32 tokens out; in a
burst, and one after the other. Medians of --repeats; every repeat has prompts of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from waste import trace
from workloads import corpus

from octavo import LLM, SamplingParams
from octavo.models import hub
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weights import open_checkpoint

Run = Callable[[int], dict[str, float]]


def lengths(scale: int, count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of `count` requests of the trace, divided by `scale`, at least 4."""
    return [(max(4, p // scale), max(4, o // scale)) for _, p, o in trace()[:count]]


def prose(model: str) -> list[int]:
    """The corpus in the model's tokens; its tokenizer here has no limit, as an engine's has."""
    return corpus(load_tokenizer(open_checkpoint(hub.resolve(model))).encode)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def timed(llm: LLM, prompts: list[list[int]], each: list[SamplingParams]) -> dict[str, float]:
    """Run all at once; tokens per second, and means over requests of latency and TTFT (seconds)."""
    stats = llm.assembly.engine.scheduler.stats
    stats.take_timings()
    padding = stats.counters.padding_tokens
    started = time.monotonic()
    llm.generate(prompts, each, progress=False)
    wall = time.monotonic() - started
    done = stats.take_timings()
    return {
        "output_tok_s": sum(t.num_output for t in done) / wall,
        "mean_latency_s": statistics.fmean(t.finished - t.queued for t in done),
        "mean_ttft_s": statistics.fmean((t.first_token or 0.0) - t.queued for t in done),
        "cached_tokens": float(sum(t.num_cached for t in done)),
        "padding_tokens": float(stats.counters.padding_tokens - padding),
    }


def in_turn(runs: dict[str, Run], repeats: int) -> dict[str, dict[str, Any]]:
    """Each run once per repeat, the order rotating; medians and the spread of the throughput."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(repeats):
        k = repeat % len(names)
        for name in names[k:] + names[:k]:
            seen[name].append(runs[name](repeat))
    out: dict[str, dict[str, Any]] = {}
    for name, results in seen.items():
        out[name] = {k: statistics.median(r[k] for r in results) for k in results[0]}
        out[name]["output_tok_s_all"] = [round(r["output_tok_s"], 1) for r in results]
    return out


def show(title: str, table: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}")
    for name, row in table.items():
        print(
            f"  {name:22s} {row['output_tok_s']:8.1f} tok/s   latency {row['mean_latency_s']:7.3f}"
            f" s   TTFT {row['mean_ttft_s']:7.3f} s   cached {row['cached_tokens']:7.0f}"
            f"   padding {row['padding_tokens']:7.0f}   {row['output_tok_s_all']}"
        )


def static_against_continuous(args: argparse.Namespace) -> dict[str, Any]:
    sizes = lengths(args.scale, 64)
    each = [params(out) for _, out in sizes]
    runs: dict[str, Run] = {}
    for policy in ("fcfs", "static"):
        llm = LLM(args.model, policy=policy, max_rows=16, kv_memory=args.kv, speculation="off")
        ids = prose(args.model)

        def run(repeat: int, llm: LLM = llm, ids: list[int] = ids) -> dict[str, float]:
            rng = random.Random(f"{repeat} {time.time_ns()}")
            starts = [rng.randrange(len(ids) - n) for n, _ in sizes]
            prompts = [ids[s : s + n] for s, (n, _) in zip(starts, sizes, strict=True)]
            return timed(llm, prompts, each)

        runs["continuous" if policy == "fcfs" else "static"] = run
    table = in_turn(runs, args.repeats)
    made = sum(o for _, o in sizes)
    read = sum(p for p, _ in sizes)
    show(f"64 requests at once, {read} prompt and {made} output tokens, 16 rows", table)
    ratio = table["continuous"]["output_tok_s"] / table["static"]["output_tok_s"]
    print(f"  continuous makes {ratio:.2f}x the tokens per second of static")
    return {"static": table, "ratio": ratio}


def prefix_on_against_off(args: argparse.Namespace) -> dict[str, Any]:
    burst: dict[str, Run] = {}
    single: dict[str, Run] = {}
    for caching in (True, False):
        llm = LLM(
            args.model, prefix_caching=caching, max_rows=16, kv_memory=args.kv, speculation="off"
        )
        ids = prose(args.model)

        def prompts(ids: list[int] = ids) -> list[list[int]]:
            rng = random.Random(time.time_ns())
            at = [rng.randrange(len(ids) - 512) for _ in range(33)]
            system = ids[at[0] : at[0] + 512]
            return [system + ids[s : s + 32] for s in at[1:]]

        def together(_: int, llm: LLM = llm, make: Any = prompts) -> dict[str, float]:
            return timed(llm, make(), [params(32)] * 32)

        def one_by_one(_: int, llm: LLM = llm, make: Any = prompts) -> dict[str, float]:
            each = [timed(llm, [p], [params(32)]) for p in make()[:8]][1:]
            return {k: statistics.fmean(r[k] for r in each) for k in each[0]}

        name = f"prefix cache {'on' if caching else 'off'}"
        burst[name], single[name] = together, one_by_one
    tables = {"burst": in_turn(burst, args.repeats), "one_by_one": in_turn(single, args.repeats)}
    show("a burst of 32 on one 512-token system prompt", tables["burst"])
    show("one after the other (the first, which fills the cache, left out)", tables["one_by_one"])
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["static", "prefix"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv", type=int, default=1 << 30, help="bytes of KV pool")
    args = parser.parse_args()
    made = static_against_continuous if args.what == "static" else prefix_on_against_off
    print("\n" + json.dumps(made(args)))


if __name__ == "__main__":
    main()
