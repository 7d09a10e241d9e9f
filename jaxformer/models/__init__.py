"""Whole models: the transformer in its three fillings, and the recurrent baseline."""
