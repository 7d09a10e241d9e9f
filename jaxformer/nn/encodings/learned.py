"""Learned absolute positions: a vector for each position, added to the input (Gehring et al. 2017; BERT, GPT-2)."""

from __future__ import annotations

from flax import linen as nn
from jaxtyping import Float32

from jaxformer.config import EncodingConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.encodings import Encoding
from jaxformer.nn.layers import embedding_lookup, parameter
from jaxformer.types import Array, Slots


class Learned(nn.Module):
    """Rows of a table `[max_length, D]`, initially normal with deviation 0.02 (as in BERT and GPT-2).

    Position p reads row p + `config.offset`; RoBERTa and BART reserve the first rows for padding. A position outside
    the table gives NaN: positions are data, so tracing can only check the number of slots.

    Raises:
      ConfigError: there are more slots than rows.
    """

    config: EncodingConfig
    width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Float32[Array, "B T D"]:
        rows, length = self.config.max_length - self.config.offset, slots.position.shape[1]
        if length > rows:
            raise ConfigError(
                f"encoding.max_length: got {rows}, expected at least the sequence length {length}; raise it"
            )
        shape = (self.config.max_length, self.width)
        table = parameter(self, "table", nn.initializers.normal(0.02), (None, "table"), shape)
        return embedding_lookup(table, slots.position + self.config.offset)


ENCODING = Encoding(embed=Learned)
