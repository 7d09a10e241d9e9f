"""Speculative decoding: the tokens are those of decoding without proposals, whatever is proposed."""

import dataclasses
import functools
import importlib
import itertools
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import decoder, make, saved_run
from test_generate import MODELS, SIZE, VOCABULARY, assert_same, generate, make_prompts, model

import jaxformer
from jaxformer import cli
from jaxformer.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    ModelConfig,
    RopeScalingConfig,
    TaskConfig,
    TokenizerConfig,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.decode import streaming
from jaxformer.decode.batching import pad_batch
from jaxformer.decode.compiled import BoundModel
from jaxformer.decode.engine import Engine, Sampling
from jaxformer.decode.generate import _unpad, prepare
from jaxformer.decode.runner import Runner
from jaxformer.decode.scheduler import call_directly, decode_queue
from jaxformer.decode.search import speculation
from jaxformer.nn.cache import TransformerState

OPTIONS = {
    "greedy": DecodeConfig(max_length=70, batch=4, repetition_penalty=1.3),
    "sample": DecodeConfig(method="sample", max_length=20, batch=4, hypotheses=2, temperature=0.4, min_length=3),
}


def followed(text: list[int], count: int) -> list[int]:
    """The tokens after the latest of the longest earlier matches of the end of a text, by search."""
    for size in range(speculation.MAX_NGRAM, 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                following = text[start + size :]
                return [following[i % len(following)] for i in range(count)]
    return []


def test_proposals_follow_the_latest_longest_match():
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 4, size).tolist() for size in (12, 9, 5, 2)] + [[7, 8, 9, 7, 8], [5, 6, 5, 5]]
    width = 15
    rows, valid = np.full((len(texts), width), 3), np.zeros((len(texts), width), bool)
    for row, text in enumerate(texts):
        begin = row % 3  # padding before the text and after its end, which must not be looked up
        rows[row, begin : begin + len(text)], valid[row, begin : begin + len(text)] = text, True
    ends = [row % 3 + len(text) for row, text in enumerate(texts)]
    found = jax.jit(speculation.look_up, static_argnums=3)(rows, valid, np.asarray(ends), 4)
    for text, proposals in zip(texts, np.asarray(found).tolist(), strict=True):
        expected = followed(text, 4)
        assert not expected or proposals == expected, text
    assert followed(texts[4], 4) == [9, 7, 8, 9]


@pytest.mark.parametrize(("name", "method"), [("decoder", "greedy"), ("seq2seq", "sample")])
def test_outputs_are_those_without_proposals(name, method, caplog):
    """Nine prompts in batches of four: rows are taken over, the cache grows, and rows keep unlike numbers of tokens."""
    prompts, options = make_prompts(name, 9), OPTIONS[method]
    with caplog.at_level(logging.INFO, "jaxformer"):
        found = generate(name, prompts, dataclasses.replace(options, speculate=3), buckets=(12,))
    assert_same(found, generate(name, prompts, options, buckets=(12,)))
    (message,) = [record for record in caplog.records if "tokens a pass" in record.message]
    assert 1.2 < message.args[0] <= 4  # repetitions are found


@functools.cache
def drafted(noise: float) -> Runner:
    """The decoder with a copy of itself as its draft, whose weights are off by some noise."""
    module, variables = model("decoder")
    rng = np.random.default_rng(1)
    off = jax.tree.map(lambda x: x + noise * rng.normal(size=x.shape).astype(np.float32), variables)
    return Runner(module, variables, VOCABULARY, draft=Runner(module, off, VOCABULARY))


def tokens_a_pass(runner, prompts, options) -> tuple[list, float]:
    """The result of `generate`, and the tokens that a pass of the model gave."""
    results, (group,) = [None] * len(prompts), prepare(runner, prompts, options)
    for outputs in decode_queue(group.run, group.queue, options.batch, [call_directly]):
        for index, hypotheses in outputs:
            results[group.indices[index]] = _unpad(hypotheses)
    return results, group.run.tally.tokens / group.run.tally.passes


def test_a_draft_proposes_what_is_checked():
    prompts, options = make_prompts("decoder", 4), OPTIONS["sample"]
    expected = generate("decoder", prompts, options)
    options = dataclasses.replace(options, speculate=3)
    shares = {}
    for noise in (0.0, 0.05):
        found, shares[noise] = tokens_a_pass(drafted(noise), prompts, options)
        assert_same(found, expected)
    # The same weights draw the same tokens from the same noise: only ends of outputs shorten a pass.
    assert shares[0.0] > 3 > shares[0.05] > 1.1


def test_draws_follow_the_distribution_whatever_is_proposed():
    """The first two tokens of 4,000 draws against their probabilities: exact in distribution."""
    module, variables = model("decoder")
    prompt, draws = np.array([3, 5, 3], np.int32), 4000
    options = DecodeConfig(method="sample", max_length=2, hypotheses=draws, temperature=3.0, speculate=2)
    (found,) = drafted(0.05).generate([{"target": prompt}], options)
    bound = BoundModel(module, variables, SIZE)

    @jax.jit
    def two_tokens(batch):
        first, state = bound.start(batch, 12)
        return first, bound.step(jnp.arange(SIZE)[:, None], state.rows(jnp.zeros(SIZE, jnp.int32)))[0]

    logits = two_tokens(make_batch([prompt]))
    first, after = (np.exp(np.asarray(x, np.float64) / 3.0) for x in logits)
    first, after = (x / x.sum(axis=1, keepdims=True) for x in (first, after))
    expected = first[0, :SIZE, None] * after[:, :SIZE]
    expected[list(VOCABULARY.eos)] = 0
    counts = np.zeros((SIZE, SIZE))
    for hypothesis in found:
        if len(hypothesis.tokens) == 2:
            counts[tuple(hypothesis.tokens)] += 1
    likely = expected > 0.002
    deviation = (counts / draws - expected)[likely] / np.sqrt(expected[likely] / draws)
    assert np.abs(deviation).max() < 4.5 and np.mean(deviation**2) < 1.5


def test_the_state_gives_back_what_was_wrong():
    """Rows that keep unlike numbers of tokens go on as if they had read no others."""
    module, variables = model("decoder")
    bound, tokens = BoundModel(module, variables), np.asarray([[4, 5, 6], [7, 8, 9]])
    batch = make_batch([[3, 1], [2, 5]])

    @jax.jit
    def run(batch):
        _, state = bound.start(batch, 16)
        logits, long = bound.extend(tokens, state)
        kept = long.keep(jnp.asarray([1, 2]), 3)
        return logits, kept, bound.step(jnp.asarray([[10], [11]]), kept)[0]

    logits, kept, after = jax.tree.map(np.asarray, run(batch))
    first = batch.target.tokens.shape[1]  # the prompts' slots, padding included
    texts = [
        ([*prompt, *tokens[row, :count].tolist(), *last], actual)
        for row, (prompt, keep) in enumerate((([3, 1], 1), ([2, 5], 2)))
        for count, last, actual in ((keep, [10 + row], after[row]), *((n, [], logits[row, n - 1]) for n in (1, 2, 3)))
    ]
    assert isinstance(kept, TransformerState) and int(kept.index) == first + 2
    assert kept.position.tolist() == [3, 4] and kept.slots.segment[:, first:].sum(axis=1).tolist() == [1, 2]
    expected = jax.jit(lambda batch: bound.start(batch, 8)[0])(make_batch([text for text, _ in texts]))
    np.testing.assert_allclose(np.stack([actual for _, actual in texts]), expected, atol=1e-4)


def make_batch(rows):
    return pad_batch([{"target": np.asarray(row, np.int32)} for row in rows], len(rows), (0, 0))


def test_the_engine_and_streams_go_on_by_several_tokens():
    prompts = make_prompts("decoder", 3)
    options = DecodeConfig(max_length=20)
    plain = generate("decoder", prompts, options)
    runner, options = Runner(*model("decoder"), VOCABULARY), dataclasses.replace(options, speculate=3)
    pieces = [piece.tolist() for piece in streaming.stream(runner, prompts[2], options, steps=2)]
    assert list(itertools.chain(*pieces)) == plain[2][0].tokens.tolist() and max(map(len, pieces)) > 2
    outputs: dict[int, list[int]] = {}
    engine = Engine(runner, options, max_new=20, max_prompt=8, rows=2)
    for index, prompt in enumerate(prompts):
        given = outputs.setdefault(index, [])
        engine.submit(
            engine.job(prompt, Sampling(), 20, lambda piece, given=given: given.extend(piece.tokens.tolist()))
        )
    while engine.has_jobs:
        engine.step()
    assert list(outputs.values()) == [hypotheses[0].tokens.tolist() for hypotheses in plain]


def learned(positions: int) -> Runner:
    return Runner(
        *make(decoder(encoding=EncodingConfig(kind="learned", max_length=positions))),
        VOCABULARY,
        max_target_length=positions,
    )


def test_the_last_positions_are_proposed_for_without_nan():
    """Proposals that pass the table get its last row: as keys they would be NaN even where nothing attends to them."""
    runner, prompts = learned(12), make_prompts("decoder", 3)
    options = DecodeConfig(max_length=40, past_positions="stop")
    expected = runner.generate(prompts, options)
    assert max(len(prompt["target"]) + len(h[0].tokens) for prompt, h in zip(prompts, expected, strict=True)) == 13
    assert_same(runner.generate(prompts, dataclasses.replace(options, speculate=5)), expected)


def test_what_cannot_be_honoured_is_refused():
    prompts, options = make_prompts("decoder", 2), DecodeConfig(max_length=20, speculate=2)
    with pytest.raises(ConfigError, match="text of up to 22 tokens, expected at most the model's 12 positions"):
        learned(12).generate(prompts, options)
    with pytest.raises(ConfigError, match="at most the draft's 12 positions"):
        dataclasses.replace(drafted(0.0), draft=learned(12)).generate(prompts, options)
    with pytest.raises(ConfigError, match="RecurrentState, which cannot take back a token"):
        generate("recurrent", make_prompts("recurrent", 2), options)
    draft = Runner(*model("recurrent"), VOCABULARY)
    with pytest.raises(ConfigError, match="got a draft with a RecurrentState"):
        dataclasses.replace(Runner(*model("seq2seq"), VOCABULARY), draft=draft).generate(
            make_prompts("seq2seq", 2), options
        )
    scaled = decoder(encoding=EncodingConfig(kind="rope", scaling=RopeScalingConfig(kind="dynamic", factor=2.0)))
    with pytest.raises(ConfigError, match="dynamic scaling"):
        Runner(*make(scaled), VOCABULARY).generate(prompts, options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and one with weights near to its own, as workdirs."""
    folder = tmp_path_factory.mktemp("runs")
    data = DataConfig(tokenizer=TokenizerConfig(kind="byte"), length=64)
    tokenizers = Tokenizers.build(data, [], ("text",))
    stack = dataclasses.replace(MODELS["decoder"].decoder, embed=EmbedConfig(vocab=tokenizers.source.vocab))
    config = Config(model=ModelConfig(decoder=stack), data=data, task=TaskConfig(name="language_modelling"))
    config = dataclasses.replace(config, decode=DecodeConfig(max_length=16, batch=4, suppress=SPECIAL))
    params = make(config.model)[1]["params"]
    rng = np.random.default_rng(2)
    near = jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(np.float32), params)
    for name, values in {"run": params, "draft": near}.items():
        saved_run(folder / name, config, values, tokenizers)
    return folder


SPECIAL = (*range(7 + 32), *range(7 + 127, 263))
"""Special tokens, and bytes that would break a line of output or be no text."""


def test_a_run_proposes_to_another(runs, tmp_path, capsys, caplog):
    (tmp_path / "in.txt").write_text("ab\nimport a thing\n\n")

    def decoded(*arguments):
        argv = ["decode", f"--workdir={runs}/run", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt"]
        code = cli.main([*argv, *arguments])
        return code, (tmp_path / "out.txt").read_text() if code == 0 else capsys.readouterr().err

    expected = decoded()
    caplog.set_level(logging.INFO, "jaxformer")
    assert decoded("--config.decode.speculate=3", f"--draft={runs}/draft") == expected
    by_draft = [record.args[0] for record in caplog.records if "tokens a pass" in record.message]
    code, message = decoded(f"--draft={runs}/draft")
    assert code == 2 and "--draft: got a draft and config.decode.speculate 0" in message
    code, message = decoded("--config.decode.speculate=3", "--config.decode.method=beam")
    assert code == 2 and "config.decode.speculate" in message and "use greedy or sample" in message

    model = jaxformer.load(runs / "run").with_draft(jaxformer.load(runs / "draft"), 3)
    lines = ["ab", "import a thing", ""]
    assert model.generate(lines) == expected[1].splitlines()
    assert by_draft[0] > 1
    ids = np.asarray([[9, 50, 51], [9, 9, 60]], np.int32)
    expected = jaxformer.load(runs / "run").generate(input_ids=ids, max_new_tokens=9)
    for drafted, options in ((model, {}), (jaxformer.load(runs / "run"), {"prompt_lookup_num_tokens": 2})):
        np.testing.assert_array_equal(drafted.generate(input_ids=ids, max_new_tokens=9, **options), expected)
    with pytest.raises(ConfigError, match="got num_beams > 1 with a draft"):
        model.generate(input_ids=ids, num_beams=2)
    with pytest.raises(ConfigError, match="got prompt_lookup_num_tokens with a draft"):
        model.generate(input_ids=ids, prompt_lookup_num_tokens=2)
    with pytest.raises(ConfigError, match="prompt_lookup_num_tokens with num_beams > 1"):
        jaxformer.load(runs / "run").generate(input_ids=ids, num_beams=2, prompt_lookup_num_tokens=2)


def test_a_draft_that_does_not_fit_is_refused(runs):
    model = jaxformer.load(runs / "run")
    words = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="character")), [{"text": "abc"}], ("text",))
    with pytest.raises(ConfigError, match="draft: got one with another source tokenizer"):
        model.with_draft(dataclasses.replace(model, tokenizers=words))
    pair = dataclasses.replace(model, config=dataclasses.replace(model.config, model=MODELS["seq2seq"]))
    with pytest.raises(ConfigError, match="draft: got an encoder-decoder, expected a decoder alone"):
        model.with_draft(pair)
    recurrent = dataclasses.replace(model, config=dataclasses.replace(model.config, model=MODELS["recurrent"]))
    with pytest.raises(ConfigError, match="got a draft that is no transformer that writes text"):
        model.with_draft(recurrent)
    for number in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="speculate"):
            model.with_draft(model, number)


def test_the_benchmark_compares_cases_by_turns(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("speculation")
    monkeypatch.setattr(benchmark, "METHODS", {"greedy": {"method": "greedy"}})
    monkeypatch.setattr(benchmark, "PROPOSALS", {"none": (0,), "draft": (3,)})
    (tmp_path / "in.txt").write_text("ab\n")
    flags = [f"--workdir={runs}/run", f"--draft={runs}/draft", f"--input={tmp_path}/in.txt", "--tokens=8", "--rounds=1"]
    assert benchmark.main(flags) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["| greedy", "1", "none"], ["| greedy", "1", "draft, 3"]]
    assert float(rows[0][3]) == 1 < float(rows[1][3]) <= 4
