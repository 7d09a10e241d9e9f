"""Pictures of a config or a run as data: what `jaxformer draw` shows, computed by the functions that the model uses.

    panels.py      heat maps and curves as values
    positions.py   position encodings: matrices, decay with distance, buckets
    masks.py       which keys each query attends to
    diagram.py     a model as columns of blocks
    model.py       the diagram of a config, with the shapes and counts of its parameters
    schedule.py    the learning rate of each step
    embeddings.py  rows of an embedding table in two dimensions, with their nearest neighbours

`jaxformer/report/pictures/` draws them.
"""
