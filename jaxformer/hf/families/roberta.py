"""RoBERTa (Liu et al. 2019): BERT with positions that begin after the padding token's id."""

from jaxformer.hf.families._roberta import family

FAMILY = family("roberta", "Roberta", "roberta")
