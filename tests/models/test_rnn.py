"""The recurrent models as wholes: step by step, padded, packed, in company; gradients, pooling, refusals."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import linen as nn

from jaxformer.config import ConfigError, EmbedConfig, HeadConfig, MeshConfig, ModelConfig, RecurrentConfig, StackConfig
from jaxformer.models import build
from jaxformer.models.rnn import Recurrent, check
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Batch, Slots, Stream

VOCAB = 12


def part(**edits) -> RecurrentConfig:
    return RecurrentConfig(**({"cell": "lstm", "width": 8, "embed": EmbedConfig(vocab=VOCAB)} | edits))


def seq2seq(cell: str = "lstm", attention: str = "additive", **encoder) -> ModelConfig:
    encoder = part(**({"cell": cell, "bidirectional": True} | encoder))
    return ModelConfig(recurrent_encoder=encoder, recurrent_decoder=part(cell=cell, attention=attention))


def classifier(pooling: str, **edits) -> ModelConfig:
    head = HeadConfig(kind="classes", classes=3, pooling=pooling)
    return ModelConfig(recurrent_encoder=part(**({"bidirectional": True} | edits)), head=head)


def language_model(cell: str = "lstm", layers: int = 2) -> ModelConfig:
    return ModelConfig(recurrent_decoder=part(cell=cell, layers=layers))


def stream(segment, seed: int = 0) -> Stream:
    """Random tokens everywhere, padding included: what stands there must not matter."""
    segment = np.asarray(segment, np.int32)
    tokens = np.random.default_rng(seed).integers(1, VOCAB, size=segment.shape).astype(np.int32)
    return Stream(tokens, Slots(np.cumsum(segment != 0, axis=1, dtype=np.int32), segment))


def ragged(lengths, room: int, seed: int = 0, left: bool = False) -> Stream:
    index = np.arange(room)[:: -1 if left else 1]
    return stream(index[None] < np.asarray(lengths)[:, None], seed)


def make(config: ModelConfig, seed: int = 0):
    """The module, and variables with random numbers everywhere, biases included."""
    module, rng = build.build(config), np.random.default_rng(seed)
    draw = lambda x: (0.5 * rng.normal(size=x.shape)).astype(np.float32)  # noqa: E731
    return module, jax.tree.map(draw, nn.meta.unbox(build.shapes(module)))


def cut(side: Stream, start: int, stop: int) -> Stream:
    return jax.tree.map(lambda x: x[:, start:stop], side)


def forward(config: ModelConfig):
    module, variables = make(config)
    return jax.jit(lambda batch: module.apply(variables, batch))


def unrolled(module, variables, batch: Batch, prompt: int) -> jax.Array:
    """Logits `[B, T - prompt + 1, V]` from a prompt of that many slots and one step for every slot that follows."""
    target = batch.target
    steps = target.tokens.shape[1]
    logits, state = module.apply(variables, batch._replace(target=cut(target, 0, prompt)), steps, method="start")
    out = [logits]
    for t in range(prompt, steps):
        logits, state = module.apply(variables, target.tokens[:, t : t + 1], state, method="step")
        out.append(logits)
    return jnp.stack(out, axis=1)


class DecodingTest(chex.TestCase):
    # Every cell and every attention: neither looks at which the other is.
    @parameterized.parameters(("lstm", "none"), ("lstm", "additive"), ("rnn", "dot"), ("gru", "additive"))
    def test_prompt_and_steps_give_the_logits_of_the_whole_pass(self, cell, attention):
        module, variables = make(seq2seq(cell, attention))
        batch = Batch(ragged([2, 5, 3], 5), ragged([4, 4, 4], 4, seed=1))
        both = jax.jit(lambda v, b: (module.apply(v, b), unrolled(module, v, b, prompt=2)))
        whole, stepped = both(variables, batch)
        assert whole.dtype == jnp.float32
        chex.assert_trees_all_close(stepped, np.asarray(whole)[:, 1:], rtol=1e-5, atol=1e-6)
        assert np.std(whole) > 0.1

    @chex.variants(with_jit=True)
    def test_a_language_model_steps_through_stacked_layers(self):
        module, variables = make(language_model("gru"))
        batch = Batch(None, ragged([4, 4], 4))
        whole = self.variant(module.apply)(variables, batch)
        stepped = self.variant(lambda v, b: unrolled(module, v, b, prompt=1))(variables, batch)
        chex.assert_trees_all_close(stepped, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("attention", "left"), [("none", False), ("dot", True)])
def test_a_prompt_goes_on_after_its_last_real_slot(attention, left):
    """Prompts of lengths 1, 3 and 2, padded on either side, then two more tokens, against the unpadded rows."""
    module, variables = make(seq2seq(attention=attention, layers=2))
    lengths, more = [1, 3, 2], np.asarray([[3, 4], [5, 6], [7, 8]], np.int32)
    batch = Batch(ragged([4, 2, 3], 4, left=left), ragged(lengths, 3, seed=1, left=left))

    @jax.jit
    def decode(batch):
        logits, state = module.apply(variables, batch, 8, method="start")
        after, state = module.apply(variables, more[:, :1], state, method="step")
        last, _ = module.apply(variables, more[:, 1:], state, method="step")
        return jnp.stack([logits, after, last], axis=1)

    got, whole = np.asarray(decode(batch)), jax.jit(module.apply)
    for row, length in enumerate(lengths):
        real = np.flatnonzero(batch.target.slots.segment[row])
        tokens = np.concatenate([batch.target.tokens[row, real], more[row]])
        tokens = np.pad(tokens, (0, 5 - len(tokens)))[None]
        target = ragged([length + 2], 5)._replace(tokens=tokens)
        source = jax.tree.map(lambda x, row=row: x[row : row + 1], batch.source)
        expected = np.asarray(whole(variables, Batch(source, target)))[0, length - 1 : length + 2]
        np.testing.assert_allclose(got[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["none", "dot"])
def test_rows_of_the_state_are_rows_of_the_future(attention):
    module, variables = make(seq2seq(attention=attention))
    batch = Batch(ragged([2, 4, 3], 4), ragged([1, 1, 1], 1))
    index, tokens = np.asarray([2, 0, 0, 1]), np.asarray([[1], [2], [3]], np.int32)

    @jax.jit
    def run(batch):
        _, state = module.apply(variables, batch, 4, method="start")
        logits, after = module.apply(variables, tokens, state, method="step")
        return (logits[index], after.rows(index)), module.apply(
            variables, tokens[index], state.rows(index), method="step"
        )

    then_picked, picked_then = run(batch)
    chex.assert_trees_all_close(picked_then, then_picked, rtol=1e-5, atol=1e-6)
    assert all(x.shape[0] == 4 for x in jax.tree.leaves(picked_then))
    assert np.ptp(np.asarray(picked_then[0]), axis=0).max() > 1e-3


CASES = {
    "additive": seq2seq("lstm", "additive"),
    "dot": seq2seq("gru", "dot"),
    "none": seq2seq("lstm", "none", bidirectional=False),
    "language model": language_model(),
    "classifier mean": classifier("mean"),
    "classifier last": classifier("last"),
}


def example(config: ModelConfig, lengths, room: int) -> Batch:
    reads = config.recurrent_encoder is not None
    source = ragged([n + 1 for n in lengths], room + 1) if reads else None
    return Batch(source, ragged(lengths, room, seed=1) if config.recurrent_decoder is not None else None)


@pytest.mark.parametrize("case", CASES)
def test_neither_padding_nor_batch_mates_change_anything(case):
    config = CASES[case]
    run, batch = forward(config), example(config, [4, 2, 3], 4)
    logits = np.asarray(run(batch))

    junk = lambda x: np.pad(x, ((0, 0), (0, 3)), constant_values=7)  # noqa: E731
    empty = lambda x: np.pad(x, ((0, 0), (0, 3)))  # noqa: E731
    wide = Batch(*(s and Stream(junk(s.tokens), jax.tree.map(empty, s.slots)) for s in batch[:2]))
    padded = np.asarray(run(wide))
    order = np.asarray([2, 0, 1])
    turned = np.asarray(run(jax.tree.map(lambda x: x[order], batch)))
    if config.head.kind == "tokens":
        real = np.asarray(batch.target.slots.segment)[:, :, None]
        logits, padded, turned = logits * real, padded[:, :4] * real, turned * real[order]
    chex.assert_trees_all_close(padded, logits, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(turned, logits[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["dot", "none", "language model"])
def test_packed_examples_are_read_as_if_alone(case):
    config = CASES[case]
    reads = config.recurrent_encoder is not None
    source, target = stream([[1, 1, 2, 2, 2, 0]]), stream([[1, 1, 1, 2, 2, 0]], seed=1)
    run = forward(config)
    packed = np.asarray(run(Batch(source if reads else None, target)))[0]
    for (s, s_end), (t, t_end) in (((0, 2), (0, 3)), ((2, 5), (3, 5))):
        alone = Batch(cut(source, s, s_end) if reads else None, cut(target, t, t_end))
        alone = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 6 - x.shape[1]))), alone)
        np.testing.assert_allclose(packed[t:t_end], np.asarray(run(alone))[0, : t_end - t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("additive", "float32"), ("dot", "bfloat16"), ("none", "float32"), ("classifier last", "bfloat16")],
)
def test_every_parameter_gets_a_finite_gradient(case, dtype):
    config = dataclasses.replace(CASES[case], dtype=dtype)
    module, variables = make(config)
    batch = example(config, [3, 2, 0], 4)  # a row that is all padding, as the last batch of an evaluation has

    def loss(variables):
        logits = module.apply(variables, batch, rngs={"dropout": jax.random.key(0)})
        return -jax.nn.log_softmax(logits)[:2, ..., 1].mean()

    gradients = jax.device_get(jax.jit(jax.grad(loss))(variables))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


def test_a_few_steps_learn_one_batch_by_heart():
    module = build.build(seq2seq("gru"))
    batch = Batch(ragged([3, 5, 4], 5), ragged([4, 3, 4], 4, seed=1))
    labels = np.random.default_rng(2).integers(1, VOCAB, (3, 4))
    optimizer = optax.adam(0.03)

    def loss(variables):
        each = optax.softmax_cross_entropy_with_integer_labels(module.apply(variables, batch), labels)
        return (each * batch.target.slots.segment).sum() / batch.target.slots.segment.sum()

    @jax.jit
    def step(variables, state):
        value, gradient = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(variables, updates), state, value

    variables = jax.jit(lambda key: nn.meta.unbox(build.init_variables(module, key)))(jax.random.key(0))
    state, losses = jax.jit(optimizer.init)(variables), []
    for _ in range(80):
        variables, state, value = step(variables, state)
        losses.append(float(value))
    assert abs(losses[0] - np.log(VOCAB)) < 0.5
    assert losses[-1] < 0.05


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_a_classifier_pools_what_it_says(pooling):
    module, variables = make(classifier(pooling))
    batch = Batch(ragged([3, 5], 5), None)
    run = lambda m, b: (m(b), m.encode(b.source).outputs)  # noqa: E731
    logits, y = jax.jit(lambda v, b: module.apply(v, b, method=run))(variables, batch)
    head, y = variables["params"]["head"]["decision"], np.asarray(y)
    for row, length in enumerate((3, 5)):
        pooled = {
            "first": y[row, 0],
            "mean": y[row, :length].mean(axis=0),
            "last": np.concatenate([y[row, length - 1, :4], y[row, 0, 4:]]),  # where each direction ends
        }[pooling]
        expected = pooled @ head["kernel"] + head["bias"]
        np.testing.assert_allclose(logits[row], expected, rtol=1e-5, atol=1e-6)


def test_alike_parts_hand_their_states_over_and_others_build_a_bridge():
    alike = seq2seq("lstm", "none", bidirectional=False)
    assert "bridge" not in make(alike)[1]["params"]["decoder"]
    module, variables = make(alike)
    batch = Batch(ragged([2, 3], 3), ragged([1, 1], 1))

    def begin(model, batch):
        encoded = model.encode(batch.source)
        return model.decoder.initial_states(encoded, batch.target.slots.segment), encoded.states

    ((h, c),), (((h_all, c_all),),) = jax.jit(lambda b: module.apply(variables, b, method=begin))(batch)
    for row, length in enumerate((2, 3)):
        chex.assert_trees_all_equal((h[row, 0], c[row, 0]), (h_all[row, length - 1], c_all[row, length - 1]))
    for other in (seq2seq("lstm", "none"), seq2seq("lstm", "none", bidirectional=False, layers=2)):
        bridge = make(other)[1]["params"]["decoder"]["bridge"]
        assert bridge["kernel"].shape == (8, 2, 8)


def test_shared_embeddings_are_one_table():
    shared = dataclasses.replace(seq2seq(), share_embeddings=True)
    parameters = make(shared)[1]["params"]
    assert "target_embed" not in parameters
    assert build.count_params(make(seq2seq())[1]) - build.count_params(parameters) == VOCAB * 8


def test_a_mesh_of_eight_devices_computes_the_same():
    config = seq2seq()
    module, variables = make(config)
    batch = Batch(ragged([2, 5, 3, 4], 5), ragged([4, 2, 3, 4], 4, seed=1))

    def loss(variables):
        return jnp.square(module.apply(variables, batch)).sum()

    single = jax.jit(jax.value_and_grad(loss))(variables)
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        layout = build.rules.shardings(build.shapes(module), mesh)
        sharded = jax.jit(jax.value_and_grad(loss))(jax.device_put(variables, layout))
    chex.assert_trees_all_close(jax.device_get(sharded), jax.device_get(single), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(), "got no part"),
        (ModelConfig(encoder=StackConfig(), recurrent_decoder=part()), "got transformer and recurrent parts"),
        (ModelConfig(recurrent_decoder=part(cell="lstn")), "did you mean 'lstm'"),
        (ModelConfig(recurrent_decoder=part(attention="dot")), "without an encoder"),
        (ModelConfig(recurrent_decoder=part(bidirectional=True)), "a decoder reads forwards"),
        (ModelConfig(recurrent_encoder=part(attention="dot")), "expected 'none'"),
        (ModelConfig(recurrent_encoder=part(width=7, bidirectional=True)), "expected an even number"),
        (ModelConfig(recurrent_encoder=part(layers=0)), "expected at least 1"),
        (seq2seq(attention="bahdanau"), "expected one of none, additive, dot"),
        (
            ModelConfig(
                recurrent_encoder=part(width=16),
                recurrent_decoder=part(embed=EmbedConfig(vocab=VOCAB)),
                share_embeddings=True,
            ),
            "share_embeddings",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(config, message):
    with pytest.raises(ConfigError, match=message) as error:
        check(config)
    assert "\n" not in str(error.value)


def test_a_prompt_longer_than_the_room_is_refused():
    module, variables = make(language_model())
    with pytest.raises(ValueError, match="got length 2, expected room for the prompt's 3"):
        module.apply(variables, Batch(None, ragged([3], 3)), 2, method=Recurrent.start)


def test_slots_of_a_step_need_no_position():
    """The state knows where it is: positions of a prompt do not matter to a recurrent model."""
    module, variables = make(language_model())
    target = ragged([3], 3)
    moved = target._replace(slots=Slots(target.slots.position + 5, target.slots.segment))
    run = jax.jit(module.apply)
    chex.assert_trees_all_equal(run(variables, Batch(None, target)), run(variables, Batch(None, moved)))


def test_a_bridge_makes_states_between_minus_one_and_one():
    """tanh of a linear map of what the encoder read last (Bahdanau et al. 2015, appendix A.2.2)."""
    module, variables = make(seq2seq("gru", "none"))
    batch = Batch(ragged([2, 3], 3), ragged([1, 1], 1))
    bridge = variables["params"]["decoder"]["bridge"]

    def begin(model, batch):
        encoded = model.encode(batch.source)
        return model.decoder.initial_states(encoded, batch.target.slots.segment)

    large = jax.tree.map(lambda x: 40.0 * x, bridge)
    params = {**variables["params"], "decoder": {**variables["params"]["decoder"], "bridge": large}}
    states = jax.jit(lambda b: module.apply({"params": params}, b, method=begin))(batch)
    assert all(float(jnp.abs(state).max()) <= 1.0 for state in jax.tree.leaves(states))
    assert max(float(jnp.abs(state).max()) for state in jax.tree.leaves(states)) > 0.9
