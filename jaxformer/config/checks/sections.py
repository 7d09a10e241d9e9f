"""Checks that the sections of a config agree."""

from __future__ import annotations

import importlib.util
import math

from jaxformer import registry
from jaxformer.config import components, templates
from jaxformer.config.checks.fields import invalid
from jaxformer.config.schema import Config, DecodeConfig, ModelConfig, TaskConfig
from jaxformer.errors import ConfigError

TASK_MODELS: dict[str, tuple[tuple[str, ...], str]] = {
    "translation": (("encoder, decoder",), "tokens"),
    "summarisation": (("encoder, decoder",), "tokens"),
    "language_modelling": (("decoder",), "tokens"),
    "dialogue": (("decoder",), "tokens"),
    "preference": (("decoder",), "tokens"),
    "prefix_lm": (("decoder",), "tokens"),
    "masked_lm": (("encoder",), "tokens"),
    "permutation_lm": (("encoder",), "tokens"),
    "replaced_tokens": (("encoder",), "slots"),
    "span_corruption": (("encoder, decoder",), "tokens"),
    "denoising": (("encoder, decoder",), "tokens"),
    "classification": (("encoder", "decoder"), "classes"),
    "tagging": (("encoder", "decoder"), "slots"),
    "answering": (("encoder", "decoder"), "slots"),
    "similarity": (("encoder", "decoder"), "pair"),
    "text_to_text": (("encoder, decoder", "decoder"), "tokens"),
    "skip_gram": (("encoder",), "tokens"),
    "cbow": (("encoder",), "tokens"),
    "multi_label": (("encoder", "decoder"), "classes"),
    "regression": (("encoder", "decoder"), "classes"),
    "forecasting": (("encoder",), "forecast"),
    "series_classification": (("encoder",), "classes"),
    "captioning": (("encoder, decoder",), "tokens"),
}
"""Task -> sides that its model may have, and the kind of its head. Tasks that are not listed are not checked here."""

WORD_VECTORS = ("skip_gram", "cbow")
"""Tasks whose model is two tables of vectors."""

CONVERSATION_TASKS = ("dialogue", "preference")
"""Tasks that read conversations, which a chat template writes."""

SERIES_TASKS = ("forecasting", "series_classification", "captioning")
"""Tasks whose model reads a series in place of tokens."""

BALANCED = "balanced"
"""The value of `task.class_weights` that takes the weights from the data."""

PACKINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("language_modelling", "prefix_lm", "span_corruption", "denoising"), ("none", "concat", "first_fit")
    ),
    **dict.fromkeys(("masked_lm", "permutation_lm", "replaced_tokens"), ("none", "concat")),
    **dict.fromkeys(("translation", "summarisation", "text_to_text", "dialogue", *WORD_VECTORS), ("none", "first_fit")),
}
"""Task -> how several of its examples may share a row; of the others in the table above, none may."""

SIDES_IN_WORDS = {
    ("encoder, decoder",): "an encoder and a decoder",
    ("encoder",): "an encoder alone",
    ("decoder",): "a decoder alone",
    ("encoder", "decoder"): "an encoder or a decoder, not both",
    ("encoder, decoder", "decoder"): "a decoder, with or without an encoder",
}

BLEU_LANGUAGES = {"zh": None, "ja": "MeCab", "ko": "mecab_ko"}
"""Languages of which sacreBLEU has words of its own, and the module that finds them."""
TEMPLATE_SCORES = ("exact_match", "squad", "bleu", "chrf", "rouge")
"""Entries of `task.template.scores`."""


def check_task(config: Config) -> None:
    """Checks that the task, the model's sides and head, and the packing fit together.

    Raises:
      ConfigError: they do not.
    """
    model, task = config.model, config.task.name
    sides = ", ".join(name for name in ("encoder", "decoder") if getattr(model, f"has_{name}"))
    if task in TASK_MODELS:
        allowed, head = TASK_MODELS[task]
        if sides not in allowed:
            expected = f"{SIDES_IN_WORDS[allowed]} for this task (the model has: {sides})"
            raise invalid("config.task.name", task, expected)
        if model.head.kind != head:
            raise invalid("config.model.head.kind", model.head.kind, f"{head} for the task {task}")
        if task == "regression" and model.head.classes not in (None, 1):
            raise invalid("config.model.head.classes", model.head.classes, "1 or None for the task regression")
        if head in ("classes", "slots") and model.head.classes == 1 and task not in ("regression", "multi_label"):
            raise invalid("config.model.head.classes", 1, f"at least 2 for the task {task}")
        if task == "answering" and model.head.classes not in (None, 2):
            raise invalid("config.model.head.classes", model.head.classes, "2 (start and end) or None for this task")
        packings = PACKINGS.get(task, ("none",))
        if config.data.packing not in packings:
            raise invalid("config.data.packing", config.data.packing, f"{' or '.join(packings)} for the task {task}")
        if task == "masked_lm" and config.task.relation != "none" and config.data.packing != "none":
            expected = f"none with task.relation {config.task.relation}: a row of running text has no second part"
            raise invalid("config.data.packing", config.data.packing, expected)
        if model.generator is not None and task != "replaced_tokens":
            raise invalid("config.model.generator", "a section", f"None for the task {task}")
    if model.multi_token is not None:
        _check_multi_token(config)
    if task == "permutation_lm":
        _check_permutation_lm(config)
    elif config.task.recurrence:
        raise invalid("config.task.recurrence", True, f"False for the task {task}", "only permutation_lm has it")
    if task == "replaced_tokens" and model.generator is None:
        raise invalid("config.model.generator", None, "a section for the task replaced_tokens", "add one in the recipe")
    if config.task.class_weights:
        _check_class_weights(config.task.class_weights, task)
    if task in WORD_VECTORS:
        _check_word_vectors(config)
    if task in SERIES_TASKS and model.series is None:
        raise invalid("config.model.series", None, f"a section for the task {task}", "add one in the recipe")
    if task in TASK_MODELS and task not in SERIES_TASKS and model.series is not None:
        expected = f"one that reads a series ({', '.join(SERIES_TASKS)}), as the model does"
        raise invalid("config.task.name", task, expected)
    if task == "forecasting":
        _check_forecasting(config)
    _check_preference(config)
    unsmoothed = ("similarity", "replaced_tokens", "forecasting", "multi_label", "regression", "preference")
    if task in (*unsmoothed, *WORD_VECTORS):
        for name in ("label_smoothing", "z_loss"):
            if getattr(config.task, name):
                raise invalid(f"config.task.{name}", getattr(config.task, name), f"0 for the task {task}")
    _check_objective(config)
    decoder = model.decoder
    writers = ("language_modelling", "prefix_lm", "text_to_text", *CONVERSATION_TASKS)
    writes = task in writers and not model.has_encoder
    if writes and decoder is not None and decoder.causal is False:
        expected = "True or None: a language model cannot see what it predicts"
        raise invalid("config.model.decoder.causal", "False", expected)
    if config.data.tokenizer.chat_template and task in TASK_MODELS and task not in CONVERSATION_TASKS:
        path = config.data.tokenizer.chat_template
        raise invalid("config.data.tokenizer.chat_template", path, f"'' for the task {task}, which reads no turns")
    if config.task.replies != "all" and task in TASK_MODELS and task != "dialogue":
        raise invalid("config.task.replies", config.task.replies, f"all for the task {task}, which has no replies")
    if config.task.language:
        _check_language(config.task.language, task)
    if model.head.copy and not config.data.tokenizer.joint:
        raise invalid("config.model.head.copy", True, "a joint vocabulary to copy ids", "set data.tokenizer.joint=true")
    if model.head.copy and config.task.z_loss:
        expected = "0 with head.copy, whose outputs are log-probabilities: their normaliser is 1 already"
        raise invalid("config.task.z_loss", config.task.z_loss, expected)
    if model.share_embeddings and not config.data.tokenizer.joint:
        raise invalid("config.model.share_embeddings", "True", "a joint vocabulary", "set data.tokenizer.joint=true")


def _check_preference(config: Config) -> None:
    """Raises ConfigError if noise makes the labels worthless, or another task has the settings of preference."""
    options, name = config.task, config.task.name
    if name == "preference":
        if options.label_noise >= 0.5:
            raise invalid("config.task.label_noise", options.label_noise, "less than 0.5: such labels say nothing")
        return
    for field, default in (("beta", TaskConfig.beta), ("label_noise", TaskConfig.label_noise)):
        if name in TASK_MODELS and getattr(options, field) != default:
            expected = f"{default} for the task {name}: only preference reads it"
            raise invalid(f"config.task.{field}", getattr(options, field), expected)


def _check_multi_token(config: Config) -> None:
    """Raises ConfigError for objectives that read the logits of the next token alone."""
    refused = {
        f"for the task {config.task.name}": config.task.name != "language_modelling",
        "with config.distillation": config.distillation is not None,
        "with data.mixture": config.data.mixture is not None,
        "with optimizer.layer_decay, which numbers equal layers": config.optimizer.layer_decay != 1,
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise invalid("config.model.multi_token", "a section", f"None {reason}")


DISTILLED_TASKS = ("language_modelling", "prefix_lm", "dialogue", "classification")
"""Tasks that may have a teacher: their logits are a distribution for each label."""


def check_distillation(config: Config) -> None:
    """Raises ConfigError if a teacher is not named, or its logits do not go with the task, the loss or the head."""
    if config.distillation is None:
        return
    path, task = "config.distillation", config.task
    if not config.distillation.directory:
        raise invalid(f"{path}.directory", "", "the workdir or Hugging Face directory of the teacher", "set it")
    if task.name not in DISTILLED_TASKS:
        expected = f"with config.distillation one of {', '.join(DISTILLED_TASKS)}"
        raise invalid("config.task.name", task.name, expected)
    if config.data.mixture is not None:
        raise invalid("config.data.mixture", "a section", "None with config.distillation")
    if task.class_weights:
        raise invalid("config.task.class_weights", task.class_weights, "() with config.distillation")
    if config.model.head.chunk is not None:
        expected = "None with config.distillation, whose loss reads all logits of both models"
        raise invalid("config.model.head.chunk", config.model.head.chunk, expected)


def check_template(config: Config) -> None:
    """Checks the templates of the task text_to_text; other tasks have none.

    Raises:
      ConfigError: a template is malformed, a score is unknown, or settings of one way to predict come with the other.
    """
    path, template = "config.task.template", config.task.texts
    if config.task.name != "text_to_text":
        if config.task.template is not None:
            raise invalid(path, "a section", f"None for the task {config.task.name}, which does not read it")
        return
    for side in ("source", "target"):
        text = getattr(template, side)
        try:
            names = templates.fields(text)
        except ValueError as error:
            expected = "text with names of fields in braces, as in 'question: {question}'; write {{ for a brace"
            raise ConfigError(f"{path}.{side}: got {text!a} ({error}), expected {expected}") from None
        if side == "source" and not names:
            raise invalid(f"{path}.source", text, "at least one field in braces: all examples would be alike")
    for score in template.scores:
        if score not in TEMPLATE_SCORES:
            known = f"names among {', '.join(TEMPLATE_SCORES)}{registry.nearest(score, TEMPLATE_SCORES)}"
            raise invalid(f"{path}.scores", score, known)
    if {"exact_match", "squad"} <= set(template.scores):
        raise invalid(f"{path}.scores", template.scores, "exact_match or squad: both give a measure exact_match")
    if template.choices and template.predict != "rank":
        raise invalid(f"{path}.choices", template.choices, "() without template.predict=rank, which chooses among them")
    if len(set(template.choices)) != len(template.choices):
        raise invalid(f"{path}.choices", template.choices, "different choices")


def _check_forecasting(config: Config) -> None:
    data, head = config.data, config.model.head
    if data.horizon is None:
        raise invalid("config.data.horizon", None, "the time steps to forecast", "set it")
    for name, value in (("length", head.look_back), ("horizon", head.horizon)):
        if value is not None and value != getattr(data, name):
            expected = f"the model's ({value}), which is linear in all of its steps"
            raise invalid(f"config.data.{name}", getattr(data, name), expected)
    if data.buckets:
        raise invalid("config.data.buckets", data.buckets, "() for forecasting: all windows have data.length steps")


def _check_permutation_lm(config: Config) -> None:
    permutation, data = config.model.permutation, config.data
    if permutation is None:
        raise invalid("config.model.permutation", None, "a section for the task permutation_lm", "add it in the recipe")
    if not config.task.recurrence:
        return
    needed = {
        "config.data.packing": (data.packing, "concat"),
        "config.data.shuffle": (data.shuffle, False),
        "config.data.tokens": (data.tokens, None),
        "config.model.permutation.reuse": (permutation.reuse, None),
        "config.model.encoder.attention.window": (config.model.stacks["encoder"].attention.window, None),
    }
    for path, (got, expected) in needed.items():
        if got != expected:
            raise invalid(path, got, f"{expected} with config.task.recurrence", "change one of them")
    if permutation.memory is None:
        raise invalid("config.model.permutation.memory", None, "a number of slots with config.task.recurrence")


def _check_word_vectors(config: Config) -> None:
    """Raises ConfigError unless the vector of a word depends on the word alone, and the data has words with counts."""
    encoder, task = config.model.encoder, config.task.name
    if encoder is None:
        raise invalid("config.model.recurrent_encoder", "a section", f"None for the task {task}", "set model.encoder")
    if encoder.layers:
        expected = f"0 for the task {task}: the vector of a word may not depend on the words around it"
        raise invalid("config.model.encoder.layers", encoder.layers, expected)
    if encoder.encoding.kind != "none":
        raise invalid("config.model.encoder.encoding.kind", encoder.encoding.kind, f"none for the task {task}")
    if config.data.tokenizer.kind != "word":
        raise invalid("config.data.tokenizer.kind", config.data.tokenizer.kind, f"word for the task {task}")
    if config.evaluate.decode_examples:
        expected = f"0 for the task {task}, which looks up words and no texts"
        raise invalid("config.evaluate.decode_examples", config.evaluate.decode_examples, expected)


def _check_class_weights(weights: tuple[str, ...], task: str) -> None:
    """Checks the form of the weights. Their names are compared with the classes when those are known."""
    path = "config.task.class_weights"
    if task in TASK_MODELS and task not in ("classification", "tagging"):
        raise invalid(path, weights, f"() for the task {task}, which has no classes")
    if weights == (BALANCED,):
        return
    for entry in weights:
        name, _, number = entry.rpartition("=")
        try:
            is_weight = 0 <= float(number) < math.inf
        except ValueError:
            is_weight = False
        if not name or not is_weight:
            raise invalid(path, entry, f"{BALANCED} alone, or CLASS=WEIGHT with a weight of at least 0")


def _check_objective(config: Config) -> None:
    """Checks the options of the objectives on running text.

    Raises:
      ConfigError: a model reads in one direction where a prefix is read in both, nothing would be corrupted, a second
        loss has no head or a head no loss, or packed rows need masks that a recurrent model has not.
    """
    model, options, name = config.model, config.task, config.task.name
    recurrent = model.recurrent_encoder is not None or model.recurrent_decoder is not None
    if name == "prefix_lm" and recurrent:
        raise invalid("config.task.name", name, "language_modelling: a recurrent decoder reads in one direction")
    if name == "prefix_lm" and model.decoder is not None:
        if model.decoder.delta is not None:
            expected = "None for the task prefix_lm: the gated delta rule reads in one direction"
            raise invalid("config.model.decoder.delta", "a section", expected)
        encoding = model.decoder.encoding
        if encoding.kind == "t5" and not encoding.bidirectional:
            path = "config.model.decoder.encoding.bidirectional"
            raise invalid(path, encoding.bidirectional, "True for the task prefix_lm, whose prefix sees later tokens")
    if recurrent and model.is_seq2seq and config.data.packing != "none":
        raise invalid("config.data.packing", config.data.packing, "none for a recurrent encoder and decoder")
    rates = (options.infilling, options.masking, options.deletion, options.permutation, options.rotation)
    if name == "denoising" and not any(rates):
        raise invalid("config.task.infilling", 0.0, "some noise for the task denoising", "raise one of its rates")
    if name == "masked_lm" and (options.relation != "none") != model.head.relation:
        expected = "none without" if options.relation != "none" else "next_sentence or sentence_order with"
        raise invalid("config.task.relation", options.relation, f"{expected} config.model.head.relation", "change one")
    if name != "masked_lm" and model.head.relation and name in TASK_MODELS:
        raise invalid("config.model.head.relation", True, f"False for the task {name}")


def check_evaluate(config: Config) -> None:
    """Raises ConfigError if the bins of lengths do not ascend."""
    bins = config.evaluate.length_bins
    if list(bins) != sorted(set(bins)) or (bins and bins[0] < 1):
        raise invalid("config.evaluate.length_bins", bins, "ascending numbers of at least 1")


def check_data(config: Config) -> None:
    """Raises ConfigError if lengths, the tokenizer, scores, the format or the splits contradict each other."""
    data = config.data
    if list(data.buckets) != sorted(set(data.buckets)) or (data.buckets and data.buckets[0] < 2):
        raise invalid("config.data.buckets", data.buckets, "ascending lengths of at least 2")
    if data.buckets and data.buckets[-1] > data.length:
        raise invalid("config.data.buckets", data.buckets, f"lengths of at most data.length ({data.length})")
    if data.tokens is not None and data.tokens < data.length:
        raise invalid("config.data.tokens", data.tokens, f"at least data.length ({data.length})")
    if data.tokenizer.kind == "file" and not data.tokenizer.path:
        raise invalid("config.data.tokenizer.path", data.tokenizer.path, "a file, since tokenizer.kind is file")
    if data.tokenizer.kind == "file" and data.tokenizer.sentinels:
        raise invalid("config.data.tokenizer.sentinels", data.tokenizer.sentinels, "0 for a file, which has its own")
    if len(data.score_range) != 2 or data.score_range[0] >= data.score_range[1]:
        raise invalid("config.data.score_range", data.score_range, "the lowest and the highest score, as 0,5")
    if data.format and data.source != "table":
        raise invalid("config.data.format", data.format, f"'' for data.source {data.source}, which has one format")
    for split, files in data.splits.items():
        if not split.replace("-", "").replace("_", "").isalnum():  # it becomes part of file names in the workdir
            raise invalid("config.data.splits", split, "names of letters, digits, - and _", "rename it")
        if not files:
            raise invalid(f"config.data.splits.{split}", files, "at least one file or split expression")


def check_shard_copies(config: Config) -> None:
    """Raises ConfigError for a bound on copies of token shards where no data are shards."""
    bound, read = config.data.shard_copies_gb, {view.data.source for view in components.views(config).values()}
    if bound is not None and "shards" not in read:
        expected = f"None for data.source {', '.join(sorted(read))}: only shards in a bucket are copied"
        raise invalid("config.data.shard_copies_gb", bound, expected)


def check_train(config: Config) -> None:
    """Raises ConfigError if the weight average, the accumulation, the averaged checkpoints or rates make no sense."""
    train, checkpoint = config.train, config.checkpoint
    recurrent = [part for part in config.model.parts if part.startswith("recurrent_")]
    if config.optimizer.layer_decay != 1 and recurrent:
        expected = f"1 for {' and '.join(recurrent)}: only the layers of transformers are stacked"
        raise invalid("config.optimizer.layer_decay", config.optimizer.layer_decay, expected)
    shared = [name for name, stack in config.model.stacks.items() if stack.share_layers]
    if config.optimizer.layer_decay != 1 and shared:
        expected = f"1 for {shared[0]}.share_layers: its parameters are of every depth"
        raise invalid("config.optimizer.layer_decay", config.optimizer.layer_decay, expected)
    if train.ema_warmup and train.ema is None:
        raise invalid("config.train.ema_warmup", True, "false without config.train.ema, the decay that it warms up to")
    if config.data.tokens is None and config.data.batch % train.accumulation:
        raise invalid("config.train.accumulation", train.accumulation, f"a divisor of data.batch ({config.data.batch})")
    if config.data.tokens is not None and config.data.tokens // config.data.length < train.accumulation:
        rows = config.data.tokens // config.data.length
        raise invalid(
            "config.train.accumulation", train.accumulation, f"at most the rows of the longest batch ({rows})"
        )
    if len(set(train.trackers)) < len(train.trackers):
        raise invalid("config.train.trackers", ",".join(train.trackers), "each tracker once")
    if train.patience is not None and not train.evaluate_every:
        raise invalid("config.train.patience", train.patience, "None with train.evaluate_every 0: nothing is evaluated")
    checkpoints = checkpoint.keep_last if checkpoint.average_of == "last" else checkpoint.keep_best
    if checkpoint.average > checkpoints:
        raise invalid(
            "config.checkpoint.average", checkpoint.average, f"at most keep_{checkpoint.average_of} ({checkpoints})"
        )


def check_decode(decode: DecodeConfig, model: ModelConfig) -> None:
    """Raises ConfigError if lengths, hypotheses or token ids of decoding contradict each other, or the model."""
    if decode.proposals == "multi_token" and model.multi_token is None:
        raise invalid("config.decode.proposals", decode.proposals, "look_up, unless there is model.multi_token")
    if decode.length_penalty < 0 and decode.length_norm == "gnmt":
        raise invalid("config.decode.length_penalty", decode.length_penalty, "at least 0 for length_norm gnmt")
    if decode.method == "beam" and decode.hypotheses > decode.beams:
        raise invalid("config.decode.hypotheses", decode.hypotheses, f"at most decode.beams ({decode.beams})")
    if decode.method == "greedy" and decode.hypotheses > 1:
        raise invalid("config.decode.hypotheses", decode.hypotheses, "1 for greedy decoding", "use beam or sample")
    if decode.method == "beam" and decode.speculate:
        expected = "0 for beam search: proposals follow one text, beams are several"
        raise invalid("config.decode.speculate", decode.speculate, expected, "use greedy or sample")
    if decode.proposals == "multi_token" and decode.speculate != 1:
        expected = "1 for proposals of multi_token: its first module predicts one token"
        raise invalid("config.decode.speculate", decode.speculate, expected)
    if decode.min_length > decode.max_length:
        raise invalid("config.decode.min_length", decode.min_length, f"at most decode.max_length ({decode.max_length})")
    if any(not word or min(word) < 0 for word in decode.bad_words):
        raise invalid("config.decode.bad_words", decode.bad_words, "sequences of token ids, none of them empty")
    if any(token < 0 for token in decode.suppress):
        raise invalid("config.decode.suppress", decode.suppress, "token ids, from 0")
    if any(token < 0 for token in decode.forced_last):
        raise invalid("config.decode.forced_last", decode.forced_last, "token ids, from 0")
    if decode.forced_first in decode.suppress:
        raise invalid("config.decode.forced_first", decode.forced_first, "a token that decode.suppress does not hold")
    if decode.forced_last and set(decode.forced_last) <= set(decode.suppress):
        raise invalid("config.decode.forced_last", decode.forced_last, "a token that decode.suppress does not hold")


def _check_language(language: str, task: str) -> None:
    """Raises ConfigError for a language that no score reads, or whose words no installed package finds."""
    if task in TASK_MODELS and task not in ("translation", "captioning", "text_to_text"):
        raise invalid("config.task.language", language, f"'' for the task {task}, whose scores do not depend on it")
    module = BLEU_LANGUAGES.get(language)
    if module is not None and importlib.util.find_spec(module) is None:
        expected = f"a language whose words are found without the package {module}"
        raise invalid("config.task.language", language, expected, f"install it: pip install 'sacrebleu[{language}]'")
