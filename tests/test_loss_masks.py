"""Loss masks of five kinds of conversation under three templates, written out by hand.

A golden mask is the whole text with what is supervised between ⟦ and ⟧; special tokens are one
token each, everything else is one token a byte, so text and brackets fix the mask of every token.
"""

import re

import numpy as np
import pytest
from chat_templates import CHATML, CHATML_TAGGED, LLAMA3, QWEN3, tokenizer_with

from hscache.conversations import parse_row
from hscache.errors import DataError
from hscache.inputs import RawRow
from hscache.render import render
from hscache.tokenize_rows import tokenize

PIECES = re.compile(r"<\|\w+\|>|⟦|⟧|.", re.DOTALL)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SINGLE = {"messages": [turn("user", "Hi?"), turn("assistant", "Yo.")]}
MULTI = {
    "messages": [
        turn("system", "Be brief."),
        *(turn("user", "A?"), turn("assistant", "B.")),
        *(turn("user", "C?"), turn("assistant", "D.")),
    ]
}
THINKING = {"messages": [turn("user", "2+2?"), turn("assistant", "4", reasoning_content="easy")]}
TAGGED_THINKING = {
    "messages": [turn("user", "2+2?"), turn("assistant", "<think>\neasy\n</think>\n\n4")]
}
CLOSING_TAG_ONLY = {"messages": [turn("user", "2+2?"), turn("assistant", "easy\n</think>\n\n4")]}
TOOL = {
    "messages": [
        turn("user", "1+1?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        turn("tool", "2"),
        turn("assistant", "It is 2."),
    ]
}
THOUGHTFUL_TOOL = {
    "messages": [
        turn("user", "1+1?"),
        turn("assistant", None, tool_calls=[CALL], reasoning_content="add"),
        turn("tool", "2"),
        turn("assistant", "It is 2.", reasoning_content="so"),
    ]
}
TOOL_IN_TEXT = {
    "messages": [
        turn("user", "1+1?"),
        turn("assistant", "add(1)"),
        turn("tool", "2"),
        turn("assistant", "It is 2."),
    ]
}
CUT = {"messages": [turn("user", "Hi?"), turn("assistant", "Once upon a")]}
CUT["finish_reason"] = "length"
CUT_IN_THOUGHT = {
    "messages": [turn("user", "Hi?"), turn("assistant", "<think>\nOnce upon a")],
    "finish_reason": "length",
}
CUT_IN_REASONING = {
    "messages": [turn("user", "Hi?"), turn("assistant", None, reasoning_content="Once upon a")],
    "finish_reason": "length",
}

S, E = "<|im_start|>", "<|im_end|>"
B, H, H2, T = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"

GOLDEN = {
    # SmolLM2's ChatML
    "chatml single": (CHATML, SINGLE, f"{S}user\nHi?{E}\n{S}assistant\n⟦Yo.{E}⟧\n"),
    "chatml multi": (
        CHATML,
        MULTI,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\n⟦B.{E}⟧\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦D.{E}⟧\n",
    ),
    "chatml thinking": (
        CHATML,
        TAGGED_THINKING,
        f"{S}user\n2+2?{E}\n{S}assistant\n⟦<think>\neasy\n</think>\n\n4{E}⟧\n",
    ),
    "chatml tool": (
        CHATML,
        TOOL_IN_TEXT,
        f"{S}user\n1+1?{E}\n{S}assistant\n⟦add(1){E}⟧\n{S}tool\n2{E}\n"
        f"{S}assistant\n⟦It is 2.{E}⟧\n",
    ),
    "chatml cut": (CHATML, CUT, f"{S}user\nHi?{E}\n{S}assistant\n⟦Once upon a⟧"),
    # Qwen3's
    "qwen3 single": (
        QWEN3,
        SINGLE,
        f"{S}user\nHi?{E}\n{S}assistant\n⟦<think>\n\n</think>\n\nYo.{E}⟧\n",
    ),
    "qwen3 thinking": (
        QWEN3,
        THINKING,
        f"{S}user\n2+2?{E}\n{S}assistant\n⟦<think>\neasy\n</think>\n\n4{E}⟧\n",
    ),
    "qwen3 thinking in the content": (
        QWEN3,
        TAGGED_THINKING,
        f"{S}user\n2+2?{E}\n{S}assistant\n⟦<think>\neasy\n</think>\n\n4{E}⟧\n",
    ),
    "qwen3 closing tag only": (
        QWEN3,
        CLOSING_TAG_ONLY,
        f"{S}user\n2+2?{E}\n{S}assistant\n⟦<think>\neasy\n</think>\n\n4{E}⟧\n",
    ),
    "qwen3 tool": (
        QWEN3,
        THOUGHTFUL_TOOL,
        f"{S}user\n1+1?{E}\n{S}assistant\n⟦<think>\nadd\n</think>\n\n<tool_call>\n"
        f'{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call>{E}⟧\n'
        f"{S}user\n<tool_response>\n2\n</tool_response>{E}\n"
        f"{S}assistant\n⟦<think>\nso\n</think>\n\nIt is 2.{E}⟧\n",
    ),
    "qwen3 offered tools": (
        QWEN3,
        {**THINKING, "tools": '[{"name": "add"}]'},
        f'{S}system\n# Tools\n{{"name": "add"}}{E}\n'
        f"{S}user\n2+2?{E}\n{S}assistant\n⟦<think>\neasy\n</think>\n\n4{E}⟧\n",
    ),
    "qwen3 cut": (
        QWEN3,
        CUT,
        f"{S}user\nHi?{E}\n{S}assistant\n⟦<think>\n\n</think>\n\nOnce upon a⟧",
    ),
    "qwen3 cut in the thought": (
        QWEN3,
        CUT_IN_THOUGHT,
        f"{S}user\nHi?{E}\n{S}assistant\n⟦<think>\nOnce upon a⟧",
    ),
    "qwen3 cut in the reasoning": (
        QWEN3,
        CUT_IN_REASONING,
        f"{S}user\nHi?{E}\n{S}assistant\n⟦<think>\nOnce upon a⟧",
    ),
    # Llama 3's
    "llama3 single": (
        LLAMA3,
        SINGLE,
        f"{B}{H}user{H2}Hi?{T}{H}assistant{H2}⟦Yo.{T}⟧",
    ),
    "llama3 multi": (
        LLAMA3,
        MULTI,
        f"{B}{H}system{H2}Be brief.{T}{H}user{H2}A?{T}{H}assistant{H2}⟦B.{T}⟧"
        f"{H}user{H2}C?{T}{H}assistant{H2}⟦D.{T}⟧",
    ),
    "llama3 thinking": (
        LLAMA3,
        TAGGED_THINKING,
        f"{B}{H}user{H2}2+2?{T}{H}assistant{H2}⟦<think>\neasy\n</think>\n\n4{T}⟧",
    ),
    "llama3 tool": (
        LLAMA3,
        TOOL,
        f"{B}{H}user{H2}1+1?{T}{H}assistant{H2}"
        f'⟦{{"name": "add", "parameters": {{"a": 1}}}}{T}⟧'
        f"{H}ipython{H2}2{T}{H}assistant{H2}⟦It is 2.{T}⟧",
    ),
    "llama3 cut": (LLAMA3, CUT, f"{B}{H}user{H2}Hi?{T}{H}assistant{H2}⟦Once upon a⟧"),
    # a template that marks what is generated
    "tags single": (CHATML_TAGGED, SINGLE, f"{S}user\nHi?{E}\n{S}assistant\n⟦Yo.{E}⟧\n"),
    "tags multi": (
        CHATML_TAGGED,
        MULTI,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\n⟦B.{E}⟧\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦D.{E}⟧\n",
    ),
    "tags cut": (CHATML_TAGGED, CUT, f"{S}user\nHi?{E}\n{S}assistant\n⟦Once upon a⟧"),
    "tags may cover less than the boundaries": (
        CHATML_TAGGED.replace("{% generation %}", "Well: {% generation %}"),
        SINGLE,
        f"{S}user\nHi?{E}\n{S}assistant\nWell: ⟦Yo.{E}⟧\n",
    ),
}


LATER_THINKING = {
    "messages": [
        *(turn("user", "A?"), turn("assistant", "B.", reasoning_content="first")),
        *(turn("user", "C?"), turn("assistant", "D.", reasoning_content="then")),
    ]
}
UNANSWERED = {"messages": [*MULTI["messages"], turn("user", "E?")]}
CUT_LATER = {"messages": MULTI["messages"], "finish_reason": "length"}
NEVER_ANSWERED = {"messages": [turn("user", "Hi?")]}

GOLDEN_LAST = {
    "chatml single": (CHATML, SINGLE, f"{S}user\nHi?{E}\n{S}assistant\n⟦Yo.{E}⟧\n"),
    "chatml multi": (
        CHATML,
        MULTI,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦D.{E}⟧\n",
    ),
    "chatml question without an answer": (
        CHATML,
        UNANSWERED,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦D.{E}⟧\n",
    ),
    "chatml no answer": (CHATML, NEVER_ANSWERED, f"{S}user\nHi?{E}\n"),
    "qwen3 single": (
        QWEN3,
        SINGLE,
        f"{S}user\nHi?{E}\n{S}assistant\n⟦<think>\n\n</think>\n\nYo.{E}⟧\n",
    ),
    "qwen3 multi": (
        QWEN3,
        MULTI,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦<think>\n\n</think>\n\nD.{E}⟧\n",
    ),
    "qwen3 thinking of earlier answers is dropped": (
        QWEN3,
        LATER_THINKING,
        f"{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦<think>\nthen\n</think>\n\nD.{E}⟧\n",
    ),
    "qwen3 question without an answer": (
        QWEN3,
        UNANSWERED,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦<think>\n\n</think>\n\nD.{E}⟧\n",
    ),
    "qwen3 tool without thinking": (
        QWEN3,
        TOOL,
        f"{S}user\n1+1?{E}\n{S}assistant\n<tool_call>\n"
        f'{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call>{E}\n'
        f"{S}user\n<tool_response>\n2\n</tool_response>{E}\n"
        f"{S}assistant\n⟦<think>\n\n</think>\n\nIt is 2.{E}⟧\n",
    ),
    "qwen3 cut": (
        QWEN3,
        CUT_LATER,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦<think>\n\n</think>\n\nD.⟧",
    ),
    "llama3 multi": (
        LLAMA3,
        MULTI,
        f"{B}{H}system{H2}Be brief.{T}{H}user{H2}A?{T}{H}assistant{H2}B.{T}"
        f"{H}user{H2}C?{T}{H}assistant{H2}⟦D.{T}⟧",
    ),
    "llama3 tool": (
        LLAMA3,
        TOOL,
        f"{B}{H}user{H2}1+1?{T}{H}assistant{H2}"
        f'{{"name": "add", "parameters": {{"a": 1}}}}{T}'
        f"{H}ipython{H2}2{T}{H}assistant{H2}⟦It is 2.{T}⟧",
    ),
    "llama3 cut": (
        LLAMA3,
        CUT_LATER,
        f"{B}{H}system{H2}Be brief.{T}{H}user{H2}A?{T}{H}assistant{H2}B.{T}"
        f"{H}user{H2}C?{T}{H}assistant{H2}⟦D.⟧",
    ),
    "tags multi": (
        CHATML_TAGGED,
        MULTI,
        f"{S}system\nBe brief.{E}\n{S}user\nA?{E}\n{S}assistant\nB.{E}\n"
        f"{S}user\nC?{E}\n{S}assistant\n⟦D.{E}⟧\n",
    ),
}
"""With `data.answers: last`."""


def tokens_of(row, tokenizer, answers="all"):
    conversation = parse_row(RawRow(values=row, number=1, where="rows.jsonl, line 1"))
    [pair] = tokenize([render(conversation, tokenizer, answers)], tokenizer)
    return pair


def by_hand(golden, tokenizer):
    """Look every token up in the vocabulary; the brackets switch the mask."""
    vocab, ids, mask, supervised = tokenizer.get_vocab(), [], [], 0
    for piece in PIECES.findall(golden):
        if piece in "⟦⟧":
            supervised = int(piece == "⟦")
            continue
        ids.append(
            vocab[piece] if len(piece) > 1 else vocab[{" ": "Ġ", "\n": "Ċ"}.get(piece, piece)]
        )
        mask.append(supervised)
    return ids, mask


@pytest.mark.parametrize("name", GOLDEN)
def test_the_loss_mask_is_the_one_written_by_hand(name):
    template, row, golden = GOLDEN[name]
    tokenizer = tokenizer_with(template)
    ids_T, mask_T = tokens_of(row, tokenizer)
    assert (ids_T.tolist(), mask_T.tolist()) == by_hand(golden, tokenizer)
    assert (ids_T.dtype, mask_T.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("name", GOLDEN_LAST)
def test_of_the_last_answer_alone_the_loss_mask_is_the_one_written_by_hand(name):
    template, row, golden = GOLDEN_LAST[name]
    tokenizer = tokenizer_with(template)
    ids_T, mask_T = tokens_of(row, tokenizer, "last")
    assert (ids_T.tolist(), mask_T.tolist()) == by_hand(golden, tokenizer)
    messages = parse_row(RawRow(values=row, number=1, where="")).messages
    if row.get("finish_reason") is None and messages[-1]["role"] == "assistant":
        # What a server sees: the template's own render, whole.
        assert ids_T.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)


REFUSED = {
    "qwen3 multi": (
        QWEN3,
        MULTI,
        r"does not only append: rendering turns 1\.\.3 .* Set data\.answers to `last`",
    ),
    "qwen3 tool without thinking": (QWEN3, TOOL, r"does not only append: rendering turns 1\.\.2"),
    "chatml thinking": (CHATML, THINKING, "leaves out the `reasoning_content` of turn 2"),
    "llama3 thinking": (LLAMA3, THINKING, "leaves out the `reasoning_content` of turn 2"),
    "chatml tool": (CHATML, TOOL, "leaves out the call of the tool 'add' of turn 2"),
    "tags thinking": (CHATML_TAGGED, THINKING, "leaves out the `reasoning_content` of turn 2"),
    "tags without effect": (
        CHATML.replace("{% for", "{% generation %}{% endgeneration %}{% for", 1),
        SINGLE,
        "tags mark nothing",
    ),
    "cut in a tool call": (
        QWEN3,
        {"messages": TOOL["messages"][:2], "finish_reason": "length"},
        "where it ends would be a guess",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_a_guess_is_refused_with_row_and_turn(name):
    template, row, complaint = REFUSED[name]
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: .*{complaint}"):
        tokens_of(row, tokenizer_with(template))


REFUSED_LAST = {
    "chatml thinking": (CHATML, LATER_THINKING, "leaves out the `reasoning_content` of turn 4"),
    "starts with an answer": (QWEN3, {"messages": SINGLE["messages"][1:]}, "starts with an assis"),
    "a prompt that the answer changes": (
        CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}!"),
        MULTI,
        "rewrites the prompt of turn 5 once the answer is there",
    ),
}


@pytest.mark.parametrize("name", REFUSED_LAST)
def test_a_last_answer_that_would_be_a_guess_is_refused_with_row_and_turn(name):
    template, row, complaint = REFUSED_LAST[name]
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: .*{complaint}"):
        tokens_of(row, tokenizer_with(template), "last")
