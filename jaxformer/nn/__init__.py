"""The modules of a model: layers, masks, attention and its three axes, blocks and stacks, heads, recurrent cells."""
