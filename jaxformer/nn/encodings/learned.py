"""A learned vector for every position, added to the input (Gehring et al. 2017; BERT and GPT-2)."""

from __future__ import annotations

from flax import linen as nn
from jaxtyping import Float32

from jaxformer.config import ConfigError, EncodingConfig
from jaxformer.nn.encodings import Encoding
from jaxformer.nn.layers import look_up
from jaxformer.types import Array, Slots


class Learned(nn.Module):
    """Rows of a table `[max_length, D]`, initially normal with deviation 0.02 (as in BERT and GPT-2).

    Position p reads row p + `config.offset`: some models keep the first rows for padding (RoBERTa, BART).

    Positions are data, so only the number of slots can be checked when the model is traced. A position outside the
    table reads NaN rather than some other position's row.

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
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (None, "table"))
        table = self.param("table", init, (self.config.max_length, self.width))
        return look_up(table, slots.position + self.config.offset)


ENCODING = Encoding(embed=Learned)
