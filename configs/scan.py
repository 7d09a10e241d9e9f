"""SCAN: commands to sequences of actions, and whether that carries over to longer ones (Lake and Baroni 2018).

`simple` is a random split; `length` trains on outputs of up to 22 actions and tests on 24 to 48; `length26` moves the
border to 26 (Csordás et al. 2021). The validation split is every 20th line of the training file, so it has the lengths
of training and says nothing of longer ones. The last checkpoint is used; none is chosen.

The files are made of the published ones, DIR/train_simple.txt and so on, in DIR:

    for name in simple length; do for part in train test; do
        awk -F ' OUT: ' '{ sub(/^IN: /, ""); print $1 "\t" $2 }' ${part}_$name.txt > ${part}_$name.tsv; done; done
    cat train_length.tsv test_length.tsv | awk -F '\t' \
        '{ print > (split($2, a, " ") > 26 ? "test_length26.tsv" : "train_length26.tsv") }'
    for name in simple length length26; do
        awk 'NR % 20 == 0' train_$name.tsv > valid_$name.tsv; awk 'NR % 20' train_$name.tsv > fit_$name.tsv; done

Command:  python -m jaxformer train --config=configs/scan.py:lstm --workdir=runs/scan --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/scan --split=test
          (another split: --config.data.splits.train=fit_length.tsv --config.data.splits.validation=valid_length.tsv
          --config.data.splits.test=test_length.tsv)
Variants: lstm_paper (two layers without attention, of width 200 and dropout 0.5, as the one that was best overall in
          the paper), lstm (the same with less dropout, a higher rate and half the steps), relative (a transformer with
          relative positions in encoder and decoder)
Hardware: 2 CPU cores
Time:     of processor time, with evaluation: lstm 5.5 minutes (simple); lstm_paper 10.5 (simple), 7.5 (length);
          relative 5.0 (simple), 4.9 (length)
Score:    exact match of the test split, %: lstm 99.98 (simple); lstm_paper 95.7 (simple), 13.3 (length); relative 88.6
          (simple), 13.9 (length); lstm on length, and length26, were not measured
"""

from jaxformer.config import RecurrentConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("lstm", "lstm_paper", "relative")


def get_config(variant: str = "lstm"):
    variant = variant or "lstm"
    recurrent = {"lstm": True, "lstm_paper": True, "relative": False}[variant]
    config = defaults()
    config.data.source = "table"
    config.data.columns = {"source": "#1", "target": "#2"}
    config.data.splits = {
        "train": ("fit_simple.tsv",),
        "validation": ("valid_simple.tsv",),
        "test": ("test_simple.tsv",),
    }
    config.data.tokenizer.kind = "word"
    config.data.batch = 32 if recurrent else 64
    config.data.length = 64
    config.data.buckets = (10, 16, 24, 34)
    config.task.name = "translation"

    if recurrent:
        dropout, embed_dropout = (0.5, 0.5) if variant == "lstm_paper" else (0.2, 0.1)
        part = dict(cell="lstm", layers=2, width=200, dropout=dropout, embed=dict(dropout=embed_dropout))
        config.model.recurrent_encoder = section(RecurrentConfig, **part)
        config.model.recurrent_decoder = section(RecurrentConfig, **part)
    else:
        stack = dict(
            layers=2,
            width=64,
            dropout=0.1,
            embed=dict(scale=True, dropout=0.1),
            encoding=dict(kind="transformer_xl"),
            attention=dict(heads=4),
            ffn=dict(width=128, activation="relu"),
        )
        config.model.encoder = section(StackConfig, **stack)
        config.model.decoder = section(StackConfig, **stack)

    config.optimizer.name = "adam"
    config.optimizer.clip = 5.0
    config.schedule.kind = "linear"
    config.schedule.peak = {"lstm": 3e-3, "lstm_paper": 1e-3, "relative": 2e-3}[variant]
    config.schedule.warmup = 100
    config.schedule.floor = 0.02
    config.train.steps = {"lstm": 2500, "lstm_paper": 5000, "relative": 3000}[variant]
    config.train.log_every = 200
    config.train.evaluate_every = 1000
    config.train.checkpoint_every = 1000
    config.checkpoint.keep_last = 1
    config.checkpoint.keep_best = 0
    config.evaluate.batch = 256
    config.evaluate.samples = 2
    config.decode.batch = 256
    config.decode.max_length = 64
    return config
