"""From a configuration to a running engine: fetch, open, pack, size, and say what was chosen.

Every "choose for me" of `EngineConfig` is resolved here, once, and shown by `facts`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import octavo
from octavo.config import EngineConfig, show_bytes
from octavo.core.drafter import NoDrafter, PromptLookup
from octavo.core.engine import Engine
from octavo.core.executor import Executor
from octavo.core.offline import behind
from octavo.core.policies import policy_of
from octavo.core.policy import Policy, fcfs
from octavo.core.probe import learn_machine
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import UNKNOWN, Coefficients, StepModel
from octavo.door import Door
from octavo.errors import InvalidRequest
from octavo.grammar.compiled import Grammars
from octavo.ops.cost import Hardware, step_terms
from octavo.ops.program import Program
from octavo.ops.table import KV_DTYPES
from octavo.text import Tokenizer

Template = Callable[..., list[int]]  # messages, and what else a template takes
Progress = Callable[[str, int, int], None]  # what is done ("fetch", "load"), done, total


def no_progress(what: str, done: int, total: int) -> None:
    """The callback of those who do not watch."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model ready to run. template: chat messages to token ids; None for a base model.

    config: with nothing left to choose. program: the traced model with the stored types of its
    weights, for costs. facts: (name, value) lines about what was chosen.
    """

    config: EngineConfig
    name: str
    tokenizer: Tokenizer
    template: Template | None
    door: Door
    engine: Engine
    executor: Executor
    system_fingerprint: str
    program: Any = None
    facts: tuple[tuple[str, str], ...] = ()
    hidden_size: int = 0


def assemble(
    config: EngineConfig,
    *,
    max_waiting: int = 1024,
    weights: Mapping[str, float] | None = None,
    offline: bool = False,
    progress: Progress = no_progress,
) -> Assembly:
    """Fetch and load the model of `config`. Raises `ModelError`, `EngineError`, `InvalidRequest`.

    max_waiting: sequences that the scheduler lets wait. weights: shares of tenants, for `fair`.
    offline: whether there will be requests that nobody waits for.
    """
    from octavo.models.hub import resolve
    from octavo.models.template import ChatTemplate, template_file
    from octavo.models.tokenizer import load_tokenizer
    from octavo.models.weights import open_checkpoint
    from octavo.runtime.cpu import CpuExecutor, CpuOptions, usable_isa

    # Before a download: what is wrong with these is known at once.
    usable_isa(config.isa)
    given = None if config.chat_template is None else template_file(config.chat_template)
    path = resolve(
        config.model, file=config.file, progress=lambda done, all: progress("fetch", done, all)
    )
    checkpoint = open_checkpoint(path)
    own = checkpoint.config.max_context
    if config.max_context is not None and config.max_context > own:
        raise InvalidRequest(
            f"--max-context {config.max_context} is beyond the {own} tokens of this model",
            "max_context",
        )
    tokenizer = load_tokenizer(checkpoint)
    options = CpuOptions(
        threads=config.threads,
        kv_bytes=config.kv_memory,
        max_tokens=config.max_batch_tokens,
        max_rows=config.max_rows,
        max_context=config.max_context,
        isa=config.isa,
        act=config.act,
        kv_dtype=config.kv_dtype,
        pin=config.pin,
    )
    executor = CpuExecutor(
        checkpoint, options, progress=lambda done, all: progress("load", done, all)
    )
    tokenizer = tokenizer.limited(executor.capacity.max_context)
    tokenizer = tokenizer if given is None else tokenizer.with_template(given)
    resolved = dataclasses.replace(
        config,
        kv_memory=executor.budget.nbytes,
        threads=executor.threads,
        isa=executor.isa,
        act=executor.options.act,
        kv_dtype=executor.options.kv_dtype,
        max_context=executor.capacity.max_context,
    )
    template = ChatTemplate(tokenizer).ids if tokenizer.chat_template is not None else None
    text = Parts(resolved, model_name(config.model), tokenizer, template)
    parts_of = {part for spec in executor.program.weights for part in spec.parts}
    types = {part: checkpoint.tensor(part).type for part in parts_of}
    program = executor.program.typed(types)
    policy = policy_of(config.policy, weights)
    made = put_together(
        text,
        executor,
        checkpoint.config.vocab_size,
        checkpoint.fingerprint,
        max_waiting,
        Steering(behind(policy) if offline else policy, _prior(program, resolved)),
    )
    return dataclasses.replace(
        made,
        program=program,
        facts=_facts(made, path, executor),
        hidden_size=checkpoint.config.hidden_size,
    )


@dataclass(frozen=True, slots=True)
class Steering:
    """What the scheduler is given: who goes first, and what a step is thought to cost."""

    policy: Policy = field(default_factory=fcfs)
    prior: Coefficients = UNKNOWN


def _prior(program: Program, config: EngineConfig) -> Coefficients:
    """What a step costs on a middling machine: the probes and the first steps correct it."""
    threads, kv = config.threads or 1, KV_DTYPES[config.kv_dtype]
    machine = Hardware("a middling machine", 20e9, threads * 3e11, threads * 5e10, 5e-6, 2e-4)
    return Coefficients(**step_terms(program, machine, kv))


@dataclass(frozen=True, slots=True)
class Parts:
    """The text side of a model."""

    config: EngineConfig
    name: str
    tokenizer: Tokenizer
    template: Template | None


def put_together(
    parts: Parts,
    executor: Executor,
    vocab_size: int,
    fingerprint: str,
    max_waiting: int = 1024,
    steering: Steering = Steering(),
) -> Assembly:
    """Scheduler, engine and door around an executor, which a policy that looks at times probes."""
    config, model = parts.config, StepModel(steering.prior)
    if steering.policy.timed:
        learn_machine(executor, model, time.monotonic)
    scheduler = Scheduler(
        executor.capacity,
        steering.policy,
        max_waiting=max_waiting,
        prefix_caching=config.prefix_caching,
        drafter=PromptLookup() if config.speculation == "auto" else NoDrafter(),
        model=model,
    )
    computed = f"{octavo.__version__} {fingerprint} {config.isa} {config.act} {config.kv_dtype}"
    if config.chat_template is not None:  # else it is the weights' own
        computed += parts.tokenizer.chat_templates["default"]
    return Assembly(
        config=config,
        name=parts.name,
        tokenizer=parts.tokenizer,
        template=parts.template,
        door=Door(
            parts.tokenizer,
            executor.capacity,
            vocab_size,
            f"{fingerprint} {config.kv_dtype}",
            speculates=config.speculation == "auto",
            grammars=Grammars(parts.tokenizer, vocab_size),
        ),
        engine=Engine(executor, scheduler),
        executor=executor,
        system_fingerprint="fp_" + hashlib.sha256(computed.encode()).hexdigest()[:12],
    )


def model_name(model: str) -> str:
    """What a model is called: a path by its last part, without .gguf."""
    path = Path(model)
    if path.suffix == ".gguf" or path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return model


def _facts(made: Assembly, path: Path, executor: Any) -> tuple[tuple[str, str], ...]:
    config, capacity, budget = made.config, executor.capacity, executor.budget
    tokens = capacity.num_blocks * capacity.block_size
    mode = f", {config.act} activations"
    cores = len(os.sched_getaffinity(0))
    if (config.threads or 1) > cores:
        mode += f" (on {cores} processors: more threads than that make every step slower)"
    own = (("template", f"{config.chat_template}, not the model's own"),)
    return (
        ("model", f"{made.name}  ({path})"),
        *(own if config.chat_template is not None else ()),
        ("weights", f"{show_bytes(executor.memory()['weights'])} in memory"),
        (
            "KV pool",
            f"{show_bytes(budget.nbytes)}, {capacity.num_blocks} blocks of {capacity.block_size}"
            f" = {tokens} tokens in {config.kv_dtype} ({budget.reason})",
        ),
        ("context", f"{capacity.max_context} tokens a sequence"),
        ("step", f"{capacity.max_rows} sequences, {capacity.max_tokens} tokens at most"),
        ("compute", f"{config.threads} threads, {config.isa}{mode}"),
        (
            "schedule",
            f"{config.policy}, prefix cache {'on' if config.prefix_caching else 'off'}"
            f", speculation {config.speculation}",
        ),
    )
