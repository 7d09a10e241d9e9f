"""One decoding engine for every family: warped sampling and beam search over the Decodable protocol."""
