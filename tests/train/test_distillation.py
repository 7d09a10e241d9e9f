"""Distillation: the loss beside its formula, a step on a mesh beside one without, whole runs, and teachers refused."""

import dataclasses
import json

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import checkpoint, losses, tasks
from jaxformer.checkpoint.reading import array_metadata
from jaxformer.config import (
    AdapterConfig,
    Config,
    ConfigError,
    DataConfig,
    DistillationConfig,
    EmbedConfig,
    HeadConfig,
    MeshConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    overrides,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import program
from jaxformer.tasks import _distillation
from jaxformer.train import freezing, in_memory, lanes, loop, step, teacher
from jaxformer.train.preemption import PreemptionListener

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


def test_a_step_on_a_mesh_has_the_gradient_of_both_losses():
    """Of adapters, in two microbatches of unequal numbers of tokens, with a teacher that is sharded, too."""
    model = dataclasses.replace(builders.decoder(layers=1), adapter=AdapterConfig(rank=2, targets=("attention",)))
    config = Config(
        model=model,
        task=TaskConfig(name="language_modelling", vocab=builders.VOCAB, label_smoothing=0.1),
        train=TrainConfig(accumulation=2),
        mesh=MeshConfig(data=2, fsdp=2, tensor=2),
        distillation=SETTINGS,
    )
    module, variables = builders.make(model, seed=1)
    large, theirs = builders.make(builders.decoder(layers=1, width=16), seed=2)
    task, batch = tasks.get("language_modelling"), builders.batch(model, [5, 2, 4, 1, 3, 5, 2, 5])
    params, other, mesh = variables["params"], theirs["params"], meshes.make(config.mesh)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(value, rules.shardings(build.shapes(each), mesh)["params"])
            for each, value in ((module, params), (large, other))
        ]
        objective = _distillation.objective(config, task)
        act = lambda p, b, t: step.batch_gradients(config, module, objective, p, {}, b, jax.random.key(0), t)  # noqa: E731
        helper = teacher.Teacher(large, placed[1])
        grads, _, sums = jax.jit(act)(placed[0], step.shard_batch(batch, mesh), helper)

    @jax.jit
    def slow(trained, frozen):
        def loss(trained):
            logits = module.apply({"params": step.overlaid(frozen, trained)}, batch)
            u = large.apply({"params": other}, batch)
            labels, count = task.loss(config, logits, batch)["loss"]
            p = jax.nn.softmax(u / 3.0)
            kl = 9.0 * jnp.sum(p * (jnp.log(p) - jax.nn.log_softmax(logits / 3.0)), -1)
            kl = jnp.sum(kl * batch.weights)
            return (0.7 * labels + 0.3 * kl) / count, (labels, kl, count)

        return jax.value_and_grad(loss, has_aux=True)(trained)

    (total, (labels, kl, count)), expected = slow(*freezing.split(config, params))
    found = {name: value[0] / value[1] for name, value in jax.device_get(sums).items()}
    parts = {"loss": total, "label_loss": labels / count, "distillation": kl / count}
    assert found == pytest.approx({name: float(x) for name, x in parts.items()}, rel=1e-4)
    chex.assert_trees_all_close(jax.device_get(grads), jax.device_get(expected), rtol=1e-3, atol=1e-5)
    assert sums["loss"][1] == count
    with pytest.raises(ConfigError, match="batch: got no logits of a teacher, expected them with config.distillation"):
        objective.loss(config, jnp.zeros((8, 5, builders.VOCAB)), batch)


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
        **dict(layers=1, width=8, encoding=dict(kind="rope"), unroll=1, norm=dict(kind="rms")),
        **dict(attention=dict(heads=1, bias=False), ffn=dict(width=8, bias=False)),
    )
    config.distillation = overrides.section(DistillationConfig, directory=str(tmp_path / "teacher"), weight=1.0)
    config.schedule.kind, config.schedule.peak, config.schedule.warmup = "constant", 0.05, 0
    config.train.steps, config.train.log_every, config.train.trackers = 3, 1, ()
    for path, value in edits.items():
        overrides.override(config, path.replace("__", "."), str(value))
    return overrides.freeze(config)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """The recipe, and a function that makes its teacher: another model, with tokenizer and class names of its own."""
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    (tmp_path / "all.tsv").write_text("text\tlabel\n" + "".join(f"{c * 3} {c}\t{c}\n" for c in "abcab"))

    def make(seed=1, directory="teacher", classes=("a", "b", "c"), kind="byte", **stack):
        data = DataConfig(tokenizer=TokenizerConfig(kind=kind))
        tokenizers = Tokenizers.build(data, [{"text": "a b c"}], ("text",))
        own = {"width": 16, "embed": EmbedConfig(vocab=tokenizers.source.vocab), "layers": 1} | stack
        parts = {"decoder" if "causal" in stack else "encoder": builders.stack(**own)}
        model = dataclasses.replace(
            builders.encoder(), **{"encoder": None, **parts}, head=HeadConfig(kind="classes", classes=len(classes))
        )
        config = Config(model=model, task=TaskConfig(name="classification", classes=classes))
        builders.saved_run(tmp_path / directory, config, builders.make(model, seed)[1]["params"], tokenizers)

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


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"classes": ("a", "c", "b")},
            "got a teacher of the classes a, c, b, expected those of the run in their order",
        ),
        ({"classes": ("a", "b")}, "got a teacher of the classes a, b, expected"),
        ({"kind": "character"}, "got a teacher with another source tokenizer than the run's, expected the same tokens"),
        ({"causal": None}, "got a teacher with decoder, expected encoder, as the run has"),
        (
            {"embed": EmbedConfig(vocab=264, kinds=2)},
            "with 2 token types, expected 0; set config.model.encoder.embed.k",
        ),
        (None, "teacher: got nothing there, expected a workdir"),
    ],
)
def test_a_teacher_of_other_outputs_or_inputs_is_refused(prepared, tmp_path, own, message):
    config, make = prepared
    if own is not None:
        make(**own)
    with pytest.raises(ConfigError, match=message) as error:
        loop.train(config, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


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
