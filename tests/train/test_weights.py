"""The weights that evaluation and decoding apply."""

from jaxformer.types import TrainState


def test_the_average_takes_the_place_of_the_parameters_where_a_run_keeps_one():
    others = {"batch_stats": {"mean": 3}}
    averaged = TrainState(0, {"a": 1}, None, None, {"ema": {"a": 2}, **others})
    assert averaged.evaluation_variables() == {"params": {"a": 2}, **others}
    assert averaged.collections() == others
    plain = TrainState(0, {"a": 1}, None, None, others)
    assert plain.evaluation_variables() == {"params": {"a": 1}, **others}
