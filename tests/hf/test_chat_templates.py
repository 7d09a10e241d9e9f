"""Chat templates of the other library's directories: where they are read from, and that they travel with the model."""

import json

import pytest
import tokenizers
from test_pretrained import GPT2, write_directory

import jaxformer
from jaxformer import cli
from jaxformer.config import ConfigError
from jaxformer.data import chat
from jaxformer.hf.table import Settings
from jaxformer.hf.tokenizer import open_tokenizers

TEMPLATE = "{% for m in messages %}{{ bos_token }} {{ m.content }} {{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ bos_token }} dog{% endif %}"
HISTORY = [{"role": "user", "content": "the cat sat"}]


@pytest.fixture
def directory(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "x": 2}, unk_token="x"))
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def rendered(directory):
    found = open_tokenizers(directory, Settings({"model_type": "gpt2", "eos_token_id": 1}))
    if found.chat_template is None:
        return None
    return chat.render(found.chat_template, chat.template_tokens(found.target), HISTORY, opening=False)[0]


def configure(directory, **settings):
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_template_is_of_the_config_or_of_its_own_file(directory):
    assert rendered(directory) is None
    configure(directory, chat_template="one")
    assert rendered(directory) == "one"
    configure(directory, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}])
    assert rendered(directory) == "two"
    (directory / "chat_template.jinja").write_text("three")
    assert rendered(directory) == "three", "the library's newer place for it"


def test_special_tokens_are_those_of_the_config(directory):
    """Set in the template's first line, which changes nothing of the text below it."""
    template = "  {% if true %}\n{{ bos_token }}|{{ eos_token }}|{{ pad_token }}\n{% endif %}"
    (directory / "chat_template.jinja").write_text(template)
    assert rendered(directory) == "<s>|</s>|\n"
    configure(directory, bos_token={"content": "<b\"'>"}, eos_token="</s>", pad_token=None)
    assert rendered(directory) == "<b\"'>|</s>|\n"
    configure(directory, bos_token=None)
    assert rendered(directory) == "|</s>|\n"


def test_an_imported_model_chats_and_keeps_its_template(tmp_path, capsys):
    """From the directory, from a workdir, and from the directory that this is exported to."""
    source, workdir, target = (tmp_path / name for name in ("hf", "run", "out"))
    write_directory(source, "gpt2", "causal_lm", GPT2)
    model = jaxformer.from_pretrained(source)
    with pytest.raises(ConfigError, match="got a model without a chat template, expected one; put chat_template.jinja"):
        model.chat(HISTORY)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>"}))
    model = jaxformer.from_pretrained(source)
    options = {"max_length": 4, "suppress": (6,)}
    reply = model.chat(HISTORY, **options)
    framed = "<s> the cat sat </s><s> dog"
    ids = model.tokenizers.target.parse(framed)
    assert ids == [5, 7, 8, 9, 6, 5, 13]
    expected = model.generate(input_ids=[ids], max_new_tokens=4, suppress_tokens=[6])[0][len(ids) :]
    assert reply == model.tokenizers.target.decode(expected)
    assert "".join(model.stream(HISTORY, **options)) == reply
    assert "".join(model.stream("the cat", **options)) == model.generate(["the cat"], **options)[0]
    assert cli.main(["import", f"--source={source}", f"--workdir={workdir}"]) == 0
    assert jaxformer.load(workdir).chat(HISTORY, **options) == reply
    assert cli.main(["export", f"--workdir={workdir}", f"--target={target}"]) == 0
    assert jaxformer.from_pretrained(target).chat(HISTORY, **options) == reply


def test_a_long_history_is_cut_to_the_positions_of_the_model(tmp_path, caplog):
    write_directory(tmp_path, "gpt2", "causal_lm", GPT2)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("bos_token", "'<s>'"))
    model = jaxformer.from_pretrained(tmp_path)
    assert model.predictor.framing.chat_length == 24
    turns = [{"role": ("user", "assistant")[i % 2], "content": "the cat sat on a mat"} for i in range(5)]
    assert isinstance(model.chat(turns, max_length=4), str)
    assert "longer than the 20 tokens that fit: its 4 oldest turns are not read" in caplog.text
