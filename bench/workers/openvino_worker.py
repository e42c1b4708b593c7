"""OpenVINO GenAI as a bench worker, in process: it has no server of its own. Continuous batching,
prefix caching and dynamic split-fuse on, as its guide recommends for throughput."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 256
    scheduler.max_num_seqs = 16
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    print("@{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        figures = closed_loop(pipe, task["jobs"], task["concurrency"])
        if task["cell"] == "prefill":
            figures["output_tok_s"] = len(task["jobs"][0]["prompt"]) / figures["first_s"]
        elif task["cell"] in ("single", "batch8"):
            figures["output_tok_s"] = figures["decode_tok_s"]
        print("@" + json.dumps(figures), flush=True)


def config_of(job: dict) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = job["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    return config


def closed_loop(pipe, jobs: list[dict], concurrency: int) -> dict[str, float]:
    """Tokens a second of all; after the last first token (decode_tok_s); its time (first_s)."""
    queue = list(reversed(list(enumerate(jobs))))
    live: dict[int, object] = {}
    first: dict[int, float] = {}
    made = 0
    started = time.perf_counter()
    while queue or live:
        while queue and len(live) < concurrency:
            index, job = queue.pop()
            ids = ov.Tensor(np.array([job["prompt"]], dtype=np.int64))
            live[index] = pipe.add_request(index, ids, config_of(job))
        pipe.step()
        now = time.perf_counter()
        for index, handle in list(live.items()):
            ended = handle.get_status() == genai.GenerationStatus.FINISHED
            while handle.can_read():
                made += sum(len(part.generated_ids) for part in handle.read().values())
                first.setdefault(index, now)
            if ended:
                del live[index]
    wall = time.perf_counter() - started
    if made != sum(job["max_tokens"] for job in jobs):
        raise SystemExit(f"made {made} tokens, not what was asked for")
    begun = max(first.values()) - started
    decoded = max(wall - begun, 1e-9)
    return {
        "output_tok_s": made / wall,
        "decode_tok_s": (made - len(jobs)) / decoded,
        "first_s": begun,
        "wall_s": wall,
    }


if __name__ == "__main__":
    main()
