"""Dialogue: what is learned of a conversation, what is cut of one that is too long, and replies to histories."""

import dataclasses
import functools
import json

import builders
import jax
import numpy as np
import pytest
from task_toys import config, encoded, learned, without

from jaxformer import tasks
from jaxformer.config import (
    ConfigError,
    DecodeConfig,
    EmbedConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    TokenizerConfig,
)
from jaxformer.conversation import Conversation
from jaxformer.data import chat
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.model import Model
from jaxformer.tasks import dialogue

CONTENTS = ("a question", "an answer", "more?", "no", "why", "so it is")
EMPTY = {"role": "user", "content": ""}


def conversation(count=6, system="be brief"):
    begin = [] if system is None else [{"role": "system", "content": system}]
    return (*begin, *({"role": ("user", "assistant")[i % 2], "content": CONTENTS[i]} for i in range(count)))


@functools.cache
def tokenizers(kind="byte"):
    return learned(TokenizerConfig(kind=kind, vocab=300), " ".join((*CONTENTS, *chat.ROLES, "be brief")))


def settings(length=500, **task):
    return config("dialogue", length=length, side="decoder", **task)


def written(messages):
    """The default template by hand: (token, whether it is learned) of every byte and special token."""
    tokenizer, found = tokenizers().target, []
    for message in messages:
        is_reply = message["role"] == "assistant"
        header = [tokenizer.bos, *tokenizer.encode(message["role"]), tokenizer.sep]
        found += [(token, False) for token in header]
        found += [(token, is_reply) for token in (*tokenizer.encode(message["content"]), tokenizer.eos)]
    return found


def test_replies_and_their_ends_are_learned_and_nothing_else():
    features = encoded(settings(), tokenizers(), messages=conversation())
    expected = written(conversation())
    assert features["target"].tolist() == [token for token, _ in expected[:-1]]
    assert features["labels"].tolist() == [token for token, _ in expected[1:]]
    assert features["weights"].tolist() == [float(is_learned) for _, is_learned in expected[1:]]
    assert "cut" not in features
    assert features["weights"].sum() == sum(len(CONTENTS[i]) + 1 for i in (1, 3, 5))


def test_the_last_reply_alone():
    features = encoded(settings(replies="last"), tokenizers(), messages=conversation())
    text = tokenizers().target.decode(features["labels"][features["weights"] > 0])
    assert text == CONTENTS[5]
    assert features["labels"][features["weights"] > 0][-1] == tokenizers().target.eos


@pytest.mark.parametrize("system", [None, "be brief"])
def test_the_oldest_exchanges_are_cut_and_counted(system):
    """Every length, beside exchanges left out one by one."""
    messages = conversation(system=system)
    begin = 0 if system is None else 1
    for length in range(2, len(written(messages)) + 2):
        features = encoded(settings(length), tokenizers(), messages=messages)
        kept = list(messages)
        while len(kept) > begin + 2 and len(written(kept)) - 1 > length:
            del kept[begin : begin + 2]
        expected = written(kept)[: length + 1]
        assert features["target"].tolist() == [token for token, _ in expected[:-1]], length
        assert features["weights"].tolist() == [float(is_learned) for _, is_learned in expected[1:]]
        assert int(features.get("cut", 0)) == len(written(messages)) - len(expected)


def test_a_prompt_is_the_beginning_of_training():
    """Where there is room for a reply; the line is what the data has, or one turn of the user."""
    example = {"messages": conversation()}
    line = dialogue.TASK.input_line(example)
    assert json.loads(line) == {"messages": list(conversation()[:-1])}
    prompt = dialogue.TASK.prompt(settings(), tokenizers(), line)
    target = encoded(settings(), tokenizers(), **example)["target"]
    assert prompt["target"].tolist() == target[: len(prompt["target"])].tolist()
    assert len(target) - len(prompt["target"]) == len(CONTENTS[5])  # its end token is a label only
    for text in ("Hi", "{x", '{"a": 1}', "[1]", " "):
        assert dialogue.parse_line(text) == [{"role": "user", "content": text}]
    with pytest.raises(ConfigError, match="line: got role assistant in the last turn, expected user"):
        dialogue.parse_line(json.dumps({"messages": list(conversation(2))}))


def test_a_prompt_leaves_room_for_the_reply_and_says_what_is_not_read():
    sizes = [len(written(conversation(count))) for count in (1, 3, 5)]
    opening = len("assistant") + 2
    messages = conversation(5)
    found = dialogue.chat_prompt(tokenizers(), messages, sizes[2] + opening, dated=False)
    assert (found.dropped, found.cropped, found.note(9)) == (0, 0, "")
    assert "cut" not in found.features
    found = dialogue.chat_prompt(tokenizers(), messages, sizes[2] + opening - 1, dated=False)
    kept = [messages[0], *messages[3:]]
    assert found.features["target"].tolist()[:-opening] == [token for token, _ in written(kept)]
    assert (found.dropped, found.cropped) == (2, 0)
    assert int(found.features["cut"]) == sizes[2] - len(written(kept))
    assert found.note(70) == (
        "chat: the conversation is longer than the 70 tokens that fit: its 2 oldest turns are not read"
    )
    found = dialogue.chat_prompt(tokenizers(), messages, 8, dated=False)
    assert tokenizers().target.decode(found.features["target"]) == "ssistant"[-7:]
    assert found.dropped == 4
    assert found.cropped > 0
    assert "its 4 oldest turns and the first" in found.note(8)
    assert [dialogue.prompt_limit(*case) for case in ((None, 9), (100, 9), (100, 90), (1, 9))] == [None, 91, 50, 1]


def test_packed_conversations_keep_their_own_weights_and_positions():
    data = {
        "packing": "first_fit",
        "length": 200,
        "batch": 2,
        "shuffle": False,
        "tokenizer": TokenizerConfig(kind="byte"),
    }
    base = settings()
    base = dataclasses.replace(base, data=dataclasses.replace(base.data, **data))
    examples = [{"messages": conversation(count, None)} for count in (2, 4, 2, 6)]
    pipeline = Pipeline(base, Dataset({"train": examples}, "x"), tokenizers(), dialogue.TASK)
    batch = next(pipeline.train())
    rows = [
        (row.tolist(), labels.tolist(), weights.tolist())
        for row, labels, weights in (
            (batch.target.tokens[r][chosen], batch.labels[r][chosen], batch.weights[r][chosen])
            for r in range(2)
            for chosen in (batch.target.slots.segment[r] == s for s in range(1, 5))
        )
        if len(row)
    ]
    alone = [encoded(base, tokenizers(), **example) for example in examples]
    assert sorted(rows) == sorted([tuple(f[name].tolist() for name in ("target", "labels", "weights")) for f in alone])
    assert batch.weights[batch.target.slots.segment == 0].sum() == 0
    assert len({int(s) for s in batch.target.slots.segment[0]}) > 2, "several share a row"


def test_packed_conversations_have_the_loss_and_the_gradient_of_rows_of_their_own():
    examples = [{"messages": conversation(count, None)} for count in (2, 4, 2, 6)]
    module, variables = builders.make(builders.decoder(layers=1, embed=EmbedConfig(vocab=264)), seed=1)

    @jax.jit
    def gradient(params, batch):
        loss = lambda p: dialogue.TASK.loss(settings(), module.apply({"params": p}, batch), batch)["loss"]  # noqa: E731
        return jax.value_and_grad(loss, has_aux=True)(params)

    found = []
    for packing in ("first_fit", "none"):
        base = settings()
        data = dataclasses.replace(base.data, packing=packing, length=200, tokenizer=TokenizerConfig(kind="byte"))
        base = dataclasses.replace(base, data=data)
        pipeline = Pipeline(base, Dataset({"train": examples}, "x"), tokenizers(), dialogue.TASK)
        (batch,) = pipeline.evaluate("train", rows=4)  # of one shape, so that there is one program
        assert (batch.target.slots.segment.max() > 1) == (packing == "first_fit")
        found.append(jax.device_get(gradient(variables["params"], batch)))
    ((total, count), packed), ((expected, same), alone) = found
    assert count == same == sum(len(CONTENTS[i]) + 1 for i in (1, 1, 3, 1, 1, 3, 5))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), packed, alone)


def test_scores_are_of_the_last_reply():
    examples = [{"messages": conversation()}, {"messages": conversation(2)}]
    assert dialogue.TASK.score(settings(), [" so it is", "an Answer"], examples) == {"exact_match": 0.5}
    assert dialogue.TASK.reference_line(settings(), examples[1]) == CONTENTS[1]


def test_a_tokenizer_without_an_end_token_is_refused():
    bare = without(learned(TokenizerConfig(kind="byte")), "eos")
    with pytest.raises(ConfigError, match="task dialogue: got a tokenizer without eos token"):
        encoded(settings(), bare, messages=conversation())


# --- models -----------------------------------------------------------------------------------------------------------


@functools.cache
def model(task="dialogue", kind="bpe") -> Model:
    parts = ModelConfig(
        decoder=builders.stack(layers=1, embed=EmbedConfig(vocab=304), ffn=FeedForwardConfig(width=8)),
        head=HeadConfig(),
    )
    module, variables = builders.make(parts, seed=3)
    base = config(task, length=96, side="decoder")
    base = dataclasses.replace(base, model=parts, decode=DecodeConfig(max_length=6, suppress=(2,)))
    return Model(module, variables["params"], {}, base, tokenizers(kind))


def test_a_reply_is_the_text_of_the_new_tokens():
    """Without the blank that this tokenizer has before every text."""
    kind = "bpe"
    talker, history = model(), list(conversation(1))
    prompt = chat.encode_prompt(tokenizers(kind).target, tokenizers(kind).chat_template, history)
    (expected,) = talker.predictor.runner.generate([{"target": np.array(prompt)}], talker.config.decode)[0]
    reply = talker.chat(history)
    assert reply == tokenizers(kind).target.decode(expected.tokens)
    assert len(expected.tokens) == 6
    assert "".join(talker.chat(history, stream=True)) == "".join(talker.stream(history)) == reply
    assert talker.predict([json.dumps({"messages": history})]) == [reply]
    assert talker.chat(history, max_length=3) == tokenizers(kind).target.decode(expected.tokens[:3])


def test_histories_are_checked_before_anything_is_computed(caplog):
    talker = model()
    for history, message in (
        ("Hi", "history: got str, expected a list of turns"),
        (list(conversation(2)), "history: got role assistant in the last turn, expected user"),
        ([{"role": "bot", "content": "Hi"}], "history, turn 1: got role 'bot', expected one of system, user, assist"),
    ):
        for call in (talker.chat, talker.stream) if not isinstance(history, str) else (talker.chat,):
            with pytest.raises(ConfigError, match=message):
                call(history)
    with pytest.raises(ConfigError, match="decode.method: got beam, expected greedy or sample to stream"):
        talker.chat(list(conversation(1)), stream=True, beams=2)
    with pytest.raises(
        ConfigError, match=r"got a decoder with a head of tokens and a chat template, .*use model\.chat"
    ):
        talker.generate(["Hi"])


def test_any_language_model_with_a_template_chats():
    history = list(conversation(1))
    assert model("language_modelling").chat(history) == model().chat(history)
    bare = dataclasses.replace(
        model("language_modelling"), tokenizers=dataclasses.replace(tokenizers(), chat_template=None)
    )
    with pytest.raises(ConfigError, match="chat: got a model without a chat template, expected one; put chat_template"):
        bare.chat(history)
    with pytest.raises(ConfigError, match="without a chat template"):
        Conversation(bare)


def test_a_conversation_keeps_what_was_said_and_read(caplog):
    talk = Conversation(model(), system="be brief")
    first = "".join(talk.reply("Hi"))
    assert first == model().chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hi"}])
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    with pytest.raises(ConfigError, match="which the tokenizer reads as a special token"):
        talk.reply("</s>")
    pieces = talk.reply("more?")
    begun = next(pieces)
    pieces.close()
    assert talk.messages[-2:] == [{"role": "user", "content": "more?"}, {"role": "assistant", "content": begun}]
    assert caplog.records == []
    "".join(talk.reply("x" * 20))
    assert "turns are not read" in caplog.text
    assert [message["role"] for message in talk.messages][:2] == ["system", "user"]
    assert len(talk.messages) < 7
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    with pytest.raises(ConfigError, match="got beam"):
        Conversation(model(), decode=DecodeConfig(method="beam"))


def test_the_task_belongs_to_its_own_runs():
    other = dataclasses.replace(model().config, task=dataclasses.replace(model().config.task, name="none"))
    assert tasks.fitting(other) is tasks.get("language_modelling")
