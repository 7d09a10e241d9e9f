"""ELECTRA: an encoder that detects tokens which a small masked language model has replaced (Clark et al. 2020).

In training the generator reads a text with masked tokens and gives a distribution p_G for each of them. A token sampled
from it takes the place of each masked one, and the discriminator reads the result (section 2):

    x_hat_i ~ p_G(x_i | x_masked) for masked i,    x_corrupt = x with x_hat_i at masked i

No gradient flows through the sampling. The parameters at the top are the discriminator's, as in an ordinary encoder;
the generator's are below "generator".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float32, Int, Key, UInt32

from jaxformer.config import GeneratorConfig, ModelConfig, StackConfig
from jaxformer.models.transformer import Transformer
from jaxformer.nn.layers import Embed
from jaxformer.types import Array, Batch, PyTree, Stream


class Detection(flax.struct.PyTreeNode):
    """Outputs of the generator and the discriminator for a batch.

    Attributes:
      generated: float32 `[B, T, V]`, the generator's logits.
      tokens: int32 `[B, T]`, the source with sampled tokens in place of the masked ones.
      detected: float32 `[B, T, 2]`, the discriminator's logits of "original" and "replaced".
    """

    generated: Array
    tokens: Array
    detected: Array


class Generator(Transformer):
    """The masked language model of `config`. `base` is the embedding whose table it uses; None: it has its own."""

    base: Embed | None = None

    @nn.nowrap
    def make_source_embed(self, encoder: StackConfig, dtype: jnp.dtype) -> Embed:
        return Embed(encoder.embed, encoder.width, dtype, base=self.base)


class Electra(Transformer):
    """The discriminator, an encoder with a head of two classes per slot, and its generator."""

    def setup(self) -> None:
        config = generator_model(self.config)
        # Whichever owns the table is made first.
        if self.sharing == "tied":
            super().setup()
            self.generator = Generator(config, base=self.source_embed)
        else:
            self.generator = Generator(config)
            super().setup()

    @property
    def sharing(self) -> str:
        """How the two share their token embeddings."""
        return required_generator(self.config).sharing

    @nn.nowrap
    def make_source_embed(self, encoder: StackConfig, dtype: jnp.dtype) -> Embed:
        base = self.generator.source_embed if self.sharing == "disentangled" else None
        return Embed(encoder.embed, encoder.width, dtype, base=base, residual=base is not None)

    def __call__(  # ty: ignore[incompatible-method-override]
        self, batch: Batch, full_logits: bool = True
    ) -> Float32[Array, "B T C"] | Detection:
        """The `Detection` of a batch with labels; without them, the discriminator's logits of the source as it is.

        The source has masked tokens where `batch.weights` is above 0, and `batch.labels` are the original tokens.
        """
        if self.is_initializing():
            self.generator(batch)
        if batch.weights is None:
            return cast(Array, super().__call__(batch))  # slots and classes have no deferred logits
        source, generated = batch.side("source"), cast(Array, self.generator(batch))
        masked = (batch.weights > 0) & (source.slots.segment > 0)
        tokens = jnp.where(masked, self.sample(source, generated), source.tokens)
        corrupted = batch._replace(source=source._replace(tokens=tokens))
        return Detection(generated, tokens, cast(Array, super().__call__(corrupted)))

    def sample(self, source: Stream, logits: Float32[Array, "B T V"]) -> Int[Array, "B T"]:
        """A token for each slot, drawn from its logits, of ids below `generator.vocab`.

        In training it is drawn from the dropout key. Otherwise from a constant key and the tokens of the row, so that
        a text has the same draws in any batch, at any padding and on any mesh.
        """
        limit = required_generator(self.config).vocab or logits.shape[-1]
        probs = jax.nn.softmax(jnp.where(jnp.arange(logits.shape[-1]) < limit, logits, -jnp.inf))
        if self.has_rng("dropout"):
            uniform = jax.random.uniform(self.make_rng("dropout"), source.tokens.shape)
        else:
            keys = jax.vmap(row_key)(jnp.where(source.slots.segment > 0, source.tokens, -1))
            uniform = jax.vmap(lambda key: jax.random.uniform(key, source.tokens.shape[1:]))(keys)
        return jnp.minimum(draw(jax.lax.stop_gradient(probs), uniform), limit - 1)


def draw(probs: Float32[Array, "*batch V"], uniform: Float32[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Ids drawn from `probs` by inverting their cumulative sum at `uniform`, numbers in [0, 1).

    On a CPU this takes a third of the time of Gumbel noise for every logit.
    """
    total = jnp.cumsum(probs, axis=-1)
    return jnp.sum(total <= uniform[..., None] * total[..., -1:], axis=-1, dtype=jnp.int32)


def row_key(tokens: Int[Array, " T"]) -> Key[Array, ""]:
    """A key for a row of tokens, the same whatever padding (-1) follows them."""
    return jax.random.fold_in(jax.random.key(0), checksum(tokens))


def checksum(tokens: Int[Array, " T"]) -> UInt32[Array, ""]:
    """A number of a row of tokens that depends on their order; padding (-1) adds 0."""
    # Knuth's multiplicative constant; products wrap around at 2^32.
    slots = jnp.arange(1, tokens.shape[0] + 1, dtype=jnp.uint32) * jnp.uint32(2654435761)
    return jnp.sum((tokens + 1).astype(jnp.uint32) * (slots | 1), dtype=jnp.uint32)


def required_generator(model: ModelConfig) -> GeneratorConfig:
    """The generator of a model that has one.

    Raises:
      ValueError: it has none.
    """
    if model.generator is None:
        raise ValueError("model.generator: got None, expected a section")
    return model.generator


def generator_model(model: ModelConfig) -> ModelConfig:
    """The config of the generator as a model by itself."""
    generator = required_generator(model)
    return ModelConfig(encoder=generator.encoder, head=generator.head, dtype=model.dtype)


def discriminator_params(model: ModelConfig, params: Mapping[str, Any]) -> dict[str, PyTree]:
    """The parameters of the discriminator by itself: those of `model` without its generator."""
    own = {name: part for name, part in params.items() if name != "generator"}
    if required_generator(model).sharing == "disentangled":
        embed = dict(own["source_embed"])
        embed["table"] = params["generator"]["source_embed"]["table"] + embed.pop("delta")
        own["source_embed"] = embed
    return own
