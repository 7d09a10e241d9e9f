"""A trained translator, exported and loaded by the other library: the same logits and the same translations.

    jaxformer export --workdir=runs/multi30k --target=exported
    python benchmarks/exported.py --workdir=runs/multi30k --directory=exported --input=test.en [--lines=64] [--beams=5]

Needs the extra [bench] (torch, transformers). Fails if logits of the run, of the export loaded here and of the export
loaded there differ by more than 1e-5 of the largest, or if any translation differs between here and there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import jaxformer

TOLERANCE = 1e-5


def rows(ids: list[list[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[B, S]` filled up with `pad`, and the mask of the real ones."""
    length = max(map(len, ids))
    tokens = np.array([row + [pad] * (length - len(row)) for row in ids])
    return tokens, np.array([[1] * len(row) + [0] * (length - len(row)) for row in ids])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("workdir", "directory", "input"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--beams", type=int, default=5)
    flags = parser.parse_args(argv)
    import torch
    from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

    run, ours = jaxformer.load(flags.workdir), jaxformer.from_pretrained(flags.directory)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(flags.directory).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(flags.directory, "tokenizer.json")))
    lines = Path(flags.input).read_text(encoding="utf-8").splitlines()[: flags.lines]
    pad, eos = theirs.config.pad_token_id, theirs.config.eos_token_id
    ids, mask = rows([tokenizer(line).input_ids for line in lines], pad)
    source = {"input_ids": ids, "attention_mask": mask}
    there = {name: torch.tensor(value) for name, value in source.items()}
    options = dict(num_beams=flags.beams, max_new_tokens=60, length_penalty=1.0, early_stopping=False, do_sample=False)
    found, expected = ours.generate(**source, **options), theirs.generate(**there, **options).numpy()
    words = lambda row: [int(token) for token in row if token not in (pad, eos)]  # noqa: E731
    same = sum(words(a) == words(b) for a, b in zip(found, expected, strict=True))
    prefix = np.asarray(found[:, : min(10, found.shape[1])])
    logits = [np.asarray(model(**source, decoder_input_ids=prefix).logits) for model in (run, ours)]
    with torch.no_grad():
        logits.append(theirs(**there, decoder_input_ids=torch.tensor(prefix.astype(np.int64))).logits.numpy())
    largest = np.abs(logits[2]).max()
    differences = [float(np.abs(each - logits[2]).max() / largest) for each in logits[:2]]
    print(f"logits differ from theirs by {differences[0]:.1e} (the run) and {differences[1]:.1e} (its export)")
    print(f"beam {flags.beams}: {same} of {len(lines)} translations are the same")
    return int(same < len(lines) or max(differences) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
