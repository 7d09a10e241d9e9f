"""Models for other programs: as Flax NNX modules, and as ONNX files."""
