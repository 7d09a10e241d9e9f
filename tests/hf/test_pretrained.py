"""Models of this project and of the other library's directories under one calling convention, without golden files."""

import dataclasses
import json
import shutil

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import jaxformer
from jaxformer import cli, tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeScalingConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
)
from jaxformer.data import vocabulary_learning
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.data.vocabularies import LibraryVocabulary
from jaxformer.hf import comparison, convert, flax, origin, reading, table, workdirs, writing
from jaxformer.hf.pretrained import HuggingFace
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "dog"]


def write_tokenizer(directory):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(WORDS[:7])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    model.save(str(directory / "tokenizer.json"))


def write_directory(directory, model_type, head, settings):
    """A directory as the other library writes it, with random weights."""
    family = dict(table.families())[model_type]
    settings = {"model_type": family.model_types[0], "architectures": [family.heads[head]], **settings}
    model = family.read_config(table.Settings(settings), head)
    params = builders.make(model)[1]["params"]
    writing.write_checkpoint(directory, settings, convert.export_tensors(family.rows(model, head), params))
    write_tokenizer(directory)
    return model, params


BERT = {
    "vocab_size": 14, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 24, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 14, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 24,
    "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 14, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 24, "eos_token_id": 6}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    place = tmp_path_factory.mktemp("hf") / "bert"
    write_directory(place, "bert", "masked_lm", BERT)
    return place


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    place = tmp_path_factory.mktemp("hf") / "gpt2"
    write_directory(place, "gpt2", "causal_lm", GPT2)
    return place


@pytest.fixture(scope="module")
def masked(bert):
    """The model of `bert`."""
    return jaxformer.from_pretrained(bert)


@pytest.fixture(scope="module")
def causal(gpt2):
    """The model of `gpt2`."""
    return jaxformer.from_pretrained(gpt2)


def test_a_masked_word_is_filled_with_the_tokenizers_own_frame(masked):
    model = masked
    found = model.fill_mask(["the [MASK] sat"], top=3)[0][0]
    ids = np.asarray([[2, 7, 4, 9, 3]])
    logits = np.asarray(model(input_ids=ids).logits)[0, 2]
    assert [f["id"] for f in found] == np.argsort(-logits)[:3].tolist()


def test_embeddings_and_ids_give_the_same(masked):
    model, ids = masked, np.asarray([[2, 7, 8, 3]])
    rows = np.asarray(model.params["source_embed"]["table"])[ids]
    np.testing.assert_allclose(model(inputs_embeds=rows).logits, model(input_ids=ids).logits, rtol=1e-6)


def test_attentions_are_distributions_over_real_tokens(masked):
    out = masked(
        input_ids=np.asarray([[2, 7, 3, 0]]), attention_mask=np.asarray([[1, 1, 1, 0]]), output_attentions=True
    )
    (weights,) = map(np.asarray, out.attentions)
    assert weights.shape == (1, 2, 4, 4)
    np.testing.assert_allclose(weights[:, :, :3].sum(-1), 1.0, rtol=1e-6)
    assert not weights[..., 3].any()


def test_another_head_on_the_same_body(bert, masked, caplog):
    model = jaxformer.from_pretrained(bert, head="sequence", classes=3)
    assert model(input_ids=np.asarray([[2, 7, 3]])).logits.shape == (1, 3)
    assert "cls.predictions" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, model.params["encoder"], masked.params["encoder"])
    results = model.classify(["the cat sat"])
    assert set(results[0]["probabilities"]) == {"LABEL_0", "LABEL_1", "LABEL_2"}


def test_padding_before_a_text_sees_no_token_whatever_its_position_is(causal):
    mask, position = np.asarray([[0, 0, 1, 1, 1]] * 2), np.asarray([[0, 1, 0, 1, 2]] * 2)
    ids = np.asarray([[7, 8, 9, 10, 11], [7, 8, 12, 10, 9]])
    out = causal(input_ids=ids, attention_mask=mask, position_ids=position, output_hidden_states=True)
    for hidden in out.hidden_states:  # the texts differ from their first token on
        np.testing.assert_array_equal(hidden[0, :2], hidden[1, :2])
        assert (np.asarray(hidden[0, 2:]) != np.asarray(hidden[1, 2:])).any()


def test_padding_beside_a_loss_of_spans_is_refused_by_a_call(tmp_path):
    sizes = {"vocab_size": 14, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 24}
    local = {"attention_types": [[["local"], 1]], "window_size": 2}
    write_directory(tmp_path, "gpt_neo", "qa", {**sizes, **local})
    given = {"input_ids": np.full((1, 4), 7), "attention_mask": np.asarray([[1, 1, 0, 0]])}
    with pytest.raises(ConfigError, match=r"padding in slot 3 of row 0 .* with at most 1 slots of padding in a row"):
        jaxformer.from_pretrained(tmp_path)(**given, start_positions=[0], end_positions=[1])


def test_a_classifier_of_the_end_token_computes_the_slots_after_it(tmp_path):
    head = write_directory(tmp_path, "bart", "sequence", {**BART, "num_labels": 3})[1]["head"]
    model, body = jaxformer.from_pretrained(tmp_path), jaxformer.from_pretrained(tmp_path, head="model")
    ids = np.asarray([[7, 2, 8, 2, 9, 10], [8, 9, 11, 11, 12, 2]])
    out, whole = (x(input_ids=ids, output_hidden_states=True) for x in (model, body))
    old = flax.FlaxBartForSequenceClassification.from_pretrained(tmp_path)(ids, output_hidden_states=True)
    ends = np.asarray(whole.last_hidden_state)[[0, 1], [3, 5]]
    inner = np.tanh(ends @ head["hidden"]["kernel"] + head["hidden"]["bias"])
    expected = inner @ head["decision"]["kernel"] + head["decision"]["bias"]
    for found in (out, old):
        np.testing.assert_allclose(found.logits, expected, atol=1e-6)
        for x, y in zip(found.decoder_hidden_states, whole.decoder_hidden_states, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)
    with pytest.raises(ConfigError, match="expected one shape"):
        model(input_ids=ids, decoder_input_ids=ids[:, :4])


def test_another_number_of_classes_keeps_the_pooler(tmp_path):
    write_directory(tmp_path / "bert", "bert", "sequence", BERT | {"num_labels": 2})
    two, five = (jaxformer.from_pretrained(tmp_path / "bert", classes=n) for n in (None, 5))
    assert five.params["head"]["decision"]["kernel"].shape == (8, 5)
    np.testing.assert_array_equal(two.params["head"]["hidden"]["kernel"], five.params["head"]["hidden"]["kernel"])
    assert five(input_ids=np.asarray([[2, 7, 3]])).logits.shape == (1, 5)


def test_tags_and_answers(bert):
    tagger, line = jaxformer.from_pretrained(bert, head="token", classes=2), "the  cat sat"
    tags, words = tagger.tag([line])[0], tagger.tag([line], words=True)[0]
    assert [tag["token"] for tag in tags] == ["the", "cat", "sat"]
    assert words == [{"word": tag.pop("token"), **tag} for tag in tags]
    context = "a dog sat on the mat"
    found = jaxformer.from_pretrained(bert, head="qa").answer(["the cat"], [context], longest=2)[0]
    assert found["answer"] == context[found["start"] : found["end"]]
    assert 1 <= len(found["answer"].split()) <= 2


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart"])
def test_an_answer_is_the_best_span_of_their_logits(family, tmp_path):
    """Of one side or two: the scores are those of a call with their argument names."""
    write_directory(tmp_path / family, family, "qa", {"bert": BERT, "gpt2": GPT2, "bart": BART}[family])
    model, context = jaxformer.from_pretrained(tmp_path / family), "a dog  sat on the mat"
    framed = tokenizers.Tokenizer.from_file(str(tmp_path / family / "tokenizer.json")).encode("the cat", context)
    kinds = {"token_type_ids": np.asarray([framed.type_ids])} if family == "bert" else {}
    out = model(input_ids=np.asarray([framed.ids]), **kinds)
    first, last = (np.asarray(x)[0] for x in (out.start_logits, out.end_logits))
    inside = [slot for slot, part in enumerate(framed.sequence_ids) if part == 1]
    sums = {(a, b): first[a] + last[b] for a in inside for b in inside if a <= b < a + 3}
    begin, end = max(sums, key=sums.__getitem__)
    (found,) = model.answer(["the cat"], [context], longest=3)
    assert (found["start"], found["end"]) == (framed.offsets[begin][0], framed.offsets[end][1])
    allowed = [0, *inside]  # [CLS], which none of these tokenizers lacks
    total = np.exp(first[allowed]).sum() * np.exp(last[allowed]).sum()
    assert found["score"] == pytest.approx(float(np.exp(sums[begin, end]) / total), rel=1e-4)
    with pytest.raises(ConfigError, match=r"use model.answer"):
        model.tag(["the cat"])


def test_resized_vocabulary_keeps_old_rows(bert, masked):
    large, small = (jaxformer.from_pretrained(bert, vocab=vocab) for vocab in (20, 10))
    ids = np.asarray([[2, 7, 8, 3]])
    old, more, fewer = (np.asarray(model(input_ids=ids).logits) for model in (masked, large, small))
    assert more.shape == (1, 4, 20)
    np.testing.assert_allclose(more[..., :14], old, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fewer, old[..., :10], rtol=1e-5, atol=1e-6)


def test_parameters_are_read_onto_a_mesh(gpt2, causal):
    mesh = meshes.make(MeshConfig(data=1, fsdp=4, tensor=2))
    sharded, whole = jaxformer.from_pretrained(gpt2, mesh=mesh), causal
    kernel = sharded.params["decoder"]["blocks"]["ffn"]["in"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), sharded.params, whole.params)


def test_generation_continues_text(causal):
    model = causal
    text = model.generate(["the cat"], max_length=4)
    ids = model.generate(input_ids=np.asarray([[2, 7, 8, 3]]), max_new_tokens=4)
    assert text[0].split() == [WORDS[i] for i in ids[0, 4:] if i >= 7 or i == 1][: len(text[0].split())]
    assert ids.shape[1] <= 8


def test_defaults_that_generation_does_not_know_are_named(gpt2, tmp_path, caplog):
    place = edited(gpt2, tmp_path / "x")
    (place / "generation_config.json").write_text('{"typical_p": 0.9, "num_beam_groups": 1.0, "max_new_tokens": 3}')
    model = jaxformer.from_pretrained(place)
    assert "knows no typical_p, and" in caplog.text
    assert model.generate(input_ids=np.asarray([[7, 8]]), eos_token_id=13, pad_token_id=0).shape[1] <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beam": 2}, "did you mean 'num_beams'"),
        ({"do_sample": True, "num_beams": 2}, "do_sample with num_beams"),
        ({"num_return_sequences": 2}, "num_return_sequences 2 with num_beams 1"),
        ({"early_stopping": "soon"}, "early_stopping 'soon'"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"attention_mask": np.ones((1, 3))}, "attention_mask"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
    ],
)
def test_generate_refuses(causal, arguments, message):
    with pytest.raises(ConfigError, match=message):
        causal.generate(input_ids=np.asarray([[7, 8]]), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_id": np.ones((1, 2), int)}, "input_ids"),
        ({}, "none of input_ids"),
        ({"input_ids": np.ones(3, int)}, "batch, length"),
        ({"input_ids": np.ones((1, 2), int), "past_key_values": 1}, "past_key_values"),
        ({"input_ids": np.ones((1, 2), int), "attention_mask": np.ones((1, 3))}, "attention_mask"),
    ],
)
def test_call_refuses(masked, arguments, message):
    with pytest.raises(ConfigError, match=message):
        masked(**arguments)


def edited(directory, place, tensors=None, **settings):
    """A copy of a directory with other settings or tensors."""
    config = reading.read_config(directory) | settings
    writing.write_checkpoint(
        place, config, {n: t.array() for n, t in reading.open_tensors(directory).items()} | (tensors or {})
    )
    return place


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gpt-2"}, "model_type 'gpt-2'.*did you mean 'gpt2'"),
        ({"n_layer": 2}, "no tensor transformer.h.1"),
        ({"n_embd": 12, "n_head": 2}, "shape"),
        ({"n_layer": "1"}, "n_layer '1'"),
        ({"activation_function": "maxout"}, "maxout"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel"),
    ],
)
def test_a_config_that_contradicts_the_file_is_refused(gpt2, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        jaxformer.from_pretrained(edited(gpt2, tmp_path / "x", **settings))


def test_extra_and_missing_tensors_are_refused(gpt2, tmp_path):
    extra = edited(gpt2, tmp_path / "extra", {"transformer.h.0.attn.rotary": np.ones(3, np.float32)})
    with pytest.raises(ConfigError, match=r"transformer\.h\.0\.attn\.rotary"):
        jaxformer.from_pretrained(extra)


def test_every_family_reads_what_it_writes():
    for name, family in table.families():
        for head, architecture in family.heads.items():
            # Blocks see the tokens ahead, so a causal model with the default of its family is refused.
            kind = {"attention_type": "original_full"} if (name, head) == ("big_bird", "causal_lm") else {}
            settings = table.Settings({"model_type": family.model_types[0], "architectures": [architecture], **kind})
            model = family.read_config(settings, head)
            again = family.read_config(table.Settings(family.write_config(model, head) | {"num_labels": 2}), head)
            assert not comparison.config_differences(model, again), f"{name} {head}"


def test_a_window_of_null_is_none_and_a_missing_one_the_default():
    read = dict(table.families())["mistral"].read_config
    windows = [
        read(table.Settings(settings), "causal_lm").decoder.attention.window
        for settings in ({"sliding_window": None}, {}, {"sliding_window": 7})
    ]
    assert windows == [None, 4096, 7]


# --- models trained here ----------------------------------------------------------------------------------------------


def ours(model):
    """A model of ours with random parameters."""
    module, variables = builders.make(model)
    params = variables["params"]
    config = Config(model=model, task=TaskConfig(name="translation"))
    head = origin.head_of_model(config)
    return Model(module, params, {}, config, None, hf=HuggingFace(head, settings=table.Settings({})))


def stack(**fields):
    fixed = dict(width=8, embed=EmbedConfig(vocab=11), attention=AttentionConfig(heads=2), unroll=1)
    return StackConfig(**{"layers": 2} | fixed | fields)


def experts(norm=None, **moe):
    return stack(
        encoding=EncodingConfig("rope", max_length=16),
        norm=NormConfig("rms"),
        attention=AttentionConfig(heads=2, kv_heads=1, bias=False, norm=norm),
        ffn=FeedForwardConfig(width=12, activation="silu", gated=True, bias=False),
        moe=MoEConfig(experts=4, capacity=1.5, **moe),  # capacity and losses are of training alone
    )


LONG_ROPE = RopeScalingConfig("longrope", factor=3.0, original=4, short=(1.0,), long=(2.5,))
EXPORTS = {
    "gpt2": ModelConfig(decoder=stack(encoding=EncodingConfig("learned", max_length=16))),
    "llama": ModelConfig(
        decoder=dataclasses.replace(
            stack(encoding=EncodingConfig("rope"), norm=NormConfig("rms")),
            attention=AttentionConfig(heads=2, bias=False),
            ffn=FeedForwardConfig(activation="silu", gated=True, bias=False),
        ),
        head=HeadConfig(tied=False),
    ),
    "mixtral": ModelConfig(decoder=experts(top_k=2), head=HeadConfig(tied=False)),
    "qwen3_moe": ModelConfig(decoder=experts(top_k=3, normalise=False, norm=NormConfig("rms"))),
    "olmo2": ModelConfig(
        decoder=dataclasses.replace(
            stack(encoding=EncodingConfig("rope"), norm=NormConfig("rms", "res_post")),
            attention=AttentionConfig(heads=2, bias=False, norm=NormConfig("rms"), norm_over="heads"),
            ffn=FeedForwardConfig(activation="silu", gated=True, bias=False),
        ),
        head=HeadConfig(tied=False),
    ),
    "gpt_oss": ModelConfig(
        decoder=dataclasses.replace(
            experts(top_k=2, router_bias=True),
            attention=AttentionConfig(heads=2, kv_heads=1, sink=True, window=2, window_every=2),
            ffn=FeedForwardConfig(width=12, activation="silu", gated=True, slope=2.0, limit=0.5, offset=1.0),
        ),
        head=HeadConfig(tied=False),
    ),
    "phi": ModelConfig(
        decoder=stack(encoding=EncodingConfig("rope", fraction=0.5), sublayers="parallel_one_norm"),
        head=HeadConfig(tied=False, bias=True),
    ),
    "phi3": ModelConfig(
        decoder=dataclasses.replace(
            stack(
                encoding=EncodingConfig("rope", fraction=0.5, scaling=LONG_ROPE), norm=NormConfig("rms"), dropout=0.1
            ),
            attention=AttentionConfig(heads=2, kv_heads=1, bias=False, window=3, dropout=0.2),
            ffn=FeedForwardConfig(width=12, activation="silu", gated=True, bias=False),
        ),
        head=HeadConfig(tied=False),
    ),
    "pegasus": ModelConfig(
        encoder=stack(encoding=EncodingConfig("sinusoidal"), layers=1),
        decoder=stack(encoding=EncodingConfig("sinusoidal")),
        share_embeddings=True,
    ),
    "marian": ModelConfig(
        encoder=stack(encoding=EncodingConfig("sinusoidal"), norm=NormConfig(order="post"), layers=1),
        decoder=stack(encoding=EncodingConfig("sinusoidal"), norm=NormConfig(order="post")),
        share_embeddings=True,
    ),
}


@pytest.mark.parametrize("family", EXPORTS)
def test_a_model_of_ours_is_exported_and_computes_the_same(family, tmp_path):
    model = ours(EXPORTS[family])
    model.save_pretrained(tmp_path / "out")
    assert reading.read_config(tmp_path / "out")["model_type"] == family
    again = jaxformer.from_pretrained(tmp_path / "out")
    ids = np.asarray([[3, 4, 5, 9], [5, 6, 7, 1]])
    given = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :3]} if model.config.model.encoder else {})
    np.testing.assert_allclose(again(**given).logits, model(**given).logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("kind", "lowercase"), [("character", False), ("byte", False), ("word", True)])
def test_a_tokenizer_that_was_learned_here_goes_along_where_the_other_library_has_its_kind(
    kind, lowercase, tmp_path, caplog
):
    data = DataConfig(tokenizer=TokenizerConfig(kind=kind, lowercase=lowercase))
    texts = Tokenizers.build(data, [{"text": "what says the dog"}], ["text"])
    config = EXPORTS["gpt2"]
    embed = dataclasses.replace(config.decoder.embed, vocab=texts.target.size)
    model = ours(dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, embed=embed)))
    model = dataclasses.replace(model, tokenizers=texts)
    model.save_pretrained(tmp_path / "out")
    again = jaxformer.from_pretrained(tmp_path / "out")
    if lowercase:
        assert again.tokenizers is None
        assert "cannot express a word tokenizer" in caplog.text
        return
    assert again.tokenizers.target.encode("the dog says") == texts.target.encode("the dog says")
    assert not caplog.text


def test_experts_are_read_one_by_one_each_device_its_own(tmp_path):
    model = ours(EXPORTS["mixtral"])
    model.save_pretrained(tmp_path / "out")
    settings, opened = reading.read_config(tmp_path / "out"), reading.open_tensors(tmp_path / "out")
    assert (settings["num_local_experts"], settings["num_experts_per_tok"], settings["intermediate_size"]) == (4, 2, 12)
    mesh = meshes.make(MeshConfig(data=1, expert=2, fsdp=2, tensor=2))
    spread = jaxformer.from_pretrained(tmp_path / "out", mesh=mesh)
    ffn = spread.params["decoder"]["blocks"]["ffn"]
    assert ffn["gate"]["kernel"].sharding.shard_shape((2, 4, 8, 12))[1] == 2
    theirs = "model.layers.1.block_sparse_moe"
    np.testing.assert_array_equal(ffn["router"][1], opened[f"{theirs}.gate.weight"].array().T)
    for part, name in (("gate", "w1"), ("in", "w3"), ("out", "w2")):
        for expert in range(4):
            tensor = opened[f"{theirs}.experts.{expert}.{name}.weight"].array()
            np.testing.assert_array_equal(ffn[part]["kernel"][1, expert], tensor.T)
    assert len(opened) == 3 + 2 * (2 + 4 + 1 + 4 * 3)
    ids = np.asarray([[3, 4, 5, 9, 1, 2, 7, 7]] * 4)
    np.testing.assert_allclose(spread(input_ids=ids).logits, model(input_ids=ids).logits, rtol=2e-5, atol=2e-5)
    missing = f"{theirs}.experts.3.w2.weight"
    left = {name: tensor.array() for name, tensor in opened.items() if name != missing}
    writing.write_checkpoint(tmp_path / "left", settings, left)
    with pytest.raises(ConfigError, match=f"got no tensor {missing}, expected it"):
        jaxformer.from_pretrained(tmp_path / "left")


def test_a_tokenizer_of_ours_goes_with_its_model(tmp_path):
    """With the class to load it by: the other library would take that of the family it is exported to."""
    target = Tokenizer(LibraryVocabulary("bpe", vocabulary_learning.bpe(["der Hund und die Katze"] * 3, 300, False)))
    model = dataclasses.replace(ours(EXPORTS["pegasus"]), tokenizers=Tokenizers(target, target))
    model.save_pretrained(tmp_path / "out")
    says = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert says["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {role: says[f"{role}_token"] for role in ("pad", "bos", "eos", "unk")} == {
        role: target.names[role] for role in ("pad", "bos", "eos", "unk")
    }
    framed = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert framed.encode("Hund").ids == [*target.encode("Hund"), target.eos]


def test_what_no_family_computes_is_refused(tmp_path):
    alibi = ours(ModelConfig(decoder=stack(encoding=EncodingConfig("alibi"))))
    with pytest.raises(ConfigError, match="no family computes; the nearest is gpt2: .*alibi"):
        alibi.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- commands ---------------------------------------------------------------------------------------------------------


def test_import_then_export_gives_the_tensors_back(gpt2, causal, tmp_path, capsys):
    workdir, target = tmp_path / "run", tmp_path / "out"
    assert cli.main(["import", f"--source={gpt2}", f"--workdir={workdir}"]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    model = jaxformer.load(workdir)
    ids = np.asarray([[7, 8, 9]])
    np.testing.assert_array_equal(model(input_ids=ids).logits, causal(input_ids=ids).logits)
    assert cli.main(["export", f"--workdir={workdir}", f"--target={target}"]) == 0
    before, after = reading.open_tensors(gpt2), reading.open_tensors(target)
    assert {n: t.array().tobytes() for n, t in before.items()} == {n: t.array().tobytes() for n, t in after.items()}
    assert json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]["cat"] == 8
    assert cli.main(["import", f"--source={gpt2}", f"--workdir={workdir}"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_an_imported_tagger_decodes(tmp_path, capsys):
    source, workdir, lines = tmp_path / "bert", tmp_path / "run", tmp_path / "lines.txt"
    write_directory(source, "bert", "token", BERT | {"id2label": {"0": "O", "1": "B-pet", "2": "I-pet"}})
    assert cli.main(["import", f"--source={source}", f"--workdir={workdir}"]) == 0
    lines.write_text("the cat sat\na dog\n")
    capsys.readouterr()
    assert cli.main(["decode", f"--workdir={workdir}", f"--input={lines}"]) == 0
    tags = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [len(line) for line in tags] == [3, 2]
    assert {tag for line in tags for tag in line} <= {"O", "B-pet", "I-pet"}
    assert tags[0] == [word["label"] for word in jaxformer.from_pretrained(source).tag(["the cat sat"])[0]]


@pytest.mark.parametrize("kind", ["bpe", "file"])
def test_a_reader_of_ours_answers_the_same_as_what_it_is_exported_to(kind, bert, tmp_path):
    """Its frame goes with it; that of a tokenizer.json, here with a second [SEP] as RoBERTa's, is trained with."""
    asked = ["the cat", "a"], ["a dog sat  on the mat", "the cat sat on a mat on " * 8]
    if kind == "bpe":
        settings = dataclasses.replace(DataConfig(), tokenizer=TokenizerConfig(kind="bpe", vocab=280))
        both = Tokenizers.build(settings, [{"text": text} for text in asked[1]], ("text",))
    else:
        model = tokenizers.Tokenizer.from_file(str(bert / "tokenizer.json"))
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        both = Tokenizers(*[Tokenizer(LibraryVocabulary("file", model))] * 2)
        example = {"question": "the cat", "context": "a dog", "answers": ("dog",), "starts": (2,)}
        features = tasks.get("answering").encode(Config(model=ModelConfig(encoder=stack())), both, example, None)
        assert features["source"].tolist() == [2, 7, 8, 3, 3, 11, 13, 3]
        assert features["labels"].tolist() == [0, 0, 0, 0, 0, 0, 3, 0]
        assert features["weights"].tolist() == [1, 0, 0, 0, 0, 1, 1, 0]
    family = dict(table.families())["bert"]
    model = family.read_config(table.Settings({**BERT, "vocab_size": both.source.vocab}), "qa")
    module, variables = builders.make(model)
    config = Config(model=model, data=DataConfig(length=24), task=TaskConfig(name="answering"))
    config = dataclasses.replace(config, decode=DecodeConfig(max_length=30))
    head = origin.head_of_model(config)
    hf = HuggingFace(head, settings=table.Settings({"pad_token_id": 0}))
    one = Model(module, variables["params"], {}, config, both, hf=hf)
    one.save_pretrained(tmp_path / "out")
    ours_, theirs = one.answer(*asked), jaxformer.from_pretrained(tmp_path / "out").answer(*asked)
    assert [{**answer, "score": None} for answer in ours_] == [{**answer, "score": None} for answer in theirs]
    np.testing.assert_allclose([a["score"] for a in ours_], [a["score"] for a in theirs], rtol=1e-5)


def test_an_imported_reader_answers_lines_and_goes_back(tmp_path, capsys):
    """The same answers and scores of the directory, of its workdir, and of what is exported from that."""
    source, workdir, back, lines = (tmp_path / name for name in ("bert", "run", "back", "lines.txt"))
    write_directory(source, "bert", "qa", BERT)
    assert cli.main(["import", f"--source={source}", f"--workdir={workdir}"]) == 0
    assert cli.main(["export", f"--workdir={workdir}", f"--target={back}"]) == 0
    asked = [["the cat", "a dog"], ["a dog sat on the mat", "the cat sat on a mat on " * 8]]  # the second in windows
    answers = [model.answer(*asked) for model in map(jaxformer.from_pretrained, (source, back))]
    assert answers[0] == answers[1] == jaxformer.load(workdir).answer(*asked)
    lines.write_text("".join(f"{question}\t{context}\n" for question, context in zip(*asked, strict=True)))
    capsys.readouterr()
    assert cli.main(["decode", f"--workdir={workdir}", f"--input={lines}"]) == 0
    assert capsys.readouterr().out.splitlines() == [answer["answer"] for answer in answers[0]]
    lines.write_text("no tab\n")
    assert cli.main(["decode", f"--workdir={workdir}", f"--input={lines}"]) == 2
    assert "got a line without a tab, 'no tab', expected question, tab, context" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "head"), [("bart", "qa"), ("bert", "model")])
def test_a_model_that_no_task_trains_is_imported_all_the_same(family, head, tmp_path, capsys):
    source, workdir = tmp_path / family, tmp_path / "run"
    write_directory(source, family, head, {"bert": BERT, "bart": BART}[family])
    assert cli.main(["import", f"--source={source}", f"--workdir={workdir}"]) == 0
    ids = np.asarray([[2, 7, 8, 3]])
    before, after = jaxformer.from_pretrained(source)(input_ids=ids), jaxformer.load(workdir)(input_ids=ids)
    jax.tree.map(np.testing.assert_array_equal, dict(before), dict(after))
    assert cli.main(["decode", f"--workdir={workdir}", f"--input={source / 'config.json'}"]) == 2
    assert "can only be called" in capsys.readouterr().err


def test_an_import_without_a_tokenizer_says_so_and_so_does_decode(gpt2, tmp_path, capsys, caplog):
    source, workdir = shutil.copytree(gpt2, tmp_path / "source"), tmp_path / "run"
    (source / "tokenizer.json").unlink()
    assert cli.main(["import", f"--source={source}", f"--workdir={workdir}"]) == 0
    assert "no tokenizer, so" in caplog.text
    capsys.readouterr()
    assert cli.main(["decode", f"--workdir={workdir}", f"--input={source / 'config.json'}"]) == 2
    error = capsys.readouterr().err
    assert f"tokenizer: got no jaxformer_tokenizer.json in {workdir}" in error
    assert error.count("\n") == 1


def test_import_of_nothing_is_one_line(tmp_path, capsys):
    assert cli.main(["import", f"--source={tmp_path}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_any_task_takes_a_directory_s_body_with_a_head_of_its_own(bert):
    """A number of classes is the data's to say."""
    for task, kind in {"classification": "classes", "tagging": "slots"}.items():
        config = Config(init=InitConfig(directory=str(bert)), task=TaskConfig(name=task))
        model, tokenizers = workdirs.ORIGIN.read_model(config)
        assert (model.head.kind, model.head.classes, model.encoder.width) == (kind, None, 8)
        assert tokenizers.source.encode("cat") == [8]
    config = Config(init=InitConfig(directory=str(bert)), task=TaskConfig(name="answering"))
    assert workdirs.ORIGIN.read_model(config)[0].head == table.SPAN_HEAD


@pytest.mark.parametrize("task", ["translation", "summarisation"])
def test_text_to_text_begins_with_all_of_a_directory(task, tmp_path):
    write_directory(tmp_path / "bart", "bart", "seq2seq", BART)
    config = Config(init=InitConfig(directory=str(tmp_path / "bart")), task=TaskConfig(name=task))
    model = workdirs.ORIGIN.read_model(config)[0]
    assert (model.head.kind, model.decoder.width) == ("tokens", model.encoder.width)


def test_a_model_of_sentences_begins_and_is_exported_as_a_body(bert, tmp_path, caplog):
    head = HeadConfig(kind="pair", pooling="mean")
    config = Config(model=ModelConfig(head=head), init=InitConfig(directory=str(bert)), task=TaskConfig("similarity"))
    model, tokenizers = workdirs.ORIGIN.read_model(config)
    assert model.head == head
    config = dataclasses.replace(config, model=model)
    params = workdirs.ORIGIN.read_params(config, jax.tree.map(jnp.zeros_like, builders.make(model)[1]["params"]))
    hf = HuggingFace(origin.head_of_model(config))
    trained = Model(build.build(model), params, {}, config, tokenizers, hf=hf)
    trained.save_pretrained(tmp_path / "out")
    assert "the mean pooling of its last hidden states" in caplog.text
    body, ids = jaxformer.from_pretrained(tmp_path / "out"), np.asarray([[2, 7, 8, 3]])
    assert (body.hf.head, body.config.model.head.kind) == ("bare", "none")
    hidden = np.asarray(body(input_ids=ids).last_hidden_state)
    np.testing.assert_allclose(trained.embed(["the cat"])[0], hidden[0].mean(axis=0), rtol=1e-5, atol=1e-6)
    original = jaxformer.from_pretrained(bert, head="model")(input_ids=ids).last_hidden_state
    np.testing.assert_allclose(hidden, original, rtol=1e-5, atol=1e-6)
    layered = dataclasses.replace(model, head=dataclasses.replace(head, width=4))
    layered = dataclasses.replace(trained, config=dataclasses.replace(config, model=layered))
    with pytest.raises(ConfigError, match="a layer of width 4, expected none: the other library has no architecture"):
        layered.save_pretrained(tmp_path / "other")


def test_a_directory_is_fine_tuned(bert, masked, tmp_path, capsys, monkeypatch):
    """A recipe without a model takes the directory's body and tokenizer, with a new head for its task."""
    builders.one_device(monkeypatch)
    data = tmp_path / "data"
    data.mkdir()
    rows = ["the cat sat\tgood", "the dog sat\tbad", "a mat\tgood", "a dog\tbad"] * 2
    for split in ("train", "validation"):
        (data / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n", encoding="utf-8")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from jaxformer.config.overrides import defaults\n"
        "def get_config():\n"
        "    config = defaults()\n"
        f"    config.data.source, config.data.dir = 'table', {str(data)!r}\n"
        "    config.data.splits = {'train': ('train.tsv',), 'validation': ('validation.tsv',)}\n"
        "    config.data.columns = {'text': 'sentence', 'label': 'label'}\n"
        "    config.data.length, config.data.batch, config.task.name = 8, 8, 'classification'\n"
        "    config.train.steps, config.train.evaluate_every, config.train.checkpoint_every = 2, 0, 0\n"
        "    config.schedule.peak = 0.01\n"
        "    return config\n"
    )
    arguments = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}", f"--config.init.directory={bert}"]
    assert cli.main(["train", *arguments]) == 0
    model = jaxformer.load(tmp_path / "run")
    assert model.config.model.encoder.width == 8
    assert model.tokenizers.source.encode("cat") == [8]
    before, after = (np.asarray(each.params["encoder"]["blocks"]["ffn"]["in"]["kernel"]) for each in (masked, model))
    moved = np.abs(after - before).max()
    assert 0 < moved < 0.1  # it started there, and learned
    assert model.classify(["the cat sat"])[0]["label"] in ("good", "bad")
    assert cli.main(["train", *arguments]) == 0  # finished before: the workdir's own model serves
    fresh = [*arguments[:1], f"--workdir={tmp_path / 'other'}", *arguments[2:]]
    for wrong, words in (
        ("--config.data.length=99", "max_length: got 24, expected at least data.length (99)"),
        ("--config.mesh.stage=2", "config.model.encoder.layers: got 1, expected a multiple of mesh.stage (2)"),
        ("--config.checkpoint.average=5", "config.checkpoint.average"),
    ):
        capsys.readouterr()
        assert cli.main(["train", *fresh, wrong]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
