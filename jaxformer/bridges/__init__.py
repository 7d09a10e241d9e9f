"""Models for other programs: as Flax NNX modules, as ONNX files, and in the evaluation harness."""
