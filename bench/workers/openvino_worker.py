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
        print("@" + json.dumps(closed_loop(pipe, task["jobs"], task["concurrency"])), flush=True)


def closed_loop(pipe, jobs: list[dict], concurrency: int) -> dict[str, float]:
    queue = list(reversed(list(enumerate(jobs))))
    live: dict[int, object] = {}
    made = 0
    started = time.perf_counter()
    while queue or live:
        while queue and len(live) < concurrency:
            index, job = queue.pop()
            config = genai.GenerationConfig()
            config.max_new_tokens = job["max_tokens"]
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([job["prompt"]], dtype=np.int64))
            live[index] = pipe.add_request(index, ids, config)
        pipe.step()
        for index, handle in list(live.items()):
            if handle.get_status() == genai.GenerationStatus.FINISHED:
                outputs = handle.read_all()
                made += sum(len(o.generated_ids) for o in outputs)
                del live[index]
    wall = time.perf_counter() - started
    if made != sum(job["max_tokens"] for job in jobs):
        raise SystemExit(f"made {made} tokens, not what was asked for")
    return {"output_tok_s": made / wall, "wall_s": wall}


if __name__ == "__main__":
    main()
