"""The offline API on the fake model: order, choices, streams, failures, threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo.assembly import Assembly, Parts, put_together
from octavo.config import EngineConfig
from octavo.core.batch import StepResult
from octavo.core.request import FinishReason, SamplingParams, StructuredOutputs
from octavo.errors import ContextOverflow, InvalidRequest
from octavo.llm import LLM
from tests.server.fakes import (
    BOS,
    CHOKES,
    VOCAB,
    FakeExecutor,
    FakeTokenizer,
    expected,
    expected_text,
    fake_template,
)

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def fake_assembly(executor: FakeExecutor | None = None, **knobs: Any) -> Assembly:
    executor = executor or FakeExecutor()
    config = EngineConfig(model="fake", **knobs)
    parts = Parts(config, "fake", FakeTokenizer(), fake_template)
    return put_together(parts, executor, VOCAB, "fake-weights", 2**31)


def fake_llm(executor: FakeExecutor | None = None, **knobs: Any) -> LLM:
    return LLM.over(fake_assembly(executor, **knobs))


def ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


def test_a_text_that_is_cut_inside_a_character_ends_before_it() -> None:
    for count in range(3, 6):
        executor = FakeExecutor()
        executor.script = "hi🙂".encode()
        done = fake_llm(executor).generate("x", SamplingParams(max_tokens=count))[0]
        assert (done.text, len(done.token_ids)) == ("hi", count)


def clean(llm: LLM) -> None:
    snapshot = llm.assembly.engine.snapshot()
    assert not any(snapshot[name] for name in ("running", "waiting", "blocks_held"))
    llm.assembly.engine.scheduler.check()


def test_completions_come_in_order_with_their_text() -> None:
    llm = fake_llm(FakeExecutor(blocks=40))
    texts = [f"prompt {i} " + "x" * (i * 13 % 50) for i in range(30)]
    done = llm.generate(texts, GREEDY)
    for text, completion in zip(texts, done, strict=True):
        tokens = expected(ids(text), GREEDY)
        assert completion.prompt == text
        assert completion.prompt_token_ids == tuple(ids(text))
        assert completion.token_ids == tuple(tokens)
        assert (completion.text, completion.finish_reason) == expected_text(tokens)[:2]
    clean(llm)


def test_texts_are_what_they_are_asked_to_be() -> None:
    llm = fake_llm()
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = StructuredOutputs(json=schema | {"additionalProperties": False})
    for outputs, texts in (
        (StructuredOutputs(choice=("left", "right")), {"left", "right"}),
        (closed, {'{"a": true}', '{"a":true}', '{"a": false}', '{"a":false}'}),
    ):
        params = SamplingParams(n=3, seed=1, structured_outputs=outputs)
        for choice in llm.generate("Which?", params)[0].choices:
            assert (choice.text in texts, choice.finish_reason) == (True, "stop")
    wrong = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    with pytest.raises(InvalidRequest, match="invalid regex") as caught:
        llm.generate("Which?", wrong)
    assert caught.value.param == "structured_outputs"
    clean(llm)


def test_every_kind_of_prompt() -> None:
    llm = fake_llm()
    want = llm.generate("hello", GREEDY)[0]
    assert llm.generate(ids("hello"), GREEDY)[0].token_ids == want.token_ids
    both = llm.generate([ids("hello"), "hello"], GREEDY)
    assert [c.token_ids for c in both] == [want.token_ids] * 2
    assert both[0].prompt is None
    assert llm.generate([], GREEDY) == []


def test_params_one_for_all_or_one_each() -> None:
    llm = fake_llm()
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    done = llm.generate(["a", "b", "c"], each)
    assert [len(c.token_ids) for c in done] == [1, 5, 9]
    with pytest.raises(InvalidRequest):
        llm.generate(["a", "b"], each)


def test_choices_and_seeds() -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=20)
    done = fake_llm().generate("hello", params)[0]
    for index, choice in enumerate(done.choices):
        assert choice.token_ids == tuple(expected(ids("hello"), params, seed=11, choice=index))


def test_stop_strings_cut_the_text_and_end_the_work() -> None:
    executor = FakeExecutor()
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True, stop=("t",))
    done = fake_llm(executor).generate("hello", params)[0]
    text, finish, used = expected_text(expected(ids("hello"), params), ("t",))
    assert (done.text, done.finish_reason, len(done.token_ids)) == (text, finish, used)
    assert executor.steps <= used + 2


def test_logprobs_one_per_token_and_prompt_logprobs_one_per_prompt_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1)
    done = fake_llm().generate("hello", params)[0]
    assert [item.token for item in done.logprobs or ()] == list(done.token_ids)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    scored = [item.token for item in done.prompt_logprobs[1:] if item is not None]
    assert scored == ids("hello")[1:]
    assert fake_llm().generate("hello", GREEDY)[0].logprobs is None


def test_chat_answers_one_talk_or_many() -> None:
    llm = fake_llm()
    talk = [{"role": "user", "content": "hello"}]
    one = llm.chat(talk, GREEDY)
    assert one.token_ids == tuple(expected(fake_template(talk), GREEDY))
    many = llm.chat([talk, talk], GREEDY)
    assert [c.token_ids for c in many] == [one.token_ids] * 2


def test_a_stream_joins_to_the_plain_text() -> None:
    llm = fake_llm()
    want = llm.generate(["one", "two"], GREEDY)
    texts, ended = ["", ""], [None, None]
    for piece in llm.stream(["one", "two"], GREEDY):
        texts[piece.prompt_index] += piece.text
        ended[piece.prompt_index] = piece.finish_reason
    assert texts == [c.text for c in want]
    assert ended == [c.finish_reason for c in want]


def test_a_stream_left_early_frees_everything() -> None:
    llm = fake_llm()
    stream = llm.stream("hello", SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    stream.close()
    clean(llm)
    assert llm.generate("hello", GREEDY)[0].text


def test_streams_may_be_open_at_once() -> None:
    llm = fake_llm()
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    first = llm.stream("one", long)
    head = [next(first) for _ in range(3)]
    other = llm.generate("two", long)[0]
    assert other.token_ids == tuple(expected(ids("two"), long))
    tokens = [t for piece in [*head, *first] for t in piece.token_ids]
    assert tokens == expected(ids("one"), long)
    clean(llm)


def test_threads_share_one_model() -> None:
    llm = fake_llm()
    got: dict[int, tuple[int, ...]] = {}

    def work(index: int) -> None:
        got[index] = llm.generate(f"thread {index}", GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: tuple(expected(ids(f"thread {i}"), GREEDY)) for i in range(8)}
    clean(llm)


def test_a_request_that_fails_is_one_bad_choice() -> None:
    llm = fake_llm()
    bad = SamplingParams(allowed_token_ids=(CHOKES,), max_tokens=9)
    good, failed = llm.generate(["a", "b"], [GREEDY, bad])
    assert good.finish_reason in ("stop", "length")
    assert failed.finish_reason == FinishReason.ERROR
    assert "no token is allowed" in (failed.choices[0].error or "")
    clean(llm)


def test_what_cannot_run_is_refused_before_anything_runs() -> None:
    executor = FakeExecutor()
    llm = fake_llm(executor)
    with pytest.raises(ContextOverflow):
        llm.generate(["fine", "x" * 4000], GREEDY)
    with pytest.raises(InvalidRequest):
        llm.generate(["fine", [999999]], GREEDY)
    assert executor.steps == 0
    clean(llm)


def test_prefix_caching_can_be_turned_off() -> None:
    for on, hit in ((True, True), (False, False)):
        llm = fake_llm(prefix_caching=on)
        llm.generate("x" * 100, GREEDY)
        assert (llm.generate("x" * 100, GREEDY)[0].num_cached > 0) is hit


def test_importing_octavo_imports_almost_nothing() -> None:
    code = (
        "import sys, octavo; "
        "heavy = {'numpy', 'tokenizers', 'torch', 'jinja2', 'rich', 'click', 'uvicorn'}; "
        "print(sorted(heavy & set(sys.modules))); "
        "octavo.SamplingParams; print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "[]"]


def test_anything_as_a_prompt_is_answered_or_refused() -> None:
    llm = fake_llm()
    numbers: list[Any] = [np.array([1, 2, 3]), [np.array([1, 2, 3])], [np.int64(1)], (1, 2)]
    for prompt in numbers:
        assert llm.generate(prompt, GREEDY)[0].finish_reason in ("stop", "length")
    strange: list[Any] = [
        None, 5, 0.5, b"abc", {"a": 1}, [1.0, 2.0], [1, "a"], [["a"]], [None], [[]], [[1.5]], [-1],
        [2**31], [2**70], np.array([0.5]), np.array([[0.5]]), object(),
    ]  # fmt: skip
    for prompt in strange:
        with pytest.raises(InvalidRequest):
            llm.generate(prompt, GREEDY)
        with pytest.raises(InvalidRequest):
            list(llm.stream(prompt, GREEDY))
    talks: list[Any] = [None, "hi", 5, {"role": "user", "content": "x"}, iter([])]
    for talk in talks:
        with pytest.raises(InvalidRequest):
            llm.chat(talk, GREEDY)
        with pytest.raises(InvalidRequest):
            llm.chat_ids(talk)
    params: list[Any] = [{"max_tokens": 2}, "greedy", [None], [{}], 5]
    for own in params:
        with pytest.raises(InvalidRequest):
            llm.generate("a", own)
    clean(llm)


class Interrupting(FakeExecutor):
    """Ctrl-C comes while the given step is computed, or at its end."""

    at = 0

    def collect(self) -> StepResult:
        result = super().collect()
        if self.steps == self.at:
            signal.raise_signal(signal.SIGINT)
        return result


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal, also where the tests were started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("step", range(1, 12))
def test_ctrl_c_ends_a_call_and_not_the_engine(step: int) -> None:
    """Whichever step it meets: the next call gets what it would have got."""
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    executor = Interrupting()
    llm = fake_llm(executor)
    executor.at = step
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a" * 700, "b"], long)
    clean(llm)
    assert llm.generate("c", GREEDY)[0].token_ids == tuple(expected(ids("c"), GREEDY))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_other_streams_alone() -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    executor = Interrupting()
    llm = fake_llm(executor)
    other = llm.stream("other", long)
    tokens = list(next(other).token_ids)
    executor.at = executor.steps + 3
    with pytest.raises(KeyboardInterrupt):
        llm.generate("mine", long)
    for piece in other:
        tokens += piece.token_ids
    assert tokens == expected(ids("other"), long)
    clean(llm)


def test_a_stream_collected_in_the_middle_of_a_step_ends_after_it() -> None:
    """The garbage collector closes a lost iterator wherever this thread happens to be."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    executor = FakeExecutor()
    llm = fake_llm(executor)
    lost = [llm.stream(text, long) for text in ("lost", "gone")]
    for stream in lost:
        next(stream)
    collect = executor.collect

    def collecting() -> StepResult:
        result = collect()
        if lost:
            lost.pop().close()  # type: ignore[attr-defined]
        return result

    executor.collect = collecting  # type: ignore[method-assign]
    assert llm.generate("kept", long)[0].token_ids == tuple(expected(ids("kept"), long))
    clean(llm)


def test_progress_says_how_much_there_may_be_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake_llm()
    params = [SamplingParams(temperature=0, max_tokens=7, n=2, ignore_eos=True), SamplingParams()]
    llm.generate(["a", "bc"], params, progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "3/3" in said
    room = llm.assembly.door.room
    assert f"of at most {2 * 7 + room - len(ids('bc')):,} tokens" in said


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (1e9, False)])
def test_one_prompt_that_takes_long_is_shown_on_a_terminal(
    patience: float,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("octavo.llm.PATIENCE", patience)
    llm = fake_llm()
    llm.generate("a", GREEDY)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate("a", GREEDY)
    assert ("generating" in capsys.readouterr().err) is shown


def test_without_a_most_a_text_goes_on_to_its_end_or_the_contexts() -> None:
    llm = fake_llm(FakeExecutor(context=100))
    for done in llm.generate(["a", "b", "c"], SamplingParams(temperature=0)):
        want = expected(ids(done.prompt or ""), SamplingParams(temperature=0), context=100)
        assert done.token_ids == tuple(want)
    (done,) = llm.generate("a", SamplingParams(temperature=0, ignore_eos=True))
    assert done.finish_reason == "length"
    assert len(ids("a")) + len(done.token_ids) == 100
