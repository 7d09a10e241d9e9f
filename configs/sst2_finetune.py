"""Sentiment by fine-tuning a pretrained encoder: the body and tokenizer of `config.init.directory`, a new head.

Command:  python -m jaxformer train --config=configs/sst2_finetune.py --workdir=runs/finetuned \
              --config.init.directory=HF_DIR --config.data.dir=DIR     (HF_DIR: BERT, RoBERTa, DeBERTa or XLNet)
Hardware: accelerators
Time:     not measured here
Score:    not measured here; 93.5 for BERT base on the test server (Devlin et al. 2019, table 1)
"""

from jaxformer.config.overrides import defaults


def get_config():
    config = defaults()
    config.init.directory = "HF_DIR"  # given on the command line
    config.init.head = False
    config.data.source = "table"
    config.data.splits = {
        "train": ("glue.train.tsv.gz",),
        "validation": ("sentences.dev.tsv",),
        "test": ("sentences.test.tsv",),
    }
    config.data.columns = {"text": "sentence", "label": "label"}
    config.data.length = 128
    config.data.buckets = (16, 32, 64)
    config.data.batch = 32
    config.task.name = "classification"
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    config.schedule.peak = 2e-5
    config.schedule.warmup = 1000
    config.train.steps = 6000
    config.train.evaluate_every = config.train.checkpoint_every = 1000
    config.checkpoint.metric = "accuracy"
    config.checkpoint.mode = "max"
    return config
