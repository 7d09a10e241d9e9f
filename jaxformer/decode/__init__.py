"""Decoding for all model families: sampling and beam search over the `Decodable` protocol; see `generate.py`."""
