"""RoBERTa with norms before each sub-layer and after the last (Ott et al. 2019, fairseq)."""

from jaxformer.hf.families._roberta import family

FAMILY = family("roberta-prelayernorm", "RobertaPreLayerNorm", "roberta_prelayernorm", order="pre")
