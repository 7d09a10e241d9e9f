"""`model.generation_config`: options of `generate` as attributes."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.hf import reading

FILE = "generation_config.json"
COPY_KEY = "_from_model_config"
"""Key of that file, true where its options were taken from config.json."""

DEFAULTS: dict[str, Any] = {
    "max_length": 20, "max_new_tokens": None, "min_length": 0, "do_sample": False, "num_beams": 1,
    "num_return_sequences": 1, "early_stopping": False, "length_penalty": 1.0, "temperature": 1.0, "top_k": 50,
    "top_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "forced_decoder_ids": None, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": None,
}  # fmt: skip
"""Options that the old `generate` read, with their defaults."""

UNREAD: dict[str, Any] = {
    "min_new_tokens": None, "repetition_penalty": 1.0, "bad_words_ids": None, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "penalty_alpha": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "force_words_ids": None,
    "constraints": None, "exponential_decay_length_penalty": None, "renormalize_logits": False,
    "return_dict_in_generate": False, "output_scores": False, "output_attentions": False,
    "output_hidden_states": False, "use_cache": True, "max_time": None, "guidance_scale": None, "min_p": None,
}  # fmt: skip
"""Options that the old Flax `generate` knew and did not read, with the values that ask for nothing."""

COUNTS = ("max_length", "min_length", "do_sample", "num_beams", "num_return_sequences", "early_stopping",
          "length_penalty")  # fmt: skip
"""Options of `DEFAULTS` for which None has no meaning of its own."""


class GenerationConfig:
    """Options of `generate` as attributes; those that are not set have their defaults."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update({**DEFAULTS, **options})

    @classmethod
    def of(cls, source: Any) -> GenerationConfig:
        """A copy of the options of a dict, of `GenerationConfig`, or of the other library's object of either version.

        Version 5 says None for what is not set. In version 4, where a number stands for that, None switches a limit off
        (`top_k`).
        """
        values = dict(source if isinstance(source, Mapping) else source.to_dict())
        unset = DEFAULTS if str(values.get("transformers_version", "4")).split(".")[0] != "4" else COUNTS
        return cls(**{name: value for name, value in values.items() if value is not None or name not in unset})

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], **changes: Any) -> GenerationConfig:
        """The generation_config.json of a local directory, with `changes`."""
        found = reading.read_config(Path(directory), FILE)
        found = {name: value for name, value in found.items() if name not in (COPY_KEY, "transformers_version")}
        return cls(**{**found, **changes})

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes generation_config.json."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        (Path(directory) / FILE).write_text(text, encoding="utf-8")

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"generation_config: got {name!r}, expected one of {', '.join(self.__dict__)}")

    def update(self, **options: Any) -> dict[str, Any]:
        """Sets the options that exist, and returns the others."""
        known = {**DEFAULTS, **UNREAD, **self.__dict__}
        self.__dict__.update({name: value for name, value in options.items() if name in known})
        return {name: value for name, value in options.items() if name not in known}

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {
            name: copy.deepcopy(x) for name, x in self.__dict__.items() if x != DEFAULTS.get(name, UNREAD.get(name))
        }

    @classmethod
    def from_model_config(cls, values: Mapping[str, Any]) -> GenerationConfig:
        """The options that a config.json holds; those of a pair that it lacks are its decoder's."""
        known = {**DEFAULTS, **UNREAD}
        decoder = values["decoder"] if isinstance(values.get("decoder"), Mapping) else {}
        wished = {name: values[name] for name in known if values.get(name) is not None}
        for name, default in known.items():
            if wished.get(name, default) == default and decoder.get(name) is not None:
                wished[name] = decoder[name]
        for name in ("output_attentions", "output_hidden_states", "use_cache"):
            wished.pop(name, None)  # of calls
        return cls(**wished)

    @classmethod
    def of_directory(cls, directory: Path) -> tuple[GenerationConfig | None, bool]:
        """The options of generation_config.json, None without it, and whether they only repeat those of config.json."""
        if not (directory / FILE).exists():
            return None, True
        found = reading.read_config(directory, FILE)
        is_copy = bool(found.pop(COPY_KEY, False))
        return cls(**{name: value for name, value in found.items() if name != "transformers_version"}), is_copy
