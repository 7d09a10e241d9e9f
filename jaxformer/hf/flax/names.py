"""Table of the classes: families by heads, the automatic classes, and the names of classes that are missing."""

from __future__ import annotations

from dataclasses import dataclass

ENCODER_HEADS = ("masked_lm", "sequence", "token", "qa", "multiple_choice", "model")
BODY_AND_LM = ("causal_lm", "model")
TRANSLATOR = ("seq2seq", "model")
CLASSIFYING_TRANSLATOR = ("seq2seq", "sequence", "qa", "model")

SUFFIXES = {
    "masked_lm": "ForMaskedLM",
    "pretraining": "ForPreTraining",
    "next_sentence": "ForNextSentencePrediction",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "qa": "ForQuestionAnswering",
    "multiple_choice": "ForMultipleChoice",
    "causal_lm": "ForCausalLM",
    "seq2seq": "ForConditionalGeneration",
    "encoder": "EncoderModel",
    "model": "Model",
}
"""Head -> end of a class name."""

SUFFIX_EXCEPTIONS = {
    ("gpt2", "causal_lm"): "LMHeadModel", ("marian", "seq2seq"): "MTModel", ("encoder-decoder", "seq2seq"): "Model",
}  # fmt: skip


T5_TYPES = ("t5", "mt5", "longt5")
"""`model_type`s of T5 and its relatives, which have rules of their own."""


@dataclass(frozen=True)
class Group:
    """The classes of one `model_type`.

    Attributes:
      prefix: start of their names, after "Flax".
      heads: the heads that have a class.
      call: name of their call's signature in `signatures.CALLS`.
    """

    prefix: str
    heads: tuple[str, ...]
    call: str


GROUPS: dict[str, Group] = {
    "albert": Group("Albert", (*ENCODER_HEADS, "pretraining"), "albert"),
    "bart": Group("Bart", (*CLASSIFYING_TRANSLATOR, "causal_lm"), "bart"),
    "bert": Group("Bert", (*ENCODER_HEADS, "pretraining", "next_sentence", "causal_lm"), "bert"),
    "big_bird": Group("BigBird", (*ENCODER_HEADS, "pretraining", "causal_lm"), "big_bird"),
    "blenderbot": Group("Blenderbot", TRANSLATOR, "bart"),
    "blenderbot-small": Group("BlenderbotSmall", TRANSLATOR, "bart"),
    "bloom": Group("Bloom", BODY_AND_LM, "bloom"),
    "distilbert": Group("DistilBert", ENCODER_HEADS, "distilbert"),
    "encoder-decoder": Group("EncoderDecoder", ("seq2seq",), "bart"),
    "electra": Group("Electra", (*ENCODER_HEADS, "pretraining", "causal_lm"), "bert"),
    "gemma": Group("Gemma", BODY_AND_LM, "gptj"),
    "gpt2": Group("GPT2", BODY_AND_LM, "gpt2"),
    "gpt_neo": Group("GPTNeo", BODY_AND_LM, "gptj"),
    "gptj": Group("GPTJ", BODY_AND_LM, "gptj"),
    "llama": Group("Llama", BODY_AND_LM, "gptj"),
    "longt5": Group("LongT5", TRANSLATOR, "t5"),
    "marian": Group("Marian", TRANSLATOR, "bart"),
    "mbart": Group("MBart", CLASSIFYING_TRANSLATOR, "bart"),
    "mistral": Group("Mistral", BODY_AND_LM, "gptj"),
    "mt5": Group("MT5", (*TRANSLATOR, "encoder"), "t5"),
    "opt": Group("OPT", BODY_AND_LM, "opt"),
    "pegasus": Group("Pegasus", TRANSLATOR, "bart"),
    "roberta": Group("Roberta", (*ENCODER_HEADS, "causal_lm"), "bert"),
    "roberta-prelayernorm": Group("RobertaPreLayerNorm", (*ENCODER_HEADS, "causal_lm"), "bert"),
    "roformer": Group("RoFormer", ENCODER_HEADS, "roformer"),
    "t5": Group("T5", (*TRANSLATOR, "encoder"), "t5"),
    "xglm": Group("XGLM", BODY_AND_LM, "xglm"),
    "xlm-roberta": Group("XLMRoberta", (*ENCODER_HEADS, "causal_lm"), "bert"),
}
"""`model_type` -> its classes."""

AUTO_HEADS: dict[str, tuple[str, ...]] = {
    "FlaxAutoModel": ("model",),
    "FlaxAutoModelForCausalLM": ("causal_lm",),
    "FlaxAutoModelForMaskedLM": ("masked_lm", "seq2seq"),
    "FlaxAutoModelForMultipleChoice": ("multiple_choice",),
    "FlaxAutoModelForNextSentencePrediction": ("next_sentence",),
    "FlaxAutoModelForPreTraining": ("pretraining", "seq2seq", "masked_lm"),
    "FlaxAutoModelForQuestionAnswering": ("qa",),
    "FlaxAutoModelForSeq2SeqLM": ("seq2seq",),
    "FlaxAutoModelForSequenceClassification": ("sequence",),
    "FlaxAutoModelForTokenClassification": ("token",),
}
"""Automatic class -> heads, of which it takes the first that the family has."""

AUTO_TYPES: dict[str, tuple[str, ...]] = {
    "FlaxAutoModelForMaskedLM": (
        "albert", "bart", "bert", "big_bird", "distilbert", "electra", "mbart", "roberta", "roberta-prelayernorm",
        "roformer", "xlm-roberta",
    ),
    "FlaxAutoModelForPreTraining": (
        "albert", "bart", "bert", "big_bird", "electra", "longt5", "mbart", "mt5", "roberta", "roberta-prelayernorm",
        "roformer", "t5", "xlm-roberta",
    ),
}  # fmt: skip
"""Automatic classes of fewer families than have the head -> their `model_type`s."""

MISSING_FAMILIES = {
    "VisionEncoderDecoder": "vision", "VisionTextDualEncoder": "vision", "SpeechEncoderDecoder": "speech",
    "Beit": "vision", "CLIP": "vision", "Dinov2": "vision", "RegNet": "vision", "ResNet": "vision", "ViT": "vision",
    "Wav2Vec2": "speech", "Whisper": "speech", "AutoModelForImageClassification": "vision",
    "AutoModelForVision2Seq": "vision", "AutoModelForSpeechSeq2Seq": "speech",
}  # fmt: skip
"""Start of the old library's class names, after "Flax" -> what is missing here."""

MISSING_MAPPINGS = {"AUDIO": "speech", "IMAGE": "vision", "SPEECH": "speech", "VISION": "vision"}
"""Start of the old library's mappings, after "FLAX_MODEL_FOR_" -> what is missing here."""


def class_name(model_type: str, head: str) -> str:
    """Name of a class: `class_name("bert", "qa")` is "FlaxBertForQuestionAnswering"."""
    return f"Flax{GROUPS[model_type].prefix}{SUFFIX_EXCEPTIONS.get((model_type, head), SUFFIXES[head])}"


def missing_family(name: str) -> str | None:
    """The family, or "vision" or "speech", of a missing name of the old library; None for a name it did not have."""
    for start, family in MISSING_MAPPINGS.items():
        if name.startswith(f"FLAX_MODEL_FOR_{start}"):
            return family
    rest = name.removeprefix("Flax")
    starts = [start for start in MISSING_FAMILIES if name.startswith("Flax") and rest.startswith(start)]
    return MISSING_FAMILIES[max(starts, key=len)] if starts else None
