"""Search strategies over a model's next-token logits: greedy search, sampling and beam search."""
