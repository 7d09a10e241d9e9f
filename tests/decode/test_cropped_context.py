"""Texts longer than a table of learned positions, compared with a loop that reads the last tokens for every new one."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_toys import decode
from flax import linen as nn

import jaxformer
from jaxformer import cli
from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    StackConfig,
    overrides,
)
from jaxformer.decode import cache_schedule, generate, int8, scheduler
from jaxformer.decode.batching import pad_batch
from jaxformer.decode.compiled import CompiledDecoder, Vocabulary, forward
from jaxformer.decode.cropped_context import CachedContext, CroppedContext, CroppingModel
from jaxformer.decode.runner import Runner
from jaxformer.decode.scheduler import ActiveBatch
from jaxformer.models import build
from jaxformer.train import loop

POSITIONS, VOCAB = 8, 16
VOCABULARY = Vocabulary(eos=(2, 12), pad=0, start=1, size=13)
ENDLESS = dataclasses.replace(VOCABULARY, eos=())
STACK = StackConfig(
    layers=1,
    width=8,
    embed=EmbedConfig(vocab=VOCAB),
    attention=AttentionConfig(heads=2),
    ffn=FeedForwardConfig(width=16),
    encoding=EncodingConfig(kind="learned", max_length=POSITIONS),
)
SIZES = (1, 3, 5, 7, 8, 9, 20, 2, 6, 1)
"""Tokens of the prompts: below, at and above the number of positions."""
GREEDY = DecodeConfig(max_length=14)


DECODER = ModelConfig(decoder=STACK)


@functools.lru_cache
def model(config=DECODER):
    module, rng = build.build(config), np.random.default_rng(1)
    shapes = nn.meta.unbox(build.shapes(module))
    return module, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def make_prompts(sizes=SIZES):
    rng = np.random.default_rng(4)
    return [{"target": rng.integers(6, VOCABULARY.size, size).astype(np.int32)} for size in sizes]


def run(prompts, options, row_indices=None, vocabulary=VOCABULARY, progress=None, **fields):
    runner = Runner(*model(), vocabulary, **{"max_target_length": POSITIONS, **fields})
    return runner.generate(prompts, options, row_indices, progress)


def next_logits(text, variables=None):
    """Logits of the token after `text`, from its last tokens alone, numbered from 0."""
    module, own = model()
    last = np.asarray(text[-POSITIONS:], np.int32)
    batch = pad_batch([{"target": last}], 1, (0, 0), (POSITIONS,))
    logits = forward(module, own if variables is None else variables, batch)
    return np.asarray(logits)[0, len(last) - 1, : VOCABULARY.size]


def reference(prompt, count, choose, vocabulary=VOCABULARY, variables=None):
    """Up to `count` new tokens, and the sum of their log-probabilities.

    `choose(logits, text, step)` returns a token and the logits that it is scored by.
    """
    text, score = list(prompt["target"]), 0.0
    for step in range(count):
        token, logits = choose(next_logits(text, variables), text, step)
        score += float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        text.append(int(token))
        if token in vocabulary.eos:
            break
    return text[len(prompt["target"]) :], score


def likeliest(logits, text, step):
    return int(logits.argmax()), logits


def assert_equal(hypotheses, expected):
    for hypothesis, (tokens, score) in zip(hypotheses, expected, strict=True):
        assert hypothesis.tokens.tolist() == tokens
        assert hypothesis.score == pytest.approx(score, rel=2e-4, abs=2e-4)


def assert_same(results, expected):
    for a, b in zip(results, expected, strict=True):
        assert_equal(a, [(h.tokens.tolist(), h.score) for h in b])


BUCKETS = (POSITIONS, 32)


def decoded_endless(monkeypatch, prompts):
    """Outputs of the greatest length, in batches of four rows whose cache grows before it is dropped."""
    monkeypatch.setattr(cache_schedule, "INITIAL_NEW_TOKENS", 2)
    return run(prompts, dataclasses.replace(GREEDY, batch=4), vocabulary=ENDLESS, buckets=BUCKETS)


def decoded_alone(prompts, progress=None, **options):
    """Outputs of prompts that are decoded one by one: the tests that do so share their programs."""
    return run(prompts, dataclasses.replace(GREEDY, batch=1, **options), progress=progress, buckets=BUCKETS)


@pytest.mark.parametrize("case", ["alone", "endless"])
def test_greedy_search_reads_the_last_tokens_for_each_new_one(case, monkeypatch):
    if case == "alone":
        prompts, vocabulary, calls = make_prompts(), VOCABULARY, []
        results = decoded_alone(prompts, lambda *numbers: calls.append(numbers))
        assert [done for done, _ in calls] == sorted(done for done, _ in calls) and calls[-1] == (10, 10)
    else:  # one of a single token has a width, and so programs, of its own
        prompts, vocabulary = [prompt for prompt in make_prompts() if len(prompt["target"]) > 1], ENDLESS
        results = decoded_endless(monkeypatch, prompts)
    expected = [reference(prompt, GREEDY.max_length, likeliest, vocabulary) for prompt in prompts]
    for hypotheses, each in zip(results, expected, strict=True):
        assert_equal(hypotheses, [each])
    lengths = [len(tokens) for tokens, _ in expected]
    if vocabulary is ENDLESS:
        assert set(lengths) == {GREEDY.max_length}
    else:  # some end in the part that is read again, some before, some never
        passed = [size + length > POSITIONS for size, length in zip(SIZES, lengths, strict=True)]
        ended = [length < GREEDY.max_length for length in lengths]
        assert {(True, True), (True, False), (False, True)} <= set(zip(passed, ended, strict=True))
        assert len(set(lengths)) > 3


def decoded_with_refills(options, monkeypatch):
    """Prompts, and what becomes of them in batches of four in two orders, whose rows are refilled: by batch order."""
    vocabulary = dataclasses.replace(VOCABULARY, eos=ENDS)  # rows are free before the batch drops its cache
    # Two widths, so that few programs are compiled: prompts with a cache at first, and those without. One of a single
    # token would have a width of its own.
    prompts = make_prompts([2, 3, 4] * 4 + [*range(9, 17)])
    refilled, refill_rows = [], CompiledDecoder.refill_rows
    monkeypatch.setattr(
        CompiledDecoder,
        "refill_rows",
        lambda self, state, *rest: refilled.append(type(state.model)) or refill_rows(self, state, *rest),
    )
    outcomes = []
    for count, order in ((1, np.arange(20)), (2, np.random.default_rng(1).permutation(20))):
        monkeypatch.setattr(scheduler, "CONCURRENT_BATCHES", count)
        options = dataclasses.replace(options, batch=4)
        results = run([prompts[i] for i in order], options, order, vocabulary, buckets=(POSITIONS, 16))
        outcomes.append([results[place] for place in np.argsort(order)])
    assert {CachedContext, CroppedContext} <= set(refilled)
    return prompts, outcomes


ENDS = (2, 7, 9, 12)


def bans_repeated_ngrams(logits, text, size):
    suffix = text[len(text) - size + 1 :]
    for start in range(len(text) - size + 1):
        if text[start : start + size - 1] == suffix:
            logits[text[start + size - 1]] = -np.inf
    return logits


@jax.jit
def drawn(logits, row, draw, step):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), row), draw)
    return jax.random.categorical(jax.random.fold_in(key, step), logits)


def test_draws_use_the_keys_of_their_row_and_step_and_processors_the_whole_text(monkeypatch):
    """Whoever shares the batch, in whichever order, and whether the row was another prompt's before."""
    options = DecodeConfig(method="sample", max_length=10, hypotheses=2, temperature=1.5, seed=5)
    options = dataclasses.replace(options, repetition_penalty=1.3, no_repeat_ngram=2)
    prompts, outcomes = decoded_with_refills(options, monkeypatch)
    vocabulary = dataclasses.replace(VOCABULARY, eos=ENDS)

    def expected(row, draw, history):
        def choose(logits, text, step):
            text = [int(token) for token in text[-history:]]
            logits = logits.copy()
            for token in set(text):
                logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
            logits = bans_repeated_ngrams(logits, text, 2)
            padded = np.pad(logits / 1.5, (0, VOCAB - VOCABULARY.size), constant_values=-np.inf)
            return int(drawn(padded, row, draw, step)), logits

        return reference(prompts[row], options.max_length, choose, vocabulary)

    whole = [[expected(row, draw, 99) for draw in range(2)] for row in range(len(prompts))]
    for results in outcomes:
        for hypotheses, each in zip(results, whole, strict=True):
            assert_equal(sorted(hypotheses, key=lambda h: -h.score), sorted(each, key=lambda pair: -pair[1]))
    last = [[expected(row, draw, POSITIONS) for draw in range(2)] for row in range(len(prompts))]
    tokens = [[[tokens for tokens, _ in each] for each in texts] for texts in (whole, last)]
    assert tokens[0] != tokens[1]  # so that what is read of the text matters
    assert len({len(each) for texts in tokens[0] for each in texts}) > 2


class WholeReader:
    """A `Decodable` whose state is all tokens of each row; a step reads the last ones."""

    def start(self, batch, length):
        size = jnp.sum(batch.target.slots.segment[0] != 0, dtype=jnp.int32)  # of the only row, padded on the right
        tokens = jnp.pad(batch.target.tokens, ((0, 0), (0, 64 - batch.target.tokens.shape[1])))
        return self.read(state := WholeText(tokens, size)), state

    def step(self, tokens, state):
        return self.read(state := WholeText(state.tokens.at[:, state.size].set(tokens[:, 0]), state.size + 1)), state

    def read(self, state):
        module, variables = model()
        column = jnp.arange(POSITIONS)
        count = jnp.minimum(state.size, POSITIONS)
        index = jnp.clip(state.size - count + column, 0, 63)
        prompt = {"target": np.zeros(POSITIONS, np.int32)}
        batch = pad_batch([prompt], 1, (0, 0), (POSITIONS,))
        rows = len(state.tokens)
        slots = batch.target.slots._replace(
            position=jnp.broadcast_to(column, (rows, POSITIONS)),
            segment=jnp.broadcast_to((column < count).astype(jnp.int32), (rows, POSITIONS)),
        )
        target = batch.target._replace(tokens=state.tokens[:, index], slots=slots)
        logits = module.apply(variables, batch._replace(target=target))[:, count - 1]
        return jnp.where(jnp.arange(VOCAB) < VOCABULARY.size, logits, -jnp.inf)


@dataclasses.dataclass
class WholeText:
    tokens: jax.Array
    size: jax.Array

    def rows(self, index):
        return WholeText(self.tokens[index], self.size)


jax.tree_util.register_dataclass(WholeText, ["tokens", "size"], [])


def test_beams_are_followed_past_the_positions(monkeypatch):
    options = DecodeConfig(method="beam", beams=3, hypotheses=3, max_length=10, no_repeat_ngram=1)
    prompts, outcomes = decoded_with_refills(options, monkeypatch)
    slow = jax.jit(lambda batch: decode(WholeReader(), batch, options, ENDS, 0))
    for prompt, *several in zip(prompts, *outcomes, strict=True):
        tokens, lengths, scores = jax.device_get(slow(pad_batch([prompt], 1, (0, 0), (2 * POSITIONS,))))
        expected = [
            (list(map(int, row[:n])), float(score))
            for row, n, score in zip(tokens[0], lengths[0], scores[0], strict=True)
        ]
        for hypotheses in several:
            assert_equal(hypotheses, expected)
    assert len({tuple(h.tokens.tolist()) for hypotheses in outcomes[0] for h in hypotheses}) > 6
    assert len({len(hypotheses[0].tokens) for hypotheses in outcomes[0]}) > 2


def test_the_cache_is_used_as_long_as_the_texts_fit(monkeypatch):
    dropped, drop = [], ActiveBatch._drop_cache_if_context_is_full

    def record(batch):
        cached = isinstance(batch.state.model, CachedContext)
        drop(batch)
        if cached and not isinstance(batch.state.model, CachedContext):
            dropped.append(batch.context_lengths[batch.prompt_indices != -1].max())

    monkeypatch.setattr(ActiveBatch, "_drop_cache_if_context_is_full", record)
    decoded_endless(monkeypatch, make_prompts((2, 5, 3, 4) * 2))
    assert dropped == [POSITIONS] * 2
    # A text that ends in time costs no pass over the window.
    short = [prompt for prompt in make_prompts() if 1 < len(prompt["target"]) < 4]
    inside = [
        prompt
        for prompt in short
        if len(prompt["target"]) + len(reference(prompt, GREEDY.max_length, likeliest)[0]) <= POSITIONS
    ]
    every_token_ends = dataclasses.replace(VOCABULARY, eos=tuple(range(VOCABULARY.size)))
    dropped.clear()
    monkeypatch.setattr(cache_schedule, "INITIAL_NEW_TOKENS", 64)
    decoded_alone(inside)
    monkeypatch.setattr(CroppingModel, "_read", None)
    options = dataclasses.replace(GREEDY, batch=1)
    run(short, options, vocabulary=every_token_ends, buckets=BUCKETS)  # its programs are traced here
    assert not dropped and inside


def test_only_texts_that_may_pass_the_positions_are_decoded_apart():
    prompts = make_prompts((1, 4, 5, 8, 9))
    groups = generate.group_by_context(prompts, [5, 5, 5, 1, 1], POSITIONS)
    assert groups == [([0, 1, 3], None), ([2], POSITIONS), ([4], POSITIONS)]
    assert generate.group_by_context(prompts, [5] * 5, None) == [([0, 1, 2, 3, 4], None)]


def test_int8_weights():
    prompts, options = make_prompts((3, 8)), dataclasses.replace(GREEDY, weights="int8")
    quantized = jax.jit(int8.quantize, static_argnums=0)(*model())
    for prompt, hypotheses in zip(prompts, run(prompts, options), strict=True):
        assert_equal(hypotheses, [reference(prompt, GREEDY.max_length, likeliest, variables=quantized)])


def test_stop_ends_the_text_and_refuse_names_the_setting():
    prompts, whole = make_prompts((2, 5, 8)), decoded_alone(make_prompts((2, 5, 8)))
    for size, short, long in zip((2, 5, 8), stopped := decoded_alone(prompts, **STOP), whole, strict=True):
        assert short[0].tokens.tolist() == long[0].tokens.tolist()[: POSITIONS - size + 1]
    assert sum(len(short[0].tokens) < len(long[0].tokens) for short, long in zip(stopped, whole, strict=True)) > 1
    with pytest.raises(ConfigError, match="got 9 tokens, expected at most the model's 8 positions; shorten it"):
        decoded_alone(make_prompts((9,)), **STOP)
    refuse = STOP | {"past_positions": "refuse"}
    assert_same(decoded_alone(prompts[:1], **refuse), stopped[:1])
    expected = r"decode\.past_positions: got refuse and a prompt of 6 tokens with up to 7 new ones, expected .* 8 posit"
    with pytest.raises(ConfigError, match=expected) as error:
        decoded_alone(make_prompts((2, 6)), **refuse)
    assert "\n" not in str(error.value)


STOP = {"max_length": 7, "past_positions": "stop"}


def test_a_prompt_longer_than_the_positions_is_announced(caplog):
    with caplog.at_level("WARNING", logger="jaxformer"):
        decoded_alone(make_prompts((9, 3, 12)))
    [message] = [record.getMessage() for record in caplog.records]
    assert message == "decode: 2 prompts have more tokens than the model has positions; only their last 8 are read"


SEQ2SEQ = ModelConfig(encoder=STACK, decoder=STACK)
SINUSOIDAL = ModelConfig(decoder=dataclasses.replace(STACK, encoding=EncodingConfig(kind="sinusoidal")))


@pytest.mark.parametrize(
    ("config", "prompt", "limit", "length"),
    [(SEQ2SEQ, {"source": [3, 4]}, POSITIONS, POSITIONS), (SINUSOIDAL, {"target": [3, 4]}, None, GREEDY.max_length)],
    ids=["encoder-decoder", "sinusoidal"],
)
def test_encoder_decoders_end_at_the_last_position_and_other_encodings_have_none(config, prompt, limit, length):
    runner = Runner(*model(config), ENDLESS, max_target_length=limit)
    for past_positions in ("crop", "stop", "refuse"):
        options = dataclasses.replace(GREEDY, past_positions=past_positions)
        assert [len(h.tokens) for [h] in runner.generate([prompt], options)] == [length]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A trained run with a table of 16 positions, on packed rows."""
    config = overrides.defaults()
    config.data.source, config.data.tokenizer.kind = "pylib", "byte"
    config.data.packing, config.data.length, config.data.batch, config.data.examples = "concat", 16, 8, 40
    config.task.name = "language_modelling"
    config.model.decoder = overrides.section(
        StackConfig,
        layers=1,
        width=8,
        attention=dict(heads=2),
        ffn=dict(width=16),
        encoding=dict(kind="learned", max_length=16),
        unroll=1,
    )
    config.mesh.data, config.mesh.fsdp = 1, 8
    config.train.steps, config.train.evaluate_every, config.evaluate.examples = 1, 1, 8
    config.decode.max_length, config.decode.batch = 30, 4
    path = tmp_path_factory.mktemp("run")
    assert loop.train(overrides.freeze(config), path) == 0
    return path


def test_the_command_goes_on_stops_or_refuses(workdir, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("ab\nimport a thing from afar\n\n")

    def decoded(*edits):
        argv = ["decode", f"--workdir={workdir}", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt"]
        code = cli.main([*argv, "--config.decode.suppress=0,1,2,3,4", *edits])
        return code, (tmp_path / "out.txt").read_text().splitlines() if code == 0 else capsys.readouterr().err

    code, lines = decoded()
    assert code == 0 and len(lines) == 3
    outputs = jaxformer.load(workdir).outputs(["ab", "import a thing from afar", ""], suppress=(0, 1, 2, 3, 4))
    assert [len(each[0].tokens) for each in outputs] == [30, 30, 30]
    code, message = decoded("--config.decode.past_positions=refuse")
    assert code == 2 and "decode.past_positions: got refuse" in message
    code, message = decoded("--config.decode.past_positions=stop")
    assert code == 2 and "expected at most the model's 16 positions" in message
    assert json.loads((workdir / "config.json").read_text())["decode"]["past_positions"] == "crop"
