"""What a model computes, as arrays: nothing here draws or writes files. `jaxformer.report` does that."""
