"""Question answering from scratch, on 32 articles (SQuAD 1.1, Rajpurkar et al. 2016): extractive, or generative.

`generative` writes the answer with an encoder and a decoder, as text (`text_to_text`).

`DIR` holds the development set of SQuAD 1.1 and a table of its articles (columns title and split: train, test);
the last 4 training articles choose the checkpoint. With the official files instead:
--config.data.splits.train=train-v1.1.json --config.data.splits.validation=dev-v1.1.json

Command:  python -m jaxformer train --config=configs/squad.py:transformer --workdir=runs/squad --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/squad --split=test
Variants: transformer, lstm, generative
Hardware: 2 CPU cores
Time:     transformer: 7.9 minutes, lstm: 10.6 minutes, on a shared machine
Score:    test exact match and F1, transformer: 14.5 and 28.7 %, lstm: 24.4 and 37.0 %; the best words beside the
          question's have 2.6 and 14.7 %, random spans 0.5 and 4.8 %; generative: not measured here
"""

from jaxformer.config import ConvConfig, RecurrentConfig, StackConfig, TemplateConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("transformer", "lstm", "generative")
OLD_VARIANTS = {"bilstm": "lstm"}


def get_config(variant: str = "transformer"):
    recurrent = {"transformer": False, "lstm": True, "generative": False}[variant or "transformer"]
    config = defaults()
    config.data.source = "squad"
    config.data.splits = {
        "train": ("dev-v1.1.json.gz[article_split.tsv=train][:32]",),
        "validation": ("dev-v1.1.json.gz[article_split.tsv=train][32:]",),
        "test": ("dev-v1.1.json.gz[article_split.tsv=test]",),
    }
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 8000
    config.data.tokenizer.lowercase = True
    config.data.batch = 32
    config.data.length = 256
    config.data.buckets = (128, 160, 192, 256)
    config.train.evaluate_every = 250
    config.train.checkpoint_every = 250
    config.evaluate.decode_examples = 1000
    config.decode.max_length = 30
    config.checkpoint.metric = "f1"
    config.checkpoint.mode = "max"

    if variant == "generative":
        config.task.name = "text_to_text"
        config.task.template = section(
            TemplateConfig, source="question: {question} context: {context}", target="{answer}", scores=("squad",)
        )
        stack = dict(
            layers=2,
            width=128,
            dropout=0.2,
            embed=dict(scale=True, dropout=0.2),
            encoding=dict(kind="rope"),
            attention=dict(heads=4),
            ffn=dict(width=256),
        )
        config.model.encoder = section(StackConfig, **stack)
        config.model.decoder = section(StackConfig, **stack)
        config.model.share_embeddings = True
        config.data.batch = 16
        config.data.buckets = ()
        config.schedule.kind = "linear"
        config.schedule.peak = 2e-3
        config.schedule.warmup = 100
        config.train.steps = 400
        config.train.evaluate_every = config.train.checkpoint_every = 200
        config.evaluate.decode_examples = 200
        return config

    config.task.name = "answering"
    if recurrent:
        config.model.recurrent_encoder = section(
            RecurrentConfig,
            cell="lstm",
            width=256,
            bidirectional=True,
            dropout=0.5,
            embed=dict(dropout=0.5, kinds=2, matches=True),
        )
    else:
        config.model.encoder = section(
            StackConfig,
            layers=2,
            width=128,
            dropout=0.4,
            embed=dict(scale=True, dropout=0.4, kinds=2, matches=True),
            encoding=dict(kind="rope"),
            attention=dict(heads=4, dropout=0.1),
            ffn=dict(width=256),
        )
        # What stands beside the question's words: near slots are read from the first step on.
        config.model.encoder.conv = section(ConvConfig, kernel=5, activation="gelu")
    config.model.head.kind = "slots"
    config.model.head.dropout = 0.3 if recurrent else 0.2

    config.optimizer.weight_decay = 0.05
    config.optimizer.decay_exclude = ("bias", "scale")
    config.schedule.peak = 1e-3
    config.schedule.warmup = 100
    config.train.steps = 1500 if recurrent else 600
    if not recurrent:
        config.train.evaluate_every = config.train.checkpoint_every = 200
    return config
