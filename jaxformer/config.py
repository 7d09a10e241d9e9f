"""The only schema: what a run is, as frozen dataclasses, and the checks that need more than one field.

Recipes in `configs/` edit an `ml_collections.ConfigDict` generated from these classes, and `overrides.freeze` turns
that back into them, so past the door every field exists and has its declared type. A field that is None is a part the
run does not have: a model without `decoder` is an encoder, a recipe without `ema` keeps no average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


class ConfigError(ValueError):
    """The user's config or input is wrong. The message is one line: what: got X, expected Y; do Z."""


class StorageError(Exception):
    """The disk refused: it is full, read-only or gone. The message is one line, and says what is still whole."""


@dataclass(frozen=True)
class EmbedConfig:
    """Token embedding of one side."""

    vocab: int | None = None  # rows of the table; None: taken from the tokenizer
    width: int | None = None  # width of the table; None: the model width; smaller: factorised (ALBERT, GPT-2 notes)
    scale: bool = False  # multiply by sqrt(model width) (Vaswani et al. 2017, section 3.4)
    kinds: int = 0  # token types (BERT's segments A and B); 0: none
    norm: bool = False  # normalise after the embedding sum, as BERT does
    dropout: float = 0.0  # on the embeddings
    deviation: float | None = None  # initial standard deviation; None: width ** -0.5
    pad: int | None = None  # this row gets no gradient from look-ups (it still does from a tied head)


@dataclass(frozen=True)
class RopeScalingConfig:
    """How rotary frequencies are stretched to texts longer than those a model was trained on."""

    kind: str = "linear"  # linear, dynamic, llama3, yarn
    factor: float = 1.0  # how many times longer
    original: int = 2048  # dynamic, llama3, yarn: the longest text of the original training
    low: float = 1.0  # llama3: turns over the original length below which a frequency is divided whole
    high: float = 4.0  # llama3: turns above which it stays
    slow: float = 1.0  # yarn: the same two bounds, whose channels are blended linearly
    fast: float = 32.0  # yarn: turns over the original length above which a frequency stays
    magnitude: float | None = None  # yarn: factor on cosines and sines; None: 0.1 ln(factor) + 1
    whole: bool = True  # yarn: bounds are rounded outwards to whole channels


@dataclass(frozen=True)
class EncodingConfig:
    """What position does. `kind` is a file of `jaxformer/nn/encodings/`."""

    kind: str = "sinusoidal"  # none, sinusoidal, learned, rope, alibi, t5, transformer_xl, deberta
    max_length: int = 512  # learned: rows of the table, those before `offset` included
    offset: int = 0  # learned: the row of position 0 (BART: 2, RoBERTa: padding token + 1)
    base: float = 10000.0  # sinusoidal, rope, transformer_xl: the geometric progression's base
    concatenated: bool = False  # sinusoidal: all sines, then all cosines (Marian), not in turn
    scaling: RopeScalingConfig | None = None  # rope: None: as trained
    fraction: float = 1.0  # rope: share of the head width that is rotated
    interleaved: bool = False  # rope: pairs are neighbours (True) or halves (False)
    buckets: int | None = 32  # t5: relative buckets; deberta: of one direction, None: one for every distance
    max_distance: int = 128  # t5, deberta: distances beyond share the last bucket
    content_to_position: bool = True  # deberta: queries meet distances
    position_to_content: bool = True  # deberta: keys meet distances
    share_projections: bool = False  # deberta: distances are projected as queries and keys are, not by their own
    norm: NormConfig | None = None  # deberta: of the table of distances
    dropout: float = 0.0  # deberta: on the table of distances, anew in every layer
    absolute: bool = False  # deberta: a learned vector for every position too, `max_length` of them
    bidirectional: bool | None = None  # t5: buckets for keys ahead too; None: exactly when the stack is not causal
    clamp: int | None = None  # transformer_xl: distances beyond count as this one; None: all differ


@dataclass(frozen=True)
class NormConfig:
    """Normalisation."""

    kind: str = "layer"  # layer, rms, batch, none
    order: str = "pre"  # pre, post, sandwich (pre and post around each sub-layer)
    epsilon: float = 1e-5  # added to the variance (rms: to the mean square)
    bias: bool = True  # layer norm: learned shift
    offset: float = 0.0  # rms: added to the learned scale, which then starts at 1 - offset (Gemma: 1)
    momentum: float = 0.99  # batch norm: share of the old running statistics kept by one step
    final: bool | None = None  # a norm after the last layer; None: exactly when the order is not post


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention. MHA, GQA and MQA differ by `kv_heads` only."""

    heads: int = 4  # of the queries
    kv_heads: int | None = None  # None: as many as heads
    head_width: int | None = None  # None ("narrow"): width // heads; the full width is the notes' "wide" heads
    scale: bool = True  # divide scores by sqrt(head_width)
    output: bool = True  # the output projection; without it heads * head_width must equal the width
    bias: bool = True  # biases of the projections
    key_bias: bool | None = None  # of the keys' alone; None: as `bias` (it shifts all scores of a query alike)
    output_bias: bool | None = None  # of the output projection alone; None: as `bias`
    norm: NormConfig | None = None  # of every head's query and key, before position acts (Qwen3); None: none
    scale_by_layer: bool = False  # also divide scores by the layer's number, from 1
    window: int | None = None  # how many positions back (and, where not causal, ahead) are visible; None: all
    window_every: int = 1  # the window is that of every so many layers; the others see all (GPT-3: 2)
    kernel: str = "auto"  # a file of jaxformer/nn/kernels/, or auto
    block: int = 128  # blockwise: rows and columns of one tile
    dropout: float = 0.0  # on the attention probabilities
    average_padding: bool = False  # padding whose output counts (a negative segment) enters as zeros and weighs all
    # slots alike (DeBERTa); False: it reads the text


@dataclass(frozen=True)
class FeedForwardConfig:
    width: int | None = None  # None: 4 * model width
    activation: str = "gelu"  # relu, gelu (exact), gelu_tanh, gelu_sigmoid, silu, tanh, relu_squared, mish, sigmoid
    gated: bool = False  # act(x W_gate) * (x W_in): GLU variants (Shazeer 2020)
    bias: bool = True  # biases of its projections
    dropout: float = 0.0  # on the hidden activations


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of every feed-forward layer; `ffn` says what one expert is."""

    experts: int = 8  # in every layer
    top_k: int = 2  # experts that a token passes
    normalise: bool = True  # the weights of a token's experts are divided by their sum; False: plain probabilities
    capacity: float | None = None  # training: an expert takes so many times its even share of a row's assignments,
    # those after them are dropped; None: none is (dropless)
    shared: int = 0  # experts that every token passes, beside the routed ones (DeepSeekMoE)
    balance_loss: float = 0.01  # weight of the load-balance loss (Switch), added for every layer
    z_loss: float = 0.001  # weight of the router's z-loss (ST-MoE), added for every layer


@dataclass(frozen=True)
class ConvConfig:
    """A convolution of the stack's input over neighbouring slots, added and normalised after the first layer."""

    kernel: int = 3  # slots, an odd number
    groups: int = 1  # of channels that do not mix
    activation: str = "tanh"  # see FeedForwardConfig


@dataclass(frozen=True)
class StackConfig:
    """A transformer encoder or decoder."""

    layers: int = 4  # each attention and feed-forward
    width: int = 128  # channels of the residual stream
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    ffn: FeedForwardConfig | None = field(default_factory=FeedForwardConfig)  # None: attention only
    moe: MoEConfig | None = None  # the feed-forward layers are mixtures of experts; None: dense
    norm: NormConfig = field(default_factory=NormConfig)
    conv: ConvConfig | None = None  # encoders only (DeBERTa v2); None: none
    dropout: float = 0.0  # on the output of every sub-layer, before the residual sum
    residual_attention: bool = True  # the input of self-attention is added to its output
    residual_cross: bool = True  # the same around attention to the encoder
    residual_ffn: bool = True  # the same around the feed-forward layer
    causal: bool | None = None  # None: decoders are, encoders are not
    unroll: int | None = None  # layers per scan iteration; None: up to 128 on CPU (faster), 1 elsewhere (compile time)
    remat: str = "none"  # what the backward pass recomputes: none, minimal (all but matrix products), full (a whole
    # layer), names (all but `remat_names`), offload (the same, and those wait in host memory)
    remat_names: tuple[str, ...] = ("attention", "ffn")  # see nn/remat.py
    microbatches: int | None = None  # pipeline: parts of a batch, a multiple of mesh.stage; None: as many as stages


@dataclass(frozen=True)
class RecurrentConfig:
    """A recurrent encoder or decoder: what transformers replaced."""

    cell: str = "lstm"  # rnn, lstm, gru
    layers: int = 1  # one above the other
    width: int = 256  # of the state
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    bidirectional: bool = False  # encoders only; each direction has width // 2
    attention: str = "none"  # decoders with an encoder: none (last state), additive (Bahdanau), dot (Luong)
    dropout: float = 0.0  # between layers and before the head
    recurrent_dropout: float = 0.0  # on the recurrent weights' input, one mask a sequence (variational)


@dataclass(frozen=True)
class HeadConfig:
    """What is made of the hidden states."""

    kind: str = "tokens"  # tokens (a vocabulary row for every slot), slots (a class for every slot), classes (one
    # decision a sequence), pooled (one vector a sequence), pair (one for each of a row's two segments), none (the
    # hidden states)
    tied: bool = True  # tokens: share the table of the embedding below
    bias: bool = False  # tokens: of the vocabulary rows
    scale: bool = False  # tokens: multiply the hidden states by width ** -0.5 first (T5)
    transform: bool = False  # tokens: dense + activation + norm before the projection, as BERT's masked LM has
    chunk: int | None = None  # tokens: losses see the logits of so many tokens at a time (a device); None: of all
    activation: str = "gelu"  # of the transform
    epsilon: float = 1e-5  # of the transform's norm
    classes: int | None = None  # classes, slots: None: taken from the data
    pooling: str = "first"  # classes, pooled, pair: first (token), mean (over tokens), last (recurrent, decoder)
    width: int | None = None  # classes, pooled, pair: a layer before the decision, or of the vector; None: none
    hidden: str = "tanh"  # activation of that layer
    decision_bias: bool = True  # classes, slots
    dropout: float = 0.0  # before the decision; without one, of the hidden states
    input_dropout: float = 0.0  # classes, pooled, pair: of the pooled vector, before the layer of `width`


@dataclass(frozen=True)
class PermutationConfig:
    """What makes an encoder with Transformer-XL positions an XLNet: a query stream and memories of earlier texts."""

    memory: int | None = None  # slots of an earlier text that are remembered; None: all
    reuse: int | None = None  # only so many slots of a text, its first, are remembered at all; None: all


@dataclass(frozen=True)
class ModelConfig:
    """Which parts exist decides the family.

    encoder only: BERT-like. decoder only: GPT-like. Both: seq2seq. The `recurrent_*` parts likewise; transformer and
    recurrent parts do not mix.
    """

    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    recurrent_encoder: RecurrentConfig | None = None
    recurrent_decoder: RecurrentConfig | None = None
    permutation: PermutationConfig | None = None
    head: HeadConfig = field(default_factory=HeadConfig)
    share_embeddings: bool = False  # one table for source and target (joint vocabulary)
    dtype: str = "float32"  # compute precision: float32 or bfloat16; parameters stay float32

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the sides that exist."""
        sides = ("encoder", "decoder", "recurrent_encoder", "recurrent_decoder")
        return tuple(side for side in sides if getattr(self, side) is not None)


@dataclass(frozen=True)
class TokenizerConfig:
    """From text to ids."""

    kind: str = "bpe"  # byte, character, word, bpe, unigram, file
    vocab: int = 8000  # word, bpe, unigram: rows to learn, special tokens included
    joint: bool = True  # one vocabulary for source and target; False: one each
    lowercase: bool = False  # before anything is split; what is decoded is lowercase too
    multiple: int = 8  # the model's vocabulary is padded to a multiple of this (sharding needs even tables)
    path: str = ""  # file: a tokenizer.json or a SentencePiece .model; with joint=False "source,target"


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they become batches."""

    source: str = "numerals"  # a file of jaxformer/data/sources/
    name: str = ""  # tfds: "wmt14_translate/de-en"; numerals: "de", "fr", "es"; algorithmic: see the file
    dir: str = ""  # local sources: the folder of the files; tfds: the prepared data_dir
    cache: str = ""  # where local data is prepared; "": $JAXFORMER_CACHE or ~/.cache/jaxformer
    splits: dict[str, tuple[str, ...]] = field(default_factory=dict)  # split -> files, or one tfds split expression
    columns: dict[str, str] = field(default_factory=dict)  # role (see data/sources/) -> column of the data
    score_range: tuple[float, ...] = (0.0, 1.0)  # table, tfds: the scores that become 0 and 1; others are refused
    format: str = ""  # table: tsv, tsv_quoted, csv, jsonl, labelled (label, blank, text); "": what the name says
    document: str = "line"  # text: what one example is: line, file (kept whole, newlines included)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batch: int = 32  # rows of a global batch; with `tokens`, the most rows
    tokens: int | None = None  # token budget of a batch (padding included); rows = tokens // bucket
    length: int = 128  # longest sequence, special tokens included; longer ones are cut (LM: row length)
    buckets: tuple[int, ...] = ()  # sequence lengths of the static shapes; (): only `length`
    packing: str = "none"  # none, concat (LM: rows cut from one long text), first_fit (several examples a row)
    shuffle: bool = True  # training examples in another random order every epoch; False: in the order of the data
    examples: int | None = None  # use only the first so many training examples
    skip_long: bool = False  # drop examples over `length` instead of cutting them (training only)


@dataclass(frozen=True)
class TaskConfig:
    """What is learned, and from which labels."""

    name: str = "translation"  # a file of jaxformer/tasks/, or none: the model is only called, never trained here
    label_smoothing: float = 0.0  # share of a label's probability that is spread over all classes
    z_loss: float = 0.0  # weight of the squared log of the softmax's denominator (PaLM)
    mask_rate: float = 0.15  # masked_lm: share of tokens predicted
    whole_words: bool = False  # masked_lm: mask all pieces of a word together
    stride: int = 128  # answering: tokens from one window of a long context to the next, at most half a window
    unanswerable: bool = False  # answering: a context may hold no answer, and then the answer is empty (SQuAD 2.0)
    language: str = ""  # translation: code of the target language, whose tokenised BLEU is added; "": left out
    classes: tuple[str, ...] = ()  # classification, tagging: names of the classes; (): taken from the data
    objective: str = "regression"  # similarity: regression (the cosine is the score), contrastive (a sentence finds its
    # partner among the others of the batch)
    temperature: float = 0.05  # similarity, contrastive: cosines are divided by it
    positive: float = 0.8  # similarity, contrastive: pairs of a lower score (0 to 1) are others, not partners
    vocab: int | None = None  # real rows of the labels' vocabulary, without its padding; None: from the tokenizer


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: str = "adamw"  # adamw, adam, adafactor, lion, sgd, muon (optax's, whose momentum is corrected for its bias)
    beta1: float = 0.9  # decay of the gradients' mean
    beta2: float = 0.999  # decay of the squared gradients' mean
    epsilon: float = 1e-8  # added to its root
    momentum: float = 0.9  # sgd, muon
    weight_decay: float = 0.0  # times the learning rate, taken off the parameters at every step
    decay_exclude: tuple[str, ...] = ("bias", "scale", "embed")  # not decayed: paths that contain one of these words
    clip: float | None = 1.0  # global norm of the gradient
    spike: float | None = None  # a step is left out whose gradient's norm is so many deviations above the mean of the
    # last 100 or so; None: none is, however large


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps."""

    kind: str = "cosine"  # constant, linear, cosine, wsd, inverse_sqrt, noam
    peak: float = 1e-3  # highest learning rate; noam: the factor before width ** -0.5
    warmup: int = 100  # steps
    floor: float = 0.0  # linear, cosine, wsd: final rate as a share of the peak
    decay: float = 0.2  # wsd: share of the run spent decaying


@dataclass(frozen=True)
class TrainConfig:
    """How long a run is, and what happens between its steps."""

    steps: int = 1000  # updates of the parameters
    seed: int = 0  # of the initial parameters, the order of the data, and dropout
    accumulation: int = 1  # microbatches summed before one update. They equal one batch but for what sees all its rows:
    # batch norm, the losses that balance experts, contrastive similarity; dropout draws other masks
    ema: float | None = None  # decay of the weight average; evaluation and decoding then use the average
    ema_warmup: bool = False  # the decay of update n (from 0) is min(ema, (1 + n) / (10 + n)): the random start is soon
    # forgotten. False: `ema` from the first update on, where the start weighs ema ** n
    log_every: int = 20  # steps
    evaluate_every: int = 200  # steps; 0: only at the end
    checkpoint_every: int = 200  # steps; 0: only at the end
    skip_limit: int = 10  # so many steps left out in a row end the run: not finite, or a spike
    deadline: float | None = None  # minutes after its start at which a process saves and ends with code 143
    watchdog: float | None = None  # minutes without a step or evaluation batch after which it ends with code 75


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run."""

    keep_last: int = 2  # newest checkpoints, for resuming: one, and one before in case it is damaged
    keep_best: int = 1  # best by `metric`; 0: none
    metric: str = "loss"  # a validation measure
    mode: str = "min"  # min, max
    average: int = 0  # evaluate and decode with the mean of this many checkpoints; 0: no averaging
    average_of: str = "last"  # last, best


@dataclass(frozen=True)
class EvaluateConfig:
    """How the validation split is measured during training."""

    batch: int = 64  # rows
    examples: int | None = None  # validation during training reads only the first so many; None: all
    decode_examples: int = 0  # validation examples decoded and scored at each evaluation; 0: loss only
    samples: int = 5  # decoded examples shown at each evaluation
    headline: str = ""  # the measure that reports name first; "": checkpoint.metric, or the task's where that is loss


@dataclass(frozen=True)
class DecodeConfig:
    """How output is made of a model."""

    method: str = "greedy"  # greedy, sample, beam
    beams: int = 4  # beam: hypotheses kept at every step
    length_norm: str = "gnmt"  # beam scores are divided by: gnmt ((5 + n) / 6) ** length_penalty, power n ** the same
    length_penalty: float = 0.6  # GNMT's alpha (Wu et al. 2016, equation 14); negative favours short outputs
    stopping: str = "estimate"  # a row's beam search ends with as many finished hypotheses as beams (first), when no
    # live one, scored as if it ended now, beats the worst of them (estimate), or can beat it (exact)
    hypotheses: int = 1  # n-best, or draws
    max_length: int = 64  # new tokens, the prompt not counted; answering: the most tokens of an answer
    min_length: int = 0  # new tokens before an end token may be chosen
    max_ratio: float | None = None  # seq2seq: at most ratio * source length + 10 new tokens
    temperature: float = 1.0  # sample: logits are divided by it
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # sample: the likeliest tokens whose probabilities reach this sum; 1: all
    min_p: float = 0.0  # sample: tokens at least so likely as this share of the likeliest; 0: all
    repetition_penalty: float = 1.0  # of tokens that have occurred (CTRL: above 1 makes them rarer); 1: none
    no_repeat_ngram: int = 0  # no n tokens in a row twice, the prompt included; 0: off
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that are never completed
    suppress: tuple[int, ...] = ()  # token ids that are never chosen
    forced_first: int | None = None  # the first new token's id
    forced_last: tuple[int, ...] = ()  # token ids, one of which stands at the greatest length
    weights: str = "float"  # as they are (float), or kernels and tables rounded to 8 bits (int8), see decode/int8.py
    batch: int = 32  # rows
    seed: int = 0  # of sampling


AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Of the mesh, slow network first."""


@dataclass(frozen=True)
class DcnConfig:
    """How many slices (without slices: processes) lie along each axis. One may be -1: those that are left."""

    stage: int = 1  # see MeshConfig.stage
    data: int = 1  # see MeshConfig.data
    fsdp: int = 1  # see MeshConfig.fsdp
    expert: int = 1  # see MeshConfig.expert
    context: int = 1  # see MeshConfig.context
    tensor: int = 1  # see MeshConfig.tensor


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. One of them may be -1: the devices that are left.

    On several slices these are sizes within one, and an axis is this times its part of `dcn` long.
    """

    stage: int = 1  # pipeline stages
    data: int = -1  # copies of the model, each with its rows of a batch
    fsdp: int = 1  # the same, with parameters divided among them
    expert: int = 1  # experts divided
    context: int = 1  # sequences divided
    tensor: int = 1  # heads and channels divided
    dcn: DcnConfig = field(default_factory=DcnConfig)  # across slices, over the slower network
    zero1: bool = False  # optimizer state is divided over data too, which parameters are not (ZeRO, stage 1)

    @property
    def slices(self) -> int:
        """Of how many slices it is, where a -1 counts as 1."""
        return math.prod(max(getattr(self.dcn, axis), 1) for axis in AXES)

    @property
    def devices(self) -> int:
        """How many it takes at least: of all slices, where a -1 counts as 1."""
        return self.slices * math.prod(max(getattr(self, axis), 1) for axis in AXES)


@dataclass(frozen=True)
class InitConfig:
    """What a run starts from."""

    directory: str = ""  # a workdir, checkpoint or Hugging Face directory whose parameters start this run; "": random.
    # A recipe that names no model gets the directory's, and its tokenizer
    head: bool = True  # the head's parameters too; False: the head starts random (a new task or number of classes)


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
