"""Distillation: the loss beside its formula, a step on a mesh beside one without, whole runs, and teachers refused."""

import dataclasses
import json

import builders
import chex
import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import checkpoint, losses, tasks
from jaxformer.checkpoint.reading import array_metadata
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    DistillationConfig,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    overrides,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import program
from jaxformer.tasks import _distillation
from jaxformer.train import in_memory, lanes, loop, step, teacher, warm_start
from jaxformer.train.preemption import PreemptionListener

CLASSES = HeadConfig(kind="classes", classes=3)
SETTINGS = DistillationConfig(directory="x", weight=0.3, temperature=3.0)


def test_the_divergence_is_that_of_the_formula_and_pulls_the_student_alone():
    rng, temperature = np.random.default_rng(0), 3.0
    x, u = (rng.normal(0, 3, (2, 3, 5)).astype(np.float32) for _ in range(2))
    weights = np.array([[1, 1, 0], [0, 1, 2]], np.float32)
    total = lambda x, u: losses.distillation(x, u, weights, temperature)[0]  # noqa: E731
    found, (slope, of_teacher) = jax.jit(jax.value_and_grad(total, (0, 1)))(x, u)
    expected, gradient = 0.0, np.zeros(x.shape)
    for row, slot in np.argwhere(weights):
        p, q = (np.exp(each[row, slot].astype(np.float64) / temperature) for each in (u, x))
        p, q = p / p.sum(), q / q.sum()
        expected += weights[row, slot] * temperature**2 * sum(p[v] * (np.log(p[v]) - np.log(q[v])) for v in range(5))
        gradient[row, slot] = weights[row, slot] * temperature * (q - p)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-6)
    assert not of_teacher.any() and losses.distillation(x, u, weights, temperature)[1] == weights.sum()
    assert losses.distillation(u, u, weights, temperature)[0] == pytest.approx(0.0, abs=1e-5)


class Table(nn.Module):
    """Logits that the token alone decides: a step of it compiles at once."""

    @nn.compact
    def __call__(self, batch, full_logits=True):
        table = self.param("table", nn.initializers.normal(), (builders.VOCAB, builders.VOCAB))
        return table[batch.target.tokens]


def test_a_step_on_a_mesh_has_the_gradient_of_both_losses():
    """In two microbatches of unequal numbers of tokens, rows and slots divided over devices."""
    config = Config(
        model=builders.decoder(),
        task=TaskConfig(name="language_modelling", vocab=builders.VOCAB, label_smoothing=0.1),
        train=TrainConfig(accumulation=2),
        mesh=MeshConfig(data=2, fsdp=2, context=2),
        distillation=SETTINGS,
    )
    rng, task = np.random.default_rng(0), tasks.get("language_modelling")
    own, other = (rng.normal(0, 2, (builders.VOCAB, builders.VOCAB)).astype(np.float32) for _ in range(2))
    batch, mesh = builders.batch(config.model, [5, 2, 4, 1, 3, 5, 2, 5], width=6), meshes.make(config.mesh)
    objective = _distillation.objective(config, task)
    with jax.set_mesh(mesh):
        act = lambda p, b, t: step.batch_gradients(config, Table(), objective, p, {}, b, jax.random.key(0), t)  # noqa: E731
        helper = teacher.Teacher(Table(), {"table": other})
        found, _, sums = jax.jit(act)({"table": own}, step.shard_batch(batch, mesh), helper)

    # Slot by slot: the gradient of labels smoothed over the vocabulary, and that of the divergence.
    slow, count, parts = np.zeros(own.shape), 0.0, np.zeros(2)
    for row, slot in np.argwhere(np.asarray(batch.weights)):
        token, label = batch.target.tokens[row, slot], batch.labels[row, slot]
        x, u = own[token].astype(np.float64), other[token].astype(np.float64)
        wanted = 0.9 * np.eye(builders.VOCAB)[label] + 0.1 / builders.VOCAB
        probs, p, q = (np.exp(each) / np.exp(each).sum() for each in (x, u / 3.0, x / 3.0))
        parts += [-(wanted * np.log(probs)).sum(), 9.0 * (p * np.log(p / q)).sum()]
        slow[token] += 0.7 * (probs - wanted) + 0.3 * 3.0 * (q - p)
        count += 1
    np.testing.assert_allclose(found["table"], slow / count, rtol=1e-4, atol=1e-6)
    values = {name: float(value[0] / value[1]) for name, value in jax.device_get(sums).items()}
    labels, divergence = parts / count
    expected = {"loss": 0.7 * labels + 0.3 * divergence, "label_loss": labels, "distillation": divergence}
    assert values == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="batch: got no logits of a teacher, expected them with config.distillation"):
        objective.loss(config, np.zeros((8, 6, builders.VOCAB), np.float32), batch)


# --- runs -------------------------------------------------------------------------------------------------------------


def classifier(tmp_path, **edits):
    """A recipe of a classifier, whose teacher is below."""
    config = overrides.defaults()
    config.task.name, config.model.head.kind = "classification", "classes"
    config.data.source, config.data.dir, config.data.cache = "table", str(tmp_path), str(tmp_path / "cache")
    config.data.splits = {"train": ("all.tsv",), "validation": ("all.tsv[:3]",)}
    config.data.columns = {"text": "text", "label": "label"}
    config.data.tokenizer.kind, config.data.batch, config.data.length = "byte", 2, 8
    config.model.encoder = overrides.section(
        StackConfig,
        **dict(layers=0, width=8, encoding=dict(kind="none"), unroll=1, norm=dict(kind="rms")),
        **dict(attention=dict(heads=1, bias=False), ffn=dict(width=8, bias=False)),
    )
    config.distillation = overrides.section(DistillationConfig, directory=str(tmp_path / "teacher"), weight=1.0)
    config.schedule.kind, config.schedule.peak, config.schedule.warmup = "constant", 0.05, 0
    config.train.steps, config.train.log_every, config.train.trackers = 2, 1, ()
    for path, value in edits.items():
        overrides.override(config, path.replace("__", "."), str(value))
    return overrides.freeze(config)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """The recipe, and a function that makes its teacher: another model, with tokenizer and class names of its own."""
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    (tmp_path / "all.tsv").write_text("text\tlabel\n" + "".join(f"{c * 3} {c}\t{c}\n" for c in "abcab"))

    def make(seed=1):
        tokenizers = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
        stack = builders.stack(
            width=16, layers=0, encoding=EncodingConfig(kind="none"), embed=EmbedConfig(vocab=tokenizers.source.vocab)
        )
        config = Config(
            model=ModelConfig(encoder=stack, head=CLASSES), task=TaskConfig("classification", classes=("a", "b", "c"))
        )
        builders.saved_run(tmp_path / "teacher", config, builders.make(config.model, seed)[1]["params"], tokenizers)

    return classifier(tmp_path), make


def test_a_resumed_run_is_the_uninterrupted_one_and_keeps_its_teacher(prepared, tmp_path, monkeypatch, shared_programs):
    config, make = prepared
    make()
    assert loop.train(config, tmp_path / "whole") == 0
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(rows[0]["distillation"]) and rows[0]["label_loss"] > 0
    assert {"loss", "accuracy"} <= rows[-1].keys() and "distillation" not in rows[-1], "measures are of labels alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreemptionListener, "should_stop", lambda self, number: number == 1)
        assert loop.train(config, tmp_path / "parts") == loop.EXIT_PREEMPTED
    (tmp_path / "teacher").rename(tmp_path / "first")
    make(seed=2)
    with pytest.raises(ConfigError, match="teacher, whose parameters are no longer those that the run began with, exp"):
        loop.train(config, tmp_path / "parts")
    (tmp_path / "teacher").rename(tmp_path / "second")
    (tmp_path / "first").rename(tmp_path / "teacher")
    assert loop.train(config, tmp_path / "parts") == 0
    mine, theirs = (checkpoint.load_run(tmp_path / name) for name in ("parts", "whole"))
    chex.assert_trees_all_equal(jax.device_get(mine.params), jax.device_get(theirs.params))
    arrays = array_metadata(checkpoint.list_checkpoints(tmp_path / "whole" / "checkpoints" / "last")[0])
    sizes = [x.shape for x in jax.tree.leaves(arrays) if hasattr(x, "shape")]
    assert sizes and not any(16 in shape for shape in sizes), "the teacher's width is nowhere in a checkpoint"


def test_a_teacher_on_a_mesh_is_divided_as_any_model_is():
    config = Config(model=builders.decoder(), task=TaskConfig(name="language_modelling"), distillation=SETTINGS)
    model, mesh = (
        builders.decoder(layers=1, width=16),
        meshes.make(MeshConfig(data=1, fsdp=4), jax.devices()[:4]),
    )
    read = lambda view, params: jax.tree.map(lambda x: jax.device_put(np.ones(x.shape), x.sharding), params)  # noqa: E731
    with jax.set_mesh(mesh):
        found = teacher.load(config, mesh, None, warm_start.InitFormat(lambda view: (model, None), read))
    assert found.module.config.decoder.width == 16
    kernel = found.params["decoder"]["blocks"]["ffn"]["in"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"head": HeadConfig(kind="classes", classes=4)}, "got a teacher with 4 classes, expected 3, as the run has"),
        ({"head": HeadConfig()}, "got a teacher with a head of tokens, expected classes"),
        (
            {"encoder": None, "decoder": builders.stack()},
            "got a teacher with decoder, expected encoder, as the run has",
        ),
        (
            {"encoder": builders.stack(embed=EmbedConfig(vocab=builders.VOCAB, kinds=2))},
            "with 2 token types, expected 0; set config.model.encoder.embed.kinds",
        ),
        (
            {"encoder": builders.stack(attention=AttentionConfig(heads=3))},
            "got x, whose model does not fit the run: config.model.encoder.width: got 8, expected a multiple of",
        ),
        (
            {"encoder": builders.stack(norm=NormConfig(kind="batch"))},
            "got a model with batch norm, expected one without",
        ),
        ({}, "got x, which lacks a head for the task, expected a trained one"),
    ],
)
def test_a_teacher_of_other_outputs_or_inputs_is_refused(own, message):
    student = dataclasses.replace(builders.encoder(), head=CLASSES)
    config = Config(model=student, task=TaskConfig(name="classification"), distillation=SETTINGS)
    model, mesh = dataclasses.replace(student, **own), meshes.make(MeshConfig(data=1), jax.devices()[:1])
    directory = warm_start.InitFormat(lambda view: (model, None), lambda view, params: params)
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=message) as error:
        teacher.load(config, mesh, None, directory)
    assert "\n" not in str(error.value) and str(error.value).startswith("config.distillation.directory: got ")


def test_a_teacher_of_other_tokens_or_names_is_refused(tmp_path, monkeypatch):
    tokens = {
        kind: Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind=kind)), [{"text": "ab"}], ("text",))
        for kind in ("byte", "character")
    }
    model, mesh = (
        dataclasses.replace(builders.encoder(), head=CLASSES),
        meshes.make(MeshConfig(data=1), jax.devices()[:1]),
    )
    config = Config(
        model=model,
        task=TaskConfig("classification", classes=("a", "b", "c")),
        distillation=DistillationConfig(str(tmp_path)),
    )
    directory = warm_start.InitFormat(lambda view: (model, tokens["character"]), lambda view, params: params)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ConfigError, match="got a teacher with another source tokenizer than the ru"),
    ):
        teacher.load(config, mesh, tokens["byte"], directory)
    padded = DataConfig(tokenizer=TokenizerConfig(kind="byte", multiple=64))
    teacher._check_tokens(tokens["byte"], Tokenizers.build(padded, [], ("text",)))  # the same ids of texts

    (tmp_path / "checkpoints" / "last" / "1").mkdir(parents=True)
    other = dataclasses.replace(config, task=TaskConfig("classification", classes=("a", "c", "b")))
    (tmp_path / "config.json").write_text(overrides.to_json(other))
    monkeypatch.setattr(warm_start, "_fetched", {"gs://bucket/teacher": tmp_path}.get)
    for place in (str(tmp_path), "gs://bucket/teacher"):
        of_place = dataclasses.replace(config, distillation=DistillationConfig(place))
        with (
            jax.set_mesh(mesh),
            pytest.raises(ConfigError, match="of the classes a, c, b, expected those of the run in th"),
        ):
            teacher.load(of_place, mesh, tokens["character"], directory)


def test_what_a_teacher_does_not_go_with_is_refused(tmp_path):
    base = Config(model=builders.decoder(), task=TaskConfig(name="language_modelling"), distillation=SETTINGS)
    overrides.check(base)
    chunked = dataclasses.replace(base.model, head=HeadConfig(chunk=4))
    for changed, message in (
        ({"distillation": DistillationConfig()}, "config.distillation.directory: got '', expected the workdir or Hugg"),
        ({"task": TaskConfig(name="preference")}, "config.task.name: got 'preference', expected with config.distill"),
        ({"model": chunked}, "config.model.head.chunk: got 4, expected None with config.distillation"),
        (
            {"task": TaskConfig("classification", class_weights=("a=2",)), "model": builders.classifier()},
            "config.task.class_weights: got .*, expected \\(\\) with config.distillation",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            overrides.check(dataclasses.replace(base, **changed))
    with pytest.raises(ConfigError, match="weight: got 0"):
        classifier(tmp_path, distillation__weight=0)
    for refuse in (lanes.differing_rates, lambda configs: in_memory.Trainer(*configs), lambda c: program.resolve(*c)):
        with pytest.raises(ConfigError, match="config.distillation: got a teacher, expected None"):
            refuse([base])
    added = overrides.edit(dataclasses.replace(base, distillation=None), ["--config.distillation.directory=d"])
    assert added.distillation == DistillationConfig(directory="d")
