"""No position encoding: unless the mask orders the slots, the model treats them as a set."""

from jaxformer.nn.encodings import Encoding

ENCODING = Encoding()
