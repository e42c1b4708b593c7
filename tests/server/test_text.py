"""Stop strings and output text: laws over random texts, cut in every way."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.request import FinishReason
from octavo.text import OutputText, StopScan, StopWatcher
from tests.server.fakes import WORDS, FakeTokenizer, shown_text

LAWS = settings(derandomize=True, max_examples=300, deadline=None)
texts = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)
tokens = st.lists(
    st.sampled_from([*b"abST", 0xC3, 0xA9, 0xF0, *range(261, 261 + len(WORDS))]), max_size=25
)
words = st.sampled_from(["a", "ab", "the", "ST", "STOP", "é", "🙂", "\n", "at", "ingS"])


def cut(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop that is complete first; of several, the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


@LAWS
@given(texts, stops)
def test_letter_by_letter_the_scan_cuts_where_the_definition_says(
    text: str, stops: list[str]
) -> None:
    scan, shown, found = StopScan(stops), "", False
    for letter in text:
        piece, found = scan.push(letter)
        shown += piece
        if found:
            break
    want = cut(text, stops)
    assert found is (want is not None)
    assert shown + ("" if found else scan.finish()) == (text if want is None else want)


@LAWS
@given(texts, stops)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    scan, seen, shown = StopScan(stops), "", ""
    for letter in text:
        piece, found = scan.push(letter)
        if found:
            return
        seen, shown = seen + letter, shown + piece
        assert seen.startswith(shown)
        held = seen[len(shown) :]
        assert not held or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)


@LAWS
@given(tokens, st.lists(words, max_size=4), st.integers(0, 6), st.data())
def test_watcher_and_writer_agree_however_tokens_are_grouped(
    ids: list[int], stops: list[str], least: int, data: st.DataObject
) -> None:
    tokenizer = FakeTokenizer()
    watcher = StopWatcher(OutputText(tokenizer.stream(), stops, least))
    kept, finish = watcher.advance(ids)
    singly = StopWatcher(OutputText(tokenizer.stream(), stops, least))
    count = 0
    for token in ids:
        used, reason = singly.advance([token])
        count += used
        if reason is not None:
            break
    assert count == kept
    text = OutputText(tokenizer.stream(), stops, least)
    shown, at = "", 0
    while at < kept:
        size = data.draw(st.integers(1, kept - at))
        shown += text.push(ids[at : at + size])
        at += size
    shown += text.finish()
    assert text.stopped is (finish is FinishReason.STOP)
    whole = OutputText(tokenizer.stream(), stops, least)
    assert whole.push(ids[:kept]) + whole.finish() == shown
    if finish is None:
        assert kept == len(ids)
        assert shown == shown_text(ids)
    else:
        assert kept > least
        assert tokenizer.decode(ids[:kept]).startswith(shown)
    if not least and finish is not None:
        assert not any(stop in shown for stop in stops)


def test_without_stops_nothing_is_held() -> None:
    text = OutputText(FakeTokenizer().stream())
    assert [text.push([token]) for token in b"STOP"] == ["S", "T", "O", "P"]
