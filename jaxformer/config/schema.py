"""The schema of a run's config: every field with its type, its allowed values, its default and its meaning.

A field is one line. Its type says which values are allowed (`constraints.py` has the named ranges and folders), and the
comment beside it is its text in docs/config.md. Recipes in `configs/` edit an `ml_collections.ConfigDict` generated
from these dataclasses, and `overrides.freeze` turns that back into them. A section whose value is None is a part that
the run does not have: a model without `decoder` is an encoder, a recipe without `ema` averages no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from jaxformer.config.constraints import (
    AtLeastOne,
    Beams,
    CellLayers,
    Count,
    EncodingName,
    KernelName,
    Layers,
    Length,
    MoreThanOne,
    NotNegative,
    OptionsOf,
    Positive,
    PositiveInt,
    PositiveShare,
    Probability,
    ProperShare,
    Range,
    Rate,
    Seed,
    SourceName,
    TaskName,
    TrackerName,
)

Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "tanh", "relu_squared", "mish", "sigmoid"]


@dataclass(frozen=True)
class EmbedConfig:
    """Token embedding of the encoder or the decoder."""

    vocab: PositiveInt | None = None  # rows of the table; None: the tokenizer's vocabulary, padded
    width: PositiveInt | None = None  # width of the table; None: the model width; other: factorised (ALBERT)
    projection: Literal["table", "sum"] = "table"  # with `width`, what is projected to the model width: the rows of the
    # table (OPT), or the sum with positions and token types after its norm and dropout (ALBERT, ELECTRA)
    projection_bias: bool = False  # bias of the projection from the table's width to the model width
    scale: bool = False  # multiply by sqrt(model width) (Vaswani et al. 2017, section 3.4)
    kinds: Count = 0  # number of token types (BERT's segments A and B); 0: none
    norm: bool = False  # normalise the sum of the embeddings, as BERT does
    norm_before_positions: bool = False  # this norm reads the unscaled tokens, before positions are added
    # (BlenderbotSmall's decoder)
    dropout: Rate = 0.0  # dropout rate of the embeddings
    dropout_first: bool = False  # with `norm`: this dropout is before the norm (BigBird); False: after it
    deviation: Positive | None = None  # standard deviation of the initial table; None: width ** -0.5
    pad: Count | None = None  # token id whose row starts at zero and gets no gradient from look-ups; None: none
    matches: bool = (
        False  # encoders with `kinds`: add learned vectors to tokens that are in both texts of a pair, one of
    )
    # them weighed by rarity (exact match; Chen et al. 2017, Weissenborn et al. 2017)
    unmatched: tuple[Count, ...] | None = None  # matches: ids that match nothing; None: the special tokens

    @property
    def sum_width(self) -> int | None:
        """Width of the sum of the embeddings where it is projected; None where it has the model width."""
        return self.width if self.projection == "sum" else None


@dataclass(frozen=True)
class RopeScalingConfig:
    """Scaling of rotary frequencies for texts longer than those of the original training."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = "linear"  # method
    factor: AtLeastOne = 1.0  # ratio of the new length to the original one
    original: PositiveInt = 2048  # dynamic, llama3, yarn, longrope: maximum length of the original training
    low: Positive = 1.0  # llama3: frequencies of fewer turns over the original length are divided by `factor`
    high: Positive = 4.0  # llama3: frequencies of more turns stay unchanged
    slow: Positive = 1.0  # yarn: as `low`; between the two bounds the channels are interpolated linearly
    fast: Positive = 32.0  # yarn: as `high`
    magnitude: Positive | None = None  # yarn, longrope: factor on cosines and sines; None: 0.1 ln(factor) + 1 (yarn),
    # sqrt(1 + ln(factor) / ln(original)) (longrope)
    short: tuple[Positive, ...] = ()  # longrope: divisor of each pair's frequency in texts of up to `original` tokens
    long: tuple[Positive, ...] = ()  # longrope: the same in longer texts
    whole: bool = True  # yarn: round the two bounds outwards to integer channels
    score_scale: NotNegative = 0.0  # yarn with attention.latent: s, scores are also multiplied by
    # (0.1 s ln(factor) + 1)^2 (DeepSeek's mscale_all_dim); 0: they are not


@dataclass(frozen=True)
class EncodingConfig:
    """Position encoding. `kind` names a file of `jaxformer/nn/encodings/`."""

    kind: EncodingName = "sinusoidal"  # how positions enter the model
    max_length: PositiveInt = 512  # learned: rows of the table, including those before `offset`
    offset: Count = 0  # learned, sinusoidal: row of position 0 (BART, OPT, XGLM: 2; RoBERTa: padding id + 1)
    base: MoreThanOne = 10000.0  # sinusoidal, rope, transformer_xl: base of the geometric series of wavelengths
    window_base: MoreThanOne | None = None  # rope: base in the layers with attention.window, which have no scaling
    # (Gemma 3, ModernBERT); None: these layers are as the others
    concatenated: bool = False  # sinusoidal: all sines, then all cosines (Marian); False: sine and cosine alternate
    scaling: RopeScalingConfig | None = None  # rope: scaling for longer texts; None: no scaling
    fraction: PositiveShare = 1.0  # rope: fraction of the head width that is rotated
    interleaved: bool = False  # rope: a rotated pair is two neighbouring channels; False: one of each half
    rotate_values: bool = False  # rope: values are rotated, too (RoFormer's rotary_value)
    buckets: Annotated[int, Range(2)] | None = 32  # t5: number of relative buckets; deberta: per direction; None:
    # one bucket per distance (deberta only)
    max_distance: PositiveInt = 128  # t5, deberta: larger distances share the last bucket
    content_to_position: bool = True  # deberta: add the score of queries with distance vectors
    position_to_content: bool = True  # deberta: add the score of keys with distance vectors
    share_projections: bool = False  # deberta: project distances with the query and key weights; False: own weights
    norm: NormConfig | None = None  # deberta: normalisation of the table of distances; None: none
    dropout: Rate = 0.0  # deberta: dropout rate of the table of distances, drawn anew in every layer
    absolute: bool = False  # deberta: also add a learned vector per position (`max_length` rows) to the embeddings
    bidirectional: bool | None = None  # t5: separate buckets for later keys; None: where the stack is not causal
    clamp: PositiveInt | None = None  # transformer_xl: maximum distance, larger ones count as this; None: no maximum


@dataclass(frozen=True)
class NormConfig:
    """Normalisation."""

    kind: Literal["layer", "rms", "batch", "none"] = "layer"  # layer norm, RMS norm, batch norm, or none
    order: Literal["pre", "post", "sandwich", "res_post"] = "pre"  # before or after each sub-layer; sandwich: before
    # and after; res_post: on its output alone, before that is added to the residual stream (Swin V2, OLMo 2)
    epsilon: Positive = 1e-5  # added to the variance (rms: to the mean square)
    scale: bool = True  # layer, rms: multiply by a learned scale
    bias: bool = True  # layer: add a learned bias
    offset: Probability = 0.0  # rms: constant added to the learned scale, which starts at 1 - offset (Gemma: 1)
    momentum: Rate = 0.99  # batch: decay of the running statistics per training step
    final: bool | None = None  # normalise after the last layer; None: exactly where the order is not post


@dataclass(frozen=True)
class SparseConfig:
    """Block-sparse self-attention between the blocks of a row's slots (BigBird, Zaheer et al. 2020, section 2).

    Queries of the first and the last block see all keys. Other queries see the first and the last block, their own
    block and the two beside it, and `random` random blocks.
    """

    size: PositiveInt = 64  # slots of a block; the last block of a row may have fewer
    random: Count = 3  # random blocks of a query block. As in the inference of the transformers library, which draws
    # none, each of them is the first block: its keys count 1 + random times
    short: Literal["full", "sparse"] = "full"  # rows of at most 5 + 2 * random blocks see all keys (full), or blocks
    # as other rows (sparse)


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    A cache holds `rank` + `rope_width` numbers a token and layer.
    """

    rank: PositiveInt = 512  # channels of the latent vector, of which all heads' keys and values are projections
    query_rank: PositiveInt | None = None  # channels of a latent vector of the queries; None: projected from the input
    content_width: PositiveInt = 128  # channels of a query or key head without positions
    rope_width: PositiveInt = 64  # further channels, which the encoding rotates; all heads share the key's
    value_width: PositiveInt | None = None  # channels of a value head; None: as `content_width`
    epsilon: Positive = 1e-6  # epsilon of the RMS norms of the latent vectors

    @property
    def query_width(self) -> int:
        """Width of a query or key head."""
        return self.content_width + self.rope_width

    @property
    def values_width(self) -> int:
        """Width of a value head."""
        return self.value_width or self.content_width

    @property
    def cache_width(self) -> int:
        """Numbers that a cache holds for a token in each layer."""
        return self.rank + self.rope_width


@dataclass(frozen=True)
class ValueResidualConfig:
    """Values of later layers are mixed with those of the first one (Zhou et al. 2024, Value Residual Learning).

    Layer n attends to the values `first` * v_1 + `own` * v_n for n > 1, and the first layer to its own.
    """

    first: float = 0.5  # factor of the first layer's values
    own: float = 0.5  # factor of the layer's own values
    learned: bool = False  # both factors are parameters of every layer, which start there; those of the first layer
    # are not read


@dataclass(frozen=True)
class TemperatureConfig:
    """Scores of a query grow with the logarithm of its position (Meta 2025, Llama 4's attention temperature)."""

    rate: Positive = 0.1  # queries at position p are multiplied by 1 + rate ln(1 + floor(p / length))
    length: PositiveInt = 8192  # positions before this have a factor of 1


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention. Multi-head, grouped-query and multi-query attention differ by `kv_heads` only."""

    heads: PositiveInt = 4  # number of query heads
    kv_heads: PositiveInt | None = None  # number of key and value heads, a divisor of `heads`; None: equal to `heads`
    head_width: PositiveInt | None = None  # width of one head; None: model width // heads
    scale: bool = True  # divide scores by sqrt(head_width)
    scale_width: Positive | None = None  # with `scale`, the width whose square root divides scores (Gemma 2's
    # query_pre_attn_scalar); None: head_width
    soft_cap: Positive | None = None  # scores s become soft_cap * tanh(s / soft_cap), before biases and masks; None: as
    # they are
    input: Literal["whole", "chunk"] = (
        "whole"  # what a head projects: all channels of its input, or a chunk of their own
    )
    # (head h of H: channels h D / H to (h + 1) D / H; key and value heads by their own number)
    output: bool = True  # output projection; without it heads * head_width must equal the model width
    bias: bool = True  # biases of the projections
    key_bias: bool | None = None  # bias of the key projection; None: as `bias`
    output_bias: bool | None = None  # bias of the output projection; None: as `bias`
    norm: NormConfig | None = None  # normalisation of each query and key head, before positions (Qwen3); None: none
    norm_over: Literal["head", "heads"] = "head"  # what `norm` averages over: the channels of one head, or of all heads
    # together (OLMo 2)
    sink: bool = False  # a learned score per query head, whose share of the softmax is dropped (gpt-oss)
    gate: bool = False  # multiply each head's output by sigmoid(x W), channel by channel, before the output projection
    # (Qiu et al. 2025, Gated Attention; Qwen3-Next); with the bias of `bias`; not in cross-attention
    latent: LatentConfig | None = None  # keys and values of all heads from one latent vector a token (DeepSeek); its
    # widths replace `head_width`, `bias` is that of the projections to latents and of the output; None: no latents
    value_residual: ValueResidualConfig | None = None  # mix values with those of the first layer (ResFormer); not in
    # cross-attention; None: each layer has its own values
    scale_by_layer: bool = False  # also divide scores by the layer number, counted from 1
    temperature: TemperatureConfig | None = None  # also multiply scores by a factor of the query's position; not in
    # cross-attention; None: by none
    window: PositiveInt | None = None  # visible positions up to the query's own (not causal: as many ahead); None: all
    window_every: PositiveInt = 1  # every n-th layer has the window, the others see all keys (GPT-3: 2)
    window_layers: tuple[int, ...] = ()  # numbers from 0 of the layers with the window; (): as `window_every` says
    sparse: SparseConfig | None = None  # visible blocks of keys, of whole rows and not causal; None: no blocks
    summary: PositiveInt | None = None  # slots of a block whose summed inputs are a further key and value, which all
    # queries of the row see whatever the window (LongT5's transient global attention); not causal; None: none
    kernel: KernelName = "auto"  # implementation, a file of `jaxformer/nn/kernels/`; auto: the fastest that applies
    block: PositiveInt = 128  # blockwise: rows and columns of a tile
    dropout: Rate = 0.0  # dropout rate of the attention probabilities
    init_scale: Positive = 1.0  # initial variance of the kernels times their fan-in (PyTorch's Linear: 1/3)
    average_padding: bool = False  # padding slots whose output is read enter as zeros and attend to all slots equally
    # (DeBERTa); False: they attend to the text


@dataclass(frozen=True)
class FeedForwardConfig:
    """Feed-forward layer."""

    width: PositiveInt | None = None  # hidden width; None: 4 * model width
    activation: Activation = "gelu"  # activation of the hidden layer; gelu is the exact one
    gated: bool = False  # act(x W_gate) * (x W_in), a GLU variant (Shazeer 2020)
    slope: Positive = 1.0  # silu: x sigmoid(slope x) (gpt-oss: 1.702)
    limit: Positive | None = None  # gated: x W_gate is clipped above at this, x W_in to +-limit (gpt-oss: 7); None: not
    offset: NotNegative = 0.0  # gated: constant added to x W_in after that (gpt-oss: 1)
    bias: bool = True  # biases of the projections
    output: bool = True  # output projection; without it the hidden width must equal the model width
    dropout: Rate = 0.0  # dropout rate of the hidden activations
    init_scale: Positive = 1.0  # initial variance of the kernels times their fan-in (PyTorch's Linear: 1/3)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of every feed-forward layer. `ffn` is the config of one expert."""

    experts: PositiveInt = 8  # routed experts per layer
    top_k: PositiveInt = 2  # experts per token
    normalise: bool = True  # divide the weights of a token's experts by their sum; False: probabilities
    router_bias: bool = False  # learned bias of the router's logits (gpt-oss)
    capacity: Positive | None = None  # training: maximum load of an expert as a multiple of the mean load of a row;
    # further assignments are dropped; None: none is dropped
    shared: Count = 0  # experts that process every token, beside the routed ones (DeepSeekMoE)
    shared_width: PositiveInt | None = None  # hidden width of all of these together; None: shared * ffn.width
    shared_gate: bool = False  # multiply their output by sigmoid(x w), one number a token (Qwen3-Next)
    dense_layers: Count = 0  # the first layers, which have a dense feed-forward layer in place of experts (DeepSeek)
    dense_at: tuple[Count, ...] = ()  # numbers from 0 of further layers with a dense feed-forward layer (Qwen3-Next's
    # mlp_only_layers)
    dense_width: PositiveInt | None = None  # hidden width of all these layers; None: ffn.width
    gate: Literal["softmax", "sigmoid"] = "softmax"  # scores of experts: probabilities over all of them, or of each by
    # itself (DeepSeek-V3)
    correction: bool = False  # add a bias per expert to the scores by which experts are chosen, not to their weights
    # (DeepSeek-V3's e_score_correction_bias); it starts at 0, and the loss gives it no gradient
    correction_rate: NotNegative = 0.0  # training: after each step the bias of an expert with more than the mean load
    # falls by this, that of one with less rises (DeepSeek-V3, section 2.1.2: 0.001); 0: it stays
    groups: PositiveInt = 1  # equal groups of experts; a token's experts are of few of them
    top_groups: PositiveInt | None = None  # groups that a token's experts are chosen from; None: all
    group_score: Literal["max", "top2"] = "max"  # a group counts by its best expert (DeepSeek-V2), or by the sum of its
    # two best (DeepSeek-V3)
    scale: Positive = 1.0  # factor on the weights of a token's experts (DeepSeek's routed_scaling_factor)
    balance_loss: NotNegative = 0.01  # weight of the load-balancing loss of each layer (Switch Transformer)
    z_loss: NotNegative = 0.001  # weight of the router's z-loss of each layer (ST-MoE)


@dataclass(frozen=True)
class DeltaConfig:
    """Linear attention by the gated delta rule (Yang et al. 2024, Gated Delta Networks) in place of attention.

    A cache holds a matrix of `key_width` x `value_width` numbers for each value head, whatever the length of the text.
    """

    key_heads: PositiveInt = 4  # heads of queries and keys
    value_heads: PositiveInt | None = None  # heads of values, a multiple of `key_heads`; None: as many
    key_width: PositiveInt = 32  # channels of a query or key head
    value_width: PositiveInt = 32  # channels of a value head
    conv_kernel: PositiveInt = 4  # slots that the causal convolution of queries, keys and values reads, with its own
    activation: Activation = "silu"  # activation of the convolution's output
    epsilon: Positive = 1e-6  # epsilon of the RMS norm of each head's output
    chunk: PositiveInt = 64  # slots that are computed together; the result is the same up to rounding
    attention_every: PositiveInt = 4  # every n-th layer has attention, the others the delta rule (Qwen3-Next: 4)
    attention_layers: tuple[Count, ...] | None = None  # numbers from 0 of the layers with attention, () for no layer;
    # None: as `attention_every` says

    @property
    def heads(self) -> int:
        """Number of value heads, each of which has a state."""
        return self.value_heads or self.key_heads

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together, which the convolution reads."""
        return 2 * self.key_heads * self.key_width + self.heads * self.value_width


@dataclass(frozen=True)
class ConvConfig:
    """Convolution of the stack's input over neighbouring slots, added and normalised after the first layer."""

    kernel: PositiveInt = 3  # kernel size in slots, odd
    groups: PositiveInt = 1  # channel groups that do not mix
    activation: Activation = "tanh"  # activation of its output


@dataclass(frozen=True)
class StackConfig:
    """Transformer encoder or decoder."""

    layers: Layers = 4  # number of layers, each attention and feed-forward; 0: embeddings alone (bigrams, word vectors)
    share_layers: bool = False  # all layers have the same parameters (ALBERT)
    width: PositiveInt = 128  # channels of the residual stream
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    delta: DeltaConfig | None = None  # causal stacks: the gated delta rule in place of attention in some layers; None:
    # all layers have attention
    ffn: FeedForwardConfig | None = field(default_factory=FeedForwardConfig)  # dense layers; None: attention only
    moe: MoEConfig | None = None  # mixture of experts in place of the feed-forward layers; None: dense layers
    norm: NormConfig = field(default_factory=NormConfig)
    conv: ConvConfig | None = None  # encoders only: convolution beside the first layer (DeBERTa v2); None: none
    dropout: Rate = 0.0  # dropout rate of every sub-layer's output, before it is added to the residual stream
    sublayers: Literal["sequential", "parallel", "parallel_one_norm"] = "sequential"  # parallel: attention and
    # feed-forward layer read the same residual stream, each with its norm (GPT-NeoX) or both with one norm (GPT-J)
    residual_after_norm: bool = False  # pre: residual connections start after the norm (BLOOM)
    first_norm: bool = True  # pre: the first layer's attention has a norm; False: it reads the stack's input as it is
    # (ModernBERT)
    residual_attention: bool = True  # residual connection around self-attention
    residual_cross: bool = True  # residual connection around cross-attention
    residual_ffn: bool = True  # residual connection around the feed-forward layer
    output_width: PositiveInt | None = None  # width after a last projection without bias (OPT); None: no projection
    memory_width: PositiveInt | None = None  # decoders beside an encoder of another width: cross-attention projects the
    # encoder's output of this width itself (T5Gemma); None: a linear map to `width` stands between
    causal: bool | None = None  # slots attend to earlier slots only; None: decoders are causal, encoders are not
    unroll: PositiveInt | None = None  # layers per scan iteration; None: up to 128 on CPU (faster), 1 elsewhere (less
    # compile time)
    remat: Literal["none", "minimal", "full", "names", "offload"] = "none"  # recomputed in the backward pass: nothing,
    # all but matrix products (minimal), whole layers (full), all but `remat_names` (names), the same with those moved
    # to host memory (offload)
    remat_names: tuple[str, ...] = ("attention", "ffn")  # activations that are stored, see jaxformer/nn/remat.py
    microbatches: PositiveInt | None = None  # pipeline: parts of a batch, a multiple of mesh.stage; None: mesh.stage

    @property
    def dense_layers(self) -> int:
        """Number of first layers without experts where the others have them; 0 in a stack without experts."""
        return 0 if self.moe is None else self.moe.dense_layers

    @property
    def first_layers(self) -> int:
        """Number of first layers with other parameters than the rest: `dense_layers`, or the one without a norm."""
        return self.dense_layers if self.first_norm else int(self.layers > 1)

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Numbers from 0 of the layers with the delta rule in place of attention; () where `delta` is None."""
        delta = self.delta
        if delta is None:
            return ()
        every = range(delta.attention_every - 1, self.layers, delta.attention_every)
        attention = every if delta.attention_layers is None else delta.attention_layers
        return tuple(number for number in range(self.layers) if number not in attention)

    @property
    def dense_numbers(self) -> tuple[int, ...]:
        """Numbers from 0 of the layers without experts in a stack that has experts; () in one that has none."""
        if self.moe is None:
            return ()
        return tuple(sorted({*range(min(self.moe.dense_layers, self.layers)), *self.moe.dense_at}))

    @property
    def is_mixed(self) -> bool:
        """True if `delta` or `moe.dense_at` gives layers unlike forms, in any order (see `layer_groups`)."""
        return self.delta is not None or (self.moe is not None and bool(self.moe.dense_at))

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """Numbers from 0 of the layers with the window of `attention`; () where there is no window."""
        own = self.attention
        if own.window is None:
            return ()
        return tuple(sorted(own.window_layers)) or tuple(range(own.window_every - 1, self.layers, own.window_every))


@dataclass(frozen=True)
class SeriesConfig:
    """Input of real numbers in place of source tokens: a series `[T, C]`, cut into patches (PatchTST, Nie et al. 2023).

    A slot of the encoder is a patch of `patch` time steps, and its embedding a linear map of their numbers. Patches
    begin at every `stride`-th step; after the end of a series they hold its last value.
    """

    channels: PositiveInt | None = None  # numbers of a time step; None: taken from the data
    patch: PositiveInt = 1  # time steps of a slot
    stride: PositiveInt | None = None  # time steps between the starts of two slots; None: equal to `patch`
    independent: bool = False  # forecast: every channel is a row of its own, with shared weights (PatchTST); False: a
    # slot holds all channels
    normalise: Literal["none", "instance", "last"] = "none"  # each channel of a series: subtract its mean and divide by
    # its deviation (instance: RevIN, Kim et al. 2022), or subtract its last value (last: NLinear, Zeng et al. 2023); a
    # forecast is scaled back
    affine: bool = False  # instance: learned scale and bias of each channel


@dataclass(frozen=True)
class LinearConfig:
    """Linear forecast of each channel from its own past (Zeng et al. 2023), without slots and layers.

    NLinear is one map of a series with `series.normalise` last, DLinear two maps of trend and remainder.
    """

    trend: PositiveInt | None = None  # steps of the moving average that is the trend, odd (DLinear: 25); None: one map
    individual: bool = False  # maps of its own for each channel; False: shared maps


@dataclass(frozen=True)
class RecurrentConfig:
    """Recurrent encoder or decoder."""

    cell: Literal["rnn", "lstm", "gru"] = "lstm"  # recurrent cell
    layers: CellLayers = 1  # number of layers
    width: PositiveInt = 256  # channels of the state
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    bidirectional: bool = False  # encoders only; each direction has width // 2 channels
    attention: Literal["none", "additive", "dot"] = "none"  # decoders with an encoder: none (read its last state),
    # additive (Bahdanau et al. 2015), dot (Luong et al. 2015)
    dropout: Rate = 0.0  # dropout rate between layers and before the head
    recurrent_dropout: Rate = 0.0  # dropout rate of the state in the recurrence, one mask per sequence (variational)


@dataclass(frozen=True)
class HeadConfig:
    """Output layer on top of the hidden states."""

    kind: Literal["tokens", "slots", "classes", "pooled", "pair", "forecast", "none"] = "tokens"  # logits over the
    # vocabulary per slot (tokens), over classes per slot (slots) or per sequence (classes); one vector per sequence
    # (pooled) or per segment of a row (pair); the next values of a series (forecast); or the hidden states (none)
    tied: bool = True  # tokens: use the embedding table as the output matrix
    projection: bool = True  # tokens: multiply with an output matrix; False: the hidden states are the logits, so the
    # model width must be the vocabulary
    bias: bool = False  # tokens: bias per vocabulary row
    init_scale: Positive = 1.0  # tokens, not tied: initial variance of the output matrix times the model width
    scale: bool = False  # tokens: multiply the hidden states by width ** -0.5 first (T5)
    soft_cap: Positive | None = None  # tokens: logits x become soft_cap * tanh(x / soft_cap); None: as they are
    transform: bool = False  # tokens: dense layer, activation and norm before the projection, as in BERT's masked LM;
    # slots, and classes after pooling: the same before dropout and decision (ModernBERT)
    transform_bias: bool = True  # bias of the dense layer of `transform`
    transform_norm_bias: bool = True  # bias of the norm of `transform`
    relation: bool = False  # tokens: also two class logits for each row, from its pooled vector (see task.relation)
    copy: bool = False  # tokens of a transformer encoder-decoder: mix with copying from the source (pointer-generator,
    # See et al. 2017); needs one vocabulary for both sides
    chunk: PositiveInt | None = None  # tokens: tokens per device whose logits a loss holds at a time; None: all
    activation: Activation = "gelu"  # activation of `transform`
    epsilon: Positive = 1e-5  # epsilon of the norm of `transform` or of the layer of `residual_width`
    classes: PositiveInt | None = None  # classes, slots: number of classes; None: taken from the data
    pooling: Literal["first", "mean", "last", "end"] = "first"  # classes, pooled, pair, relation: vector of a
    # sequence: its first token, the mean over its tokens, its last token (decoders and recurrent models), or the last
    # slot of its row, padding or not (end: classes of an encoder, RoFormer's choice)
    width: PositiveInt | None = None  # classes, pooled, pair, relation: width of a dense layer after pooling; slots: of
    # one before the decision (ELECTRA's discriminator); None: no such layer
    hidden: Activation = "tanh"  # activation of that layer, or of that of `residual_width`
    residual_width: PositiveInt | None = None  # slots: hidden width of a feed-forward layer that is added to its input
    # and normalised, before the decision (BigBird's spans); None: no such layer
    decision_bias: bool = True  # classes, slots: bias per class; forecast: per output
    dropout: Rate = 0.0  # dropout rate before the last projection (relation: of the pooled vector alone), or of the
    # hidden states where there is none
    input_dropout: Rate = 0.0  # classes, pooled, pair: dropout rate of the pooled vector, before the layer of `width`;
    # slots: of the input of the layer of `residual_width`, whose output then has `dropout`
    look_back: PositiveInt | None = None  # forecast: time steps that it is made of; None: data.length
    horizon: PositiveInt | None = None  # forecast: time steps that it has; None: data.horizon


@dataclass(frozen=True)
class PermutationConfig:
    """Permutation language modelling (XLNet): a query stream and memories of earlier texts."""

    memory: PositiveInt | None = None  # slots of earlier texts that are kept as memory; None: all
    reuse: PositiveInt | None = None  # leading slots of a text that enter the memory; None: all


@dataclass(frozen=True)
class GeneratorConfig:
    """Small masked language model that replaces tokens for the model to detect (ELECTRA)."""

    encoder: StackConfig = field(default_factory=StackConfig)  # its layers; embed.vocab None: that of the model
    head: HeadConfig = field(default_factory=HeadConfig)  # its head of kind tokens
    sharing: Literal["none", "tied", "disentangled"] = "tied"  # token embeddings: two tables (none); one (tied, as in
    # ELECTRA); or the generator's, without gradient, plus a table of the model's that starts at 0 (DeBERTa-v3)
    vocab: PositiveInt | None = None  # only ids below this are sampled; None: the tokenizer's number of tokens


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021): targets compute `x W + alpha / rank * dropout(x) A B` with W frozen.

    A pattern names one or more components of a path, as `attention/query` or `decoder/blocks/ffn/*`; see
    `jaxformer/config/patterns.py`.
    """

    rank: PositiveInt = 8  # columns of A and rows of B
    alpha: Positive = 16.0  # the product A B is multiplied by alpha / rank
    targets: tuple[str, ...] = ("attention/query", "attention/value")  # patterns of the linear maps that get adapters
    dropout: Rate = 0.0  # dropout rate of the adapters' input
    stabilised: bool = False  # divide alpha by the root of the rank instead (rsLoRA, Kalajdzievski 2023)
    ranks: tuple[str, ...] = ()  # other ranks for some targets, as "ffn/in=4"; the last pattern that matches counts
    alphas: tuple[str, ...] = ()  # other alphas for some targets, as "ffn/in=8"
    layers: tuple[int, ...] = ()  # numbers from 0 of the layers that get adapters; (): all
    train: tuple[str, ...] | None = None  # patterns of further parameters to train; None: the head, where it is not
    # over the vocabulary


@dataclass(frozen=True)
class MultiTokenConfig:
    """Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): training predicts further tokens, too.

    Module k is one layer beside the decoder's, and predicts token t + k + 1 from the hidden states of the module before
    it at t and the embedding of token t + k. Embedding and head are the model's. Decoding does not run the modules.
    """

    depth: PositiveInt = 1  # number of modules: tokens that are predicted beyond the next one
    weight: NotNegative = 0.3  # weight of the mean of the modules' losses in the training loss


@dataclass(frozen=True)
class ModelConfig:
    """Architecture: the sections that are not None decide the family.

    An encoder alone is BERT-like, a decoder alone GPT-like, both are a sequence-to-sequence model. The same holds for
    `recurrent_encoder` and `recurrent_decoder`. Transformer and recurrent sections cannot be combined. With `series`
    the encoder, or `linear` in its place, reads real numbers instead of tokens.
    """

    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    recurrent_encoder: RecurrentConfig | None = None
    recurrent_decoder: RecurrentConfig | None = None
    linear: LinearConfig | None = None
    series: SeriesConfig | None = None
    permutation: PermutationConfig | None = None
    generator: GeneratorConfig | None = None
    adapter: AdapterConfig | None = None
    multi_token: MultiTokenConfig | None = None  # language_modelling: predict further tokens in training; None: not
    head: HeadConfig = field(default_factory=HeadConfig)
    share_embeddings: bool = False  # one embedding table for source and target (needs a joint vocabulary)
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute precision; parameters are always float32

    @property
    def multi_token_stack(self) -> StackConfig:
        """The stack of one layer in a module of `multi_token`: like the decoder's last, and with experts if that has.

        Encodings that are added to the embeddings are left out: the hidden states hold the position already.

        Raises:
          ValueError: the model has no decoder.
        """
        stack = self.decoder
        if stack is None:
            raise ValueError("model.multi_token: got no decoder, expected one; set it to None")
        own, encoding, moe = stack.attention, stack.encoding, stack.moe
        if stack.layers - 1 not in stack.windowed_layers:
            own, encoding = replace(own, window=None), replace(encoding, window_base=None)
        if encoding.kind in ("learned", "sinusoidal"):
            encoding = EncodingConfig("none")
        return replace(
            stack,
            layers=1,
            share_layers=False,
            first_norm=True,
            embed=EmbedConfig(vocab=stack.embed.vocab),
            encoding=encoding,
            attention=replace(own, window_every=1, window_layers=(), value_residual=None),
            delta=None,
            moe=None if moe is None else replace(moe, dense_layers=0, dense_at=(), dense_width=None),
            microbatches=None,
        )

    @property
    def encoder_part(self) -> StackConfig | RecurrentConfig | None:
        """The encoder of either family; None without one."""
        return self.encoder or self.recurrent_encoder

    @property
    def decoder_part(self) -> StackConfig | RecurrentConfig | None:
        """The decoder of either family; None without one."""
        return self.decoder or self.recurrent_decoder

    @property
    def has_encoder(self) -> bool:
        """True if the model reads `Batch.source`."""
        return self.encoder_part is not None or self.linear is not None

    @property
    def has_decoder(self) -> bool:
        """True if the model reads `Batch.target`."""
        return self.decoder_part is not None

    @property
    def reads_tokens(self) -> bool:
        """False if the model reads a series and nothing else: it needs no tokenizer."""
        return self.series is None or self.has_decoder

    @property
    def is_empty(self) -> bool:
        """True if there is no section that makes a model."""
        return not self.parts and self.linear is None

    def slots(self, side: str, length: int) -> int:
        """Slots of the stack "encoder" or "decoder" for `length` tokens, or time steps of a series."""
        if side != "encoder" or self.series is None:
            return length
        return -(-length // (self.series.stride or self.series.patch))

    @property
    def is_seq2seq(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return self.has_encoder and self.has_decoder

    @property
    def input_side(self) -> str:
        """Stream of an input text: "source" with an encoder, "target" without one."""
        return "source" if self.has_encoder else "target"

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The transformer stacks by their path in the model: "encoder", "decoder", "generator.encoder"."""
        generator = None if self.generator is None else self.generator.encoder
        named = {"encoder": self.encoder, "decoder": self.decoder, "generator.encoder": generator}
        return {path: stack for path, stack in named.items() if stack is not None}

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the encoder and decoder sections that are not None."""
        sides = ("encoder", "decoder", "recurrent_encoder", "recurrent_decoder")
        return tuple(side for side in sides if getattr(self, side) is not None)


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer."""

    kind: Literal["byte", "character", "word", "bpe", "unigram", "file"] = "bpe"  # what a token is; file: see `path`
    vocab: PositiveInt = 8000  # word, bpe, unigram: tokens to learn, special tokens (but not sentinels) included
    joint: bool = True  # one vocabulary for source and target; False: one for each
    lowercase: bool = False  # lowercase the text before tokenisation; decoded text is then lowercase too
    sentinels: Count = 0  # learned vocabularies: tokens <extra_id_0>, <extra_id_1>, ... beside `vocab`, which stand for
    # dropped spans (task span_corruption); a file has its own
    multiple: PositiveInt = 8  # the model's vocabulary is padded to a multiple of this, so that shards are even
    path: str = ""  # file: a tokenizer.json or a SentencePiece .model, or a model on the hub that has one (org/name);
    # with joint=false "source,target"
    chat_template: str = ""  # dialogue, preference: a file with the Jinja text that writes conversations; "": the
    # tokenizer's own, or the project's


@dataclass(frozen=True)
class SourceConfig:
    """Where examples come from."""

    source: SourceName = "numerals"  # a file of `jaxformer/data/sources/`
    name: str = ""  # tfds: "wmt14_translate/de-en"; numerals: "de", "fr" or "es"; algorithmic: name of the problem
    dir: str = ""  # local sources: directory of the files; tfds: directory of the prepared data; of a component: below
    # data.dir
    splits: dict[str, tuple[str, ...]] = field(default_factory=dict)  # split -> its files, or one tfds split expression
    columns: dict[str, str] = field(default_factory=dict)  # role of the task (see docs/data.md) -> column of the data
    score_range: tuple[float, ...] = (0.0, 1.0)  # table, tfds: scores that become 0 and 1; those outside are refused
    format: Literal["", "tsv", "tsv_quoted", "csv", "jsonl", "labelled"] = ""  # table: format of the files; labelled:
    # a label, a blank and the text per line; "": by the file name
    document: Literal["line", "file"] = "line"  # text: an example is a line, or a whole file with its newlines
    examples: PositiveInt | None = None  # number of training examples, the first ones; None: all


@dataclass(frozen=True)
class ComponentConfig(SourceConfig):
    """One data set of a mixture, with its share of the training examples and its task."""

    weight: NotNegative = 1.0  # share of the training examples, relative to the other components' (with
    # mixture.temperature: times their sizes' share); 0: evaluated, never trained on
    task: TaskConfig | None = None  # its objective, labels and templates; None: those of config.task
    classes: tuple[str, ...] = ()  # names of its classes; (): taken from the data


@dataclass(frozen=True)
class MixtureConfig:
    """Several data sets in one run. Each batch holds examples of all of them."""

    components: dict[str, ComponentConfig] = field(default_factory=dict)  # name -> data set; the name is part of its
    # measures, as loss/NAME
    temperature: AtLeastOne | None = None  # T: a component of n examples has the share min(n, limit) ** (1 / T); 1: in
    # proportion to sizes; None: shares are the weights alone
    limit: PositiveInt | None = None  # larger components count as this many examples; None: no limit


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Examples and how they are batched."""

    mixture: MixtureConfig | None = None  # several data sets, each with a source of its own; None: one
    cache: str = ""  # directory of prepared data; "": $JAXFORMER_CACHE or ~/.cache/jaxformer
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batch: PositiveInt = 32  # rows of a global batch; with `tokens`: maximum number of rows
    tokens: PositiveInt | None = None  # tokens of a batch with padding: rows = tokens // bucket; None: `batch` rows
    length: Length = 128  # maximum sequence length in tokens, special tokens included; longer examples are truncated
    # (language models: row length; series: time steps, of a forecast its look-back)
    horizon: PositiveInt | None = None  # forecasting: time steps to forecast
    standardise: bool = True  # series: subtract the mean of each channel and divide by its deviation, both of the
    # training part
    buckets: tuple[int, ...] = ()  # ascending row lengths that batches are padded to, with packing those of decoding
    # alone; (): `length` alone
    packing: Literal["none", "concat", "first_fit"] = "none"  # concat: rows are cut from one long text, for
    # language models; first_fit: several examples share a row, of pairs each side its own; evaluation packs no pairs
    shuffle: bool = True  # a new random order of the training examples every epoch; False: the order of the data
    skip_long: bool = False  # training: drop examples over `length`; False: truncate them
    workers: Count = 0  # loader processes of each host that make training batches; 0: threads of the run's own
    shard_copies_gb: NotNegative | None = None  # GB that copies of token shards in a bucket take on each host at most;
    # other shards are read record by record; 0: all are; None: copies leave a tenth of the disk free


@dataclass(frozen=True)
class TemplateConfig:
    """The texts that the task text_to_text makes of an example; `{name}` stands for its field of that name."""

    source: str = "{source}"  # text that the model reads, as "premise: {text} hypothesis: {pair}"
    target: str = "{target}"  # text that it writes, as "{label}"
    words: dict[str, str] = field(default_factory=dict)  # name of a class -> the word that {label} stands for; a class
    # that is not listed keeps its name
    predict: Literal["generate", "rank"] = "generate"  # prediction: the decoded text, or the likeliest of the choices
    choices: tuple[str, ...] = ()  # rank: the targets to choose from; (): one for every class
    scores: tuple[str, ...] = ("exact_match",)  # scores of predictions: exact_match (equal to the target), squad (exact
    # match and F1 of words, as SQuAD compares answers), bleu, chrf, rouge


@dataclass(frozen=True)
class TaskConfig:
    """Training objective and labels."""

    name: TaskName = "translation"  # a file of `jaxformer/tasks/`; none: a model that is called but never trained
    label_smoothing: Rate = 0.0  # share of a label's probability that is spread over all classes
    z_loss: NotNegative = 0.0  # weight of the squared log of the softmax denominator (PaLM)
    predict_every: PositiveInt = 6  # permutation_lm: one in so many tokens is predicted, the last of the order (K in
    # Yang et al. 2019, section 2.3); 1: all
    recurrence: bool = False  # permutation_lm: rows read memories of the text before them, model.permutation.memory
    # slots per layer; needs data.packing=concat and data.shuffle=false
    detection_weight: NotNegative = 50.0  # replaced_tokens: weight of the discriminator's loss beside the generator's
    mask_rate: ProperShare = 0.15  # masked_lm, replaced_tokens: fraction of tokens that are chosen; span_corruption:
    # that are dropped
    whole_words: bool = False  # masked_lm, replaced_tokens: mask all tokens of a word together
    window: PositiveInt = 5  # skip_gram, cbow: maximum distance of a context word; each word draws its own from 1 on
    negatives: PositiveInt = 5  # skip_gram, cbow: noise words beside each true one
    noise_power: NotNegative = 0.75  # skip_gram, cbow: noise words are drawn in proportion to count ** noise_power
    subsample: NotNegative = 0.0  # skip_gram, cbow: words of a frequency f above this are left out with probability
    # 1 - (subsample / f) ** 0.5; 0: none is
    all_positions: bool = False  # masked_lm: predict all tokens, hidden or not; False: the chosen ones
    relation: Literal["none", "next_sentence", "sentence_order"] = "none"  # masked_lm: a second loss of two parts of a
    # text: the second one follows or is of another text (next_sentence, BERT), or the two are swapped (sentence_order,
    # ALBERT); needs model.head.relation
    prefix: ProperShare | None = None  # prefix_lm: fraction of a text that is its prefix; None: drawn uniformly
    span: AtLeastOne = 3.0  # span_corruption, denoising: mean length of a span in tokens
    infilling: Rate = 0.3  # denoising: fraction of tokens in spans (Poisson lengths, 0 included) that one mask replaces
    masking: Rate = 0.0  # denoising: fraction of the other tokens that a mask replaces one by one
    deletion: Rate = 0.0  # denoising: fraction of the other tokens that are deleted
    permutation: Probability = 1.0  # denoising: fraction of sentences that change places
    rotation: Probability = 0.0  # denoising: fraction of texts that are rotated, to begin with any of their tokens
    stride: PositiveInt = 128  # answering: tokens between the starts of two windows of a long context, at most half a
    # window
    unanswerable: bool = False  # answering: contexts may hold no answer; the answer is then empty (SQuAD 2.0)
    replies: Literal["all", "last"] = "all"  # dialogue: turns of the assistant that are learned and measured
    beta: Positive = 0.1  # preference: reward of a reply for each nat by which it is likelier than in the beginning; a
    # small beta lets the model move far from where it started
    label_noise: Rate = 0.0  # preference: fraction of pairs whose labels are taken to be swapped, below 0.5
    # (conservative DPO)
    language: str = ""  # translation, captioning, text_to_text: code of the target language, by whose words BLEU counts
    # (zh: characters; ja, ko: MeCab's; else 13a); the first two also have a tokenised BLEU of languages by 13a
    template: TemplateConfig | None = None  # text_to_text: the texts made of an example; None: its source and target
    classes: tuple[str, ...] = ()  # classification, tagging: names of the classes; (): taken from the data
    class_weights: tuple[str, ...] = ()  # classification, tagging: weights of classes in the training loss, as
    # "positive=2,negative=0.5" (others: 1); "balanced": examples / (classes * examples of the class); (): all 1
    class_counts: tuple[int, ...] = ()  # balanced: training labels of each class; (): counted in the data
    objective: Literal["regression", "contrastive"] = "regression"  # similarity: predict the score as the cosine
    # (regression), or find a sentence's partner in the batch (contrastive)
    temperature: Positive = 0.05  # similarity, contrastive: cosines are divided by it
    positive: Probability = 0.8  # similarity, contrastive: minimum score of a pair that counts as partners
    channels: tuple[str, ...] = ()  # names of a series' channels; (): taken from the data
    means: tuple[float, ...] = ()  # mean of each channel, which is subtracted; (): of the training part
    deviations: tuple[float, ...] = ()  # deviation of each channel, by which it is divided; (): of the training part
    vocab: PositiveInt | None = None  # size of the labels' vocabulary without padding; None: from the tokenizer
    options: Annotated[Any, OptionsOf("name")] = None  # settings of a task from outside the project, typed by the
    # dataclass that its `TASK.options` names; None: the task has none

    @property
    def texts(self) -> TemplateConfig:
        """The templates of the task text_to_text: those of the config, or the defaults."""
        return self.template or TemplateConfig()


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer."""

    name: Literal["adamw", "adam", "adafactor", "lion", "sgd", "muon"] = "adamw"  # muon: optax's, with bias correction
    beta1: Rate = 0.9  # decay of the first moment
    beta2: Rate = 0.999  # decay of the second moment
    epsilon: Positive = 1e-8  # added to the root of the second moment
    momentum: Rate = 0.9  # sgd, muon: momentum
    weight_decay: NotNegative = 0.0  # decoupled weight decay, multiplied by the learning rate
    decay_exclude: tuple[str, ...] = ("bias", "scale", "embed")  # parameter paths that contain these are not decayed
    freeze: tuple[str, ...] = ()  # patterns of parameters that are not trained, as "source_embed,encoder/blocks"; one
    # with "!" before it trains again what those before it froze
    layer_decay: PositiveShare = 1.0  # the rate of layer l of L is multiplied by layer_decay ** (L + 1 - l), that of
    # embeddings by layer_decay ** (L + 1), that of the head by 1
    clip: Positive | None = 1.0  # maximum global gradient norm of the trained parameters; None: no clipping
    spike: Positive | None = None  # skip a step whose gradient norm is this many standard deviations above the mean of
    # the last 100 or so; None: skip none, however large


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the steps."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "noam"] = "cosine"  # shape after the warmup
    peak: Positive = 1e-3  # maximum learning rate; noam: factor on width ** -0.5
    warmup: Count = 100  # steps of linear increase at the start
    floor: Probability = 0.0  # linear, cosine, wsd: final learning rate as a fraction of the peak
    decay: Probability = 0.2  # wsd: fraction of the run in which the rate decreases


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run, and what happens between its steps."""

    steps: PositiveInt = 1000  # updates of the parameters
    seed: Seed = 0  # seed of the initial parameters, the order of the data, and dropout
    accumulation: PositiveInt = 1  # microbatches per update. Their sum equals one batch except where a value depends on
    # all rows: batch norm, load-balancing losses, contrastive similarity, and what is drawn: dropout masks, and the
    # samples of a generator
    ema: Rate | None = None  # decay of the weight average that evaluation and decoding use; None: no average
    ema_warmup: bool = False  # the decay of update n (from 0) is min(ema, (1 + n) / (10 + n)), so that the random start
    # is soon forgotten; False: `ema` from the first update on
    log_every: PositiveInt = 20  # steps between two log lines
    evaluate_every: Count = 200  # steps between two evaluations; 0: only at the end
    checkpoint_every: Count = 200  # steps between two checkpoints; 0: only at the end
    skip_limit: PositiveInt = 10  # consecutive skipped steps (not finite, or a spike) that end the run
    patience: PositiveInt | None = None  # the run ends after so many evaluations in a row without a better
    # checkpoint.metric; None: it ends at `steps`
    deadline: Positive | None = None  # minutes after which the process saves and ends with exit code 143; None: none
    watchdog: Positive | None = None  # minutes without a step or evaluation batch that end the process with exit code
    # 75; None: no limit
    trackers: tuple[TrackerName, ...] = ("tensorboard",)  # where the rows of metrics.jsonl, the config and the final
    # measures go too; (): nowhere


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run."""

    keep_last: PositiveInt = 2  # newest checkpoints to keep, for resuming; 2: one more in case the newest is damaged
    keep_best: Count = 1  # best checkpoints to keep by `metric`; 0: none
    metric: str = "loss"  # a measure of the validation split
    mode: Literal["min", "max"] = "min"  # whether the smallest or largest metric is best
    average: Count = 0  # evaluate and decode with the mean of this many checkpoints; 0: no averaging
    average_of: Literal["last", "best"] = "last"  # which checkpoints are averaged


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation on the validation split during training."""

    batch: PositiveInt = 64  # rows of a batch
    examples: PositiveInt | None = None  # number of validation examples, the first ones; None: all
    decode_examples: Count = 0  # validation examples that are decoded at each evaluation, to be scored where the task
    # has scores of decoded text, and to be seen; 0: loss only
    samples: Count = 5  # decoded examples that are printed at each evaluation
    length_bins: tuple[int, ...] = ()  # jaxformer evaluate: measures by source length, as "10,20,40": up to 10 tokens,
    # 11 to 20, 21 to 40, and more; (): quartiles of the split
    headline: str = ""  # measure that reports show first; "": checkpoint.metric, or the task's where that is loss


@dataclass(frozen=True)
class DecodeConfig:
    """Decoding."""

    method: Literal["greedy", "sample", "beam"] = "greedy"  # search method
    beams: Beams = 4  # beam: live hypotheses per prompt
    length_norm: Literal["gnmt", "power"] = "gnmt"  # beam: scores of n tokens are divided by ((5 + n) / 6) **
    # length_penalty (gnmt) or n ** length_penalty (power)
    length_penalty: float = 0.6  # GNMT's alpha (Wu et al. 2016, equation 14); negative favours short outputs (power)
    stopping: Literal["first", "estimate", "exact"] = "estimate"  # beam: stop with as many finished hypotheses as beams
    # (first), once no live one beats the worst of them at its current length (estimate), or at any length (exact)
    hypotheses: Beams = 1  # results per prompt: the best of a beam, or independent samples
    max_length: PositiveInt = 64  # maximum number of new tokens; answering: of the answer
    min_length: Count = 0  # new tokens before an end token is allowed
    past_positions: Literal["crop", "stop", "refuse"] = "crop"  # learned positions: a text longer than their
    # table goes on, each token computed from the last tokens that fit (crop), ends there (stop), or its prompt is
    # refused (refuse); encoder-decoders: the output always ends there
    max_ratio: Positive | None = None  # encoder-decoder: at most max_ratio * source length + 10 new tokens
    temperature: Positive = 1.0  # sample: logits are divided by it
    top_k: Count = 0  # sample: keep the k likeliest tokens; 0: all
    top_p: PositiveShare = 1.0  # sample: keep the likeliest tokens up to this total probability; 1: all
    min_p: Probability = 0.0  # sample: keep tokens of at least this fraction of the highest probability; 0: all
    repetition_penalty: Positive = 1.0  # above 1: tokens that occurred become less likely (CTRL); 1: off
    no_repeat_ngram: Count = 0  # no n-gram of this size occurs twice, the prompt included; 0: off
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that are never produced
    suppress: tuple[int, ...] = ()  # token ids that are never produced
    forced_first: Count | None = None  # id of the first new token; None: free
    forced_last: tuple[int, ...] = ()  # ids of which one is produced at the maximum length; (): free
    weights: Literal["float", "int8"] = "float"  # int8: kernels and tables rounded to 8 bits, see decode/int8.py
    batch: PositiveInt = 32  # rows of a batch
    seed: Seed = 0  # sample: seed of the draws
    speculate: Count = 0  # greedy, sample: tokens that are proposed and checked in one pass of the model; 0: none
    proposals: Literal["look_up", "multi_token"] = "look_up"  # speculate without a draft: tokens that followed in the
    # text before, or one token (speculate 1) of the first module of model.multi_token


AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Axes of the mesh, from the slowest network to the fastest."""


@dataclass(frozen=True)
class DcnConfig:
    """Number of slices (or of processes, where there are no slices) along each axis. One may be -1: the rest."""

    stage: int = 1  # see MeshConfig.stage
    data: int = 1  # see MeshConfig.data
    fsdp: int = 1  # see MeshConfig.fsdp
    expert: int = 1  # see MeshConfig.expert
    context: int = 1  # see MeshConfig.context
    tensor: int = 1  # see MeshConfig.tensor


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. One of them may be -1: the remaining devices.

    On several slices these are sizes within one slice. The full size of an axis is its size here times that in `dcn`.
    """

    stage: int = 1  # pipeline stages
    data: int = -1  # data parallelism: replicas of the model
    fsdp: int = 1  # data parallelism with sharded parameters
    expert: int = 1  # shards of the experts
    context: int = 1  # shards of a sequence
    tensor: int = 1  # shards of heads and channels
    dcn: DcnConfig = field(default_factory=DcnConfig)  # sizes across slices, over the slower network
    zero1: bool = False  # shard the optimizer state over the data axis too (ZeRO, stage 1)

    @property
    def slices(self) -> int:
        """Number of slices, with -1 counted as 1."""
        return math.prod(max(getattr(self.dcn, axis), 1) for axis in AXES)

    @property
    def devices(self) -> int:
        """Minimum number of devices of all slices, with -1 counted as 1."""
        return self.slices * math.prod(max(getattr(self, axis), 1) for axis in AXES)


@dataclass(frozen=True)
class InitConfig:
    """Initial parameters."""

    directory: str = ""  # workdir, checkpoint or Hugging Face directory to start from, or a model on the hub
    # (org/name or org/name@revision); "": random parameters. A recipe that names no model gets the directory's, and its
    # tokenizer
    head: bool = True  # also load the head; False: it starts random (a new task or number of classes)


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation: a trained model, the teacher, whose outputs are learned beside the labels (Hinton et al. 2015).

    The loss is (1 - weight) times that of the labels plus weight times T^2 KL(teacher, student), both distributions at
    temperature T.
    """

    directory: str = ""  # workdir, checkpoint or Hugging Face directory of the teacher
    weight: PositiveShare = 0.5  # weight of the teacher's part of the loss; 1: the labels have none
    temperature: Positive = 2.0  # T, by which the logits of both are divided


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    init: InitConfig = field(default_factory=InitConfig)
    distillation: DistillationConfig | None = None  # a teacher; None: the run learns from its labels alone
