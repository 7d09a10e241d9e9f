"""Models: the transformer, XLNet and the recurrent baseline, and how they are built from a config."""
