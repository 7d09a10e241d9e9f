"""Word vectors: what is drawn, the loss and its gradient against numpy, and the neighbours of a word."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter

import builders
import jax
import numpy as np
import pytest
import recipes

from jaxformer import cli, tasks
from jaxformer.config import (
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    checks,
    overrides,
)
from jaxformer.data import packing, pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.hf import workdirs
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.tasks import _words, cbow
from jaxformer.train import step

NAMES = ("skip_gram", "cbow")
WORDS = tuple("abcdefghi")
VOCAB = 16  # 7 special tokens and 9 words


def text(rng: np.random.Generator, length: int) -> str:
    """Words of falling frequency."""
    return " ".join(rng.choice(WORDS, length, p=np.arange(9, 0, -1) / 45))


def tokenizers() -> Tokenizers:
    examples = [{"text": text(np.random.default_rng(0), 400)}]
    config = dataclasses.replace(Config().data, tokenizer=TokenizerConfig(kind="word", vocab=100))
    return Tokenizers.build(config, examples, ("text",))


def config_of(name: str, chunk: int | None = 4, bias: bool = False, **task) -> Config:
    stack = StackConfig(
        layers=0, width=6, embed=EmbedConfig(vocab=VOCAB), encoding=EncodingConfig("none"), norm=NormConfig(kind="none")
    )
    return Config(
        model=ModelConfig(encoder=stack, head=HeadConfig(tied=False, chunk=chunk, bias=bias)),
        data=DataConfig(length=12, batch=8, tokenizer=TokenizerConfig(kind="word")),
        task=TaskConfig(name=name, **{"window": 2, "negatives": 3} | task),
        optimizer=OptimizerConfig(name="sgd"),
    )


def encoded(config: Config, count: int, seed: int = 0) -> list:
    rng, task = np.random.default_rng(seed), tasks.get(config.task.name)
    lengths = rng.integers(1, config.data.length, count)
    return [task.encode(config, tokenizers(), {"text": text(rng, length)}, rng) for length in lengths]


# What is drawn.


def test_a_vocabulary_of_words_counts_them(tmp_path):
    config = dataclasses.replace(Config().data, tokenizer=TokenizerConfig(kind="word", vocab=9))
    found = Tokenizers.build(config, [{"text": "a b a c"}, {"text": "b a <unk>"}], ("text",)).source
    assert dict(zip(found.vocabulary.pieces, found.counts, strict=True)) == {
        **dict.fromkeys(("<pad>", "<s>", "</s>", "<mask>", "<cls>", "<sep>"), 0), "<unk>": 2, "a": 3, "b": 2,
    }  # fmt: skip
    found.save(tmp_path / "t.json")
    again = Tokenizer.load(tmp_path / "t.json")
    assert again.counts == found.counts and again.fingerprint == found.fingerprint
    again.vocabulary.counts = None  # as earlier versions wrote it
    assert Tokenizer(again.vocabulary).fingerprint == Tokenizer(found.vocabulary).fingerprint
    with pytest.raises(ConfigError, match="got one without counts of its words, expected one that this version"):
        _words.frequencies(Tokenizer(again.vocabulary), 0.75)


def test_noise_words_are_drawn_in_proportion_to_the_power_of_their_counts():
    tokenizer, draws = tokenizers().source, 200_000
    noise = _words.draw_noise(config_of("cbow", negatives=4), tokenizer, draws // 4, np.random.default_rng(1))
    counts = np.array(tokenizer.counts) ** 0.75
    found = np.bincount(noise.ravel(), minlength=tokenizer.size) / draws
    np.testing.assert_allclose(found, counts / counts.sum(), atol=0.005)
    assert noise.min() >= 7, "no special token"


def test_frequent_words_are_left_out_with_the_papers_probability():
    tokenizer, length = tokenizers().source, 60_000
    config = config_of("skip_gram", subsample=0.05)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))
    line = " ".join([*("a" for _ in range(length // 2)), *("i" for _ in range(length // 2)), "unknown"])
    kept = Counter(_words.draw_context(config, tokenizer, line, np.random.default_rng(0)).ids.tolist())
    shares = np.array(tokenizer.counts) / 400
    for word in "ai":
        (index,) = tokenizer.encode(word)
        assert kept.pop(index) / (length // 2) == pytest.approx(min((0.05 / shares[index]) ** 0.5, 1.0), abs=0.01)
    assert not kept, "words outside the vocabulary are left out"


def test_windows_are_drawn_evenly_and_hold_the_words_around():
    config, tokenizer = config_of("skip_gram", window=3), tokenizers().source
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, length=5000))
    found = _words.draw_context(config, tokenizer, text(np.random.default_rng(2), 5007), np.random.default_rng(3))
    assert len(found.ids) == 5000 and found.cut == 7
    assert _words.offsets(3).tolist() == [-3, -2, -1, 1, 2, 3]
    for t in (*range(5), 77, *range(4995, 5000)):
        for column, offset in enumerate((-3, -2, -1, 1, 2, 3)):
            if found.inside[t, column]:
                assert found.words[t, column] == found.ids[t + offset] and 0 <= t + offset < 5000
    middle = found.inside[3:-3]
    np.testing.assert_array_equal(middle, middle[:, ::-1])
    np.testing.assert_allclose(middle[:, 3:].mean(axis=0), [1, 2 / 3, 1 / 3], atol=0.02)
    assert not found.inside[0, :3].any() and not found.inside[-1, 3:].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_text_of_one_word_or_none_has_no_pair(name):
    config = config_of(name)
    for line in ("", "unknown words", "a"):
        features = tasks.get(name).encode(config, tokenizers(), {"text": line}, np.random.default_rng(0))
        assert not features["weights"].any() and features["labels"].shape == features["weights"].shape
        assert len(features["source"]) == (line == "a")


# Loss.


def by_hand(name, window, batch, table, output, bias):
    """Loss, its gradients and the accuracy, one pair after the other."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    loss, right, pairs = 0.0, 0, 0
    grads = np.zeros_like(table), np.zeros_like(output), np.zeros_like(bias)
    offsets = [*range(-window, 0), *range(1, window + 1)]
    tokens = batch.source.tokens
    for b, t in np.ndindex(tokens.shape):
        labels, weights = batch.labels[b, t], batch.weights[b, t]
        contexts = [offset for j, offset in enumerate(offsets) if weights[j]]
        if name == "skip_gram":
            inputs, trues = [tokens[b, t]], [tokens[b, t + offset] for offset in contexts]
            noise = labels[2 * window :]
        else:
            inputs, trues = [tokens[b, t + offset] for offset in contexts], [tokens[b, t]] * bool(contexts)
            noise = labels[2 * window + 1 :]
        for true in trues:
            x = np.mean([table[i] for i in inputs], axis=0)
            candidates = [(true, 1.0), *((word, 0.0) for word in noise if word != true)]
            found = [x @ output[word] + bias[word] for word, _ in candidates]
            for score, (word, label) in zip(found, candidates, strict=True):
                loss -= np.log(sigmoid(score if label else -score))
                slope = sigmoid(score) - label
                grads[1][word] += slope * x
                grads[2][word] += slope
                for i in inputs:
                    grads[0][i] += slope * output[word] / len(inputs)
            right += all(found[0] > score for score in found[1:])
            pairs += 1
    return loss, right, pairs, grads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradients_are_those_by_hand(name, packed):
    """With and without the logits of the whole vocabulary, packed rows included: no pair crosses a text."""
    texts = encoded(config_of(name), 6)
    rows = [[texts[0], texts[1]], [texts[2]], [texts[3], texts[4], texts[5]]] if packed else [[one] for one in texts]
    batch = packing.collate(rows, 36 if packed else 12)
    rng = np.random.default_rng(5)
    table, output, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((VOCAB, 6), (VOCAB, 6), VOCAB))
    params = {"source_embed": {"table": table}, "head": {"kernel": output.T, "bias": bias}}
    loss, right, pairs, (of_table, of_output, of_bias) = by_hand(name, 2, batch, table, output, bias)
    for chunk in (4,) if packed else (4, None):
        config = config_of(name, chunk, bias=True)
        module, task = build.build(config.model), tasks.get(name)

        def total(params, config=config, module=module, task=task):
            logits = module.apply({"params": params}, batch, full_logits=False)
            found = task.metrics(config, logits, batch)
            return task.loss(config, logits, batch)["loss"][0], found

        (numerator, found), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        np.testing.assert_allclose(numerator, loss, rtol=1e-5)
        assert [float(x) for x in found["accuracy"]] == [right, pairs] and found["loss"][1] == pairs > 10
        np.testing.assert_allclose(grads["source_embed"]["table"], of_table, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grads["head"]["kernel"].T, of_output, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grads["head"]["bias"], of_bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "mesh"), [("skip_gram", MeshConfig(data=2, fsdp=2, tensor=2)), ("cbow", MeshConfig(data=4, context=2))]
)
def test_a_mesh_and_microbatches_change_nothing(name, mesh):
    config = config_of(name)
    module, variables = build.build(config.model), builders.make(config.model)[1]
    batch = packing.collate([[one] for one in encoded(config, 8)], 12)

    def gradients(mesh, devices, parts):
        settings = dataclasses.replace(config, train=TrainConfig(accumulation=parts))
        place = meshes.make(mesh, jax.devices()[:devices])

        def run(params, batch):
            return step.batch_gradients(settings, module, tasks.get(name), params, {}, batch, jax.random.key(0))

        with jax.set_mesh(place):
            grads, _, sums = jax.device_get(jax.jit(run)(variables["params"], step.shard_batch(batch, place)))
        return grads, sums["loss"]

    single = gradients(MeshConfig(), 1, 1)
    for ours, theirs in zip(jax.tree.leaves(gradients(mesh, 8, 2)), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("model.encoder.layers=1", "layers: got 1, expected 0 for the task skip_gram: the vector of a word may not"),
        ("model.encoder.encoding.kind=sinusoidal", "kind: got 'sinusoidal', expected none for the task skip_gram"),
        ("data.tokenizer.kind=bpe", "tokenizer.kind: got 'bpe', expected word for the task skip_gram"),
        ("data.packing=concat", "packing: got 'concat', expected none or first_fit for the task skip_gram"),
        ("evaluate.decode_examples=3", "decode_examples: got 3, expected 0 for the task skip_gram"),
        ("task.z_loss=0.1", "z_loss: got 0.1, expected 0 for the task skip_gram"),
    ],
)
def test_what_does_not_fit_is_refused(edit, message):
    with pytest.raises(ConfigError, match=message):
        checks.check(overrides.parse([f"--config={recipes.CONFIGS / 'word_vectors.py'}", f"--config.{edit}"]))


def test_the_mean_of_a_window_is_zero_without_context():
    x, inside = np.ones((1, 3, 2), np.float32), np.zeros((1, 3, 4), np.float32)
    inside[0, 1, :2] = 1.0
    np.testing.assert_array_equal(cbow.window_mean(x, inside, 2)[0], [[0, 0], [1, 1], [0, 0]])


# A run.


@pytest.mark.parametrize("name", NAMES)
def test_draws_resume_exactly_and_differ_between_epochs(name):
    config = config_of(name, subsample=0.05)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing="first_fit", batch=2))
    rng = np.random.default_rng(6)
    dataset = Dataset({"train": [{"text": text(rng, 9)} for _ in range(8)]}, "toy")
    run = pipeline.Pipeline(config, dataset, tokenizers(), tasks.get(name))
    batches, states, seen = run.train(), [], []
    for _ in range(8):
        states.append(run.data_state(batches))
        seen.append(next(batches))
    again = run.resume(states[3])
    for batch in seen[3:]:
        jax.tree.map(np.testing.assert_array_equal, next(again), batch)
    epochs = {state["epoch"] for state in states}
    assert len(epochs) > 1 and len({batch.labels.tobytes() for batch in seen}) == len(seen)
    for iterator in (batches, again):
        iterator.close()


def test_a_run_finds_neighbours(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(4)
    for split, lines in (("train", 40), ("valid", 5), ("test", 5)):
        (tmp_path / f"{split}.txt").write_text("\n".join(text(rng, rng.integers(0, 9)) for _ in range(lines)))
    arguments = [
        f"--config={recipes.CONFIGS / 'word_vectors.py'}", f"--config.data.dir={tmp_path}",
        f"--config.data.cache={tmp_path / 'cache'}", "--config.data.splits.train=train.txt", "--config.data.length=16",
        "--config.model.encoder.width=6", "--config.train.steps=2", "--config.data.batch=8",
        "--config.task.subsample=0", "--config.checkpoint.keep_best=0",
    ]  # fmt: skip
    assert cli.main(["train", *arguments, f"--workdir={tmp_path / 'run'}"]) == 0
    model = workdirs.load(tmp_path / "run")
    table = np.asarray(model.params["source_embed"]["table"], np.float64)
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    pieces = list(model.tokenizers.source.vocabulary.pieces)
    index = pieces.index

    def expected(direction, without):
        cosines = {w: float(units[index(w)] @ direction / np.linalg.norm(direction)) for w in WORDS if w not in without}
        return sorted(cosines.items(), key=lambda item: -item[1])

    found = model.nearest("a", top=3)
    assert [row["word"] for row in found] == [word for word, _ in expected(units[index("a")], "a")[:3]]
    np.testing.assert_allclose([row["cosine"] for row in found], [c for _, c in expected(units[index("a")], "a")[:3]],
                               rtol=1e-5, atol=1e-6)  # fmt: skip
    assert len(model.nearest("a", top=100)) == len(WORDS) - 1, "neither the word itself nor special tokens"
    direction = units[index("b")] - units[index("a")] + units[index("c")]
    assert [row["word"] for row in model.analogy("a", "b", "c")] == [word for word, _ in expected(direction, "abc")]
    np.testing.assert_allclose(model.embed(["a"])[0], table[index("a")], rtol=1e-6)

    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb c\n"))
    capsys.readouterr()
    assert cli.main(["decode", f"--workdir={tmp_path / 'run'}"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert [cell.split()[0] for cell in first.split("\t")] == [word for word, _ in expected(units[index("a")], "a")]
    assert second.split("\t")[0].split()[0] == expected(units[index("b")] + units[index("c")], "bc")[0][0]
    with pytest.raises(ConfigError, match="export: got a model with layers 0, expected at least 1"):
        model.save_pretrained(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    for call, message in (
        (lambda: model.nearest("zebra"), "word: got 'zebra', expected one of the vocabulary's 16 words"),
        (lambda: model.nearest(" "), "nearest: got a line without a word"),
        (lambda: model.nearest("a", top=0), "nearest: got top 0, expected at least 1"),
        (lambda: model.fill_mask(["a"]), "use model.nearest"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
