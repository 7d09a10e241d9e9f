"""Pairs of an encoder and a decoder: keys of both sides, refusals, saving, generation, putting together, training."""

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer
from jaxformer.cli import main
from jaxformer.config import ConfigError, MeshConfig
from jaxformer.hf import arguments, convert, flax, keys, reading, workdirs, writing
from jaxformer.hf.families import encoder_decoder
from jaxformer.hf.pretrained import HuggingFace
from jaxformer.hf.table import Settings, family_of
from jaxformer.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("rolled")

GOLDENS = Path(__file__).with_name("goldens")
CASES = json.loads((GOLDENS / "cases.json").read_text(encoding="utf-8"))


SPEC = importlib.util.spec_from_file_location("write_cases_of_pairs", GOLDENS / "write.py")
WRITE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(WRITE)
values = WRITE.values


def written(case, place, config=None, without=()):
    tensors = {
        name: values(name, tuple(shape)) for name, shape in CASES[case]["tensors"].items() if name not in without
    }
    writing.write_checkpoint(place, CASES[case]["config"] | (config or {}), tensors)
    return place


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return jaxformer.from_pretrained(written("pair_bert_gpt2", tmp_path_factory.mktemp("pair")))


def read(config):
    settings = Settings({"model_type": "encoder-decoder", **config})
    family = family_of(settings)
    return keys.read_model(family, keys.with_defaults(family, settings), "seq2seq")


@pytest.mark.parametrize(
    ("side", "changes", "message"),
    [
        ("encoder", {"is_decoder": True}, "(encoder): got is_decoder True, expected False"),
        ("encoder", {"model_type": "gpt2"}, "'gpt2' as the encoder of a pair, expected one of bert, roberta"),
        ("decoder", {"model_type": "bart"}, "'bart' as the decoder of a pair, expected one of gpt2, bert"),
        ("decoder", {"add_cross_attention": False}, "(decoder): got add_cross_attention False, expected True"),
        ("decoder", {"is_decoder": False}, "(decoder): got is_decoder False, expected True"),
        ("decoder", {"cross_attention_hidden_size": 8}, "cross_attention_hidden_size, expected null"),
        ("decoder", {"output_attentions": True}, "output_attentions True, expected False"),
        ("encoder", {"quantization_config": {"bits": 4}}, "(encoder): got weights in {'bits': 4}"),
    ],
)
def test_keys_of_the_sides_are_refused_in_one_line(side, changes, message):
    config = CASES["pair_bert_gpt2"]["config"]
    with pytest.raises(ConfigError) as error:
        read(config | {side: config[side] | changes})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_keys_of_each_side_change_that_side_alone():
    config = CASES["pair_bert"]["config"]
    before = read(config)
    for key, value in {"hidden_act": "silu", "layer_norm_eps": 0.25, "num_hidden_layers": 3, "vocab_size": 40}.items():
        for side, other in (("encoder", "decoder"), ("decoder", "encoder")):
            after = read(config | {side: config[side] | {key: value}})
            assert getattr(after, side) != getattr(before, side), (side, key)
            assert getattr(after, other) == getattr(before, other), (side, key)


def test_a_decoder_with_cross_attention_is_refused_without_an_encoder():
    for name in ("bert", "gpt2"):
        settings = Settings({"model_type": name, "is_decoder": True, "add_cross_attention": True})
        family = family_of(settings)
        with pytest.raises(ConfigError, match="add_cross_attention True, expected False; this variant"):
            keys.read_model(family, keys.with_defaults(family, settings), "causal_lm")


def test_labels_need_a_start_token_and_vocabularies_stay(tmp_path, pair):
    case = dict(CASES["pair_bert_gpt2"]["config"])
    place = written("pair_bert_gpt2", tmp_path / "in", {"decoder_start_token_id": None})
    with pytest.raises(ConfigError, match="got no decoder_start_token_id in .*config.json, expected it"):
        jaxformer.from_pretrained(place)(input_ids=np.ones((1, 3), int), labels=np.ones((1, 3), int))
    with pytest.raises(ConfigError, match="vocab: got 30 for a pair of two vocabularies"):
        jaxformer.from_pretrained(place, vocab=30)
    assert pair.config.model.encoder.embed.vocab == case["encoder"]["vocab_size"] != case["decoder"]["vocab_size"]


def test_saved_again_byte_for_byte_with_both_configs(tmp_path, pair):
    pair.save_pretrained(tmp_path / "out")
    before = {name: values(name, tuple(shape)) for name, shape in CASES["pair_bert_gpt2"]["tensors"].items()}
    after = reading.open_tensors(tmp_path / "out")
    assert set(before) - set(after) == {"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"}
    assert all((after[name].array() == before[name]).all() for name in after)
    config = reading.read_config(tmp_path / "out")
    for side in ("encoder", "decoder"):
        assert config[side] == CASES["pair_bert_gpt2"]["config"][side]


def test_generation_equals_calls_of_the_whole_text(pair):
    ids, mask = np.asarray([[3, 4, 5, 0], [6, 7, 8, 9]]), np.asarray([[1, 1, 1, 0], [1, 1, 1, 1]])
    found = pair.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, eos_token_id=None)
    logits = pair(input_ids=ids, attention_mask=mask, decoder_input_ids=found[:, :-1]).logits
    np.testing.assert_array_equal(found[:, 1:], np.argmax(logits, axis=-1))
    assert (found[:, 0] == 2).all() and found.shape == (2, 5)


def test_generation_defaults_are_the_decoders_where_the_pair_names_none():
    config = CASES["pair_bert_gpt2"]["config"]
    settings = Settings(config | {"decoder": config["decoder"] | {"eos_token_id": 5, "pad_token_id": 9}})
    found = encoder_decoder.generation_values(settings)
    assert (found["eos_token_id"], found["pad_token_id"], found["decoder_start_token_id"]) == (5, 0, 2)
    roberta = {"model_type": "roberta", "is_decoder": True, "add_cross_attention": True}  # silent: the library's own
    assert encoder_decoder.generation_values(Settings({"decoder": roberta}))["eos_token_id"] == 2


def test_positions_of_a_padded_source_are_those_of_a_call(tmp_path):
    """RoBERTa counts tokens that are not padding, on whichever side that stands."""
    model = jaxformer.from_pretrained(written("pair_roberta", tmp_path / "in"))
    left = {"input_ids": np.asarray([[1, 1, 3, 4]]), "attention_mask": np.asarray([[0, 0, 1, 1]])}
    found = model.generate(**left, max_new_tokens=3, eos_token_id=None)
    logits = model(**left, decoder_input_ids=found[:, :-1]).logits
    np.testing.assert_array_equal(found[:, 1:], np.argmax(logits, axis=-1))
    for padded in ({"decoder_input_ids": np.asarray([[2, 1, 3]])}, {"decoder_start_token_id": 1}):
        with pytest.raises(ConfigError, match=r"got padding \(1\) as decoder_start_token_id or in decoder_input_ids"):
            model.generate(**left, **padded, max_new_tokens=3)


def test_one_set_of_layers_is_read_as_two(tmp_path, caplog):
    names = CASES["pair_roberta"]["tensors"]
    own = [n for n in names if n.startswith("encoder.") and f"decoder.roberta.{n[8:]}" in names]
    place = written("pair_roberta", tmp_path / "in", {"tie_encoder_decoder": True}, without=own)
    model = jaxformer.from_pretrained(place)
    encoder, decoder = (model.params[side]["blocks"]["ffn"]["in"]["kernel"] for side in ("encoder", "decoder"))
    np.testing.assert_array_equal(encoder, decoder)
    assert "both sides start equal here, and are trained and saved apart" in caplog.text
    model.save_pretrained(tmp_path / "out")
    assert reading.read_config(tmp_path / "out")["tie_encoder_decoder"] is False
    assert set(own) - set(reading.open_tensors(tmp_path / "out")) == set()


def sides(place):
    """The two sides of a pair's case as checkpoints of their own: a masked language model and GPT-2."""
    case = CASES["pair_bert_gpt2"]
    tensors = {name: values(name, tuple(shape)) for name, shape in case["tensors"].items()}
    bert = {f"bert.{name[8:]}": x for name, x in tensors.items() if name.startswith("encoder.")}
    bert["cls.predictions.bias"] = np.zeros(24, np.float32)
    gpt2 = {name[8:]: x for name, x in tensors.items() if name.startswith("decoder.") and "cross" not in name}
    config = case["config"]["decoder"] | {"add_cross_attention": False, "architectures": ["GPT2LMHeadModel"]}
    writing.write_checkpoint(place / "encoder", case["config"]["encoder"] | {"architectures": ["BertModel"]}, bert)
    writing.write_checkpoint(
        place / "decoder", config | {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": None}, gpt2
    )
    for side, count in (("encoder", 24), ("decoder", 20)):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"{side[0]}{i}" for i in range(4, count))]
        (place / side / "vocab.txt").write_text("\n".join(words))
    return place / "encoder", place / "decoder"


def test_put_together_of_two_checkpoints(tmp_path, pair, caplog):
    encoder, decoder = sides(tmp_path)
    model = jaxformer.from_encoder_decoder_pretrained(encoder, decoder, seed=3)
    assert "12 parameters start from random values (cross-attention, memory_projection)" in caplog.text
    old, new = (convert.export_tensors(m.hf.family.rows(m.config.model, "seq2seq"), m.params) for m in (pair, model))
    fresh = {name for name in new if not (old[name]() == new[name]()).all()}
    assert fresh == {name for name in new if "cross" in name or name.startswith("enc_to_dec_proj")}
    drawn = new["decoder.transformer.h.0.crossattention.q_attn.weight"]()
    assert 0.01 < drawn.std() < 0.03 and not new["enc_to_dec_proj.bias"]().any()
    assert (new["decoder.transformer.h.0.ln_cross_attn.weight"]() == 1).all()
    stated = {
        name: model.hf.settings(name, None) for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    }
    assert stated == {"decoder_start_token_id": 7, "eos_token_id": 8, "pad_token_id": 0}
    again = jaxformer.from_encoder_decoder_pretrained(encoder, decoder, seed=4)
    kernel = lambda m: m.params["decoder"]["blocks"]["cross"]["query"]["kernel"]  # noqa: E731
    assert (kernel(again) != kernel(model)).any()
    with pytest.raises(ConfigError, match="got 'bert' as the|got 'gpt2' as the encoder of a pair"):
        jaxformer.from_encoder_decoder_pretrained(decoder, decoder)


def test_the_import_command_puts_a_pair_together(tmp_path, capsys):
    encoder, decoder = sides(tmp_path)
    flags = ["import", f"--source={encoder}", f"--decoder={decoder}", f"--workdir={tmp_path / 'run'}"]
    assert main(flags) == 0 and "EncoderDecoderModel" in capsys.readouterr().out
    model = workdirs.load(tmp_path / "run")
    assert model.hf.settings("decoder_start_token_id", None) == 7 and model.config.task.name == "translation"
    model.save_pretrained(tmp_path / "out")
    assert reading.read_config(tmp_path / "out")["decoder"]["model_type"] == "gpt2"
    again = jaxformer.from_pretrained(tmp_path / "out").tokenizers
    assert again.source.encode("e4 d4") == [4, 1] and again.target.encode("e4 d4") == [1, 4]
    (text,) = model.translate(["e4 e9"], max_length=3)
    features = model.hf.predictor(model, model.config).framing.prompt("e4 e9")
    assert set(text.split()) <= {f"d{i}" for i in range(4, 20)} | {"[UNK]"}
    assert features["source"].tolist() == [2, 4, 9, 3] and features["target"].tolist() == [7]
    with pytest.raises(ConfigError, match="--base: got 'x' beside --decoder, expected none"):
        workdirs.import_checkpoint(encoder, tmp_path / "other", base="x", decoder=decoder)
    assert not (tmp_path / "other").exists()


def test_a_model_trained_here_is_written_as_the_pair_that_computes_the_same(tmp_path, pair):
    """Without an origin, as after training from a recipe: both families follow from the model."""
    trained = dataclasses.replace(pair, hf=HuggingFace("seq2seq"))
    trained.save_pretrained(tmp_path / "out")
    config = reading.read_config(tmp_path / "out")
    assert [config[side]["model_type"] for side in ("encoder", "decoder")] == ["bert", "gpt2"]
    again = jaxformer.from_pretrained(tmp_path / "out")
    assert again.config.model == pair.config.model
    jax.tree.map(np.testing.assert_array_equal, again.params, pair.params)


def test_sharded_over_devices_a_pair_computes_the_same(tmp_path, pair):
    mesh = meshes.make(MeshConfig(data=1, fsdp=4, tensor=2))
    sharded = jaxformer.from_pretrained(written("pair_bert_gpt2", tmp_path / "in"), mesh=mesh)
    kernel = sharded.params["memory_projection"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    jax.tree.map(np.testing.assert_array_equal, sharded.params, pair.params)
    inputs = {"input_ids": np.asarray([[3, 4, 5]]), "decoder_input_ids": np.asarray([[2, 6]])}
    np.testing.assert_allclose(sharded(**inputs).logits, pair(**inputs).logits, atol=2e-6)


def test_the_old_class_puts_two_checkpoints_together(tmp_path, caplog):
    encoder, decoder = sides(tmp_path)
    make = flax.FlaxEncoderDecoderModel.from_encoder_decoder_pretrained
    model = make(encoder, decoder, decoder_start_token_id=7, pad_token_id=0)
    assert "random leaves" in caplog.text
    tree = model.params
    old = {path: values(name, tuple(CASES["pair_bert_gpt2"]["tensors"][name])) for path, name in {
        ("encoder", "embeddings", "word_embeddings", "embedding"): "encoder.embeddings.word_embeddings.weight",
        ("decoder", "transformer", "h", "0", "attn", "c_attn", "kernel"): "decoder.transformer.h.0.attn.c_attn.weight",
    }.items()}  # fmt: skip
    for path, value in old.items():
        leaf = functools.reduce(dict.__getitem__, path, tree)
        np.testing.assert_array_equal(leaf, value.T if path[-1] == "kernel" else value)
    assert {"encoder", "decoder", "enc_to_dec_proj"} == set(tree) and "pooler" in tree["encoder"]
    assert tree["decoder"]["transformer"]["h"]["0"]["crossattention"]["c_attn"]["kernel"].shape == (12, 6)
    assert (model.config.decoder_start_token_id, model.config.decoder["add_cross_attention"]) == (7, True)
    model.save_pretrained(tmp_path / "out")
    again = flax.FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(again) is flax.FlaxEncoderDecoderModel
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    with pytest.raises(ConfigError, match="got no decoder_input_ids, expected them; a pair makes none of its own"):
        again(np.ones((1, 3), int))
    sides_given = {
        "encoder_model": flax.FlaxBertModel.from_pretrained(encoder),
        "decoder_config": flax.AutoConfig.from_pretrained(decoder, resid_pdrop=0.3),
    }
    own = make(None, decoder, decoder_from_pt=True, decoder_start_token_id=7, pad_token_id=0, seed=0, **sides_given)
    jax.tree.map(np.testing.assert_array_equal, own.params, tree)
    assert own.config.decoder["resid_pdrop"] == 0.3 and own.spec.config.decoder != model.spec.config.decoder
    with pytest.raises(ConfigError, match="got both or none of a path and encoder_model"):
        make(encoder, decoder, **sides_given)
    with pytest.raises(ConfigError, match="got 'bert' as the decoder|got 'gpt2' as the encoder of a pair"):
        make(decoder, encoder)
    writing.write_checkpoint(tmp_path / "deberta", {"model_type": "deberta"}, {"a": np.zeros(1, np.float32)})
    with pytest.raises(ConfigError, match="got deberta as the encoder, which had no Flax class"):
        make(tmp_path / "deberta", decoder)


def test_padding_of_an_input_made_of_labels_is_hidden(pair):
    given = {"input_ids": np.asarray([[3, 4]]), "labels": np.asarray([[3, -100, 5, 6]])}
    model = pair.config.model
    batch = arguments.make_batch(pair.hf.convention, pair.hf.settings, model, "seq2seq", given)
    assert batch.target.tokens.tolist() == [[2, 3, 0, 5]] and (batch.target.slots.segment > 0).tolist() == [
        [True, True, False, True]
    ]
    shown = given | {"decoder_attention_mask": np.ones((1, 4), int)}
    batch = arguments.make_batch(pair.hf.convention, pair.hf.settings, model, "seq2seq", shown)
    assert (batch.target.slots.segment > 0).all()


def test_each_side_counts_positions_as_its_family_does():
    settings = Settings(CASES["pair_prelayernorm_untied"]["config"])  # DistilBERT counts slots, the decoder tokens
    family = family_of(settings)
    settings = keys.with_defaults(family, settings)
    ids, mask = np.asarray([[1, 1, 3, 4]]), np.asarray([[0, 0, 1, 1]])
    given = {"input_ids": ids, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    model = keys.read_model(family, settings, "seq2seq")
    batch = arguments.make_batch(family.convention, settings, model, "seq2seq", given)
    assert batch.source.slots.position.tolist() == [[0, 1, 2, 3]]
    assert batch.target.slots.position.tolist() == [[-1, -1, 0, 1]]
    with pytest.raises(ConfigError, match=r"got padding \(1\) that the attention_mask does not hide"):
        arguments.make_batch(
            family.convention, settings, model, "seq2seq", {**given, "decoder_attention_mask": mask + 1}
        )
