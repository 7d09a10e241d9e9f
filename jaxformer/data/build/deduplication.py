"""Finds duplicates among the documents of a build, whose keys its workers have written to files.

Of every set of duplicates the first in the order of the input survives, so the result depends neither on the number of
workers nor on which of them was first.

Exact duplicates have equal 128-bit hashes. Near duplicates are found by MinHash (Broder 1997, "On the resemblance and
containment of documents"): the share of equal numbers in two signatures estimates the Jaccard similarity of the sets of
five consecutive words. Candidates share a band of their signatures (locality-sensitive hashing; Leskovec, Rajaraman and
Ullman 2020, section 3.4). Each is compared with the first document that has the band, and dropped if the estimate
reaches the limit.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxformer.data.build.options import digest

SIGNATURE = 128
"""Numbers in a MinHash signature. The estimated similarity has a standard error of at most 0.044."""
SHINGLE_WORDS = 5
MIN_RECALL = 0.9
"""Bands are chosen so that a pair at the limit is a candidate with at least this probability."""
PASS_DOCUMENTS = 2**24
"""Exact hashes that are sorted at a time; more are sorted in several passes over the files."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
WORD = re.compile(r"\w+")


def exact_keys(texts: Sequence[str]) -> np.ndarray:
    """The 128-bit hashes of texts, uint64 `[n, 2]`."""
    return np.frombuffer(b"".join(map(digest, texts)), "<u8").reshape(-1, 2)


@functools.cache
def _coefficients() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    odd = generator.integers(0, 2**63, SIGNATURE, np.uint64) * np.uint64(2) + np.uint64(1)
    return odd, generator.integers(0, 2**63, SIGNATURE, np.uint64)


def signature(text: str) -> np.ndarray:
    """The MinHash signature of a text, uint32 `[SIGNATURE]`. Case and punctuation do not matter.

    A text of fewer than `SHINGLE_WORDS` words is one shingle.
    """
    words = WORD.findall(text.lower())
    codes = np.fromiter((zlib.crc32(word.encode()) for word in words), np.uint64, len(words))
    width = min(SHINGLE_WORDS, max(len(codes), 1))
    shingles = np.zeros(max(len(codes) - width + 1, 1), np.uint64)
    for offset in range(width if len(codes) else 0):
        shingles = _mixed(shingles * MULTIPLIER + codes[offset : offset + len(shingles)])
    shingles = np.unique(shingles)
    odd, added = _coefficients()
    lowest = np.full(SIGNATURE, 2**32 - 1, np.uint32)
    for begin in range(0, len(shingles), 1024):  # bounds the memory
        hashed = shingles[begin : begin + 1024, None] * odd + added
        lowest = np.minimum(lowest, (hashed >> np.uint64(32)).astype(np.uint32).min(0))
    return lowest


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(31))) * MULTIPLIER
    return values ^ (values >> np.uint64(29))


def signatures(texts: Sequence[str]) -> np.ndarray:
    """Signatures of texts, uint32 `[n, SIGNATURE]`."""
    return np.stack([signature(text) for text in texts]) if texts else np.zeros((0, SIGNATURE), np.uint32)


def band_rows(similarity: float) -> int:
    """Numbers in a band: as many as keep the recall of pairs at the limit above `MIN_RECALL`."""
    fits = [rows for rows in (1, 2, 4, 8, 16, 32) if 1 - (1 - similarity**rows) ** (SIGNATURE // rows) >= MIN_RECALL]
    return max(fits, default=1)


def exact_survivors(files: Sequence[Path]) -> list[np.ndarray]:
    """Which documents of each file of `exact_keys` survive, bool `[n]` for each file.

    Memory: about 48 bytes for each of `PASS_DOCUMENTS` documents, and one for every document.
    """
    keys = [np.load(file, mmap_mode="r") for file in files]
    survives = np.zeros(sum(map(len, keys)), bool)
    passes = -(-len(survives) // PASS_DOCUMENTS)
    for number in range(passes):
        parts, indices, first = [], [], 0
        for each in keys:
            chosen = np.flatnonzero(np.asarray(each[:, 0]) % np.uint64(passes) == number)
            parts.append(np.asarray(each)[chosen])
            indices.append(chosen + first)
            first += len(each)
        selected, index = np.concatenate(parts), np.concatenate(indices)
        order = np.lexsort((selected[:, 1], selected[:, 0]))  # stable: the first of equal ones stays first
        ordered = selected[order]
        is_first = np.ones(len(ordered), bool)
        is_first[1:] = (ordered[1:] != ordered[:-1]).any(1)
        survives[index[order[is_first]]] = True
    return np.split(survives, np.cumsum([len(each) for each in keys])[:-1])


def near_survivors(files: Sequence[Path], similarity: float) -> list[np.ndarray]:
    """Which documents of each file of `signatures` survive, bool `[n]` for each file.

    Memory: about 40 bytes a document; the signatures stay on disk.
    """
    numbers = [np.load(file, mmap_mode="r") for file in files]
    counts = np.array([len(each) for each in numbers], np.int64)
    firsts = np.concatenate([[0], np.cumsum(counts)])
    survives, rows = np.ones(firsts[-1], bool), band_rows(similarity)

    def signature_at(indices: np.ndarray) -> np.ndarray:
        found = np.zeros((len(indices), SIGNATURE), np.uint32)
        places = np.searchsorted(firsts, indices, side="right") - 1
        for file in np.unique(places):
            members = places == file
            found[members] = numbers[file][indices[members] - firsts[file]]
        return found

    for band in range(SIGNATURE // rows):
        keys = np.concatenate([_band_keys(each, band * rows, rows) for each in numbers] or [np.zeros(0, np.uint64)])
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(ordered) else order
        first = np.repeat(order[begins], np.diff(np.concatenate([begins, [len(ordered)]])))
        pairs = np.flatnonzero((order != first) & survives[order])
        for begin in range(0, len(pairs), 2**16):
            chosen = pairs[begin : begin + 2**16]
            equal = signature_at(order[chosen]) == signature_at(first[chosen])
            survives[order[chosen[equal.mean(1) >= similarity]]] = False
    return np.split(survives, firsts[1:-1])


def _band_keys(numbers: np.ndarray, begin: int, rows: int) -> np.ndarray:
    keys = np.zeros(len(numbers), np.uint64)
    for column in range(begin, begin + rows):
        keys = _mixed(keys * MULTIPLIER + np.asarray(numbers[:, column]).astype(np.uint64))
    return keys
