"""XLM-RoBERTa (Conneau et al. 2020): RoBERTa on text of a hundred languages."""

from jaxformer.hf.families._roberta import family

FAMILY = family("xlm-roberta", "XLMRoberta", "roberta")
