"""The shipped demo data keeps its promises: nothing leaks from training to the held-out side."""

from collections import Counter
from pathlib import Path

import pytest

from tools.make_demo_data import (
    MAX_ANSWER_TOKENS,
    MAX_REPEATED_TRIGRAMS,
    MIN_HELD_OUT_TOKENS,
    MIN_TRAIN_TOKENS,
    STOP_WORDS,
    answer_of,
    frames,
    opening_frame,
    prompt_of,
    read_jsonl,
    repeated_trigram_share,
    subjects,
    words,
)

FOLDER = Path(__file__).parents[1] / "tools" / "demo_data"


@pytest.fixture(scope="module")
def train():
    return read_jsonl(FOLDER / "train.jsonl.gz")


@pytest.fixture(scope="module")
def held_out():
    return read_jsonl(FOLDER / "held_out.jsonl.gz")


def of_all(rows, keys):
    return set().union(*(keys(prompt_of(row)) for row in rows))


def test_no_frame_is_shared(train, held_out):
    assert not of_all(train, frames) & of_all(held_out, frames)


def test_no_opening_of_three_words_is_shared(train, held_out):
    def opening(prompt):
        return {tuple(words(prompt)[:3])}

    assert not of_all(train, opening) & of_all(held_out, opening)


def test_no_subject_is_shared(train, held_out):
    assert not of_all(train, subjects) & of_all(held_out, subjects)


def test_shared_words_are_stop_words_numbers_or_single_letters(train, held_out):
    # Plain words this time, without the tool's stems.
    shared = of_all(train, lambda prompt: set(words(prompt))) & of_all(
        held_out, lambda prompt: set(words(prompt))
    )
    content = {word for word in shared if len(word) > 1 and not word.isdigit()}
    assert content <= STOP_WORDS


def test_no_long_word_begins_like_one_of_the_other_side(train, held_out):
    def prefixes(prompt):
        return {word[:6] for word in words(prompt) if len(word) >= 6 and word not in STOP_WORDS}

    assert not of_all(train, prefixes) & of_all(held_out, prefixes)


def test_no_answer_is_shared_and_no_training_answer_repeats(train, held_out):
    answers = Counter(answer_of(row) for row in train + held_out)
    assert max(answers.values()) == 1


def test_rows_are_ended_answers_without_loops(train, held_out):
    for row in train + held_out:
        assert row["finish_reason"] == "stop"
        assert repeated_trigram_share(answer_of(row)) <= MAX_REPEATED_TRIGRAMS
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    for row in train:
        assert MIN_TRAIN_TOKENS <= row["completion_tokens"] <= MAX_ANSWER_TOKENS
    for row in held_out:
        assert row["temperature"] == 0
        assert MIN_HELD_OUT_TOKENS <= row["completion_tokens"] <= MAX_ANSWER_TOKENS


def test_live_prompts_are_unanswered_and_not_among_the_other_rows(train, held_out):
    prompts = read_jsonl(FOLDER / "prompts.jsonl")
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in prompts)
    ids = [row["id"] for row in train + held_out + prompts]
    assert len(set(ids)) == len(ids)
    assert not {row["messages"][0]["content"] for row in prompts} & {
        prompt_of(row) for row in train + held_out
    }


def test_readme_states_the_counts_and_the_folder_is_small(train, held_out):
    readme = (FOLDER / "README.md").read_text()
    for rows in (train, held_out):
        num_tokens = sum(row["completion_tokens"] for row in rows)
        assert f"{len(rows):,} conversations, {num_tokens:,} answer tokens" in readme
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000


def test_frames_see_through_politeness_and_later_sentences():
    assert frames("Can you please tell me about owls?") == {"tell"}
    assert frames("I'm lost. Where can I go?") == {"i", "where"}
    assert opening_frame("... Who's there? Why?") == "who"


def test_subjects_meet_across_plurals_tenses_and_derivations():
    for left, right in [
        ("plans", "planning"),
        ("recipe", "recipes"),
        ("city", "cities"),
        ("country", "countries"),
        ("generates", "generator"),
        ("leader", "leadership"),
    ]:
        assert subjects(left) & subjects(right)
    assert not subjects("owls") & subjects("bowls")
    assert subjects("What are the 3 best ways to help a person?") == set()


def test_repeated_trigrams_are_near_one_in_a_loop_and_zero_without():
    assert repeated_trigram_share("one two three four five six") == 0
    assert repeated_trigram_share("to be or not " * 50) > 0.95
    assert repeated_trigram_share("ok") == 0
