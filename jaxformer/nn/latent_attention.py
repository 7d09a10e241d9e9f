"""Multi-head latent attention: keys and values of all heads are projections of one small vector a token.

DeepSeek-V2 (DeepSeek-AI 2024, section 2.1). The cache holds that vector and one rotated key, which all heads share.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from jaxformer.config import AttentionConfig, EncodingConfig, LatentConfig, NormConfig
from jaxformer.errors import ConfigError
from jaxformer.nn import encodings, kernels, remat
from jaxformer.nn.cache import LayerCache
from jaxformer.nn.kernels import AttentionDropout, dense
from jaxformer.nn.layers import Dense, Norm, parameter
from jaxformer.nn.masks import Mask
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, is_zero


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1 and appendix C), with the signature of `Attention`.

        c = norm(x W_c)         k_h = [c W_k,h ; rotate(x W_r)]         v_h = c W_v,h
        q_h = [c_q W_q,h ; rotate(c_q W_qr,h)]                          c_q = norm(x W_cq), or x without `query_rank`

    The latent c has `latent.rank` channels. The rotated part of a key is one for all heads. Scores are divided by the
    root of the width of a whole query.

    A cache keeps c and the rotated key. Against it there are two ways with equal values: keys and values of all heads
    are made from the cached latents, or W_k is applied to the queries and W_v to the output, so that all heads read
    the latents as one key head (`absorbs`). The kernels take values as wide as keys: the narrower are padded with
    zeros.

    Attributes:
      encoding: position encoding, rope or one without a part in attention.
      width: model width D.
    """

    config: AttentionConfig
    latent: LatentConfig
    encoding: EncodingConfig
    width: int

    def setup(self) -> None:
        config, latent, width = self.config, self.latent, self.width
        dense = functools.partial(Dense, init_scale=config.init_scale)
        norm = NormConfig("rms", epsilon=latent.epsilon)
        read, names = width, "embed"
        if latent.query_rank is not None:
            self.query_down = dense((width, latent.query_rank), ("embed", None), bias=config.bias)
            self.query_norm = Norm(norm)
            read, names = latent.query_rank, None
        self.query = dense((read, config.heads, latent.query_width), (names, "heads", "head"), bias=False)
        self.down = dense((width, latent.rank + latent.rope_width), ("embed", None), bias=config.bias)
        self.latent_norm = Norm(norm)
        self.up = UpProjection(
            (latent.rank, config.heads, latent.content_width + latent.values_width), config.init_scale
        )
        output_bias = config.bias if config.output_bias is None else config.output_bias
        shape = (config.heads, latent.values_width, width)
        self.out = dense(shape, ("heads", "head", "embed"), 2, output_bias)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        position: Any = None,
        memory: None = None,
        cache: LayerCache | None = None,
        layer: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attention output `[B, T, D]`, and the updated cache; see `Attention`.

        Args:
          mask: over T query slots and S key slots, those of `x` or of the cache.
          position: result of the encoding's `shared` hook for the slots of `x`.
          cache: new latents and rotated keys are written at its index, then all of it is attended to.
          layer: not read.

        Raises:
          ConfigError: there is a memory; latent attention is self-attention.
        """
        if memory is not None:
            raise ConfigError("attention.latent: got a memory, expected self-attention; set latent to None")
        latent, encoding = self.latent, encodings.get(self.encoding.kind)
        q = self.query(x if latent.query_rank is None else self.query_norm(self.query_down(x)))
        q = constrain(remat.name_activation(q, "query"), "batch", "length", "act_heads", None)
        compressed = remat.name_activation(self.down(x), "key")
        c, key = self.latent_norm(compressed[..., : latent.rank]), compressed[..., None, latent.rank :]
        content, turned = q[..., : latent.content_width], q[..., latent.content_width :]
        if encoding.rotate is not None:
            turned = encoding.rotate(self.encoding, turned, position)
            key = encoding.rotate(self.encoding, key, position)
        if cache is not None:
            cache = cache.write(c[:, :, None], key)
            cached, key = cache.read()
            c, key = cached[:, :, 0].astype(x.dtype), key.astype(x.dtype)
        up = self.up(x.dtype)
        up_key, up_value = up[..., : latent.content_width], up[..., latent.content_width :]
        if cache is not None and absorbs(latent, x.shape[1], c.shape[1]):
            q = jnp.concatenate([jnp.einsum("bthc,rhc->bthr", content, up_key), turned], axis=-1)
            k, v = jnp.concatenate([c[:, :, None], key], axis=-1), c[:, :, None]
            o = jnp.einsum("bthr,rhv->bthv", self.attend(q, k, v, mask), up_value)
        else:
            k = jnp.einsum("bsr,rhc->bshc", c, up_key)
            v = remat.name_activation(jnp.einsum("bsr,rhv->bshv", c, up_value), "value")
            k = jnp.concatenate([k, jnp.broadcast_to(key, (*k.shape[:-1], latent.rope_width))], axis=-1)
            k, v = (constrain(y, "batch", "length", "act_heads", None) for y in (k, v))
            o = self.attend(jnp.concatenate([content, turned], axis=-1), k, v, mask)
        return self.out(o), cache

    def attend(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B S G K"], v: Float[Array, "B S G _"], mask: Mask
    ) -> Float[Array, "B T H _"]:
        """Attention output per head, as wide as `v`: `[B, T, H, V]`. `q` is not yet scaled."""
        factor = score_factor(self.config, self.latent, self.encoding)
        return self.apply_kernel(q * jnp.asarray(factor, q.dtype), k, v, mask)

    def apply_kernel(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G _"],
        mask: Mask,
        bias: None = None,
    ) -> Float[Array, "B T H _"]:
        """Output `[B, T, H, V]` of the kernel; see `Attention.apply_kernel`."""
        config, dropout = self.config, None
        if not is_zero(config.dropout) and self.has_rng("dropout"):
            dropout = AttentionDropout(config.dropout, self.make_rng("dropout"))
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "probabilities", dense.kernel_weights(q, k, mask, None, config))
        width = max(q.shape[-1], v.shape[-1])
        q, k, padded = (pad_channels(y, width) for y in (q, k, v))
        o = kernels.apply(q, k, padded, mask, None, dropout, config)
        return o[..., : v.shape[-1]]


class UpProjection(nn.Module):
    """The kernel `[R, H, C + V]` from latents to the contents of keys and the values of each head, without a bias."""

    shape: tuple[int, int, int]
    init_scale: float

    @nn.compact
    def __call__(self, dtype: jnp.dtype) -> Float[Array, "R H _"]:
        init = nn.initializers.variance_scaling(
            self.init_scale, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
        )
        return parameter(self, "kernel", init, (None, "heads", "head"), self.shape).astype(dtype)


def absorbs(latent: LatentConfig, queries: int, keys: int) -> bool:
    """True if applying the up-projection to T queries and outputs costs fewer products than making S keys and values.

    Per head, absorbed: T S (2 R + P) + T R (C + V); else T S (C + P + V) + S R (C + V). So a decode step absorbs, and
    reading a long prompt into the cache does not.
    """
    contents = latent.content_width + latent.values_width
    more = queries * keys * (2 * latent.rank - contents)
    return more < (keys - queries) * latent.rank * contents


def score_factor(config: AttentionConfig, latent: LatentConfig, encoding: EncodingConfig) -> float:
    """Factor on products of queries and keys; YaRN's `score_scale` s is (0.1 s ln(factor) + 1)^2 of it."""
    factor = (config.scale_width or latent.query_width) ** -0.5 if config.scale else 1.0
    scaling = encoding.scaling
    if scaling is not None and scaling.score_scale and scaling.factor > 1:
        factor *= (0.1 * scaling.score_scale * math.log(scaling.factor) + 1.0) ** 2
    return factor


def pad_channels(x: Float[Array, "B S G _"], width: int) -> Float[Array, "B S G _"]:
    """`x` with zeros up to `width` channels."""
    return x if x.shape[-1] == width else jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
