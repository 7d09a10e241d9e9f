"""The Flax classes as scripts use them: parameters in the old layout, calls, caches, generation, files, refusals."""

import functools
import itertools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization, traverse_util
from flax.core import freeze
from safetensors.numpy import save_file

from jaxformer.errors import ConfigError
from jaxformer.hf import flax
from jaxformer.hf.flax import generation, layout, search
from jaxformer.hf.flax.spec import converted

BERT = {
    "model_type": "bert", "vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16, "hidden_dropout_prob": 0.2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 31, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 24,
        "eos_token_id": 30, "bos_token_id": 30, "initializer_range": 0.5}  # fmt: skip
T5 = {
    "model_type": "t5", "vocab_size": 31, "d_model": 8, "d_kv": 3, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 2,
    "num_heads": 2, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1, "initializer_factor": 2.0,
}  # fmt: skip
BIG_BIRD = {**BERT, "model_type": "big_bird", "block_size": 2}
IDS = np.array([[5, 7, 9, 11], [6, 8, 0, 0]], np.int32)
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32)
LEFT = np.array([[5, 7, 9, 11], [0, 0, 6, 8]], np.int32)
LEFT_MASK = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], np.int32)


@pytest.fixture(scope="module")
def bert():
    return flax.FlaxBertForSequenceClassification(flax.PretrainedConfig(**BERT, num_labels=3), seed=1)


@pytest.fixture(scope="module")
def gpt2():
    return flax.FlaxGPT2LMHeadModel(GPT2, seed=2)


@pytest.fixture(scope="module")
def t5():
    return flax.FlaxT5ForConditionalGeneration(T5, seed=3)


def close(got, expected, rtol=1e-5):
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_allclose(got, expected, atol=rtol * np.abs(expected).max())


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


# --- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_have_the_old_names_and_shapes(bert, gpt2, t5):
    query = bert.params["bert"]["encoder"]["layer"]["1"]["attention"]["self"]["query"]
    assert query["kernel"].shape == (8, 8) and query["bias"].shape == (8,)
    assert bert.params["classifier"]["kernel"].shape == (8, 3)
    assert bert.params["bert"]["embeddings"]["LayerNorm"]["scale"].shape == (8,)
    assert gpt2.params["transformer"]["h"]["0"]["attn"]["c_attn"]["kernel"].shape == (24, 8)  # as the old Conv1D
    assert flat(t5.params)["decoder/block/1/layer/1/EncDecAttention/k/kernel"].shape == (8, 6)
    assert flat(t5.params)["encoder/final_layer_norm/weight"].shape == (8,)
    assert bert.required_params == set(traverse_util.flatten_dict(bert.params))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_the_layout_is_read_in_both_directions(name, request):
    model = request.getfixturevalue(name)
    again = layout.from_params(model.spec.table, converted(model.spec, model.params))
    assert set(flat(again)) == set(flat(model.params))
    for path, value in flat(model.params).items():
        np.testing.assert_array_equal(flat(again)[path], value, err_msg=path)


def test_projections_of_embeddings_are_kernels():
    opt = {"model_type": "opt", "vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
           "ffn_dim": 12, "max_position_embeddings": 16, "word_embed_proj_dim": 6}  # fmt: skip
    leaves = {"/".join(path): leaf.shape for path, leaf in flax.FlaxOPTModel(opt, _do_init=False).spec.leaves.items()}
    assert leaves["decoder/project_in/kernel"] == (6, 8) and leaves["decoder/project_out/kernel"] == (8, 6)
    assert leaves["decoder/embed_tokens/embedding"] == (31, 6)


def test_new_parameters_are_checked_and_used(bert):
    old = bert.params
    changed = jax.tree.map(lambda x: 1.5 * x, old)
    try:
        before = bert(IDS, MASK).logits
        bert.params = changed
        after = bert(IDS, MASK).logits
        assert np.abs(after - before).max() > 1e-3
        close(bert(IDS, MASK, params=old).logits, before)
        with pytest.raises(ValueError, match="got none of classifier/kernel"):
            bert.params = {**old, "classifier": {"bias": old["classifier"]["bias"]}}
    finally:
        bert.params = old


def test_initial_parameters_follow_the_old_rules(gpt2, t5):
    leaves = flat(gpt2.params)
    assert (leaves["transformer/ln_f/scale"] == 1).all() and (leaves["transformer/ln_f/bias"] == 0).all()
    assert 0.3 < float(jnp.std(leaves["transformer/wte/embedding"])) < 0.7
    assert float(jnp.std(flat(t5.params)["shared/embedding"])) == pytest.approx(2.0, rel=0.3)
    kernel = flat(t5.params)["encoder/block/0/layer/1/DenseReluDense/wo/kernel"]
    assert float(jnp.std(kernel)) == pytest.approx(2.0 * 12**-0.5, rel=0.4)


def test_a_model_without_parameters(tmp_path, bert):
    model = flax.FlaxBertForSequenceClassification(BERT, _do_init=False)
    with pytest.raises(ValueError, match="_do_init=False"):
        _ = model.params
    partial = {"classifier": {"bias": jnp.full(2, 7.0)}}
    params = model.init_weights(jax.random.PRNGKey(0), (1, 1), partial)
    assert (params["classifier"]["bias"] == 7.0).all()
    assert set(traverse_util.flatten_dict(params)) == model.required_params
    assert flat(model.to_bf16(params))["classifier/kernel"].dtype == jnp.bfloat16
    mask = jax.tree.map(lambda x: x.ndim > 1, params)
    for given, wanted in ((params, freeze(mask)), (freeze(params), mask)):  # the two kinds of tree, mixed
        cast = model.to_bf16(given, wanted)
        assert cast["classifier"]["kernel"].dtype == jnp.bfloat16
        assert cast["classifier"]["bias"].dtype == jnp.float32
    renamed = {("head" if name == "classifier" else name): tree for name, tree in mask.items()}  # as many leaves
    with pytest.raises(ValueError, match="expected one bool for each parameter; .* 'classifier/bias'"):
        model.to_bf16(params, renamed)
    mask = jax.tree.map(lambda x: x.ndim == 1, params)
    assert flat(model.to_fp16(params, mask))["classifier/kernel"].dtype == jnp.float32
    close(model(IDS, MASK, params=model.to_bf16(params)).logits, model(IDS, MASK, params=params).logits, 0.1)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_outputs_by_name_key_and_index(bert):
    out = bert(IDS, MASK, output_hidden_states=True, output_attentions=True)
    assert type(out).__name__ == "FlaxSequenceClassifierOutput"
    assert list(out) == ["logits", "hidden_states", "attentions"]
    assert out[0] is out.logits and out["logits"] is out.logits and out[1] is out.hidden_states
    assert len(out.hidden_states) == 3 and out.attentions[0].shape == (2, 2, 4, 4)
    as_tuple = bert(IDS, MASK, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == 1
    np.testing.assert_array_equal(as_tuple[0], bert(IDS, MASK)[0])
    assert bert(IDS, MASK).hidden_states is None
    assert jax.tree.map(jnp.shape, out)["logits"] == (2, 3)


def test_the_module_computes_the_same(bert, gpt2):
    variables = {"params": bert.params}
    kinds, positions = np.zeros_like(IDS), np.arange(4)[None]
    out = bert.module.apply(variables, IDS, MASK, kinds, positions, np.ones((2, 2)), deterministic=True)
    np.testing.assert_array_equal(out.logits, bert(IDS, MASK).logits)
    dropped = bert.module.apply(variables, IDS, MASK, kinds, positions, None, deterministic=False,
                                rngs={"dropout": jax.random.PRNGKey(0)})  # fmt: skip
    again = bert(IDS, MASK, dropout_rng=jax.random.PRNGKey(0), train=True)
    np.testing.assert_array_equal(dropped.logits, again.logits)
    with pytest.raises(ConfigError, match="method"):
        gpt2.module.apply(variables, IDS, method="encode")


def test_a_head_mask_hides_what_heads_read(bert):
    mask = np.array([[1, 0], [1, 1]], np.int32)
    # the second head of the first layer, without values: 8 columns are 2 heads
    params = jax.tree.map(lambda x: 20 * np.array(x), bert.params)
    call = functools.partial(bert, IDS, MASK, output_attentions=True)
    got, whole = call(params=params, head_mask=mask), call(params=params)
    half = bert.module.apply({"params": params}, IDS, MASK, head_mask=mask + 0.5, output_attentions=True)
    # the classes took whole numbers, their modules any
    np.testing.assert_array_equal(call(params=params, head_mask=mask + 0.5).logits, got.logits)
    np.testing.assert_allclose(half.attentions[0], whole.attentions[0] * np.array([[[1.5]], [[0.5]]]), rtol=1e-5)
    value = params["bert"]["encoder"]["layer"]["0"]["attention"]["self"]["value"]
    value["kernel"][:, 4:], value["bias"][4:] = 0, 0
    close(got.logits, call(params=params).logits)
    assert np.abs(got.logits - whole.logits).max() > 1e-3
    assert not np.any(got.attentions[0][:, 1]) and np.all(np.sum(got.attentions[1], -1) > 0.99)


def test_dropout_needs_train_and_a_key(bert):
    plain, key = bert(IDS, MASK).logits, jax.random.PRNGKey(3)
    np.testing.assert_array_equal(bert(IDS, MASK, dropout_rng=key).logits, plain)
    dropped = bert(IDS, MASK, dropout_rng=key, train=True).logits
    assert np.abs(dropped - plain).max() > 1e-4
    with pytest.raises(ConfigError, match="train=True without dropout_rng"):
        bert(IDS, MASK, train=True)


def test_gradients_have_the_old_layout_and_are_right(bert):
    def loss(params):
        return jnp.sum(jnp.square(bert(IDS, MASK, params=params)[0]))

    grads = jax.jit(jax.grad(loss))(bert.params)
    assert jax.tree.structure(grads) == jax.tree.structure(bert.params)
    path = ("bert", "encoder", "layer", "1", "output", "dense", "kernel")
    flat_params = traverse_util.flatten_dict(bert.params)
    step = jnp.zeros((12, 8)).at[3, 5].set(1e-2)
    values = [loss(traverse_util.unflatten_dict({**flat_params, path: flat_params[path] + s * step})) for s in (1, -1)]
    numeric = (values[0] - values[1]) / 2e-2
    assert float(traverse_util.flatten_dict(grads)[path][3, 5]) == pytest.approx(float(numeric), rel=2e-2)


def test_a_cache_gives_what_the_whole_call_gives(gpt2):
    whole = gpt2(LEFT, LEFT_MASK, position_ids=np.maximum(np.cumsum(LEFT_MASK, 1) - 1, 0), output_hidden_states=True)
    inputs = gpt2.prepare_inputs_for_generation(LEFT[:, :2], 6, attention_mask=LEFT_MASK[:, :2])
    inputs["attention_mask"] = inputs["attention_mask"].at[:, 2:4].set(LEFT_MASK[:, 2:])
    out = gpt2(LEFT[:, :2], **inputs, output_hidden_states=True)
    for i in (2, 3):
        inputs = gpt2.update_inputs_for_generation(out, inputs)
        inputs["position_ids"] = (np.cumsum(LEFT_MASK, 1) - 1)[:, i : i + 1]
        out = gpt2(LEFT[:, i : i + 1], **inputs, output_hidden_states=True, output_attentions=True)
        close(out.logits[:, 0], whole.logits[:, i])
        close(out.hidden_states[1][:, 0], whole.hidden_states[1][:, i])
    assert out.attentions[0].shape == (2, 2, 1, 6)
    with pytest.raises(ConfigError, match="expected one of all 6 slots"):
        gpt2(LEFT[:, :1], past_key_values=gpt2.init_cache(2, 6), attention_mask=LEFT_MASK)


def test_positions_that_do_not_rise_are_refused(gpt2):
    twice, text = np.array([[0, 1, 1, 2]]), "got position_ids [0, 1, 1, 2] in row 0, expected positions that increase"
    with pytest.raises(ConfigError) as error:  # a token would see the next one of its position
        gpt2(IDS, position_ids=twice)
    assert text in str(error.value)
    assert np.isfinite(gpt2(IDS, [[1, 0, 1, 1]] * 2, position_ids=twice).logits).all()  # one of them is hidden
    step = jax.jit(lambda at, cache: gpt2(IDS[:, 2:3], position_ids=at, past_key_values=cache).logits)
    cache = gpt2(IDS[:, :2], position_ids=twice[:, :2], past_key_values=gpt2.init_cache(2, 4)).past_key_values
    assert np.isnan(step(twice[:, 2:3], cache)).all() and np.isfinite(step(twice[:, 3:], cache)).all()
    with pytest.raises(ConfigError, match="expected positions that increase"):
        gpt2(IDS[:, 2:3], position_ids=twice[:, 2:3], past_key_values=cache)
    model = flax.FlaxBartModel({"model_type": "bart", "d_model": 16}, _do_init=False)
    given = {"decoder_input_ids": IDS, "decoder_position_ids": twice}
    with pytest.raises(ConfigError, match="expected positions that increase"):
        model(IDS, **given, params={})
    with pytest.raises(ConfigError, match="expected positions that increase"):
        model._decode_all({}, IDS, {"position_ids": twice}, None, None)
    mistral = {"model_type": "mistral", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 31}
    with pytest.raises(ConfigError, match="expected positions that grow by 1"):
        flax.FlaxMistralModel(mistral, _do_init=False)(IDS, position_ids=[[0, 1, 2, 4]], params={})


def test_the_two_sides_of_an_encoder_decoder(t5):
    target, target_mask = IDS[::-1], MASK[::-1]
    whole = t5(IDS, MASK, target, target_mask)
    encoded = t5.encode(IDS, MASK, output_hidden_states=True)
    close(encoded.last_hidden_state[0], whole.encoder_last_hidden_state[0])
    assert len(encoded.hidden_states) == 2
    decoded = t5.decode(target, encoded, encoder_attention_mask=MASK, decoder_attention_mask=target_mask)
    close(decoded.logits[1], whole.logits[1])
    cache, logits = t5.init_cache(2, 4, encoded), []
    for i in range(4):
        out = t5.decode(target[:, i : i + 1], encoded, encoder_attention_mask=MASK, past_key_values=cache,
                        decoder_attention_mask=target_mask)  # fmt: skip
        cache, logits = out.past_key_values, [*logits, out.logits[:, 0]]
    close(jnp.stack(logits, 1)[1], whole.logits[1])
    with pytest.raises(ConfigError, match="no decoder_input_ids"):
        t5(IDS, MASK)


# --- generation -------------------------------------------------------------------------------------------------------

SEARCH = {"attention_mask": LEFT_MASK, "max_length": 9, "eos_token_id": None, "pad_token_id": 0}


def test_greedy_search_is_the_likeliest_token_of_calls(gpt2):
    found = np.asarray(gpt2.generate(LEFT, **SEARCH).sequences)
    assert found.shape == (2, 9)
    alone = found[1:, 2:]  # without its padding
    np.testing.assert_array_equal(np.argmax(gpt2(alone).logits[0, 1:-1], -1), alone[0, 2:])
    first = int(found[0, 4])
    ended = np.asarray(gpt2.generate(LEFT, **SEARCH | {"eos_token_id": first, "pad_token_id": 3}).sequences)
    assert (ended[0, 5:] == 3).all() and ended[0, 4] == first


@pytest.mark.parametrize("compiled", [True, False])
def test_a_loop_in_python_is_the_same_loop(gpt2, compiled):
    plan = search.Plan(gpt2.spec, max_length=5, pad=0, ends=(), compiled=compiled)
    seen = []

    def body(state):
        seen.append(state)
        return state + 2

    assert int(search._loop(plan, lambda x: x < 7, body, jnp.asarray(1))) == 7
    assert len(seen) == (1 if compiled else 3)


def test_wide_beams_find_the_best_sequence(t5):
    """Of two new tokens, over all pairs; none of which ends before (min_length)."""
    out = t5.generate(IDS[:1], attention_mask=MASK[:1], max_length=3, num_beams=31, min_length=3,
                      num_return_sequences=2)  # fmt: skip
    encoded = t5.encode(IDS[:1], MASK[:1])
    targets = np.stack([np.zeros(31, np.int32), np.arange(31, dtype=np.int32)], 1)
    states = np.repeat(encoded.last_hidden_state, 31, 0)
    logits = np.array(t5.decode(targets, (states,), np.ones((31, 4))).logits)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    first, second = logits[0, 0], logits[:, 1]
    first[1] = second[:, 1] = -np.inf
    best = np.unravel_index(np.argmax(first[:, None] + second), (31, 31))
    assert tuple(np.asarray(out.sequences)[0, 1:]) == best
    in_order = np.sort((first[:, None] + second).reshape(-1))[::-1]
    close(out.scores, in_order[:2])  # none has ended, so no penalty divides them


def test_processors_bind_the_search(gpt2):
    plain = np.asarray(gpt2.generate(LEFT, **SEARCH).sequences)[0]

    def only_a_few(sequences, scores, length):
        return jnp.where((jnp.arange(31) < 10) | (jnp.arange(31) == 17), scores, -jnp.inf)

    banned = int(plain[4])
    options = {**SEARCH, "suppress_tokens": [banned], "no_repeat_ngram_size": 2, "forced_eos_token_id": 17}
    found = np.asarray(gpt2.generate(LEFT, **options, logits_processor=[only_a_few]).sequences)
    assert banned not in found[:, 4:] and (found[:, 4:-1] < 10).all() and (found[:, -1] == 17).all()
    for row in found:
        pairs = list(itertools.pairwise(row[:-1]))
        new = pairs[3:]
        assert len(set(new)) == len(new) and not set(new) & set(pairs[:3])
    with pytest.raises(ConfigError, match="an option that makes one"):
        gpt2.generate(LEFT, **options, logits_processor=[flax.FlaxNoRepeatNGramLogitsProcessor(3)])


def test_processors_alone():
    """Outputs begin and end as the old library's; the lengths are those of the old library, off by one or not."""
    scores = jnp.zeros((1, 4))
    kept = lambda processor, length: np.isfinite(processor(None, scores, length))[0].tolist()  # noqa: E731
    every, no_end, only_two = [True] * 4, [True, False, True, True], [False, False, True, False]
    shortest = flax.FlaxMinLengthLogitsProcessor(3, 1)
    assert [kept(shortest, n) for n in (2, 3, 4)] == [no_end, no_end, every]
    assert [kept(flax.FlaxForcedBOSTokenLogitsProcessor(2), n) for n in (1, 2)] == [only_two, every]
    assert [kept(flax.FlaxForcedEOSTokenLogitsProcessor(5, 2), n) for n in (3, 4)] == [every, only_two]
    assert [kept(flax.FlaxSuppressTokensAtBeginLogitsProcessor([1], 2), n) for n in (1, 2)] == [every, no_end]
    forced = flax.FlaxForceTokensLogitsProcessor([(1, 2), (3, None)])
    assert [kept(forced, n) for n in range(5)] == [every, only_two, every, every, every]


def test_sampling_follows_its_key_and_its_limits(gpt2):
    draw = lambda seed, **more: np.asarray(  # noqa: E731
        gpt2.generate(LEFT, prng_key=jax.random.PRNGKey(seed), do_sample=True, **SEARCH, **more).sequences
    )
    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()
    np.testing.assert_array_equal(draw(0, top_k=1), np.asarray(gpt2.generate(LEFT, **SEARCH).sequences))


def test_warpers_keep_what_they_say():
    scores = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    kept = lambda warper: np.isfinite(warper(None, scores, 0))[0].tolist()  # noqa: E731
    assert kept(flax.FlaxTopKLogitsWarper(2)) == [False, True, False, True]
    assert kept(flax.FlaxTopPLogitsWarper(0.7)) == [False, True, False, True]
    assert kept(flax.FlaxTopPLogitsWarper(0.8)) == [False, True, True, True]
    close(flax.FlaxTemperatureLogitsWarper(2.0)(None, scores, 0), scores / 2)
    assert flax.FlaxTopKLogitsWarper(2) == flax.FlaxTopKLogitsWarper(2) != flax.FlaxTopKLogitsWarper(3)


def test_lengths_follow_the_old_rules(gpt2, caplog):
    def length(**options):
        config = flax.GenerationConfig(**options)
        generation.set_length(gpt2, config, options, 4)
        return config.max_length

    assert length(max_new_tokens=3) == 7
    assert length(max_length=6) == 6
    assert length(max_length=20) == 24  # the default as an argument counts new tokens, up to the positions
    with caplog.at_level(logging.WARNING):
        assert length() == 20
    assert "the default; set max_length" in caplog.text
    with pytest.raises(ConfigError, match="at most 25"):
        length(max_length=26)


def test_options_of_a_config_that_nothing_reads_are_named(gpt2, caplog):
    options = {"repetition_penalty": 1.3, "typical_p": 1.0, "use_cache": False, "max_length": 2}
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="expected"):
        gpt2.generate(IDS, generation_config=options)  # too short for its prompt: nothing is compiled
    assert "the generation config has repetition_penalty, which the old Flax classes never read" in caplog.text


def test_options_set_in_a_config_after_loading_count(tmp_path, caplog):
    model = flax.FlaxT5ForConditionalGeneration(T5)
    model.config.num_beams, model.config.max_length = 2, 5
    with caplog.at_level(logging.WARNING):
        found = generation._read_options(model, None, {})[0]
    assert (found.num_beams, found.max_length) == (2, 5) and "generation_config is the place" in caplog.text
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["_from_model_config"] is True
    again = flax.FlaxT5ForConditionalGeneration.from_pretrained(tmp_path, num_beams=3)
    assert generation._read_options(again, None, {})[0].num_beams == 3
    again.generation_config.max_length = 7  # from here on the config says nothing
    again.config.num_beams = 4
    found = generation._read_options(again, None, {})[0]
    assert (found.num_beams, found.max_length) == (3, 7)
    again.save_pretrained(tmp_path)
    assert "_from_model_config" not in json.loads((tmp_path / "generation_config.json").read_text())


def test_generation_configs_of_either_version(gpt2, tmp_path):
    class Theirs:
        def __init__(self, **values):
            self.to_dict = lambda: values

    unset = {name: None for name in generation.DEFAULTS}
    for version, top_k in (("5.0.0", 50), ("4.55.4", None)):
        given = Theirs(**{**unset, "num_beams": 3, "_from_model_config": None, "transformers_version": version})
        found = generation._read_options(gpt2, given, {})[0]
        assert (found.num_beams, found.max_length, found.length_penalty, found.top_k) == (3, 20, 1.0, top_k)
    found.save_pretrained(tmp_path)
    again = flax.GenerationConfig.from_pretrained(tmp_path, max_length=9)
    assert (again.num_beams, again.max_length, again.top_k) == (3, 9, None)


def test_a_pair_generates_with_what_its_decoder_says():
    sides = {"encoder": BERT, "decoder": {**GPT2, "add_cross_attention": True, "forced_eos_token_id": 9}}
    config = flax.EncoderDecoderConfig(**sides, eos_token_id=7)
    found = flax.FlaxEncoderDecoderModel(config, _do_init=False).generation_config
    assert (found.eos_token_id, found.bos_token_id, found.forced_eos_token_id) == (7, 30, 9)


# --- files ------------------------------------------------------------------------------------------------------------


def test_arguments_of_downloads_are_named_where_they_ask_for_something(gpt2, tmp_path, caplog):
    gpt2.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path, revision="main", token=None, cache_dir="", _from_auto=True)
        assert "change nothing" not in caplog.text
        flax.FlaxAutoModelForCausalLM.from_pretrained(tmp_path, revision="v2", use_safetensors=True)
    assert "got revision, use_safetensors, which change nothing: a local directory is read" in caplog.text


def test_saved_directories_load_again(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path / "one")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "config.json", "flax_model.msgpack", "generation_config.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "one" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    tree = serialization.msgpack_restore((tmp_path / "one" / "flax_model.msgpack").read_bytes())
    assert set(flat(tree)) == set(flat(gpt2.params))
    gpt2.save_pretrained(tmp_path / "many", max_shard_size="2KB")
    assert len(list((tmp_path / "many").glob("flax_model-*.msgpack"))) > 1
    for name in ("one", "many"):
        again = flax.FlaxAutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(again) is flax.FlaxGPT2LMHeadModel and again.generation_config.eos_token_id == 30
        np.testing.assert_array_equal(again(IDS).logits, gpt2(IDS).logits)
    model, params = flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path / "one", _do_init=False)
    np.testing.assert_array_equal(model(IDS, params=params).logits, gpt2(IDS).logits)


def test_safetensors_and_arguments_of_an_upload_that_is_not_asked_for(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path, push_to_hub=False, commit_message="step 3", use_auth_token=True)
    params = gpt2.to_bf16(gpt2.params)
    gpt2.save_pretrained(tmp_path, params=params, safe_serialization=True)
    assert not list(tmp_path.glob("*.msgpack"))  # which would be read first
    again = flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    again.config.save_pretrained(tmp_path / "new")
    assert flax.GPT2Config.from_pretrained(tmp_path / "new").to_dict() == again.config.to_dict()


def test_a_body_and_a_head_load_each_other(bert, tmp_path, caplog):
    bert.save_pretrained(tmp_path / "headed")
    with caplog.at_level(logging.WARNING):
        body = flax.FlaxAutoModel.from_pretrained(tmp_path / "headed")
    assert "left out classifier/bias, classifier/kernel" in caplog.text
    np.testing.assert_array_equal(
        body.params["pooler"]["dense"]["kernel"], bert.params["bert"]["pooler"]["dense"]["kernel"]
    )
    body.save_pretrained(tmp_path / "body")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        tagger = flax.FlaxAutoModelForTokenClassification.from_pretrained(tmp_path / "body", num_labels=5)
    assert "got no classifier/bias, classifier/kernel" in caplog.text and "left out" in caplog.text
    assert tagger(IDS, MASK).logits.shape == (2, 4, 5)
    with pytest.raises(ConfigError, match=r"classifier/bias \[3\].*expected \[2\]"):
        flax.FlaxBertForSequenceClassification.from_pretrained(tmp_path / "headed", num_labels=2)
    resized = flax.FlaxBertForSequenceClassification.from_pretrained(
        tmp_path / "headed", num_labels=2, ignore_mismatched_sizes=True
    )
    assert resized.params["classifier"]["kernel"].shape == (8, 2)


def torch_tensors(model):
    """The tensors as torch's classes name them, from the old tree: the table the other way round."""
    tensors = {}
    for entry in model.spec.table:
        for index in np.ndindex(entry.count):
            value = np.asarray(traverse_util.flatten_dict(model.params)[entry.leaf(index)])
            tensors[entry.row.name(index)] = np.ascontiguousarray(value.T if entry.transposed else value)
    return tensors


def test_safetensors_of_the_newer_library_load(bert, gpt2, tmp_path):
    for name, model in (("bert", bert), ("gpt2", gpt2)):
        directory = tmp_path / name
        model.save_pretrained(directory)
        (directory / "flax_model.msgpack").unlink()
        tensors = torch_tensors(model)
        assert tensors.get("transformer.h.0.attn.c_attn.weight", np.zeros((8, 24))).shape == (8, 24)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        again = type(model).from_pretrained(directory)
        np.testing.assert_array_equal(again(IDS).logits, model(IDS).logits)
    gpt2.save_pretrained(tmp_path / "gpt2", params=jax.tree.map(jnp.zeros_like, gpt2.params))
    from_pt = flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path / "gpt2", from_pt=True)
    np.testing.assert_array_equal(from_pt(IDS).logits, gpt2(IDS).logits)


def test_flax_safetensors_and_damaged_files(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    path = tmp_path / "flax_model.msgpack"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(ConfigError, match="flax_model.msgpack: got .*expected a tree of arrays"):
        flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="got none of flax_model.msgpack"):
        flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    named = {path.replace("/", "."): np.asarray(x) for path, x in flat(gpt2.params).items()}
    save_file(named, tmp_path / "model.safetensors", {"format": "flax"})
    again = flax.FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again(IDS).logits, gpt2(IDS).logits)


# --- configs and refusals ---------------------------------------------------------------------------------------------


class ForeignConfig:
    """A config object of the other library, as far as it is read."""

    model_type = "gpt2"

    def __init__(self, **values):
        self.__dict__.update(values)

    def to_dict(self):
        return dict(self.__dict__)


def test_configs_of_all_kinds(gpt2, tmp_path):
    foreign = ForeignConfig(**{k: v for k, v in GPT2.items() if k != "model_type"})
    model = flax.FlaxAutoModelForCausalLM.from_config(foreign, seed=2)
    assert model.config is foreign
    np.testing.assert_array_equal(model(IDS).logits, gpt2(IDS).logits)
    config = flax.AutoConfig.for_model("gpt2", hidden_size=8, n_head=2, n_layer=1)
    assert config.n_embd == config.hidden_size == 8 and config.vocab_size == 50257 and config.num_labels == 2
    config.num_labels = 4
    assert config.id2label[3] == "LABEL_3" and config.to_dict()["n_embd"] == 8
    with pytest.raises(AttributeError, match="expected a key of model_type gpt2"):
        _ = config.hidden_sizes


def test_the_old_rules_of_families_that_changed(caplog):
    llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
             "intermediate_size": 12, "vocab_size": 31, "rope_theta": 5e5, "tie_word_embeddings": True}  # fmt: skip
    with caplog.at_level(logging.WARNING):
        model = flax.FlaxLlamaForCausalLM(llama, _do_init=False).spec.config
    assert model.decoder.encoding.base == 10000.0 and not model.head.tied
    assert "which the old class of llama did not read" in caplog.text
    mistral = {**llama, "model_type": "mistral", "tie_word_embeddings": False}
    windows = {None: 1, 5: 6}
    for given, expected in windows.items():
        spec = flax.FlaxMistralModel({**mistral, "sliding_window": given}, _do_init=False).spec
        assert spec.config.decoder.attention.window == expected
    gemma = {**mistral, "model_type": "gemma", "head_dim": 4, "hidden_act": "relu"}
    assert flax.FlaxGemmaModel(gemma, _do_init=False).spec.config.decoder.ffn.activation == "gelu_tanh"
    tied = flax.FlaxMT5ForConditionalGeneration(
        {**T5, "model_type": "mt5", "tie_word_embeddings": True}, _do_init=False
    )
    assert tied.spec.config.head.scale
    encoder = {key: llama[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")}
    electra = {**encoder, "model_type": "electra", "summary_type": "mean", "position_embedding_type": "relative_key"}
    for edits in (electra, {**encoder, "model_type": "electra"}):
        found = flax.FlaxElectraForMultipleChoice(edits, _do_init=False).spec.config
        assert (found.head.pooling, found.encoder.encoding.kind) == ("first", "learned")


def test_refusals_say_what_to_do(bert, gpt2, t5, tmp_path):
    refused = [
        (lambda: bert(IDS, MASK, heads=3), "expected some of input_ids"),
        (lambda: bert(IDS, MASK, head_mask=np.zeros(2)), "got a head_mask [2], expected [layers, heads], [2, 2]"),
        (
            lambda: flax.FlaxDistilBertModel({"model_type": "distilbert"}, _do_init=False)(
                IDS, head_mask=np.ones((6, 12)), params={}
            ),
            "the old class of distilbert did not read it",
        ),
        (lambda: flax.BertConfig(model_type="gpt2"), "got model_type 'gpt2', expected 'bert'"),
        (lambda: gpt2(IDS, encoder_hidden_states=np.zeros((2, 4, 8))), "encoder_hidden_states"),
        (lambda: bert(np.full((1, 2), 99)), "expected 0 to 30"),
        (lambda: bert.generate(IDS), "expected a class with a language-model head"),
        (lambda: gpt2.generate(IDS, repetition_penalty=2.0), "never read it"),
        (lambda: gpt2.generate(IDS, maxlength=9), "got maxlength"),
        (lambda: gpt2.generate(IDS, max_length=4), "expected room for a token"),
        (lambda: gpt2.generate(IDS, max_length=9, do_sample=True, num_beams=2), "do_sample with num_beams"),
        (lambda: gpt2.generate(IDS, max_length=9, num_return_sequences=2), "at most num_beams"),
        (lambda: gpt2.save_pretrained(tmp_path, push_to_hub=True, repo_id="a b"), "push_to_hub: got 'a b'"),
        (lambda: gpt2.save_pretrained(tmp_path, push_to_hub=True, create_pr=True), "got create_pr, expected some of"),
        (lambda: gpt2.save_pretrained(tmp_path, commit="x"), "got commit, expected some of repo_id"),
        (lambda: flax.FlaxBertModel(BERT, dtype=jnp.float16), "float16"),
        (lambda: flax.FlaxBertModel(GPT2), "got a config of model_type 'gpt2'"),
        (lambda: flax.FlaxAutoModelForSeq2SeqLM.from_config(BERT), "expected one of bart"),
        (lambda: flax.FlaxAutoModel.from_config({"model_type": "deberta"}), "got model_type 'deberta'"),
        (
            lambda: flax.FlaxBigBirdModel(BIG_BIRD, _do_init=False)(IDS, params={}),
            "expected a multiple of block_size (2)",
        ),
        (lambda: flax.FlaxAutoModel.from_pretrained("bert-base-uncased"), "expected a local directory"),
        (lambda: flax.FlaxAutoModel(), "from_pretrained"),
        (lambda: flax.FlaxPreTrainedModel(BERT), "a base class"),
    ]
    for number, (call, text) in enumerate(refused):
        with pytest.raises(ConfigError) as error:
            call()
        assert text in str(error.value) and "\n" not in str(error.value), number


def test_mappings_and_config_classes():
    kinds = [config.model_type for config in flax.FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    assert kinds == list(flax.FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING._classes) and "pegasus" in kinds
    assert len(flax.FLAX_MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING) == 1
    assert flax.FLAX_MODEL_FOR_CAUSAL_LM_MAPPING[flax.GPT2Config] is flax.FlaxGPT2LMHeadModel
    assert flax.FLAX_MODEL_FOR_CAUSAL_LM_MAPPING.get(flax.T5Config) is None
    config = flax.FlaxBertModel.config_class(hidden_size=8, num_attention_heads=2, num_labels=3)
    assert (config.model_type, config.num_labels, config.intermediate_size) == ("bert", 3, 3072)
    pair = flax.EncoderDecoderConfig.from_encoder_decoder_configs(config, flax.GPT2Config(n_embd=8))
    assert pair.decoder["add_cross_attention"] and pair.encoder["hidden_size"] == 8
    module = __import__(flax.FlaxBartModel.__module__, fromlist=["shift_tokens_right"])  # as scripts find it
    labels = np.array([[5, 6, 2, -100], [7, 2, 1, -100]])
    np.testing.assert_array_equal(module.shift_tokens_right(labels, 1, 9), [[9, 5, 6, 2], [9, 7, 2, 1]])
    np.testing.assert_array_equal(module.shift_tokens_right(labels, 1), [[2, 5, 6, 2], [2, 7, 2, 1]])


def test_missing_families_are_refused_by_name():
    with pytest.raises(ImportError, match=r"FlaxVisionEncoderDecoderModel \(vision\), expected a class of one"):
        from jaxformer.hf.flax import FlaxVisionEncoderDecoderModel  # noqa: F401
    assert issubclass(flax.FlaxBartForCausalLM, flax.FlaxBartDecoderPreTrainedModel)
    with pytest.raises(ImportError, match=r"FLAX_MODEL_FOR_VISION_2_SEQ_MAPPING \(vision\)"):
        _ = flax.FLAX_MODEL_FOR_VISION_2_SEQ_MAPPING
    with pytest.raises(ImportError, match="speech"):
        _ = flax.FlaxWhisperForConditionalGeneration
    assert not hasattr(flax, "FlaxNothing")
