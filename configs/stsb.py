"""Semantic textual similarity: the cosine of two sentence vectors predicts their similarity (STS-B, Cer et al. 2017).

From scratch on its 5,749 training pairs, or from a Hugging Face encoder.

Command:  python -m jaxformer train --config=configs/stsb.py:transformer --workdir=runs/stsb --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/stsb --split=test
          python -m jaxformer train --config=configs/stsb.py:finetune --workdir=runs/stsb_finetuned \\
              --config.init.directory=HF_DIR --config.data.dir=DIR     (HF_DIR: BERT, RoBERTa, DeBERTa, XLNet, T5)
Variants: transformer, lstm, finetune
Hardware: 2 CPU cores; finetune: accelerators
Time:     transformer: 2.1 minutes, lstm: 1.4 minutes, on a shared machine; finetune: not measured here
Score:    test Spearman, transformer: 65.4 %, lstm: 69.8 %; finetune: not measured here, 84.7 for BERT base
          (Reimers and Gurevych 2019, table 2)
"""

from jaxformer.config import RecurrentConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("transformer", "lstm", "finetune")
OLD_VARIANTS = {"bilstm": "lstm"}


def get_config(variant: str = "transformer"):
    variant = variant or "transformer"
    config = defaults()
    config.data.source = "table"
    config.data.splits = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
    config.data.columns = {"text": "sentence1", "pair": "sentence2", "score": "score"}
    config.data.score_range = (0.0, 5.0)
    config.data.length = 128
    config.data.buckets = (32, 64, 128)
    config.data.batch = 32
    config.task.name = "similarity"
    config.model.head.kind = "pair"
    config.model.head.pooling = "mean"
    config.evaluate.decode_examples = 1500
    config.checkpoint.metric = "spearman"
    config.checkpoint.mode = "max"

    if variant == "finetune":  # four epochs, as SBERT's (section 4.2), at BERT's rate
        config.init.directory = "HF_DIR"  # given on the command line
        config.optimizer.weight_decay = 0.01
        config.schedule.kind = "linear"
        config.schedule.peak = 2e-5
        config.schedule.warmup = 72
        config.train.steps = 720
        config.train.evaluate_every = config.train.checkpoint_every = 180
        return config

    if {"transformer": False, "lstm": True}[variant]:
        config.model.recurrent_encoder = section(
            RecurrentConfig, cell="lstm", width=256, bidirectional=True, dropout=0.3, embed=dict(dropout=0.3)
        )
    else:
        config.model.encoder = section(
            StackConfig,
            layers=2,
            width=128,
            dropout=0.2,
            embed=dict(scale=True, dropout=0.3),
            encoding=dict(kind="rope"),
            attention=dict(heads=4),
            ffn=dict(width=256),
        )
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.lowercase = True
    config.data.tokenizer.vocab = 6000
    config.optimizer.weight_decay = 0.05
    config.optimizer.decay_exclude = ("bias", "scale")
    config.schedule.peak = 1e-3
    config.schedule.warmup = 100
    config.train.steps = 1000
    config.train.evaluate_every = config.train.checkpoint_every = 100
    return config
