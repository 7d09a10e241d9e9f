"""Which weights evaluation and decoding apply."""

from jaxformer.config import Config, TrainConfig
from jaxformer.train import evaluate


def test_the_average_takes_the_place_of_the_parameters_where_a_run_keeps_one():
    others = {"batch_stats": {"mean": 3}}
    kept = evaluate.weights(Config(train=TrainConfig(ema=0.9)), {"a": 1}, {"ema": {"a": 2}, **others})
    assert kept == {"params": {"a": 2}, **others}
    assert evaluate.weights(Config(), {"a": 1}, others) == {"params": {"a": 1}, **others}
