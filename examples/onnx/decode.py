"""Greedy decoding of an exported model with onnxruntime and numpy alone.

    model.export_onnx_step("exported", length=64)                       # once, with jaxformer
    python examples/onnx/decode.py exported --prompt 5 6 7 --prompt 8 9 --new 10 --end 2

prints the new token ids of each prompt. An encoder-decoder has been exported with `source_length` and takes as many
`--source` as `--prompt`, whose ids begin the output (the start token).
"""

import argparse
import pathlib
import sys

import numpy as np
import onnxruntime


def fail(message):
    print(message, file=sys.stderr)
    sys.exit(2)


def padded(rows, length, name):
    """Token ids and segments (1 for a token), int32 `[rows, length]`, with padding on the left."""
    if not all(0 < len(tokens) <= length for tokens in rows):
        fail(f"{name}: got {[len(tokens) for tokens in rows]} tokens, expected 1 to {length} in each")
    ids, segment = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32)
    for row, tokens in enumerate(rows):
        ids[row, length - len(tokens) :], segment[row, length - len(tokens) :] = tokens, 1
    return ids, segment


def load(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # else a warning for every constant that is not used
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def read_sources(directory, sources):
    """Keys and values that cross-attention reads of the sources: inputs of the step by name."""
    session = load(directory / "source.onnx")
    length = session.get_inputs()[0].shape[1]
    ids, segment = padded(sources, length, "source")
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(None, {"source_tokens": ids, "source_segment": segment})
    return dict(zip(names, arrays)) | {"source_segment": segment}


def decode(directory, prompts, new, end=None, sources=None):
    """The new token ids of each prompt: at most `new`, up to and without `end`."""
    directory = pathlib.Path(directory)
    step = load(directory / "step.onnx")
    inputs = {input.name: input for input in step.get_inputs()}
    if (sources is not None) != ("source_segment" in inputs) or (sources is not None and len(sources) != len(prompts)):
        fail("source: expected one for each prompt of an encoder-decoder, and none for a decoder")
    fixed = {} if sources is None else read_sources(directory, sources)
    length, rows = inputs["segment"].shape[1], len(prompts)
    width = max(map(len, prompts))
    if width + new - 1 > length:
        fail(
            f"new: got {new} after {width} tokens, expected at most {length + 1 - width}: the cache has {length} slots"
        )
    ids, prompt_segment = padded(prompts, width, "prompt")
    segment = np.zeros((rows, length), np.int32)
    past = {
        name: np.zeros((rows, *input.shape[1:]), np.float32)
        for name, input in inputs.items()
        if name.startswith("past.")
    }
    outputs, done = [[] for _ in prompts], np.zeros(rows, bool)
    for index in range(width + new - 1):
        if index < width:  # the prompt is read one token at a time, too
            tokens, segment[:, index] = ids[:, index], prompt_segment[:, index]
        else:
            segment[:, index] = 1
        state = {"tokens": tokens[:, None], "index": np.array(index, np.int32), "segment": segment, **past, **fixed}
        logits, *present = step.run(None, state)
        past = dict(zip(past, present))
        if index >= width - 1:
            tokens = np.argmax(logits, axis=1).astype(np.int32)
            done |= tokens == end
            for row in np.flatnonzero(~done):
                outputs[row].append(int(tokens[row]))
            if done.all():
                break
    return outputs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--prompt", type=int, nargs="+", action="append", required=True, metavar="ID")
    parser.add_argument("--source", type=int, nargs="+", action="append", metavar="ID")
    parser.add_argument("--new", type=int, default=10)
    parser.add_argument("--end", type=int)
    options = parser.parse_args()
    for tokens in decode(options.directory, options.prompt, options.new, options.end, options.source):
        print(*tokens)


if __name__ == "__main__":
    main()
