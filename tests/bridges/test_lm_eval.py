"""A language model in the evaluation harness: its likelihoods and continuations are those of the model itself."""

import json
from types import SimpleNamespace

import builders
import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import Config, DataConfig, DecodeConfig, TaskConfig, TokenizerConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.model import Model
from jaxformer.models import build

pytest.importorskip("lm_eval", reason="needs the extra [harness]")

from jaxformer.bridges import lm_eval as bridge

LENGTH = 24
DATA = DataConfig(tokenizer=TokenizerConfig(kind="byte"), length=LENGTH, buckets=(LENGTH,))


def model(parts=None) -> Model:
    norm = builders.NormConfig(kind="rms")  # a bias after the last layer would choose the same token everywhere
    parts = parts or builders.decoder(embed=builders.EmbedConfig(vocab=264), layers=1, norm=norm)
    config = Config(model=parts, data=DATA, task=TaskConfig(name="language_modelling"), decode=DecodeConfig())
    module, rng = build.build(parts), np.random.default_rng(7)
    shapes = nn.meta.unbox(build.shapes(module))["params"]
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    return Model(module, params, {}, config, Tokenizers.build(config.data, [], ("text",)))


PLAIN = model()
ADAPTER = bridge.HarnessModel(PLAIN)


def asked(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def slow(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One token after the other, each from a pass over all before it."""
    total, greedy, tokens = 0.0, True, list(context)
    for token in continuation:
        seen = np.asarray(tokens[-LENGTH:], np.int32)[None]
        slots = builders.stream(np.random.default_rng(0), [seen.shape[1]])._replace(tokens=seen)
        logits = np.asarray(PLAIN(builders.Batch(None, slots)))[0, -1].astype(np.float64)
        total += logits[token] - np.log(np.exp(logits).sum())
        greedy &= int(logits.argmax()) == token
        tokens.append(token)
    return total, greedy


def test_likelihoods_are_those_of_one_token_after_the_other():
    pairs = [("ab", " cd"), ("", "xyz"), ("a ", "b")]
    encode = PLAIN.tokenizers.target.encode
    for (context, continuation), got in zip(pairs, ADAPTER.loglikelihood(asked(*pairs)), strict=True):
        blanks = len(context) - len(context.rstrip())
        context, continuation = context.rstrip(), " " * blanks + continuation
        want = slow([ADAPTER.prefix_token_id, *encode(context)], encode(continuation))
        assert got == (pytest.approx(want[0], rel=1e-5), want[1]), (context, continuation)


def test_a_context_that_is_too_long_loses_its_beginning():
    encode, context = PLAIN.tokenizers.target.encode, "abcdefghij" * 5
    (got,) = ADAPTER.loglikelihood(asked((context, "xyz")))
    want = slow(encode(context)[-(LENGTH - 2) :], encode("xyz"))
    assert got == (pytest.approx(want[0], rel=1e-5), want[1])


def test_a_greedy_continuation_is_known_as_one_and_another_is_not():
    (text,) = ADAPTER.generate_until(asked(("ab", {"max_gen_toks": 3, "until": []})))
    tokens = PLAIN.outputs(["ab"], max_length=3, method="greedy")[0][0].tokens.tolist()
    context = ADAPTER.tok_encode("ab")
    other = [*tokens[:-1], (tokens[-1] + 1) % 200]
    found = ADAPTER._loglikelihood_tokens([(None, context, tokens), (None, context, other)])
    assert [greedy for _, greedy in found] == [True, False]
    assert text == PLAIN.generate(["ab"], max_length=3, method="greedy")[0]


def test_a_rolling_likelihood_and_that_of_the_end_are_the_score():
    for line in ("a", "some words"):
        (rolling,) = ADAPTER.loglikelihood_rolling(asked((line,)))
        ((end, _),) = ADAPTER._loglikelihood_tokens([(None, ADAPTER.tok_encode(line), [ADAPTER.eot_token_id])])
        assert rolling + end == pytest.approx(PLAIN.score([line])[0], rel=1e-5)
    long = "x" * (2 * LENGTH + 5)
    (rolling,) = ADAPTER.loglikelihood_rolling(asked((long,)))
    ids, first = PLAIN.tokenizers.target.encode(long), ADAPTER.prefix_token_id
    starts = range(0, len(ids), LENGTH)
    assert rolling == pytest.approx(
        sum(slow([first if s == 0 else ids[s - 1]], ids[s : s + LENGTH])[0] for s in starts)
    )
    assert ADAPTER.loglikelihood_rolling(asked(("",))) == [0.0]


def test_continuations_end_before_the_first_stop():
    (whole,) = ADAPTER.generate_until(asked(("ab", {"max_gen_toks": 8})))
    stop = whole[3:5]
    assert stop
    first, second = ADAPTER.generate_until(
        asked(("ab", {"max_gen_toks": 8, "until": [stop, ""]}), ("ab", {"max_gen_toks": 2, "until": "\n\n"}))
    )
    assert first == whole[: whole.index(stop)] and whole.startswith(second)
    end = "abcdefghijklmnop"  # of a longer context all that is read
    contexts = ("x" * 40 + end, "y" * 40 + end, end[::-1])
    one, same, other = ADAPTER.generate_until(asked(*((context, {"max_gen_toks": 8}) for context in contexts)))
    assert one == same != other


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bridge.HarnessModel(model(builders.encoder())), "no language model"),
        (lambda: bridge.HarnessModel(PLAIN, length=1), "got length 1, expected at least 2"),
        (lambda: ADAPTER.generate_until(asked(("a", {"num_beams": 2}))), "got generation_kwargs num_beams, expected"),
        (lambda: ADAPTER.generate_until(asked(("a", {"max_gen_toks": 24}))), "expected fewer than the 24 tokens"),
        (lambda: ADAPTER.loglikelihood(asked(("a", "b" * 30))), "got a continuation of 30 tokens after"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_local_task_gives_the_models_own_figures(tmp_path):
    import lm_eval

    lines = ["one two", "three", "four five six"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    task = {
        "task": "local_text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    found = lm_eval.simple_evaluate(ADAPTER, tasks=[task], bootstrap_iters=0)["results"]["local_text"]
    ends = ADAPTER._loglikelihood_tokens([(None, ADAPTER.tok_encode(line), [ADAPTER.eot_token_id]) for line in lines])
    nats = sum(PLAIN.score(lines)) - sum(value for value, _ in ends)
    assert found["bits_per_byte,none"] == pytest.approx(-nats / sum(map(len, lines)) / np.log(2), rel=1e-5)
