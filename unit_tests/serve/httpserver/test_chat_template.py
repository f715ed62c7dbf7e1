import pytest

from serve.httpserver.chat_template import ChatTemplate, ChatTemplateError

HI = [{"role": "user", "content": "hi"}]


def test_smollm_template_equals_transformers(tokenizer):
    from transformers.utils.chat_template_utils import render_jinja_template

    from models.packaged import pull
    from serve.httpserver.gguf_metadata import read_gguf_metadata

    source = read_gguf_metadata(pull("smollm2-135m", progress=False))["tokenizer.chat_template"]
    for messages in (
        HI,
        [{"role": "system", "content": "be\n kind"}, *HI, {"role": "assistant", "content": "ok"}, *HI],
    ):
        expected, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
        assert tokenizer.chat_template.render(messages) == expected[0]


def test_whitespace_and_tojson_follow_transformers():
    source = "{% for m in messages %}\n    {{ m.content | tojson }}\n{% endfor %}\n{{ tools | tojson(indent=2) }}"
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "<é>'"}], tools=[{"a": 1}])
    assert text == '    "<é>\'"\n[\n  {\n    "a": 1\n  }\n]'


def test_globals_and_special_tokens():
    template = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(HI) == "<s>"
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", {}).render(HI)) == 4
    assert ChatTemplate("{% for i in [1,2] %}{{ i }}{% break %}{% endfor %}", {}).render(HI) == "1"
    assert ChatTemplate("{% generation %}x{% endgeneration %}", {}).render(HI) == "x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
        "{{ none.x.y }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_failures_are_one_error(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(HI)


def test_a_template_that_does_not_compile_is_refused():
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{% if %}", {})
