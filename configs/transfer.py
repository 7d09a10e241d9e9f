"""What pre-training is worth: a small encoder pre-trained on text, then trained for sentiment and for entities.

Pre-training is BERT's objective or T5's on WikiText-2 and War and Peace (`DIR` holds the folders wikitext2 and
war_and_peace). Sentiment (SST-2) and entities (WNUT 2017) are trained with and without it: the same tokenizer, steps
and settings. From scratch is the second command without `--config.init.directory`.

Command:  python -m jaxformer train --config=configs/transfer.py:masked_lm --workdir=runs/pretrained \
              --config.data.dir=DIR
          python -m jaxformer train --config=configs/transfer.py:sst2 --workdir=runs/sst2_pretrained --seeds=3 \
              --config.data.dir=DIR/sst2 --config.data.tokenizer.path=runs/pretrained/tokenizer.json \
              --config.init.directory=runs/pretrained
          python -m jaxformer evaluate --workdir=runs/sst2_pretrained --split=test
Variants: masked_lm (Devlin et al. 2019), span_corruption (Raffel et al. 2020: the same encoder, and a decoder), sst2
          (glue.train.tsv.gz: labelled phrases, as for sst2.py), wnut17 (train.conll)
Hardware: 2 CPU cores
Time:     masked_lm: 27, span_corruption: 50 minutes on two cores of a shared machine; a seed of sst2: 2.2 to 7, of
          wnut17: 3.9 to 10 minutes
Score:    masked_lm: validation loss of masked tokens 4.076 (from 9.01), accuracy 36.2 %; span_corruption: validation
          loss 4.258 (from 9.01), accuracy 34.2 %. On test, mean of 3 seeds, after masked_lm, after span_corruption and
          from scratch: wnut17, entity F1 14.9 %, 7.9 % and 5.1 %; sst2, accuracy 79.9 %, 79.5 % and 80.4 %
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("masked_lm", "span_corruption", "sst2", "wnut17")

ENCODER = dict(
    layers=3,
    width=128,
    dropout=0.1,
    embed=dict(dropout=0.1, deviation=0.02),
    encoding=dict(kind="rope"),
    attention=dict(heads=4),
    ffn=dict(activation="gelu"),
)


def get_config(variant: str = "masked_lm"):
    config = defaults()
    config.model.encoder = section(StackConfig, **ENCODER)
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    parts = {"masked_lm": pretrain, "span_corruption": pretrain, "sst2": classify, "wnut17": tag}
    parts[variant or "masked_lm"](config, variant or "masked_lm")
    return config


def pretrain(config, objective):
    config.data.source = "text"
    config.data.splits = {
        "train": ("wikitext2/train.txt.gz", "war_and_peace/warandpeace.txt.gz"),
        "validation": ("wikitext2/valid.txt",),
    }
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 8000
    config.data.tokenizer.lowercase = True  # SST-2 is in small letters
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 32
    config.task.name = objective
    if objective == "span_corruption":
        config.model.decoder = section(StackConfig, **ENCODER)
        config.model.share_embeddings = True
        config.data.tokenizer.sentinels = 100
    else:
        config.model.head.transform = True
        config.model.head.bias = True
    config.optimizer.beta2 = 0.98
    config.schedule.peak = 2e-3
    config.schedule.warmup = 200
    config.train.steps = 2500
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 250
    config.evaluate.batch = 32


def classify(config, name):
    fine_tune(config)
    config.data.source = "table"
    config.data.splits = {
        "train": ("glue.train.tsv.gz",),
        "validation": ("sentences.dev.tsv",),
        "test": ("sentences.test.tsv",),
    }
    config.data.columns = {"text": "sentence", "label": "label"}
    config.data.batch = 64
    config.task.name = "classification"
    config.model.head.kind = "classes"
    config.model.head.pooling = "mean"
    config.checkpoint.metric = "accuracy"


def tag(config, name):
    fine_tune(config)
    config.data.source = "conll"
    config.data.splits = {"train": ("train.conll",), "validation": ("dev.conll",), "test": ("test.conll",)}
    config.data.batch = 32
    config.task.name = "tagging"
    config.model.head.kind = "slots"
    config.evaluate.decode_examples = 1009  # all of dev.conll
    config.checkpoint.metric = "f1"


def fine_tune(config):
    config.data.tokenizer.kind = "file"
    config.data.tokenizer.path = "runs/pretrained/tokenizer.json"
    config.data.length = 128
    config.data.buckets = (16, 32, 64, 128)
    config.init.head = False
    config.model.head.dropout = 0.3
    config.schedule.peak = 5e-4
    config.schedule.warmup = 100
    config.train.steps = 800
    config.train.evaluate_every = config.train.checkpoint_every = 100
    config.checkpoint.mode = "max"
