"""Answers in text: streaming, stops, thinking, reuse from turn to turn (cases 2, 6, 10, 13, 14, 15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

import lily
from lily.errors import ContextLengthError, UsageError
from lily.generation import Generation

FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = lily.SamplingParams()


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.TextEngine]:
    opened = lily.load(max_context=2048)
    yield opened
    opened.close()


def run(generation: Generation) -> Generation:
    for _ in generation:
        pass
    return generation


def test_pieces_joined_are_the_result(engine: lily.TextEngine) -> None:
    generation = engine.chat(FOX, params=GREEDY, max_tokens=300)
    pieces = list(generation)
    result = generation.result
    assert "".join(piece.text for piece in pieces if piece.kind == "content") == result.text
    assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == result.reasoning
    assert result.reasoning
    assert result.text
    assert "<" not in result.text + result.reasoning
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in engine.eos_ids
    assert result.ttft_s > 0
    assert result.decode_s > 0


def test_case_13_streamed_text_equals_the_whole_text(engine: lily.TextEngine) -> None:
    generation = engine.complete(
        "Emoji: \U0001f469\u200d\U0001f680 and 漢字 and e\u0301. ", params=GREEDY, max_tokens=60
    )
    pieces = [piece.text for piece in generation]
    assert "".join(pieces) == engine.tokenizer.decode(generation.result.token_ids, skip_special=True)


def test_case_14_a_stop_string_at_any_place_ends_the_text_just_before_it(engine: lily.TextEngine) -> None:
    whole = run(engine.complete("Once upon a time", params=GREEDY, max_tokens=40)).result.text
    for start in range(3, len(whole) - 12, 5):
        stop = whole[start : start + 7]
        generation = engine.complete("Once upon a time", params=GREEDY, max_tokens=40, stops=[stop])
        shown = "".join(piece.text for piece in generation)
        assert shown == whole[: whole.index(stop)]
        assert generation.result.finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 8])
def test_case_10_and_15_max_tokens_inside_thinking(engine: lily.TextEngine, limit: int) -> None:
    result = run(engine.chat(FOX, params=GREEDY, max_tokens=limit)).result
    assert result.completion_tokens == limit
    assert result.finish_reason == "length"
    assert result.text == ""


def test_no_think_answers_at_once(engine: lily.TextEngine) -> None:
    result = run(engine.chat(FOX, params=GREEDY, max_tokens=100, enable_thinking=False)).result
    assert result.reasoning == ""
    assert result.text


def _turns(
    engine: lily.TextEngine, count: int, **options: object
) -> Iterator[tuple[Generation, Sequence[dict[str, str]]]]:
    session = engine.session()
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a kind teller of stories. " * 8}]
    for i in range(count):
        messages.append({"role": "user", "content": f"Tell me a story about animal number {i}."})
        generation = engine.chat(messages, session=session, params=GREEDY, max_tokens=120, **options)
        run(generation)
        yield generation, list(messages)
        result = generation.result
        messages.append({"role": "assistant", "content": result.text, "reasoning_content": result.reasoning})
    session.close()


@pytest.mark.parametrize("thinking", [True, False])
def test_case_6_the_next_turn_reuses_the_last_and_equals_a_fresh_run(engine: lily.TextEngine, thinking: bool) -> None:
    """Though the template drops earlier thoughts, and renders an empty think block in the last turn only."""
    previous = 0
    for generation, messages in _turns(engine, 4, enable_thinking=thinking):
        result = generation.result
        assert result.cached_tokens >= previous
        fresh = run(engine.chat(messages, params=GREEDY, max_tokens=120, enable_thinking=thinking)).result
        assert fresh.cached_tokens == 0
        assert result.token_ids == fresh.token_ids
        assert engine.template is not None
        history, _ = engine.template.render_parts(messages, enable_thinking=thinking)
        previous = len(engine.tokenizer.encode(history))


def test_case_6_with_thoughts_kept_the_whole_answer_is_reused(engine: lily.TextEngine) -> None:
    session = engine.session()
    messages = [*FOX]
    first = run(engine.chat(messages, session=session, params=GREEDY, preserve_thinking=True)).result
    messages += [
        {"role": "assistant", "content": first.text, "reasoning_content": first.reasoning},
        {"role": "user", "content": "Another one, please."},
    ]
    second = run(engine.chat(messages, session=session, params=GREEDY, preserve_thinking=True, max_tokens=40)).result
    session.close()
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1


def test_case_2_one_system_prompt_serves_several_questions(engine: lily.TextEngine) -> None:
    """Within one session the common beginning is found again from the snapshot at the end of the first question."""
    session = engine.session()
    run(engine.chat(FOX, session=session, params=GREEDY, max_tokens=20))
    again = run(engine.chat(FOX, session=session, params=GREEDY, max_tokens=20)).result
    session.close()
    assert again.cached_tokens > 0
    assert again.token_ids == run(engine.chat(FOX, params=GREEDY, max_tokens=20)).result.token_ids


def test_closing_early_leaves_the_session_usable(engine: lily.TextEngine) -> None:
    session = engine.session()
    pieces = iter(engine.chat(FOX, session=session, params=GREEDY))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert session.valid
    result = run(engine.chat(FOX, session=session, params=GREEDY, max_tokens=30)).result
    session.close()
    assert result.token_ids == run(engine.chat(FOX, params=GREEDY, max_tokens=30)).result.token_ids


def test_case_18_an_overlong_prompt_names_both_numbers_and_loses_nothing(engine: lily.TextEngine) -> None:
    session = engine.session(max_context=64)
    run(engine.chat(FOX, session=session, params=GREEDY, max_tokens=3))
    before = list(session.tokens)
    long = [{"role": "user", "content": "word " * 200}]
    with pytest.raises(ContextLengthError, match=r"is \d+ tokens long but the context holds 64"):
        run(engine.chat(long, session=session))
    assert session.tokens == before
    session.close()


def test_a_wrong_limit_is_refused(engine: lily.TextEngine) -> None:
    with pytest.raises(UsageError, match="max_tokens is 0; it must be 1 or more"):
        engine.complete("x", max_tokens=0)
