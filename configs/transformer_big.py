"""The transformer of Vaswani et al. 2017, big model of table 3, on WMT14 English to German.

Command:  jaxformer data prepare wmt14_translate/de-en --dir=DIR      (once, needs the extra [prepare])
          python -m jaxformer train --config=configs/transformer_big.py --workdir=runs/big --config.data.dir=DIR
Hardware: 8 accelerators (the paper: 8 P100, 3.5 days, 300,000 steps)
Time:     not measured here
Score:    not measured here. The paper: 28.4 BLEU (tokenised) on newstest2014
"""

from pathlib import Path

from jaxformer.config.overrides import load


def get_config():
    config = load(f"{Path(__file__).with_name('transformer_base.py')}:big")
    config.train.steps = 300000
    config.checkpoint.keep_last = 20
    config.checkpoint.average = 20
    return config
