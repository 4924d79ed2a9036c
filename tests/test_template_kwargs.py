import json

import pytest
from conftest import byte_tokenizer, conversation, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from hscache.config import DataConfig, ProduceConfig, TargetConfig
from hscache.errors import ConfigError, DataError
from hscache.prepare import prepare
from hscache.produce import describe_plan
from hscache.target import Target
from hscache.template_kwargs import parse_template_kwargs, set_template_kwargs

SWITCHED = (
    "\n{%- macro say(text) %}{{ x|default('unset') }}:{{ text }}{% endmacro -%}"
    "{% for m in messages %}{{ say(m.content) }}{% if x is not defined %}?{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks is not defined or thinks %}<think>{% endif %}{% endif %}"
)
ROWS = [conversation(f"question {i}", f"answer {i}") for i in range(6)]


def rendered(tokenizer, **kwargs) -> str:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    return tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)


@given(st.one_of(st.booleans(), st.integers(), st.text(max_size=20)))
def test_a_value_in_the_template_renders_as_one_given_with_the_call(value):
    given_with_call, inside = byte_tokenizer(), byte_tokenizer()
    given_with_call.chat_template = inside.chat_template = SWITCHED
    set_template_kwargs(inside, parse_template_kwargs(json.dumps({"x": value})))
    assert rendered(inside) == rendered(given_with_call, x=value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"x": [1]}', '{"x y": 1}', '{"x": null}'])
def test_what_is_no_object_of_plain_values_is_refused(text):
    with pytest.raises(ConfigError, match=r"target\.chat_template_kwargs"):
        TargetConfig(path="x", chat_template_kwargs=text)


def test_a_variable_the_template_does_not_use_is_refused():
    with pytest.raises(ConfigError, match="sets thinking"):
        set_template_kwargs(byte_tokenizer(), {"thinking": False})


@pytest.fixture
def produce_config(llama_dir, tmp_path):
    """A config whose rows a server answered with `thinks` false, made with the given setting."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS
    for file in llama_dir.iterdir():
        (tmp_path / "target").mkdir(exist_ok=True)
        (tmp_path / "target" / file.name).symlink_to(file)
    (tmp_path / "target" / "chat_template.jinja").unlink()
    (tmp_path / "target" / "chat_template.jinja").write_text(THINKS)
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    extra = {"chat_template_kwargs": {"thinks": False}, "top_k": 3}
    (tmp_path / "rows.jsonl.settings.json").write_text(json.dumps({"extra_body": extra}))

    def make(kwargs: str | None) -> ProduceConfig:
        return ProduceConfig(
            shard_dir=tmp_path / "cache",
            target=TargetConfig(
                path=str(tmp_path / "target"),
                target_layer_ids=(1,),
                device="cpu",
                chat_template_kwargs=kwargs,
            ),
            data=DataConfig(train=(str(rows),)),
        )

    return make


@pytest.mark.parametrize("kwargs", [None, '{"thinks": true}'])
def test_rows_answered_to_other_prompts_are_refused(produce_config, kwargs):
    config = produce_config(kwargs)
    with pytest.raises(DataError, match=r"--target\.chat-template-kwargs '\{\"thinks\": false\}'"):
        describe_plan(config)
    with pytest.raises(DataError, match="not the prompts the target saw"):
        prepare(config, Target(config.target))


def test_what_was_set_is_in_the_tokens_and_in_the_identity(produce_config):
    config = produce_config('{"thinks": false}')
    target = Target(config.target)
    cache = prepare(config, target)
    assert cache.identity.states.template_kwargs == '{"thinks":false}'
    document = cache.documents[0]
    text = target.tokenizer.decode(document.input_ids.tolist())
    assert "<think>" not in text
    answer = target.tokenizer.decode(document.input_ids[document.loss_mask].tolist())
    assert answer.startswith("answer")
    assert answer.endswith("<|im_end|>")
