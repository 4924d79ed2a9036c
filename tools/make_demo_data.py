"""Choose the demo's conversations from a large file that the target sampled itself.

Takes the JSONL.gz of self-generated conversations and writes `train.jsonl.gz`, `held_out.jsonl.gz`
and `prompts.jsonl`, printing the share that each rule removes. Held-out conversations share neither
a frame nor a subject with training; `tests/test_demo_data.py` checks the result. Same input and
same seed give the same rows.

    python tools/make_demo_data.py smollm2-selfchat.jsonl.gz tools/demo_data
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SEED = 0
NUM_TRAIN = 1500
NUM_HELD_OUT = 60
NUM_PROMPTS = 8
NUM_HELD_OUT_FRAMES = 5

MIN_TRAIN_TOKENS = 16  # a block of 8 has little to learn from an answer of one or two
MIN_HELD_OUT_TOKENS = 24
MAX_ANSWER_TOKENS = 256
MAX_PROMPT_CHARS = 400  # prompt tokens cost the demo's target forward and teach nothing
MAX_REPEATED_TRIGRAMS = 0.2
COMMON_FRAME_SHARE = 0.01
COMMON_SUBJECT_SHARE = 0.01

# Words that carry no subject. Function words first, then the words of asking: what kind of answer
# is wanted and how, which any prompt about anything may hold.
FUNCTION_WORDS = """
a about above across after again against all almost along already also although always am among an
and another any anyone anything are around as at away back be because become been before being below
between both but by can cannot come could did do does doing done down during each either else enough
etc even ever every everyone everything few for from further get gets getting go goes going got had
has have having he her here hers herself him himself his how however i if in inside instead into is
it its itself just least less let like ll made make makes making many may maybe me might mine more
most much must my myself near need needs neither never next no nobody non none nor not nothing now
of off often on once one ones only onto or other others our ours out outside over own per quite
rather re really same say says see seem seen she should since so some someone something sometimes
soon still such take takes taken than that the their theirs them themselves then there these they
thing things this those though through thus to together too toward towards two three four five six
seven eight nine ten under until up upon us use used uses using usually ve very via want wants was
way ways we well were what whatever when where whether which while who whoever whom whose why will
with within without would yes yet you your yours yourself don doesn didn isn aren wasn won couldn
shouldn wouldn hasn haven hadn ain
"""
REQUEST_WORDS = """
answer answers ask asked assist assistance best better brief briefly calculate compare consider
considering contrast create current currently describe description design detail detailed details
different discuss example examples explain explanation find first following format generate give
given gives good great help helps hi hello idea ideas imagine include includes including know last
latest list long looking main many mean means multiple name named names new number numbers old
option options please possible prompt provide provided provides question questions recommend
request response responses result results second sentence sentences short show simple simply
specific suggest suggestion suggestions summarize summary sure task tell text thanks thank think
topic top translate translation try type types understand various word words work works write
written year years day days time times today kind sort lot part parts people person world
"""
STOP_WORDS = frozenset((FUNCTION_WORDS + REQUEST_WORDS).split())

SENTENCE_END = re.compile(r"[.?!:;\n]+")
# Politeness before the request proper: "Can you please tell me ..." has the frame of "Tell me ...".
LEAD_IN = re.compile(r"^(?:please|hi|hello|hey|ok|okay|so|and|but|can you|could you|would you)\s+")
SUFFIX = re.compile(r"(?<=\w{4})(?:ings?|ers?|ies|ed|es|s|ly|al|y|e)$")  # four letters stay
PREFIX_LETTERS = 6


def answer_of(row: Row) -> str:
    """Return the text of the last message."""
    return row["messages"][-1]["content"]


def prompt_of(row: Row) -> str:
    """Return the text of the last message but one."""
    return row["messages"][-2]["content"]


def words(text: str) -> list[str]:
    """Return lower-case runs of letters and digits; an apostrophe ends a word ("I'm" is i, m)."""
    return re.findall(r"[^\W_]+", text.lower())


def repeated_trigram_share(text: str) -> float:
    """Return the share of word 3-grams that occurred earlier in the text; loops approach 1."""
    found = words(text)
    trigrams = list(zip(found, found[1:], found[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def frames(prompt: str) -> set[str]:
    """Return the opening word of each sentence of a prompt, after any politeness.

    The prompts were sampled by giving the target a word or two ("Tell me", "Where", "Suggest") and
    letting it finish, so the opening is the template. Later sentences count too: they often hold
    the same request over again.
    """
    found = set()
    for sentence in SENTENCE_END.split(prompt.lower()):
        rest = " ".join(words(sentence)) + " "
        while LEAD_IN.match(rest):
            rest = LEAD_IN.sub("", rest)
        if rest.strip():
            found.add(rest.split()[0])
    return found


def subjects(prompt: str) -> set[str]:
    """Return two keys of each content word: without its ending, and its first six letters.

    Content words are neither stop words, numbers nor single letters. Two prompts share a subject if
    they share any key: planned and plans meet in one, generator and generates in the other. That
    product and productivity meet too only costs some training rows.
    """
    content = {
        word
        for word in words(prompt)
        if len(word) > 1 and not word.isdigit() and word not in STOP_WORDS
    }
    return {stem(word) for word in content} | {word[:PREFIX_LETTERS] for word in content}


def stem(word: str) -> str:
    """Return a word without one ending, a doubled last consonant, and the choice of i or y."""
    root = SUFFIX.sub("", word)
    root = re.sub(r"([^\Waeiou])\1$", r"\1", root)
    return re.sub(r"y$", "i", root)


def choose(rows: list[Row], seed: int) -> dict[str, list[Row]]:
    """Return the rows of each part ("train", "held_out", "prompts") in their shuffled order."""
    rng = random.Random(seed)
    num_prompts = len(rows)
    frame_counts = Counter(opening_frame(prompt_of(row)) for row in rows)
    subject_counts = Counter(subject for row in rows for subject in subjects(prompt_of(row)))
    common_frames = sorted(
        frame for frame, seen in frame_counts.items() if seen > COMMON_FRAME_SHARE * num_prompts
    )
    common_subjects = {
        subject
        for subject, seen in subject_counts.items()
        if seen > COMMON_SUBJECT_SHARE * num_prompts
    }
    held_out_frames = set(rng.sample(common_frames, NUM_HELD_OUT_FRAMES))
    print(f"{len(common_frames)} frames open more than 1 % of the prompts each: {common_frames}")
    print(f"held-out frames: {sorted(held_out_frames)}")
    print(f"too common to hold out: {len(common_subjects)} subject keys: {sorted(common_subjects)}")

    rows = keep(
        rows, "answer was cut at the token limit", lambda row: row["finish_reason"] == "stop"
    )
    rows = keep(
        rows,
        f"more than {MAX_REPEATED_TRIGRAMS:.0%} of the answer's word 3-grams are repeats",
        lambda row: repeated_trigram_share(answer_of(row)) <= MAX_REPEATED_TRIGRAMS,
    )
    rows = keep(
        rows,
        f"answer longer than {MAX_ANSWER_TOKENS} tokens",
        lambda row: row["completion_tokens"] <= MAX_ANSWER_TOKENS,
    )
    rows = keep(
        rows,
        f"prompt longer than {MAX_PROMPT_CHARS} characters, or without a subject",
        lambda row: len(prompt_of(row)) <= MAX_PROMPT_CHARS and bool(subjects(prompt_of(row))),
    )
    rng.shuffle(rows)

    print("held-out side:")
    candidates = keep(
        rows,
        "a sentence has another frame",
        lambda row: frames(prompt_of(row)) <= held_out_frames,
    )
    candidates = keep(candidates, "sampled, not greedy", lambda row: row["temperature"] == 0)
    candidates = keep(
        candidates,
        f"answer shorter than {MIN_HELD_OUT_TOKENS} tokens",
        lambda row: row["completion_tokens"] >= MIN_HELD_OUT_TOKENS,
    )
    candidates = keep(
        candidates,
        "has a subject that more than 1 % of all prompts have",
        lambda row: not subjects(prompt_of(row)) & common_subjects,
    )
    held_out = deal_by_frame(candidates, NUM_HELD_OUT)
    held_out_subjects = set().union(*(subjects(prompt_of(row)) for row in held_out))
    held_out_answers = {answer_of(row) for row in held_out}

    print("training side:")
    train = keep(
        rows,
        "a sentence has a held-out frame",
        lambda row: not frames(prompt_of(row)) & held_out_frames,
    )
    train = keep(
        train,
        f"has one of the {len(held_out_subjects)} keys of held-out subjects",
        lambda row: not subjects(prompt_of(row)) & held_out_subjects,
    )
    train = keep(
        train,
        f"answer shorter than {MIN_TRAIN_TOKENS} tokens",
        lambda row: row["completion_tokens"] >= MIN_TRAIN_TOKENS,
    )
    train = keep(train, "same answer as an earlier row or a held-out one", once(held_out_answers))
    spare = [  # short ones, for a quick live run
        row
        for row in train[NUM_TRAIN:]
        if row["temperature"] == 0 and row["completion_tokens"] <= 96 and len(prompt_of(row)) <= 80
    ]
    return {
        "train": train[:NUM_TRAIN],
        "held_out": held_out,
        "prompts": spare[:NUM_PROMPTS],
    }


def opening_frame(prompt: str) -> str:
    """Return the frame of the first sentence that has a word; "" if none has."""
    for sentence in SENTENCE_END.split(prompt):
        for frame in frames(sentence):
            return frame
    return ""


def deal_by_frame(rows: list[Row], num_rows: int) -> list[Row]:
    """Take rows in turn from each opening frame, so that no frame fills the held-out set."""
    piles: dict[str, list[Row]] = {}
    for row in rows:
        piles.setdefault(opening_frame(prompt_of(row)), []).append(row)
    dealt: list[Row] = []
    while len(dealt) < num_rows and any(piles.values()):
        for pile in piles.values():
            if pile and len(dealt) < num_rows:
                dealt.append(pile.pop(0))
    return dealt


def keep(rows: list[Row], reason: str, wanted: Callable[[Row], bool]) -> list[Row]:
    """Return the wanted rows and print the share of the others."""
    kept = [row for row in rows if wanted(row)]
    dropped = len(rows) - len(kept)
    print(f"  {len(rows):6,} rows, {dropped:6,} dropped ({dropped / len(rows):5.1%}): {reason}")
    return kept


def once(seen: set[str]) -> Callable[[Row], bool]:
    """Return a test that is true the first time an answer comes by and it is not in `seen`."""
    seen = set(seen)

    def is_new(row: Row) -> bool:
        new = answer_of(row) not in seen
        seen.add(answer_of(row))
        return new

    return is_new


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, gzipped if the name says so; the same rows give the same bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text, compresslevel=9, mtime=0)
    path.write_bytes(text)


def read_jsonl(path: Path) -> list[Row]:
    """Read rows from JSONL, gzipped or not."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return [json.loads(line) for line in text.split("\n") if line]


def main() -> None:
    """Read the arguments, choose the rows, write the folder, print the shares."""
    parser = argparse.ArgumentParser(description="Choose the demo's conversations.")
    parser.add_argument("source", type=Path, help="JSONL.gz of self-generated conversations")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of every draw (default 0)")
    args = parser.parse_args()
    parts = choose(read_jsonl(args.source), args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    prompts = [{"id": row["id"], "messages": row["messages"][:-1]} for row in parts["prompts"]]
    write_jsonl(args.folder / "train.jsonl.gz", parts["train"])
    write_jsonl(args.folder / "held_out.jsonl.gz", parts["held_out"])
    write_jsonl(args.folder / "prompts.jsonl", prompts)
    for name, rows in parts.items():
        num_tokens = sum(row["completion_tokens"] for row in rows)
        greedy = sum(row["temperature"] == 0 for row in rows)
        print(f"{name:9} {len(rows):5,} rows, {greedy:5,} greedy, {num_tokens:8,} answer tokens")


if __name__ == "__main__":
    main()
