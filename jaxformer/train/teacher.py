"""The teacher of a distillation: a trained model whose parameters are read, never changed and never saved."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
from flax import linen as nn

from jaxformer.checkpoint import find_run
from jaxformer.config import Config, InitConfig, ModelConfig, OptimizerConfig, TrainConfig, checks, overrides
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.train.warm_start import InitFormat, init_directory
from jaxformer.types import Array, Batch, PyTree

PATH = "config.distillation.directory"


class Teacher(flax.struct.PyTreeNode):
    """A module with its parameters, an argument of the train step.

    Attributes:
      params: sharded by the same rules as those of the model that is trained.
    """

    module: nn.Module = flax.struct.field(pytree_node=False)
    params: PyTree

    def logits(self, batch: Batch) -> Array:
        """Its logits for a batch, `[B, T, V]` or `[B, C]`. Nothing in them is random."""
        logits: PyTree = self.module.apply({"params": self.params}, batch)
        return logits


def load(config: Config, mesh: jax.sharding.Mesh, tokenizers: Tokenizers | None, init_format: InitFormat) -> Teacher:
    """The teacher that `config.distillation` names, on the current mesh.

    Args:
      config: the resolved config of the run.
      tokenizers: those of the run.
      init_format: reads the directory.

    Raises:
      ConfigError: there is no model, or its logits are not of the run's tokens or classes, or it does not read the same
        input, or does not fit the run's data or mesh.
    """
    settings = config.distillation
    if settings is None:
        raise ValueError("teacher: got a config without distillation, expected one with it")
    view = dataclasses.replace(
        config,
        model=ModelConfig(dtype=config.model.dtype, head=config.model.head),
        optimizer=OptimizerConfig(freeze=("*",)),  # no optimizer state, when memory is checked
        train=TrainConfig(),
        init=InitConfig(directory=settings.directory),
        distillation=None,
    )
    try:
        model, own_tokenizers = init_format.read_model(view)
        _check_tokens(tokenizers, own_tokenizers)
        _check_classes(config, view)
        head = dataclasses.replace(model.head, chunk=None)
        model = dataclasses.replace(model, dtype=config.model.dtype, head=head)
        vocabularies = (None, None) if tokenizers is None else (tokenizers.source.vocab, tokenizers.target.vocab)
        model = build.resolve(model, *vocabularies, config.model.head.classes)
        _check_same_streams(model, config.model)
        view = overrides.freeze(dataclasses.asdict(dataclasses.replace(view, model=model)))
        checks.mesh.check_divisibility(view, mesh.shape)
        checks.size.check_memory(view, mesh.shape, meshes.device_memory(mesh))
        module = build.build(model)
        boxed = build.shapes(module)
        if set(boxed) != {"params"}:
            raise ConfigError(f"{PATH}: got a model with batch norm, expected one without running statistics")
        layout = rules.shardings(boxed, mesh)
        shaped = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), nn.meta.unbox(boxed), layout
        )
        params = init_format.read_params(view, shaped["params"])
        if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(params)):
            raise ConfigError(
                f"{PATH}: got {settings.directory}, which lacks a head for the task, expected a trained one"
            )
        return Teacher(module, params)
    except ConfigError as error:
        text = str(error).replace("config.init.directory", PATH)
        where = "" if text.startswith(PATH) else f"{PATH}: got {settings.directory}, whose model does not fit the run: "
        raise ConfigError(f"{where}{text}") from None


def _check_tokens(tokenizers: Tokenizers | None, own: Tokenizers | None) -> None:
    """Raises a ConfigError if the teacher has another tokenizer than the run."""
    if tokenizers is None or own is None:
        return  # the sizes are compared all the same
    side = tokenizers.differing_side(own)
    if side is not None:
        raise ConfigError(
            f"{PATH}: got a teacher with another {side} tokenizer than the run's, expected the same tokens; set "
            "data.tokenizer.kind=file and data.tokenizer.path to a file of the teacher's tokenizer"
        )


def _check_classes(config: Config, view: Config) -> None:
    """Raises a ConfigError if the teacher's classes are named, and not the run's in their order.

    Args:
      view: the config whose `init.directory` is the teacher's.
    """
    if config.model.head.kind != "classes":
        return
    try:
        workdir, _ = find_run(init_directory(view).absolute())
    except ConfigError:  # a directory of another format: only the number of its classes is compared
        return
    own = overrides.read(workdir).task.classes
    if own and config.task.classes and own != config.task.classes:
        expected = f"those of the run in their order, {', '.join(config.task.classes)}"
        raise ConfigError(f"{PATH}: got a teacher of the classes {', '.join(own)}, expected {expected}")


def _check_same_streams(model: ModelConfig, student: ModelConfig) -> None:
    """Raises a ConfigError if the teacher reads other streams than the run's batches have, or has other logits."""

    def sides(model: ModelConfig) -> str:
        return " and ".join(side for side in ("encoder", "decoder") if getattr(model, f"has_{side}"))

    if sides(model) != sides(student):
        raise ConfigError(f"{PATH}: got a teacher with {sides(model)}, expected {sides(student)}, as the run has")
    if model.head.kind != student.head.kind or model.head.relation:
        raise ConfigError(f"{PATH}: got a teacher with a head of {model.head.kind}, expected {student.head.kind}")
    own, part = (each.decoder_part or each.encoder_part for each in (model, student))
    if own is None or part is None:
        raise ConfigError(f"{PATH}: got a model without an encoder or decoder, expected one that reads tokens")
    if own.embed.kinds != part.embed.kinds:
        where = f"config.model.{student.parts[-1]}.embed.kinds"
        raise ConfigError(
            f"{PATH}: got a teacher with {own.embed.kinds} token types, expected {part.embed.kinds}; set {where}"
        )
    sizes = [m.head.classes if m.head.kind == "classes" else p.embed.vocab for m, p in ((model, own), (student, part))]
    if sizes[0] != sizes[1]:
        noun = "classes" if student.head.kind == "classes" else "rows of the vocabulary"
        raise ConfigError(f"{PATH}: got a teacher with {sizes[0]} {noun}, expected {sizes[1]}, as the run has")
